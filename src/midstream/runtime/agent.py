"""What an agent is: a model, its instructions, its tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from midstream.runtime.models import Model
from midstream.tools import Approval, Tool, by_name, tool


class Agent:
    """A model with instructions and tools; it keeps nothing, so one agent serves any number of sessions.

    Args:
        model: What answers (`midstream.integrations` has real ones, `midstream.testing` a scripted one).
        instructions: The system prompt.
        tools: Tools, or plain functions that become tools with the careful defaults (effects, outcome unknown
            when in doubt).
        name: What people see.
        approval: The host's own rule about calls that a person must allow, beside each tool's own: it says whether, or
            in words why. Where it fails, somebody is asked.
        turn_s: Seconds a whole turn may take, people's answers not counted; 0 for no limit.

    Raises:
        ToolDefinitionError: A function cannot become a tool, or two tools have one name.
    """

    def __init__(
        self,
        model: Model,
        *,
        instructions: str = "",
        tools: Iterable[Tool | Callable[..., Any]] = (),
        name: str = "agent",
        approval: Approval | None = None,
        turn_s: float = 0.0,
    ) -> None:
        self.model = model
        self.instructions = instructions
        self.tools = by_name(each if isinstance(each, Tool) else tool(each) for each in tools)
        self.name = name
        self.approval = approval
        self.turn_s = turn_s

    def __repr__(self) -> str:
        return f"Agent({self.name!r}, model={self.model.name!r}, tools={sorted(self.tools)!r})"
