"""What an agent is: a model, its instructions, its tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from midstream.errors import ToolDefinitionError
from midstream.runtime.models import Model
from midstream.tools import Approval, Tool, ToolSource, by_name, tool


class Agent:
    """A model with instructions and tools; it keeps nothing, so one agent serves any number of sessions.

    Args:
        model: What answers (`midstream.integrations` has real ones, `midstream.testing` a scripted one).
        instructions: The system prompt.
        tools: Tools; plain functions, which become tools with the careful defaults (effects, outcome unknown
            when in doubt); sources of tools that come and go, such as MCP servers. Their connections are the host's
            to close.
        name: What people see.
        approval: The host's own rule about calls that a person must allow, beside each tool's own: it says whether, or
            in words why. Where it fails, somebody is asked.
        turn_s: Seconds a whole turn may take, people's answers not counted; 0 for no limit.

    Raises:
        ToolDefinitionError: A function cannot become a tool, or two tools or two sources have one name.
    """

    def __init__(
        self,
        model: Model,
        *,
        instructions: str = "",
        tools: Iterable[Tool | ToolSource | Callable[..., Any]] = (),
        name: str = "agent",
        approval: Approval | None = None,
        turn_s: float = 0.0,
    ) -> None:
        given = [*tools]
        self.model = model
        self.instructions = instructions
        self.sources = _distinct(each for each in given if isinstance(each, ToolSource))
        self.tools = by_name(
            each if isinstance(each, Tool) else tool(each)
            for each in given
            if not isinstance(each, ToolSource)
        )
        self.name = name
        self.approval = approval
        self.turn_s = turn_s

    def with_tools(self, *more: Tool | ToolSource | Callable[..., Any]) -> Agent:
        """Return an agent like this one that has more tools; raises like the constructor."""
        tools = (*self.tools.values(), *self.sources, *more)
        return Agent(
            self.model,
            instructions=self.instructions,
            tools=tools,
            name=self.name,
            approval=self.approval,
            turn_s=self.turn_s,
        )

    def __repr__(self) -> str:
        sources = f", sources={[each.name for each in self.sources]!r}" if self.sources else ""
        return f"Agent({self.name!r}, model={self.model.name!r}, tools={sorted(self.tools)!r}{sources})"


def _distinct(sources: Iterable[ToolSource]) -> tuple[ToolSource, ...]:
    found: dict[str, ToolSource] = {}
    for each in sources:
        if each.name in found:
            raise ToolDefinitionError(f"two sources of tools are named {each.name!r}: give one another name")
        found[each.name] = each
    return tuple(found.values())
