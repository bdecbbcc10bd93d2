"""Serve an agent of pydantic-ai as an agent of midstream: sessions, page, approvals and CLI included.

    from midstream.frameworks.pydantic_ai_served import make_agent

    agent = make_agent(pydantic_agent, deps=Deps(...))

`midstream serve module:pydantic_agent` calls it without `deps`. midstream runs the loop with the agent's model, and
journals each tool call before it starts. Parts that need pydantic-ai's own loop are refused.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from midstream.engine.agent import Agent, describe
from midstream.environment import World
from midstream.errors import ToolDefinitionError, ToolsUnavailableError, UsageError
from midstream.extras import extra
from midstream.frameworks.tool_connections import HeldContext, run_bounded
from midstream.history.messages import Outcome, ToolSpec
from midstream.models.pydantic_ai import PydanticAIModel
from midstream.session.calls import OnDoubt
from midstream.tools.function_tools import TIMEOUT_S, CallContext, StatedOutcome, Tool, current_call

with extra("pydantic-ai"):
    import pydantic_ai
    from pydantic import ValidationError
    from pydantic_ai.exceptions import ApprovalRequired, CallDeferred, ModelRetry, ToolFailed
    from pydantic_ai.messages import InstructionPart, ToolReturn, ToolReturnPart
    from pydantic_ai.models import infer_model
    from pydantic_ai.tools import DeferredToolRequests, RunContext, ToolDefinition
    from pydantic_ai.toolsets import (
        AbstractToolset,
        ApprovalRequiredToolset,
        CombinedToolset,
        ExternalToolset,
        FunctionToolset,
        ToolsetTool,
        WrapperToolset,
    )
    from pydantic_ai.usage import RunUsage

METADATA_KEY = "midstream"
"""Key of the policy in a tool's metadata: `metadata={"midstream": "rerun"}`."""
_POLICIES = (OnDoubt.UNKNOWN, OnDoubt.RERUN, OnDoubt.RERUN_WITH_KEY, OnDoubt.HOLD)
_INJECTED = ("ToolSearch", "PendingMessageDrainCapability")
"""Capabilities of every agent of pydantic-ai, which have no effect without its loop."""
_NO_JSON = "This tool finished, but its answer has no JSON form."
_NOT_ASKED = (
    "This tool did not run: it requires approval or runs elsewhere, and reports this only when it is called. "
    "Declare it with `requires_approval=True`."
)


def make_agent(agent: pydantic_ai.Agent[Any, Any], *, deps: Any = None, name: str | None = None) -> Agent:  # noqa: ANN401 - the application's own
    """Convert an agent of pydantic-ai.

    Args:
        agent: The agent. Supported are its model, model settings, static instructions and system prompts, tools and
            toolsets, also tools that are registered later.
        deps: The dependencies of tool calls, which all sessions share.
        name: Name of the agent; by default its own.

    A tool with `requires_approval=True` waits for a person. Metadata `{"midstream": policy}` (`unknown`, `rerun`,
    `rerun_with_key`, `hold`) sets the policy for calls in doubt; an MCP tool with `readOnlyHint` or `idempotentHint`
    runs again. A tool's `RunContext` has `deps`, the model and the call; its messages and its usage are empty.

    Raises:
        UsageError: `agent` is not a `pydantic_ai.Agent`, has no model, needs `deps`, or has parts that only
            pydantic-ai's own loop can run. The message lists all of them.
    """
    if not isinstance(agent, pydantic_ai.Agent):
        raise UsageError(f"`agent` is {describe(agent)}; expected a `pydantic_ai.Agent`")
    if agent.model is None:
        raise UsageError("the agent has no model: write `pydantic_ai.Agent(model, ...)`")
    if deps is None and agent.deps_type not in (object, type(None)):
        raise UsageError(
            f"the tools of the agent need deps ({describe(agent.deps_type)}): write "
            "`agent = midstream.frameworks.pydantic_ai_served.make_agent(your_agent, deps=...)` and serve that"
        )
    if refused := [*_refusals_of(agent)]:
        raise UsageError(
            f"the agent cannot be served: {'; '.join(refused)}. Remove these parts, or use pydantic-ai's own loop "
            "and make it durable with `midstream.frameworks.pydantic_ai_durable`"
        )
    model = PydanticAIModel(agent.model, settings=typing.cast("Any", agent.model_settings))
    sources = [_Toolset(each, agent, deps, place) for place, each in enumerate(agent.toolsets)]
    return Agent(
        model,
        instructions="\n\n".join(text for text in _texts(agent) if text),
        tools=sources,
        name=name or agent.name or "agent",
    )


# --- unsupported parts --------------------------------------------------------------------------------------


