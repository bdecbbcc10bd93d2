"""Durable turns of agents of pydantic-ai: one capability, and one context around the run.

    from midstream.frameworks.pydantic_ai_durable import DurableTurns

    durable = DurableTurns("agent.db")
    agent = Agent("openai:gpt-5", tools=[book], capabilities=[durable])

    async with durable.turn("chat-42", key=message_id):
        result = await agent.run("Book a table", message_history=history)

Run the same turn again after a crash. Recorded responses are not requested again, tool calls that ended do not run
again, and the policy decides about an interrupted one. Outside of a `turn`, the agent does not change.

The implementation uses pydantic-ai's wrappers for models and toolsets. Its `BaseDurabilityCapability` delivers a
streamed response only after its end. `replay_scope` of `pydantic_ai.durable_exec` excludes replayed parts from traces.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from midstream.engine.driven_sessions import DrivenTurn, Driver, OpenTurn
from midstream.environment import World
from midstream.errors import LeaseLostError, UsageError
from midstream.extras import extra
from midstream.frameworks.context_values import value_within
from midstream.frameworks.pydantic_ai_messages import (
    answers_in,
    failure_of,
    finished_messages,
    message_of,
    native_of,
    our_response_of,
    prompt_in,
    response_of,
    success_of,
    value_of,
)
from midstream.history.messages import (
    Outcome,
    TextJoiner,
    ToolCall,
    ToolResult,
)
from midstream.observability.observers import Observer
from midstream.session.calls import CallPlan, OnDoubt, OnDoubtName, digest_of
from midstream.session.records import CallEnded, Delta, TurnStatus
from midstream.store.contract import Store, StoredRecord
from midstream.store.store_registry import open_store
from midstream.tools.function_tools import current_call, running

with extra("pydantic-ai"):
    from pydantic import TypeAdapter, ValidationError
    from pydantic_ai.capabilities import (
        AbstractCapability,
        CapabilityOrdering,
        ReinjectSystemPrompt,
        WrapRunHandler,
        WrapToolValidateHandler,
    )
    from pydantic_ai.durable_exec import record_durable_unit, replay_scope
    from pydantic_ai.exceptions import ApprovalRequired, CallDeferred, ModelRetry, RunCancelled, ToolFailed
    from pydantic_ai.messages import (
        ModelMessage,
        ModelRequest,
        ModelResponse,
        ModelResponseStreamEvent,
        PartDeltaEvent,
        PartStartEvent,
        SystemPromptPart,
        TextPart,
        TextPartDelta,
        ThinkingPart,
        ThinkingPartDelta,
        ToolCallPart,
        UserContent,
    )
    from pydantic_ai.models import (
        CompletedStreamedResponse,
        Model,
        ModelRequestContext,
        ModelRequestParameters,
        StreamedResponse,
    )
    from pydantic_ai.models.wrapper import WrapperModel
    from pydantic_ai.run import AgentRunResult
    from pydantic_ai.settings import ModelSettings
    from pydantic_ai.tools import AgentDepsT, DeferredToolRequests, RunContext, ToolDefinition
    from pydantic_ai.toolsets import AbstractToolset, ToolsetTool, WrapperToolset

DRIVER = "pydantic-ai"
METADATA_KEY = "midstream"
"""Key of the policy in a tool's metadata: `metadata={"midstream": "rerun"}`."""
_REMOVED_KEY = "midstream_removed"
"""Key in the metadata of a tool that the agent no longer has, but whose calls are in the journal."""
_REMOVED_CONTENT = (
    "The process running this tool stopped before its outcome was recorded, and the tool, or these parameters of it, "
    "no longer exist. It may or may not have taken effect."
)
_any_arguments: Any = TypeAdapter(Any).validator


class _Scope:
    """The context of one turn."""

    def __init__(self, driver: Driver, session: str, key: str) -> None:
        self.driver = driver
        self.session = session
        self.key = key
        self.owner = asyncio.current_task()
        """The task whose cancellation ends the runs inside, which pydantic-ai starts in separate tasks."""
        self.turn: DrivenTurn | None = None

    @property
    def is_inside_a_tool(self) -> bool:
        """Whether the caller is a tool of this turn; runs that it starts are part of its call."""
        with suppress(LookupError):
            return current_call().session == self.session
        return False


