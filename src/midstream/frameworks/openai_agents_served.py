"""Serve an agent of the OpenAI Agents SDK as an agent of midstream: sessions, page, approvals and CLI included.

    from midstream.frameworks.openai_agents_served import make_agent

    agent = make_agent(sdk_agent, context=AppContext(...))

`midstream serve module:sdk_agent` calls it without `context`. midstream runs the loop with the agent's model, and
journals each tool call before it starts. Parts that need the SDK's own `Runner` are refused.
"""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from midstream.engine.agent import Agent, describe
from midstream.environment import World
from midstream.errors import ToolsUnavailableError, UsageError
from midstream.extras import extra
from midstream.frameworks.openai_agents_model import OpenAIAgentsModel, spec_of
from midstream.frameworks.tool_connections import HeldContext, run_bounded
from midstream.history.messages import Outcome, ToolCall
from midstream.session.calls import OnDoubt, OnDoubtName
from midstream.tools.function_tools import TIMEOUT_S, StatedOutcome, Tool, current_call

with extra("openai-agents"):
    import agents
    from agents import (
        CodeInterpreterTool,
        FileSearchTool,
        FunctionTool,
        HostedMCPTool,
        ItemHelpers,
        RunContextWrapper,
        WebSearchTool,
    )
    from agents.exceptions import ModelBehaviorError, ToolTimeoutError
    from agents.mcp import MCPServer
    from agents.tool import (
        default_tool_timeout_error_message,
        invoke_function_tool,
        resolve_function_tool_failure_error_function,
        set_function_tool_failure_error_function,
    )
    from agents.tool_context import ToolContext
    from agents.tool_guardrails import ToolInputGuardrailData, ToolOutputGuardrailData
    from openai.types.responses import ResponseFunctionToolCall

TIMEOUT_GRACE_S = 5.0
"""Seconds between a tool's own time limit and midstream's, for the tool's `timeout_error_function`."""
_POLICIES = (OnDoubt.UNKNOWN, OnDoubt.RERUN, OnDoubt.RERUN_WITH_KEY, OnDoubt.HOLD)
_HOSTED = (WebSearchTool, FileSearchTool, CodeInterpreterTool)
"""Hosted tools whose result is text."""
_MAY_HAVE_RUN = "It may or may not have taken effect."
_HALTED = "This tool call was stopped by the guardrail {name!r}."


def make_agent(
    agent: agents.Agent[Any],
    *,
    context: Any = None,  # noqa: ANN401 - the application's own
    on_doubt: Mapping[str, OnDoubt | OnDoubtName] | None = None,
    name: str | None = None,
) -> Agent:
    """Convert an agent of the OpenAI Agents SDK.

    Args:
        agent: The agent. Supported are its model, model settings, instructions, prompt, function tools, agents as tools
            and MCP servers. Supported hosted tools are web search, file search, the code interpreter, and MCP without
            approvals.
        context: The context object of instructions and tools, which all sessions share.
        on_doubt: Policies for calls in doubt, by tool name: `unknown` (the default), `rerun`, `rerun_with_key`, `hold`.
            An MCP tool with `readOnlyHint` or `idempotentHint` runs again.
        name: Name of the agent; by default its own.

    A tool with `needs_approval` waits for a person. `usage` and `turn_input` of a tool's context are empty.

    Raises:
        UsageError: `agent` is not an `agents.Agent`, its model cannot be created, it needs a `context`, or it has parts
            that only the SDK's own `Runner` can run. The message lists all of them.
    """
    if not isinstance(agent, agents.Agent):
        raise UsageError(f"`agent` is {describe(agent)}; expected an `agents.Agent`")
    if context is None and (kind := _context_type(agent)) is not None:
        raise UsageError(
            f"the agent needs a context ({describe(kind)}): write "
            "`agent = midstream.frameworks.openai_agents_served.make_agent(your_agent, context=...)` and serve that"
        )
    policies = {tool: _policy(tool, policy) for tool, policy in (on_doubt or {}).items()}
    if refused := [*_refusals_of(agent), *_unknown(agent, policies)]:
        raise UsageError(
            f"the agent cannot be served: {'; '.join(refused)}. Change these parts, or use the SDK's own `Runner` "
            "and make it durable with `midstream.frameworks.openai_agents`"
        )
    listed: dict[str, FunctionTool] = {}
    shared = _Shared(agent, context, policies, listed, World())
    return Agent(
        OpenAIAgentsModel(agent, context, listed),
        instructions=agent.instructions if isinstance(agent.instructions, str) else "",
        tools=[
            _Functions(shared),
            *(_Server(shared, server, place) for place, server in enumerate(agent.mcp_servers)),
        ],
        name=name or agent.name or "agent",
        approval=_approval(context),
    )