def _refusals_of(agent: pydantic_ai.Agent[Any, Any]) -> Iterator[str]:
    kinds = set(_kinds(agent.output_type)) - {DeferredToolRequests}
    if kinds != {str}:
        yield f"`output_type` is {agent.output_type!r} (a session's answer is text)"
    if _read_hidden(agent, "_output_validators"):
        yield "it has output validators"
    for each in _read_hidden(agent, "_root_capability").capabilities:
        if type(each).__name__ not in _INJECTED:
            yield f"it has the capability `{type(each).__name__}`"
    if _read_hidden(agent, "_system_prompt_functions"):
        yield "it has system prompts from a function"
    if any(not isinstance(each, str) for each in _instructions(agent)):
        yield "it has instructions from a function or a template"
    if callable(agent.model_settings):
        yield "its `model_settings` are a function"
    if callable(_read_hidden(agent, "_validation_context")):
        yield "its `validation_context` is a function"
    if _read_hidden(agent, "_concurrency_limiter") is not None:
        yield "it has `max_concurrency`"
    for toolset in agent.toolsets:
        for each in _inner(toolset):
            yield from _refusals_of_toolset(each)


def _refusals_of_toolset(toolset: AbstractToolset[Any]) -> Iterator[str]:
    if type(toolset).__name__ == "DynamicToolset":
        yield "it has a toolset from a function"
    elif isinstance(toolset, ExternalToolset):
        yield "it has an `ExternalToolset` (give tools of a client to the client)"
    elif isinstance(toolset, ApprovalRequiredToolset):
        yield "it has an `ApprovalRequiredToolset` (declare its tools with `requires_approval=True`)"
    elif getattr(toolset, "include_instructions", False):
        yield f"the toolset {toolset.id!r} has `include_instructions`"
    elif isinstance(toolset, FunctionToolset):
        for each in toolset.tools.values():
            try:
                _policy_of(each.name, each.metadata)
            except ToolDefinitionError as error:
                yield error.message


def _inner(toolset: AbstractToolset[Any]) -> Iterator[AbstractToolset[Any]]:
    """Yield a toolset and all toolsets that it wraps."""
    yield toolset
    if isinstance(toolset, WrapperToolset):
        yield from _inner(toolset.wrapped)
    elif isinstance(toolset, CombinedToolset):
        for each in toolset.toolsets:
            yield from _inner(each)


def _kinds(output: object) -> Iterator[object]:
    if isinstance(output, Sequence) and not isinstance(output, str):
        for each in output:
            yield from _kinds(each)
    elif typing.get_origin(output) in (typing.Union, types.UnionType):
        for each in typing.get_args(output):
            yield from _kinds(each)
    else:
        yield output if isinstance(output, type) else repr(output)


def _texts(agent: pydantic_ai.Agent[Any, Any]) -> Iterator[str]:
    yield from _read_hidden(agent, "_system_prompts")
    yield from (str(each) for each in _instructions(agent))


def _instructions(agent: pydantic_ai.Agent[Any, Any]) -> Iterator[object]:
    """Yield the instructions of an agent and its toolsets: text, or functions that return it."""
    yield from _unpack(_read_hidden(agent, "_instructions"))
    for toolset in agent.toolsets:
        for each in _inner(toolset):
            if isinstance(each, FunctionToolset):
                yield from _unpack(_read_hidden(each, "_instructions"))


def _unpack(instructions: Iterable[Any]) -> Iterator[object]:
    for each in instructions:
        found = getattr(each, "instruction", each)
        yield found.content if isinstance(found, InstructionPart) else found


def _read_hidden(value: object, name: str) -> Any:  # noqa: ANN401 - pydantic-ai's own
    """Return a private attribute of pydantic-ai.

    Raises:
        UsageError: This version of pydantic-ai does not have it, so it is unknown whether the agent can be served.
    """
    try:
        return getattr(value, name)
    except AttributeError as error:
        version = pydantic_ai.__version__
        raise UsageError(f"agents of pydantic-ai {version} cannot be served: it has no {name!r}") from error


# --- the tools ------------------------------------------------------------------------------------------------


def _policy_of(name: str, metadata: dict[str, Any] | None) -> OnDoubt:
    known = metadata or {}
    hints = known.get("annotations") or {}
    can_repeat = hints.get("readOnlyHint") is True or hints.get("idempotentHint") is True
    policy = known.get(METADATA_KEY, OnDoubt.RERUN if can_repeat else OnDoubt.UNKNOWN)
    if policy not in _POLICIES:
        expected = ", ".join(repr(each.value) for each in _POLICIES)
        raise ToolDefinitionError(
            f"the metadata {METADATA_KEY!r} of tool {name!r} is {policy!r}; expected one of {expected}"
        )
    return OnDoubt(policy)