_scope: ContextVar[_Scope | None] = ContextVar("midstream_pydantic_ai_turn", default=None)
_running: ContextVar[_Scope | None] = ContextVar("midstream_pydantic_ai_run", default=None)
"""The scope of the current run; set in `wrap_run`, so that the whole run inherits it."""


@dataclass(init=False)
class DurableTurns(AbstractCapability[AgentDepsT]):
    """Makes an agent's turns durable.

    Args:
        store: Store of the journals, or the path of a SQLite file.
        on_doubt: Policies for calls in doubt, by tool name: `unknown` (the default: the model is informed), `rerun`,
            `rerun_with_key`. They take precedence over a tool's metadata (`{"midstream": "rerun"}`) and the hints of an
            MCP server.
        agent: Name of the agent in the journal. An open turn of another name is refused with `AgentMismatchError`, and
            `open_turns` does not list it. "" (the default) continues turns of any name.
        agent_version: Version of the agent. Different known versions count as different agents.
        world: Clock, random numbers and tasks; the real ones by default.
        own_prompts: Whether the agent's own instructions and system prompts replace system prompts in a stored
            `message_history`, which pydantic-ai would also send. Without own prompts, those of the history stay.
        observers: Notified of appends, such as `midstream.observability.opentelemetry.OpenTelemetry`.

    One instance supports any number of agents and sessions of one event loop. Do not combine it with another durability
    capability.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        on_doubt: Mapping[str, OnDoubt | OnDoubtName] | None = None,
        own_prompts: bool = True,
        agent: str = "",
        agent_version: str = "",
        world: World | None = None,
        observers: Iterable[Observer] = (),
    ) -> None:
        opened = open_store(store, world=world or World())
        self._driver = Driver(
            DRIVER, opened, agent=agent, agent_version=agent_version, world=world, observers=observers
        )
        self._policies = {name: OnDoubt(policy) for name, policy in (on_doubt or {}).items()}
        self._own_prompts = own_prompts
        self._run: _Run | None = None
        self._prompts: AbstractCapability[AgentDepsT] | None = None

    @asynccontextmanager
    async def turn(self, session: str, *, key: str = "") -> AsyncGenerator[None, None]:
        """Make the run inside this context a turn of `session`.

        Args:
            session: Name of the session: 1 to 128 of letters, digits and `._:-`.
            key: Id of the message, such as its id at the client. With it, the message is accepted once, and an ended
                turn is replayed from the journal, without the model. An open turn is continued with the key that opened
                it; an equal prompt with another key is another message. Without a key, a run with the prompt of the
                open turn continues that turn, and any other prompt opens a new one.

        The next message ends a turn that was left open. Its finished part is in the `message_history` of that run,
        unless the application put it there itself.

        Besides its own errors, the run inside raises `SessionBusyError` (another turn of this session is running),
        `SeqnoReusedError` (the key was used with another prompt), `LeaseHeldError` (another process runs the session),
        and errors of the store, such as `StoreFullError`. A failed or interrupted run leaves the turn open; run it
        again to continue.
        """
        scope = _Scope(self._driver, session, key)
        try:
            with value_within(_scope, scope):
                yield
        except RunCancelled:
            if scope.turn is not None:
                with suppress(LeaseLostError):
                    await scope.turn.close(TurnStatus.CANCELLED, {})
            raise
        finally:
            if scope.turn is not None:  # a run that was interrupted at its end has not released the turn
                self._driver.leave(session, scope.turn)

    def open_turns(self) -> AsyncIterator[OpenTurn]:
        """Yield the open turns, which should run again, newest change first."""
        return self._driver.open_turns()

    async def abandon(self, session: str) -> list[ModelMessage]:
        """End the open turn of a session, if any, as interrupted; the outcomes of its tools stay in the journal.

        Returns its finished part, to append to the application's history: the prompt, the responses, and a result for
        each call. Later runs do not receive it otherwise.

        Raises:
            SessionBusyError, LeaseHeldError: The turn is running. Nothing was changed.
        """
        return finished_messages(await self._driver.abandon(session))

    def follow(self, session: str, *, after: int = 0) -> AsyncIterator[StoredRecord]:
        """Yield a session's records after position `after`, and then each new record of runs in this process."""
        return self._driver.follow(session, after=after)

    async def close(self) -> None:
        """Close the store. Open turns stay open."""
        await self._driver.close()

    # --- hooks of pydantic-ai -------------------------------------------------------------------------------

    def get_ordering(self) -> CapabilityOrdering:
        """Return the innermost position: wrappers of other capabilities run again when a turn is replayed."""
        return CapabilityOrdering(position="innermost")

    async def for_run(self, ctx: RunContext[AgentDepsT]) -> AbstractCapability[AgentDepsT]:
        """Return a separate instance for each run inside a turn; other runs do not change."""
        scope = _scope.get()
        if scope is None or scope.driver is not self._driver or scope.is_inside_a_tool:
            return self
        if _running.get() is scope:  # the nested run of a validator or a hook is part of the run
            return self
        bound = copy.copy(self)
        bound._run = _Run(scope, self._policies)  # noqa: SLF001 - a copy of ourselves
        prompts = ReinjectSystemPrompt[AgentDepsT](replace_existing=self._own_prompts)
        bound._prompts = await prompts.for_run(ctx)  # noqa: SLF001 - the same
        return bound

    async def before_model_request(
        self, ctx: RunContext[AgentDepsT], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        """Replace system prompts of the history by the agent's own."""
        if self._run is None or self._prompts is None:
            return request_context
        is_stale = self._own_prompts and self._run.is_prompted and await _has_prompts(ctx, request_context)
        if not (is_stale or self._run.is_continuing_alone):
            return request_context
        return await self._prompts.before_model_request(ctx, request_context)

    def get_wrapper_model(self, model: Model) -> Model | None:
        """Wrap the model with the journal."""
        return _DurableModel(model, self._run) if self._run else None

    def get_wrapper_toolset(self, toolset: AbstractToolset[AgentDepsT]) -> AbstractToolset[AgentDepsT] | None:
        """Wrap the tools with the journal."""
        return _DurableToolset(toolset, self._run) if self._run else None

    async def wrap_tool_validate(
        self,
        ctx: RunContext[AgentDepsT],  # noqa: ARG002 - pydantic-ai's parameters
        *,
        call: ToolCallPart,
        tool_def: ToolDefinition,  # noqa: ARG002 - the same
        args: str | dict[str, Any],
        handler: WrapToolValidateHandler,
    ) -> dict[str, Any]:
        """Check the journal before the validation of arguments, because a tool's parameters may have changed."""
        if self._run is None or (known := self._run.started_call(call.tool_call_id)) is None:
            return await handler(args)
        if not self._run.has_outcome(known):
            try:
                return await handler(args)
            except (ValidationError, ModelRetry, ToolFailed):
                self._run.unfit.add(call.tool_call_id)
        return args if isinstance(args, dict) else {}

    async def wrap_run(self, ctx: RunContext[AgentDepsT], *, handler: WrapRunHandler) -> AgentRunResult[Any]:
        """Open or resume the turn, run, and end the turn if the run has a result."""
        run = self._run
        if run is None:
            return await handler()
        await run.begin(ctx.prompt, ctx.messages)
        try:
            _running.set(_scope.get())
            run.go_on_from(ctx.messages)
            with replay_scope():
                result = await handler()
            if isinstance(result.output, DeferredToolRequests):
                await run.turn.pause()
            else:
                await run.turn.close(TurnStatus.COMPLETED, answers_in(result.new_messages()))
            return result
        finally:
            run.leave()


def prompt_of(turn: OpenTurn) -> str | list[UserContent]:
    """Return the prompt of an open turn, with its files, to run it again.

    Texts, binary contents and URLs are in the journal. Of other contents, such as `UploadedFile`, it has only the kind:
    store such prompts yourself.
    """
    return prompt_in(turn.message)


class _Run:
    """One run of an agent inside a turn."""

    def __init__(self, scope: _Scope, policies: Mapping[str, OnDoubt]) -> None:
        self._scope = scope
        self._policies = policies
        self.is_prompted = False
        """Whether the given history has system prompts."""
        self.is_continuing_alone = False
        """Whether the history is only a cancelled turn: then pydantic-ai adds no system prompt."""
        self.unfit: set[str] = set()
        """Calls in doubt whose arguments no longer match their tools."""

    @property
    def turn(self) -> DrivenTurn:
        assert self._scope.turn is not None, "the run has begun"
        return self._scope.turn

    async def begin(
        self, prompt: str | Sequence[UserContent] | None, messages: Sequence[ModelMessage]
    ) -> None:
        """Begin or resume the turn of this run.

        A run whose history has calls without results (deferred tools) brings the results: it continues the turn of
        these calls, if it is open.
        """
        scope, unanswered = self._scope, _unanswered_response(messages)
        message = message_of(prompt, messages)
        digest = digest_of("message", msgspec.json.encode(message).decode())
        scope.turn = await scope.driver.begin(
            scope.session,
            message,
            key=scope.key,
            digest=digest,
            goes_on=unanswered is not None,
            cancels=True,
            owner=scope.owner,
        )

    def go_on_from(self, messages: list[ModelMessage]) -> None:
        """Continue at the end of the history; append the finished parts of cancelled turns before this one.

        Raises:
            UsageError: The history ends with calls of another turn.
        """
        unanswered = _unanswered_response(messages)
        if unanswered is not None and self.turn.recorded:
            self.turn.skip(_number_of(unanswered, self.turn))
        self.is_prompted = any(
            isinstance(part, SystemPromptPart) for message in messages for part in message.parts
        )
        known = {message.timestamp for message in messages if isinstance(message, ModelResponse)}
        finished = finished_messages(self.turn.cancelled)
        if not any(isinstance(each, ModelResponse) and each.timestamp in known for each in finished):
            self.is_continuing_alone = bool(finished) and not messages
            messages.extend(finished)

    def leave(self) -> None:
        """Release the session for other processes."""
        self._scope.driver.leave(self._scope.session, self._scope.turn)

    def started_call(self, call_id: str) -> ToolCall | None:
        """Return a call of the current response if an earlier run started it, else None."""
        return self.turn.started_calls(self.turn.response_no).get(call_id)

    def has_outcome(self, call: ToolCall) -> bool:
        """Return whether a call of the current response has its outcome."""
        return self.turn.has_outcome(self.turn.response_no, call.id)

    def removed_tools(self, present: Mapping[str, object]) -> set[str]:
        """Return the tools of started calls (of this or the next recorded response) that the agent no longer has."""
        number = self.turn.response_no
        started = (call for each in (number, number + 1) for call in self.turn.started_calls(each).values())
        return {call.name for call in started} - present.keys()

    async def find_response(self, messages: Sequence[ModelMessage]) -> ModelResponse | None:
        """Return the next response from the journal; without one, announce the attempt, and return None."""
        known = await self.turn.request_response(answers_in(messages))
        if known is None:
            return None
        record_durable_unit(executed=False)
        return response_of(known.native)

    async def journal_response(self, response: ModelResponse, parameters: ModelRequestParameters) -> None:
        """Journal a complete response."""
        _, number, _ = self.turn.next_place
        our_response = our_response_of(response, number)
        tools = {tool.name: tool for tool in parameters.function_tools}
        plans = [self._plan(call, tools.get(call.name)) for call in our_response.calls]
        await self.turn.journal_response(our_response, plans, native_of(response))
        record_durable_unit(executed=True)

    async def journal_failure(self, error: Exception) -> None:
        """Journal that the model failed, with only the type of the error: its message may contain text of users."""
        status = getattr(error, "status_code", None)
        kind = type(error).__name__
        await self.turn.journal_failure("model_failed", f"{kind} ({status})" if status else kind)

    def _plan(self, call: ToolCall, tool: ToolDefinition | None) -> CallPlan:
        metadata = (tool.metadata if tool else None) or {}
        hints = metadata.get("annotations") or {}
        is_reading = hints.get("readOnlyHint") is True
        default = OnDoubt.RERUN if is_reading or hints.get("idempotentHint") is True else OnDoubt.UNKNOWN
        policy = self._policies.get(call.name) or OnDoubt(metadata.get(METADATA_KEY, default))
        digest = digest_of(call.name, call.arguments)
        return CallPlan(call.id, digest, has_effects=not is_reading, on_doubt=policy)


def _unanswered_response(messages: Sequence[ModelMessage]) -> ModelResponse | None:
    """Return the last response if some of its calls have no result in the history."""
    answered = answers_in(messages)
    last = next((each for each in reversed(messages) if isinstance(each, ModelResponse)), None)
    is_open = last is not None and any(call.tool_call_id not in answered for call in last.tool_calls)
    return last if is_open else None


def _number_of(response: ModelResponse, turn: DrivenTurn) -> int:
    """Return the number of the open turn's response with which the history of a run ends."""
    for number, recorded in turn.recorded.items():
        known = response_of(recorded.native)
        if known.timestamp == response.timestamp and _call_ids(known) == _call_ids(response):
            return number
    raise UsageError(
        "the history ends with calls that no response of the open turn requested; run them in their own session"
    )


def _call_ids(response: ModelResponse) -> list[str]:
    return [call.tool_call_id for call in response.tool_calls]


# --- the model ------------------------------------------------------------------------------------------------


class _DurableModel(WrapperModel):
    """Checks the journal before it calls the model, and journals the model's output."""

    def __init__(self, wrapped: Model, run: _Run) -> None:
        super().__init__(wrapped)
        self._run = run

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        if (known := await self._run.find_response(messages)) is not None:
            return known
        model_request_parameters = _without_removed(model_request_parameters)
        try:
            response = await super().request(messages, model_settings, model_request_parameters)
        except Exception as error:
            await self._run.journal_failure(error)
            raise
        await self._run.journal_response(response, model_request_parameters)
        return response

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse, None]:
        if (known := await self._run.find_response(messages)) is not None:
            yield CompletedStreamedResponse(
                known, model_request_parameters=model_request_parameters, replay_events=True
            )
            return
        model_request_parameters = _without_removed(model_request_parameters)
        ear = _StreamJournal(self._run.turn)
        try:
            async with super().request_stream(
                messages, model_settings, model_request_parameters, run_context
            ) as streamed:
                ear.listen(streamed)
                yield streamed
        except Exception as error:
            if ear.is_done:  # the response was complete: the error is that of its reader
                await self._run.journal_response(streamed.get(), model_request_parameters)
            else:
                await self._run.journal_failure(error)
            raise
        if ear.is_done:
            await self._run.journal_response(streamed.get(), model_request_parameters)