def _context_type(agent: agents.Agent[Any]) -> object:
    """Return the context type `X` of `Agent[X](...)`; None if any context is accepted."""
    (kind, *_) = typing.get_args(getattr(agent, "__orig_class__", None)) or (None,)
    return None if kind in (Any, object, type(None)) or isinstance(kind, typing.TypeVar) else kind


# --- unsupported parts --------------------------------------------------------------------------------------


def _refusals_of(agent: agents.Agent[Any]) -> Iterator[str]:
    """Yield the parts of an agent that need the SDK's own loop, each with an alternative."""
    if type(agent).__module__.startswith("agents.sandbox"):
        yield f"it is a `{type(agent).__name__}` (give the sandbox's commands as function tools)"
    if agent.output_type not in (None, str):
        yield f"`output_type` is {agent.output_type!r} (a session's answer is text)"
    if agent.handoffs:
        yield (
            "it has `handoffs` (give the other agents as tools: `tools=[other.as_tool(...)]`, or "
            "`make_agent(...).with_tools(midstream.sub_agent(make_agent(other), description=...))`)"
        )
    if agent.input_guardrails:
        yield "it has `input_guardrails` (check a message before it is sent to the session)"
    if agent.output_guardrails:
        yield "it has `output_guardrails` (an answer is streamed: its text is shown before its end)"
    if agent.hooks is not None:
        yield "it has `hooks` (follow the session's events, or use an observer)"
    if callable(agent.tool_use_behavior):
        yield "a function is its `tool_use_behavior` (name the tools: `StopAtTools`)"
    if agent.model_settings.retry is not None:
        yield "it has `model_settings.retry` (midstream retries failed requests itself)"
    for each in agent.tools:
        yield from _refusals_of_tool(each)


def _refusals_of_tool(tool: object) -> Iterator[str]:
    if isinstance(tool, FunctionTool):
        if tool.qualified_name != tool.name or tool.defer_loading:
            yield f"the tool {tool.name!r} has a namespace or `defer_loading` (declare it without them)"
        nested = getattr(tool, "_agent_instance", None)
        if nested is not None and (asking := [*_with_approval(nested, set())]):
            yield (
                f"the agent behind the tool {tool.name!r} has tools that need approval ({', '.join(asking)}; give it "
                "to the served agent: `make_agent(...).with_tools("
                "midstream.sub_agent(make_agent(other), description=...))`)"
            )
    elif isinstance(tool, HostedMCPTool):
        if tool.tool_config.get("require_approval") != "never":
            label = tool.tool_config.get("server_label", "")
            yield f"the hosted MCP server {label!r} requires approvals (`require_approval: never`, or `mcp_servers`)"
    elif not isinstance(tool, _HOSTED):
        yield f"it has a `{type(tool).__name__}` (use a function tool instead)"


def _with_approval(agent: Any, seen: set[int]) -> Iterator[str]:  # noqa: ANN401 - an agent, or a handoff to one
    """Yield the names of tools that need approval in an agent inside a tool, and in agents that it uses."""
    if agent is None or id(agent) in seen:
        return
    seen.add(id(agent))
    for tool in getattr(agent, "tools", ()):
        if isinstance(tool, FunctionTool):
            if tool.needs_approval is not False:
                yield repr(tool.name)
            yield from _with_approval(getattr(tool, "_agent_instance", None), seen)
    for server in getattr(agent, "mcp_servers", ()):
        if getattr(server, "_needs_approval_policy", False) is not False:
            yield repr(server.name)
    for other in getattr(agent, "handoffs", ()):
        reference = getattr(other, "_agent_ref", None)
        yield from _with_approval(reference() if callable(reference) else other, seen)


def _unknown(agent: agents.Agent[Any], policies: Mapping[str, OnDoubt]) -> Iterator[str]:
    """Yield policies of unknown tools; with MCP servers, the tools are not known yet."""
    known = {each.name for each in agent.tools if isinstance(each, FunctionTool)}
    for name in policies:
        if name not in known and not agent.mcp_servers:
            yield f"`on_doubt` names the tool {name!r}, which it does not have"


def _policy(name: str, policy: str) -> OnDoubt:
    if policy not in _POLICIES:
        expected = ", ".join(repr(each.value) for each in _POLICIES)
        raise UsageError(f"`on_doubt` of the tool {name!r} is {policy!r}; expected one of {expected}")
    return OnDoubt(policy)


# --- approvals ------------------------------------------------------------------------------------------------