class _Toolset:
    """A toolset of pydantic-ai as a tool source."""

    def __init__(
        self, toolset: AbstractToolset[Any], agent: pydantic_ai.Agent[Any, Any], deps: object, place: int
    ) -> None:
        self.name = f"{(toolset.id or type(toolset).__name__).strip('<>')}-{place}"
        self._toolset = toolset
        self._agent = agent
        self._deps = deps
        self._world = World()
        self._model = infer_model(agent.model or "")
        self._listed: dict[str, ToolsetTool[Any]] = {}
        self._made: dict[str, tuple[ToolDefinition, Tool]] = {}
        self._entered: HeldContext | None = None

    async def tools(self) -> Sequence[Tool]:
        """Return the current tools; see `ToolSource`.

        Raises:
            ToolsUnavailableError: The toolset cannot be opened, or cannot list its tools.
        """
        if self._entered is None or self._entered.has_ended:
            self._entered = HeldContext(self._toolset, self._world)
        try:
            await self._entered.wait_until_open()
            self._listed = await self._toolset.get_tools(self._context())
        except Exception as error:
            raise ToolsUnavailableError(f"{self.name!r}: {type(error).__name__}: {error}") from error
        self._made = {name: self._tool(name, each.tool_def) for name, each in self._listed.items()}
        return tuple(made for _, made in self._made.values())

    async def close(self) -> None:
        """Close the toolset with its connections and processes. The next `tools` opens it again."""
        entered, self._entered = self._entered, None
        if entered is not None:
            await entered.close()

    def _tool(self, name: str, definition: ToolDefinition) -> tuple[ToolDefinition, Tool]:
        known = self._made.get(name)
        if known is not None and known[0] == definition:
            return known
        if definition.kind not in ("function", "unapproved"):
            raise UsageError(f"the tool {name!r} is of kind {definition.kind!r}: midstream cannot run it")
        hints = (definition.metadata or {}).get("annotations") or {}
        made = Tool(
            ToolSpec(name, definition.description or "", definition.parameters_json_schema),
            self._function(name),
            None,
            has_effects=hints.get("readOnlyHint") is not True,
            on_doubt=_policy_of(name, definition.metadata),
            timeout_s=definition.timeout or _read_hidden(self._agent, "_tool_timeout") or TIMEOUT_S,
            needs_approval=definition.kind == "unapproved",
        )
        return definition, made

    def _function(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> str | StatedOutcome:  # noqa: ANN401 - any JSON of the model
            return await self._run_call(name, arguments)

        return call

    async def _run_call(self, name: str, arguments: dict[str, Any]) -> str | StatedOutcome:
        tool, call = self._listed[name], current_call()
        context = self._context(name, tool, call)
        try:
            valid = tool.args_validator.validate_json(
                msgspec.json.encode(arguments), context=context.validation_context
            )
            if tool.args_validator_func is not None:
                checked = tool.args_validator_func(context, **valid)
                if inspect.isawaitable(checked):
                    await checked
            value = await run_bounded(self._toolset.call_tool(name, valid, context, tool), self._world)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            problem = msgspec.json.encode(found, enc_hook=str).decode()
            return StatedOutcome(f"The arguments of {name!r} do not fit its schema: {problem}", Outcome.ERROR)
        except (ModelRetry, ToolFailed) as error:
            return StatedOutcome(error.message, Outcome.ERROR)
        except (ApprovalRequired, CallDeferred):
            return StatedOutcome(_NOT_ASKED, Outcome.ERROR)
        return _text_of(name, value, call.call_id)

    def _context(
        self, name: str = "", tool: ToolsetTool[Any] | None = None, call: CallContext | None = None
    ) -> RunContext[Any]:
        context = RunContext[Any](
            deps=self._deps,
            model=self._model,
            usage=RunUsage(),
            agent=self._agent,
            validation_context=_read_hidden(self._agent, "_validation_context"),
        )
        if tool is not None and call is not None:
            context.tool_name = name
            context.tool_call_id = call.call_id
            context.tool_call_approved = tool.tool_def.kind == "unapproved"
            context.max_retries = tool.max_retries
            context.run_step = call.response
            context.run_id = f"{call.session}/{call.turn}"
            context.conversation_id = call.session
        return context


def _text_of(name: str, value: object, call_id: str) -> str | StatedOutcome:
    """Return a tool's value as text like pydantic-ai."""
    if isinstance(value, str):
        return value
    returned = value if isinstance(value, ToolReturn) else ToolReturn(return_value=value)
    more = [returned.content] if isinstance(returned.content, str) else [*(returned.content or ())]
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        text = ToolReturnPart(name, returned.return_value, call_id).model_response_str()
        extras = (each if isinstance(each, str) else f"[{type(each).__name__}]" for each in more)
        return "\n\n".join((text, *extras))
    return StatedOutcome(_NO_JSON, Outcome.ERROR)
