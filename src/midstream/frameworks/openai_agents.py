"""Durable turns of agents of the OpenAI Agents SDK, whose models and tools use the journal.

    from midstream.frameworks.openai_agents import DurableAgents

    durable = DurableAgents("agent.db")
    agent = Agent(name="waiter", model=durable.model(OpenAIResponsesModel(...)), tools=durable.tools([book]))

    async with durable.turn("chat-42", "Book a table", key=message_id):
        result = await Runner.run(agent, "Book a table")

Run the same turn again after a crash. Responses are replayed from the journal, so that call ids stay the same. Tool
calls that ended do not run again, and the policy decides about an interrupted one. A turn has one run, and is complete
when it has finished. The input of the run must be a list or a text: each run would write to a `Session` of the SDK
again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from midstream.engine.driven_sessions import DrivenTurn, Driver, OpenTurn
from midstream.environment import World
from midstream.errors import UsageError
from midstream.extras import extra
from midstream.frameworks.openai_agents_runs import (
    TurnScope,
    current_turn,
    enter_scope,
    inside_tool,
    install_runner,
)
from midstream.history.messages import (
    Finish,
    Outcome,
    Response,
    ResponsePart,
    Text,
    TextJoiner,
    ToolCall,
    ToolResult,
    UserMessage,
    storable,
    with_distinct_ids,
)
from midstream.history.messages import Usage as Tokens
from midstream.models.stream_json import encode_json
from midstream.observability.observers import Observer
from midstream.session.calls import CallPlan, OnDoubt, OnDoubtName, digest_of
from midstream.session.records import (
    CallEnded,
    Delta,
    MessageAccepted,
    Record,
    ResponseCompleted,
    TurnStatus,
)
from midstream.store.contract import Store
from midstream.store.store_registry import open_store
from midstream.tools.function_tools import running

with extra("openai-agents"):
    from agents import FunctionTool, ItemHelpers, ModelResponse, Usage
    from agents.models.interface import Model
    from agents.tool_context import ToolContext
    from openai.types.responses import (
        Response as ModelsResponse,
    )
    from openai.types.responses import (
        ResponseCompletedEvent,
        ResponseFunctionToolCall,
        ResponseOutputItem,
        ResponseUsage,
    )
    from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
    from pydantic import TypeAdapter

DRIVER = "openai-agents"
_items: TypeAdapter[list[ResponseOutputItem]] = TypeAdapter(list[ResponseOutputItem])


class DurableAgents:
    """Makes the turns of agents durable.

    Args:
        store: Store of the journals, or the path of a SQLite file.
        on_doubt: Policies for calls in doubt, by tool name: `unknown` (the default: the model is informed), `rerun`,
            `rerun_with_key`.
        agent: Name of the agent in the journal. An open turn of another name is refused with `AgentMismatchError`, and
            `open_turns` does not list it. "" (the default) continues turns of any name.
        agent_version: Version of the agent. Different known versions count as different agents.
        world: Clock, random numbers and tasks; the real ones by default.
        observers: Notified of appends, such as `midstream.observability.opentelemetry.OpenTelemetry`.
    """

    def __init__(
        self,
        store: Store | str | Path,
        *,
        on_doubt: Mapping[str, OnDoubt | OnDoubtName] | None = None,
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

    @asynccontextmanager
    async def turn(self, session: str, message: str, *, key: str = "") -> AsyncGenerator[None, None]:
        """Make the one run inside this context the run of a turn of `session`.

        The turn ends when the run has its final output. It stays open if the run raises, is interrupted, waits for
        approvals, or is streamed but not read to its end inside. Enter the context again with the same message to
        continue it.

        Args:
            session: Name of the session: 1 to 128 of letters, digits and `._:-`.
            message: The user's message.
            key: Id of the message. With it, the message is accepted once, and an ended turn is replayed. An open turn
                is continued with the key that opened it, also after approvals; an equal message with another key is
                another message. Without a key, the message of the open turn continues that turn.

        Raises:
            SessionBusyError: Another turn of this session is running. Nothing was changed.
            SeqnoReusedError: The key was used with another message. Nothing was changed.
            LeaseHeldError: Another process runs the session. Nothing was changed.

        The next message ends a turn that was left open. Its finished part precedes the message in the input of that
        run, unless the application put it there itself. A second `Runner.run` inside, except one that continues with
        approvals, raises `UsageError`.
        """
        install_runner()
        user_message = UserMessage.of(storable(message))
        turn = await self._driver.begin(
            session, user_message, key=key, digest=digest_of("message", storable(message)), cancels=True
        )
        scope = TurnScope(turn, finished_items(turn.cancelled))
        try:
            with enter_scope(scope):
                yield
        finally:
            try:
                await scope.leave()
                if scope.is_finished:
                    await turn.close(TurnStatus.COMPLETED, {})
                elif scope.is_waiting:
                    await turn.pause()
            finally:
                self._driver.leave(session, turn)

    def model(self, model: Model) -> Model:
        """Return a model that replays responses from the journal. Outside of a `turn`, it does not change the model."""
        return _DurableModel(model, self._policies)

    def tools(self, tools: Iterable[Any]) -> list[Any]:
        """Return the tools; function tools check the journal first, hosted tools do not change."""
        return [_durable(each) if isinstance(each, FunctionTool) else each for each in tools]

    def open_turns(self) -> AsyncIterator[OpenTurn]:
        """Yield the open turns, which should run again."""
        return self._driver.open_turns()

    async def abandon(self, session: str) -> list[Any]:
        """End the open turn of a session, if any, as interrupted; the outcomes of its tools stay in the journal.

        Returns its finished part as items to append to the application's history: the message, the responses, and an
        output for each call. Later runs do not receive it otherwise.

        Raises:
            SessionBusyError, LeaseHeldError: The turn is running. Nothing was changed.
        """
        return finished_items(await self._driver.abandon(session))

    async def close(self) -> None:
        """Close the store. Open turns stay open."""
        await self._driver.close()


class _DurableModel(Model):  # type: ignore[misc, unused-ignore]  # untyped if the SDK is not installed
    def __init__(self, wrapped: Model, policies: Mapping[str, OnDoubt]) -> None:
        self._wrapped = wrapped
        self._policies = policies

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002, ANN401 - the SDK's name and type
        *args: Any,  # noqa: ANN401
        **keywords: Any,  # noqa: ANN401
    ) -> ModelResponse:
        turn = current_turn()
        if turn is None:
            return await self._wrapped.get_response(system_instructions, input, *args, **keywords)
        if (known := await turn.request_response(_answers(input))) is not None:
            return _response_of(known.native)
        try:
            response = await self._wrapped.get_response(system_instructions, input, *args, **keywords)
        except Exception as error:
            await turn.journal_failure("model_failed", type(error).__name__)
            raise
        await self._journal_response(turn, response)
        return response

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002, ANN401 - the SDK's name and type
        *args: Any,  # noqa: ANN401
        **keywords: Any,  # noqa: ANN401
    ) -> AsyncIterator[Any]:
        turn = current_turn()
        known = await turn.request_response(_answers(input)) if turn else None
        if known is not None:
            yield _completed_event(_response_of(known.native))
            return
        joiner = TextJoiner()
        try:
            async for event in self._wrapped.stream_response(system_instructions, input, *args, **keywords):
                if turn is not None:
                    await self._journal_event(turn, event, joiner)
                yield event
        except Exception as error:
            if turn is not None:
                await turn.journal_failure("model_failed", type(error).__name__)
            raise

    async def close(self) -> None:
        await self._wrapped.close()

    async def _journal_event(
        self,
        turn: DrivenTurn,
        event: Any,  # noqa: ANN401 - one of the SDK's many events
        joiner: TextJoiner,
    ) -> None:
        """Journal text as it arrives, and the complete response before its last event reaches the SDK."""
        if event.type in ("response.output_text.delta", "response.output_text.done"):
            text = joiner.add(event.delta) if event.type.endswith("delta") else joiner.end()
            if text:
                turn.journal_output((Delta(*turn.next_place, event.output_index, "text", text),))
        elif event.type in ("response.completed", "response.incomplete"):
            done = event.response
            await self._journal_response(turn, ModelResponse(done.output, _usage_of(done.usage), done.id))

    async def _journal_response(self, turn: DrivenTurn, response: ModelResponse) -> None:
        _, number, _ = turn.next_place
        our_response = _our_response_of(response, number)
        plans = [
            CallPlan(
                call.id,
                digest_of(call.name, call.arguments),
                on_doubt=self._policies.get(call.name, OnDoubt.UNKNOWN),
            )
            for call in our_response.calls
        ]
        try:
            output = _items.dump_json(response.output, exclude_unset=True)
        except ValueError:  # a text has half a character
            output = encode_json(
                _items.dump_python(response.output, mode="json", exclude_unset=True)
            ).encode()
        native = {
            "output": msgspec.Raw(output),
            "id": response.response_id,
            "tokens": (response.usage.input_tokens, response.usage.output_tokens),
        }
        await turn.journal_response(our_response, plans, msgspec.json.encode(native).decode())


def _durable(tool: FunctionTool) -> FunctionTool:
    async def invoke(context: ToolContext[Any], arguments: str) -> Any:  # noqa: ANN401 - any value of a tool
        turn = current_turn()
        if turn is None:
            return await tool.on_invoke_tool(context, arguments)
        started = await turn.start(context.tool_call_id)
        if isinstance(started, CallEnded):
            return msgspec.json.decode(started.native) if started.native else started.result.content
        try:
            with running(started), inside_tool() as runs:
                value = await tool.on_invoke_tool(context, arguments)
            _require_whole(tool, runs)
        except Exception as error:
            failed = storable(f"{type(error).__name__}: {error}")
            await turn.journal_outcome(ToolResult(started.call_id, failed, Outcome.ERROR), "")
            raise
        await turn.journal_outcome(*_result_of(started.call_id, value))
        return value

    return dataclasses.replace(tool, on_invoke_tool=invoke)


def _require_whole(tool: FunctionTool, runs: Iterable[Any]) -> None:
    """Refuse a sub-agent that waits for approvals, because its work so far is not in the journal."""
    if any(run.interruptions for run in runs):
        raise UsageError(
            f"a tool of the agent behind {tool.name!r} needs an approval, which a run inside a tool cannot wait for; "
            f"set `needs_approval` on the tool {tool.name!r} itself"
        )


def _result_of(call_id: str, value: object) -> tuple[ToolResult, str]:
    if isinstance(value, str):
        return ToolResult(call_id, storable(value)), ""
    try:
        plain = TypeAdapter(Any).dump_json(value).decode()
    except ValueError:
        lost = "This tool finished, but its answer has no JSON form and was lost when the process died."
        return ToolResult(call_id, lost, Outcome.ERROR), ""
    return ToolResult(call_id, plain), plain


def _answers(items: object) -> dict[str, ToolResult]:
    """Return the results of calls in the input of a request, by call id."""
    found = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    return {
        item["call_id"]: ToolResult(item["call_id"], storable(str(item.get("output", ""))))
        for item in found
        if item.get("type") == "function_call_output"
    }


def finished_items(records: Sequence[Record]) -> list[Any]:
    """Return the items of ended turns: messages, responses, and an output for each call."""
    ended = {
        (each.turn, each.response, each.result.call_id): each
        for each in records
        if isinstance(each, CallEnded)
    }
    items: list[Any] = []
    for record in records:
        if isinstance(record, MessageAccepted):
            text = "".join(part.text for part in record.message.parts if isinstance(part, Text))
            items.append({"role": "user", "content": text})
        elif isinstance(record, ResponseCompleted):
            if record.native:
                items += _response_of(record.native).to_input_items()
            elif record.body.text:  # an interrupted response has only text
                items.append({"role": "assistant", "content": record.body.text})
            for call in record.body.calls:
                known = ended.get((record.turn, record.response, call.id))
                if known is not None:
                    items.append(_output_of(call, known))
    return items


def _output_of(call: ToolCall, ended: CallEnded) -> Any:  # noqa: ANN401 - one of the SDK's items
    """Return the item for a recorded result, as the SDK makes it: images and files stay what they are."""
    value = msgspec.json.decode(ended.native) if ended.native else ended.result.content
    requested = ResponseFunctionToolCall(
        arguments=call.arguments, call_id=call.provider_id or call.id, name=call.name, type="function_call"
    )
    return ItemHelpers.tool_call_output_item(requested, value)


def _our_response_of(response: ModelResponse, number: int) -> Response:
    parts: list[ResponsePart] = []
    for item in response.output:
        if item.type == "message":
            text = "".join(each.text for each in item.content if each.type == "output_text")
            parts.append(Text(storable(text)))
        elif item.type == "function_call":
            parts.append(ToolCall(storable(item.call_id), storable(item.name), storable(item.arguments)))
    distinct = with_distinct_ids(tuple(parts), response_no=number)
    finish = Finish.CALLS if any(isinstance(part, ToolCall) for part in distinct) else Finish.STOP
    usage = Tokens(response.usage.input_tokens, response.usage.output_tokens)
    return Response(distinct, finish, usage=usage)


def _response_of(native: str) -> ModelResponse:
    if not native:
        raise UsageError("this response was interrupted and cannot be replayed")
    known = msgspec.json.decode(native)
    input_tokens, output_tokens = known["tokens"]
    usage = Usage(
        requests=1,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        total_tokens=input_tokens + output_tokens,
    )
    return ModelResponse(_items.validate_python(known["output"]), usage, known["id"])


def _completed_event(response: ModelResponse) -> ResponseCompletedEvent:
    used = response.usage
    usage = ResponseUsage(
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        total_tokens=used.total_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
    )
    whole = ModelsResponse(
        id=response.response_id or "told-again",
        created_at=0,
        model="",
        object="response",
        output=response.output,
        tool_choice="auto",
        tools=[],
        parallel_tool_calls=True,
        usage=usage,
    )
    return ResponseCompletedEvent(response=whole, sequence_number=0, type="response.completed")


def _usage_of(used: ResponseUsage | None) -> Usage:
    if used is None:
        return Usage(requests=1)
    return Usage(
        requests=1,
        input_tokens=used.input_tokens,
        output_tokens=used.output_tokens,
        total_tokens=used.total_tokens,
    )