def _approval(context: object) -> Callable[[ToolCall, Tool], bool]:
    """Return the approval rule of tools whose `needs_approval` is a function."""

    def needs_approval(call: ToolCall, tool: Tool) -> bool:
        sdk_tool = getattr(tool.function, "sdk_tool", None)
        if sdk_tool is None or not callable(sdk_tool.needs_approval):
            return False
        return _evaluate_approval(sdk_tool, RunContextWrapper(context), call)

    return needs_approval


def _evaluate_approval(tool: FunctionTool, context: RunContextWrapper[Any], call: ToolCall) -> bool:
    """Evaluate a function like the SDK; a function that must wait means that a person is asked.

    Like the SDK, it also means that if the tool's arguments differ from those of the model.
    """
    from agents.util._approvals import evaluate_function_tool_approval  # noqa: PLC0415 - has no public name

    evaluating = evaluate_function_tool_approval(tool, context, call.arguments or "{}", call.id)
    try:
        evaluating.send(None)
    except StopIteration as done:
        return bool(done.value.outcome != "invoke")
    finally:
        evaluating.close()
    return True


# --- the tools ------------------------------------------------------------------------------------------------


class _Shared(msgspec.Struct, frozen=True):
    """Shared data of an agent's tool sources."""

    agent: Any
    context: Any
    policies: Mapping[str, OnDoubt]
    listed: dict[str, FunctionTool]
    world: World

    def make_tools(self, tools: Sequence[Any], running: set[str] | None = None) -> tuple[Tool, ...]:
        """Convert function tools to tools of midstream; `running` collects the running calls of a server."""
        functions = [each for each in tools if isinstance(each, FunctionTool)]
        self.listed.update((each.name, each) for each in functions)
        return tuple(_tool(each, self, running) for each in functions)


class _Functions:
    """The enabled function tools of an agent."""

    name = "function-tools"

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared

    async def tools(self) -> Sequence[Tool]:
        """Return the current tools; see `ToolSource`."""
        enabled = [each for each in self._shared.agent.tools if await self._is_enabled(each)]
        return self._shared.make_tools(enabled)

    async def close(self) -> None:
        """Do nothing: functions have no connection."""

    async def _is_enabled(self, tool: object) -> bool:
        enabled: Any = getattr(tool, "is_enabled", False)
        if callable(enabled):
            enabled = enabled(RunContextWrapper(self._shared.context), self._shared.agent)
        return bool(await enabled if inspect.isawaitable(enabled) else enabled)


class _Server:
    """The tools of one MCP server of an agent, connected at first use if the application did not connect it."""

    def __init__(self, shared: _Shared, server: MCPServer, place: int) -> None:
        self.name = f"{server.name}-{place}"
        self._shared = shared
        self._server = server
        self._alone = shared.agent.clone(mcp_servers=[server])
        self._held: HeldContext | None = None
        self._running: set[str] = set()

    async def tools(self) -> Sequence[Tool]:
        """Return the current tools; see `ToolSource`.

        Raises:
            ToolsUnavailableError: The server cannot be connected, or cannot list its tools.
        """
        held = self._held
        try:
            return await self._find_tools()
        except Exception as error:
            # Keep a connection with running calls.
            if not self._running and (held is None or self._held is held):
                await self.close()
            if held is None or self._running:
                raise ToolsUnavailableError(f"{self.name!r}: {type(error).__name__}: {error}") from error
        return await self.tools()  # the connection was lost: reconnect once

    async def _find_tools(self) -> Sequence[Tool]:
        if self._held is None and getattr(self._server, "session", None) is None:
            self._held = HeldContext(self._server, self._shared.world)
        if self._held is not None:
            await self._held.wait_until_open()
        found = await self._alone.get_mcp_tools(RunContextWrapper(self._shared.context))
        return self._shared.make_tools(found, self._running)

    async def close(self) -> None:
        """Close the connection that this object opened. The next `tools` connects again."""
        held, self._held = self._held, None
        if held is not None:
            await held.close()


def _tool(tool: FunctionTool, shared: _Shared, running: set[str] | None) -> Tool:
    hints = tool.mcp_annotations
    reads = getattr(hints, "read_only_hint", getattr(hints, "readOnlyHint", None)) is True
    repeats = getattr(hints, "idempotent_hint", getattr(hints, "idempotentHint", None)) is True
    usual = OnDoubt.RERUN if reads or repeats else OnDoubt.UNKNOWN
    limit_s = tool.timeout_seconds

    async def call(**arguments: Any) -> str | StatedOutcome:  # noqa: ANN401 - any JSON of the model
        if running is None:
            return await _run_tool(tool, arguments, shared, has_effects=not reads)
        key = current_call().effect_key
        running.add(key)
        try:
            return await _run_tool(tool, arguments, shared, has_effects=not reads, is_remote=True)
        finally:
            running.discard(key)

    call.sdk_tool = tool  # type: ignore[attr-defined]  # `_approval` finds it here
    return Tool(
        spec_of(tool),
        call,
        None,
        has_effects=not reads,
        on_doubt=shared.policies.get(tool.name, usual),
        timeout_s=TIMEOUT_S if limit_s is None else limit_s + TIMEOUT_GRACE_S,
        needs_approval=tool.needs_approval is True,
    )