def _without_removed(parameters: ModelRequestParameters) -> ModelRequestParameters:
    tools = [tool for tool in parameters.function_tools if not (tool.metadata or {}).get(_REMOVED_KEY)]
    if len(tools) == len(parameters.function_tools):
        return parameters
    return replace(parameters, function_tools=tools)


class _StreamJournal:
    """Journals the text of a streamed response while the agent reads it."""

    def __init__(self, turn: DrivenTurn) -> None:
        self._turn = turn
        self._places: dict[int, int] = {}
        """Indexes of parts in the journal's response by pydantic-ai's index, which also counts other parts."""
        self._joiner = TextJoiner()
        self._open: tuple[int, Literal["text", "thinking"]] | None = None
        """The part whose text arrives."""
        self.is_done = False

    def listen(self, streamed: StreamedResponse) -> None:
        """Journal all events of `streamed`; call it before another reader.

        It overrides the method of the object that every model of pydantic-ai implements, because the agent needs this
        object.
        """
        events = streamed._get_event_iterator  # noqa: SLF001 - see above
        streamed._get_event_iterator = lambda: self._journal_events(events())  # type: ignore[method-assign]  # noqa: SLF001

    async def _journal_events(
        self, events: AsyncIterator[ModelResponseStreamEvent]
    ) -> AsyncIterator[ModelResponseStreamEvent]:
        async for event in events:
            self._journal_event(event)
            yield event
        self._journal_text(self._joiner.end())
        self.is_done = True

    def _journal_event(self, event: ModelResponseStreamEvent) -> None:
        match event:
            case PartStartEvent(index=index, part=TextPart(content=text)):
                self._journal_output(index, "text", text)
            case PartDeltaEvent(index=index, delta=TextPartDelta(content_delta=text)):
                self._journal_output(index, "text", text)
            case PartStartEvent(index=index, part=ThinkingPart(content=text)):
                self._journal_output(index, "thinking", text)
            case PartDeltaEvent(index=index, delta=ThinkingPartDelta(content_delta=str() as text)):
                self._journal_output(index, "thinking", text)
            case PartStartEvent(index=index, part=ToolCallPart()):
                self._places.setdefault(index, len(self._places))
            case _:
                pass

    def _journal_output(self, index: int, kind: Literal["text", "thinking"], text: str) -> None:
        place = self._places.setdefault(index, len(self._places))
        if self._open != (place, kind):
            self._journal_text(self._joiner.end())
            self._open = (place, kind)
        self._journal_text(self._joiner.add(text))

    def _journal_text(self, text: str) -> None:
        if text and self._open is not None:
            self._turn.journal_output((Delta(*self._turn.next_place, *self._open, text),))


