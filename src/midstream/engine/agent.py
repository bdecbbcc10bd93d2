"""Definition of an agent: a model, its instructions, its tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from midstream.engine.watchdog import OnStall
from midstream.errors import AgentNotFoundError, ToolDefinitionError, UsageError
from midstream.history.messages import ToolCall
from midstream.models.model import Model
from midstream.number_checks import require_count, require_seconds
from midstream.session.calls import Site
from midstream.timing import StallBudgets
from midstream.tools.function_tools import Approval, Tool, ToolSource, by_name, tool

SUB_AGENT_RESPONSES_MAX = 50
"""Responses of a sub-agent before it must hand in its result."""
SUB_AGENT_S = 30 * 60.0
"""Seconds that a sub-agent may work before it must hand in its result."""


class Agent:
    """A model with instructions and tools. An agent is stateless, so it can serve any number of sessions.

    Args:
        model: The model (`midstream.agents` has real ones, `midstream.testing` a scripted one).
        instructions: The system prompt.
        tools: Tools, plain functions, and sources of tools, such as MCP servers. A function becomes a tool with effects
            and the policy `unknown`. The host closes the sources.
        name: The name that users see. An open turn belongs to the agent of its name and `version`; another agent does
            not continue it. A turn that is resumed on request continues with the agent that is served then.
        version: Change it if open turns must not continue automatically, as after a change of tools. "" matches any.
        approval: A rule for calls that a person must allow, in addition to the rule of each tool. It returns a bool, a
            reason as text, or an `Ask` with the terms, such as the number of people. It also applies to tools of
            clients. If it raises, the call needs the approval of one person, or of as many as its tool requires.
        turn_s: Seconds that a turn may take, without the time that people need to answer; 0 for no limit.
        stalls: How long a model or a tool may be silent before it is reported, and before it is cut.
        on_stall: Called for each silence that was reported, was cut, or has ended. It must not block.

    Raises:
        ToolDefinitionError: A function cannot become a tool, or two tools or two sources have one name.
        UsageError: `model` is not a `Model` (a string, an agent of another framework): the message names the wrapper
            that makes one. Or `instructions` is not text, or `turn_s` is not a number of seconds.
    """

    def __init__(
        self,
        model: Model,
        *,
        instructions: str = "",
        tools: Iterable[Tool | ToolSource | Callable[..., Any]] = (),
        name: str = "agent",
        version: str = "",
        approval: Approval | None = None,
        turn_s: float = 0.0,
        stalls: StallBudgets = StallBudgets(),
        on_stall: OnStall | None = None,
    ) -> None:
        if not isinstance(instructions, str):
            raise UsageError(f"`instructions` is {describe(instructions)}; expected a string")
        require_seconds("turn_s", turn_s)
        given = _check_tools(tools)
        self.model = require_model(model)
        self.instructions = instructions
        self.sources = _distinct(each for each in given if isinstance(each, ToolSource))
        self.tools = by_name(
            each if isinstance(each, Tool) else tool(each)
            for each in given
            if not isinstance(each, ToolSource)
        )
        self.name = name
        self.version = version
        self.approval = approval
        self.turn_s = turn_s
        self.stalls = stalls
        self.on_stall = on_stall

    def sub_agent(self, path: tuple[str, ...]) -> Agent:
        """Return the sub-agent at `path`, a sequence of names below this agent.

        Raises:
            AgentNotFoundError: There is no such sub-agent.
        """
        agent = self
        for name in path:
            found = agent.tools.get(name)
            if not isinstance(found, SubAgent):
                raise AgentNotFoundError(f"agent {agent.name!r} has no sub-agent named {name!r}")
            agent = found.agent
        return agent

    def with_tools(self, *more: Tool | ToolSource | Callable[..., Any]) -> Agent:
        """Return a copy of this agent with more tools; raises like the constructor."""
        tools = (*self.tools.values(), *self.sources, *more)
        return Agent(
            self.model,
            instructions=self.instructions,
            tools=tools,
            name=self.name,
            version=self.version,
            approval=self.approval,
            turn_s=self.turn_s,
            stalls=self.stalls,
            on_stall=self.on_stall,
        )

    def __repr__(self) -> str:
        sources = f", sources={[each.name for each in self.sources]!r}" if self.sources else ""
        return f"Agent({self.name!r}, model={self.model.name!r}, tools={sorted(self.tools)!r}{sources})"


# The advice for a foreign object: the longest prefix of its module's name decides.
_WRAPPERS = {
    "pydantic_ai.models": "Wrap it with `midstream.models.pydantic_ai.PydanticAIModel(model)`.",
    "pydantic_ai": "Convert it with `midstream.frameworks.pydantic_ai_served.make_agent(agent)`, make it durable with "
    "`midstream.frameworks.pydantic_ai_durable`, or give its model to "
    "`midstream.Agent(PydanticAIModel(model), ...)`.",
    "langgraph": "Convert it with `midstream.frameworks.langgraph_served.make_agent(graph)`, or make its tools durable "
    "with `midstream.frameworks.langgraph`.",
    "langchain": "Make it durable with `midstream.frameworks.langgraph`.",
    "agents": "Make it durable with `midstream.frameworks.openai_agents`.",
    "agents.agent": "Convert it with `midstream.frameworks.openai_agents_served.make_agent(agent)`, or make it "
    "durable with `midstream.frameworks.openai_agents`.",
    "openai": "Use `midstream.models.openai_compatible.OpenAICompatible(...)`.",
    "anthropic": "Use `midstream.models.anthropic_messages.AnthropicMessages(...)`.",
}
_ANY_MODEL = (
    "`midstream.agents` has models of every provider, `midstream.testing.ScriptedModel` needs no key."
)


def describe(value: object) -> str:
    """Describe a wrong argument for an error message: by its value if that is short and plain, else by its type."""
    if value is None or isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return f"the string {value[:60]!r}"
    kind = value if isinstance(value, type) else type(value)
    name = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
    return f"the class `{name}`" if isinstance(value, type) else f"a `{name}`"


def require_agent(value: object) -> Agent:
    """Return `value` if it is an agent.

    Raises:
        UsageError: It is not. The message states what to write instead.
    """
    if isinstance(value, Agent):
        return value
    advice = _advice(value) or "Make one with `midstream.Agent(model, ...)`."
    raise UsageError(f"`agent` is {describe(value)}; expected a `midstream.Agent`. {advice}")


def require_model(value: Any) -> Model:  # noqa: ANN401 - any value of a caller
    """Return `value` if it has the attributes of a `Model`.

    Raises:
        UsageError: It has not. The message states what to write instead.
    """
    if isinstance(value, Agent):
        advice = "Pass it as a tool: `tools=[midstream.sub_agent(agent, description=...)]`."
    elif isinstance(value, str):
        advice = f"Write `midstream.models.pydantic_ai.PydanticAIModel({value[:60]!r})`."
    elif isinstance(value, type):
        advice = f"Create an instance: `{value.__name__}(...)`."
    elif advice := _advice(value):
        pass
    elif callable(getattr(value, "stream", None)) and isinstance(getattr(value, "name", None), str):
        model: Model = value
        return model
    else:
        advice = f"A model has a `name` and an async generator `stream(request)`. {_ANY_MODEL}"
    raise UsageError(f"`model` is {describe(value)}; expected a `midstream.Model`. {advice}")


def _advice(value: object) -> str:
    kind = value if isinstance(value, type) else type(value)
    parts = kind.__module__.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_WRAPPERS[prefix] for prefix in prefixes if prefix in _WRAPPERS), "")


def _check_tools(tools: object) -> list[Tool | ToolSource | Callable[..., Any]]:
    if isinstance(tools, str | bytes) or callable(tools) or not isinstance(tools, Iterable):
        raise ToolDefinitionError(f"`tools` is {describe(tools)}; expected a list: `tools=[...]`")
    given = [*tools]
    for each in given:
        is_function = callable(each) and hasattr(each, "__name__") and not isinstance(each, type)
        if not (isinstance(each, Tool | ToolSource) or is_function):
            advice = _advice(each) or "Give a function, a `@tool`, or a source of tools such as `McpServer`."
            raise ToolDefinitionError(f"`tools` contains {describe(each)}. {advice}")
    return given


def _distinct(sources: Iterable[ToolSource]) -> tuple[ToolSource, ...]:
    found: dict[str, ToolSource] = {}
    for each in sources:
        if each.name in found:
            raise ToolDefinitionError(f"two sources of tools are named {each.name!r}; rename one of them")
        found[each.name] = each
    return tuple(found.values())


class SubAgent(Tool, frozen=True, kw_only=True):
    """A tool that runs another agent in a session of its own. Create it with `sub_agent`.

    Args:
        agent: The agent that works on the task.
        responses_max: Responses before one last request, without tools, for its result.
    """

    agent: Agent
    responses_max: int

    def task_of(self, call: ToolCall) -> str:
        """Return the task that the model gave the sub-agent."""
        return msgspec.json.decode(call.arguments or "{}", type=_Task, strict=False).task


class _Task(msgspec.Struct):
    task: str


def sub_agent(
    agent: Agent,
    *,
    description: str,
    name: str | None = None,
    responses_max: int = SUB_AGENT_RESPONSES_MAX,
    timeout_s: float = SUB_AGENT_S,
) -> SubAgent:
    """Create a tool with which a model gives a task to another agent.

    The other agent works in a session of its own, with its own history. Readers of the parent session receive its
    events. After a crash the same child session continues.

    Args:
        agent: The agent that works on the task.
        description: The description for the model.
        name: The name the model sees; the agent's own by default.
        responses_max: Responses after which it must hand in its result.
        timeout_s: Seconds after which it must hand in its result, without the time that people need to answer.

    Raises:
        ToolDefinitionError: A limit is not positive, or `timeout_s` is longer than 366 days.
    """
    require_count("responses_max", responses_max, least=1, error=ToolDefinitionError)
    require_seconds("timeout_s", timeout_s, is_positive=True, error=ToolDefinitionError)

    def work(task: str) -> str:
        raise AssertionError(task)  # `run_child` runs the session instead

    made = tool(name=name or agent.name, has_effects=False, timeout_s=timeout_s)(work)
    spec = msgspec.structs.replace(made.spec, description=description)
    return SubAgent(
        spec,
        made.function,
        made.arguments,
        has_effects=False,
        timeout_s=timeout_s,
        site=Site.CHILD,
        agent=agent,
        responses_max=responses_max,
    )