async def _run_tool(
    tool: FunctionTool,
    arguments: dict[str, Any],
    shared: _Shared,
    *,
    has_effects: bool,
    is_remote: bool = False,
) -> str | StatedOutcome:
    call, written = current_call(), msgspec.json.encode(arguments).decode()
    requested = ResponseFunctionToolCall(
        type="function_call", name=tool.name, call_id=call.call_id, arguments=written
    )
    context = ToolContext(
        shared.context,
        tool_name=tool.name,
        tool_call_id=call.call_id,
        tool_arguments=written,
        tool_call=requested,
        agent=shared.agent,
    )
    given = ToolInputGuardrailData(context, shared.agent)
    for guardrail in tool.tool_input_guardrails or ():
        if (refusal := _refusal(guardrail, await guardrail.run(given))) is not None:
            return StatedOutcome(refusal, Outcome.ERROR)
    failures: list[Exception] = []
    running = invoke_function_tool(
        function_tool=_record_failures(tool, context, failures), context=context, arguments=written
    )
    try:
        value = await run_bounded(running, shared.world)
    except Exception as error:  # noqa: BLE001 - foreign code: each error is a result
        failures.append(error)
        value = str(error) if isinstance(error, ToolTimeoutError) else f"{type(error).__name__}: {error}"
    for checking in tool.tool_output_guardrails or ():
        returned = ToolOutputGuardrailData(context, shared.agent, value)
        if (refusal := _refusal(checking, await checking.run(returned))) is not None:
            return StatedOutcome(refusal, Outcome.ERROR)
    if not failures:
        return _text_of(tool, requested, value)
    is_cut = isinstance(failures[-1], ToolTimeoutError) or is_remote
    if has_effects and is_cut and not isinstance(failures[-1], ModelBehaviorError):
        return StatedOutcome(f"{value} {_MAY_HAVE_RUN}", Outcome.UNKNOWN)
    return StatedOutcome(str(value), Outcome.ERROR)


def _record_failures(
    tool: FunctionTool, context: ToolContext[Any], failures: list[Exception]
) -> FunctionTool:
    """Return the tool with error functions that also note each error, because their text does not show a failure."""

    def note_failures(formatter: Callable[..., Any]) -> Callable[..., Any]:
        async def formatted(of: RunContextWrapper[Any], error: Exception) -> Any:  # noqa: ANN401 - the formatter's
            failures.append(error)
            text = formatter(of, error)
            return await text if inspect.isawaitable(text) else text

        return formatted

    def late(_: RunContextWrapper[Any], error: ToolTimeoutError) -> str:
        text: str = default_tool_timeout_error_message(
            tool_name=error.tool_name, timeout_seconds=error.timeout_seconds
        )
        return text

    copied = copy.copy(tool)
    formatter = resolve_function_tool_failure_error_function(tool, context)
    if formatter is not None:
        set_function_tool_failure_error_function(copied, note_failures(formatter))
    copied.timeout_error_function = note_failures(tool.timeout_error_function or late)
    return copied


def _refusal(guardrail: Any, output: Any) -> str | None:  # noqa: ANN401 - the SDK's, of two kinds
    """Return the guardrail's replacement of the result, or None if it allows the result."""
    behavior = output.behavior
    if behavior["type"] == "reject_content":
        return str(behavior["message"])
    return _HALTED.format(name=guardrail.get_name()) if behavior["type"] == "raise_exception" else None


def _text_of(tool: FunctionTool, call: ResponseFunctionToolCall, value: object) -> str:
    """Return a tool's value as text like the SDK; images and files are only named."""
    item: Any = ItemHelpers.tool_call_output_item(
        call,
        value,
        output_json_schema=tool.output_json_schema,
        output_type_adapter=getattr(tool, "_output_type_adapter", None),
    )
    output: str | list[dict[str, str]] = item["output"]
    if isinstance(output, str):
        return output
    return "\n\n".join(
        part["text"] if part["type"] == "input_text" else f"[{part['type'].removeprefix('input_')}]"
        for part in output
    )