# --- the tools ------------------------------------------------------------------------------------------------


@dataclass
class _DurableToolset(WrapperToolset[AgentDepsT]):
    """Checks the journal before a tool runs, and journals its outcome."""

    run: _Run

    async def get_tools(self, ctx: RunContext[AgentDepsT]) -> dict[str, ToolsetTool[AgentDepsT]]:
        """Return the tools, and a placeholder for each removed tool with calls in the journal, to answer them."""
        tools = await super().get_tools(ctx)
        removed = self.run.removed_tools(tools)
        return {**tools, **{name: self._removed_tool(name) for name in removed}} if removed else tools

    def _removed_tool(self, name: str) -> ToolsetTool[AgentDepsT]:
        definition = ToolDefinition(name=name, metadata={_REMOVED_KEY: True})
        return ToolsetTool(toolset=self, tool_def=definition, max_retries=1, args_validator=_any_arguments)

    async def call_tool(
        self,
        name: str,
        tool_args: dict[str, Any],
        ctx: RunContext[AgentDepsT],
        tool: ToolsetTool[AgentDepsT],
    ) -> Any:  # noqa: ANN401 - a tool's result
        turn = self.run.turn
        started = await turn.start(ctx.tool_call_id or "", is_approved=ctx.tool_call_approved)
        if isinstance(started, CallEnded):
            record_durable_unit(executed=False)
            return value_of(started)
        if tool.toolset is self or ctx.tool_call_id in self.run.unfit:
            lost = ToolResult(started.call_id, _REMOVED_CONTENT, Outcome.UNKNOWN)
            await turn.journal_outcome(lost, "")
            raise ToolFailed(_REMOVED_CONTENT)
        try:
            with running(started):
                value = await self.wrapped.call_tool(name, tool_args, ctx, tool)
        except (ApprovalRequired, CallDeferred):
            raise  # the call waits for a person, and stays open
        except Exception as error:
            await turn.journal_outcome(*failure_of(started.call_id, error))
            raise
        await turn.journal_outcome(*success_of(started.call_id, name, value))
        record_durable_unit(executed=True)
        return value


async def _has_prompts(ctx: RunContext[Any], request_context: ModelRequestContext) -> bool:
    """Return whether the agent has its own instructions or system prompts."""
    last = request_context.messages[-1]
    if isinstance(last, ModelRequest) and last.instructions:
        return True
    return ctx.agent is not None and bool(
        await ctx.agent.system_prompt_parts(deps=ctx.deps, prompt=ctx.prompt)
    )
