"""A model with responses that outlive connection and process, against a scripted server that keeps them."""

from __future__ import annotations

import asyncio

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.errors import (
    ModelAccessError,
    ModelCutError,
    ModelError,
    ModelFilteredError,
    ModelForgotError,
    ModelOverloadedError,
    ModelRateLimitedError,
    ModelStalledError,
    ModelUnavailableError,
    UsageError,
)
from midstream.history.messages import (
    Finish,
    History,
    Response,
    Step,
    ToolCall,
    ToolResult,
    ToolSpec,
    Usage,
    UserMessage,
)
from midstream.models import openai_responses
from midstream.models.http_limits import HttpLimits
from midstream.models.model import Model, ResumableModel
from midstream.models.openai_responses import OpenAIResponses
from midstream.models.prompt_prefix import cache_key_of
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    ModelRequest,
    Resumable,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    Working,
)
from midstream.retries import RESPONSE_RECONNECTS_MAX, Backoff
from midstream.session.model_settings import ModelSettings
from midstream.session.records import AttemptContinued, AttemptStarted, Delta, ResponseCompleted, decode
from midstream.session.turn import deciding
from midstream.session.turn.commands import Cancel, SendMessage
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import run_turn
from tests.models.chat_server import WAIT_S, Hasty, Json
from tests.models.responses_server import (
    HELLO,
    HELLO_TEXT,
    Link,
    ResponsesServer,
    call_events,
    call_item,
    completed,
    event,
    responses_server,
    resume_positions,
    text_deltas,
)
from tests.spec import spec

READ = ToolSpec("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
REQUEST = ModelRequest("Be brief.", History((UserMessage.of("hi"),)), (READ,), key="s1/1/1")
END = Finished(Finish.STOP, "m-1", Usage(7, 2, 5))
SHORT = HttpLimits(connect_s=1, first_byte_s=0.25, between_bytes_s=0.25)


def model_at(
    server: ResponsesServer, *, is_background: bool = True, limits: HttpLimits | None = None
) -> OpenAIResponses:
    return OpenAIResponses(server.url, "m", "key", is_background=is_background, limits=limits, world=Hasty())


async def events_of_model(model: Model, request: ModelRequest = REQUEST) -> list[ModelEvent]:
    """Return the events of a model, without keep-alives."""
    async with asyncio.timeout(WAIT_S):
        events = [event async for event in model.stream(request)]
    return [event for event in events if not isinstance(event, KeepAlive | Working)]


async def answered_by(*events: Json) -> list[ModelEvent]:
    async with responses_server(events) as server, model_at(server) as model:
        found = await events_of_model(model)
    assert isinstance(found[0], Resumable)
    return found[1:]


async def error_from(
    response: list[Json], *links: Link, is_background: bool = True, limits: HttpLimits | None = None
) -> ModelError:
    async with (
        responses_server(response, links=links) as server,
        model_at(server, is_background=is_background, limits=limits) as model,
    ):
        with pytest.raises(ModelError) as caught:
            await events_of_model(model)
    return caught.value


def text_of(events: list[ModelEvent]) -> str:
    return "".join(each.text for each in events if isinstance(each, TextDelta))


# --- one response ------------------------------------------------------------------------------------------------


async def test_text_is_streamed_with_its_usage_and_its_resume_token() -> None:
    async with responses_server(HELLO) as server, model_at(server) as model:
        kept, *rest = await events_of_model(model)
    assert kept == Resumable(next(iter(server.kept)))
    assert rest == [*(TextDelta(each) for each in ("Hel", "lo, ", "you ", "there")), END]
    assert isinstance(model, ResumableModel)


async def test_thinking_precedes_the_text_with_its_parts_separated() -> None:
    thought = text_deltas("one", kind="reasoning_summary_text")
    part = event("reasoning_summary_part.added", summary_index=1)
    assert await answered_by(*thought, part, *thought, *text_deltas("yes"), completed()) == [
        ThinkingDelta("one"),
        ThinkingDelta("\n\n"),
        ThinkingDelta("one"),
        TextDelta("yes"),
        END,
    ]


async def test_calls_arrive_complete_at_the_end() -> None:
    events = [
        *text_deltas("Let me see."),
        *call_events('{"path": "x"}'),
        *call_events('{"path": "y"}', "call_2"),
    ]
    expected = [
        TextDelta("Let me see."),
        ToolCallRequested("call_1", "read", '{"path": "x"}'),
        ToolCallRequested("call_2", "read", '{"path": "y"}'),
        Finished(Finish.CALLS, "m-1", Usage(7, 2, 5)),
    ]
    assert await answered_by(*events, completed()) == expected
    output = (call_item('{"path": "x"}'), call_item('{"path": "y"}', "call_2"))
    assert await answered_by(*events, completed(*output)) == expected


async def test_streamed_arguments_are_a_sign_of_progress() -> None:
    async with responses_server([*call_events("{}"), completed()]) as server, model_at(server) as model:
        events = [event async for event in model.stream(REQUEST)]
    assert events.count(Working("read")) >= 1


@spec("TURN-60")
async def test_a_response_at_its_length_limit_includes_its_partial_call() -> None:
    cut = call_item('{"path": ', status="incomplete")
    details = {"reason": "max_output_tokens"}
    incomplete = completed(cut, kind="incomplete", incomplete_details=details)
    assert await answered_by(*text_deltas("Hm"), incomplete) == [
        TextDelta("Hm"),
        ToolCallRequested("call_1", "read", '{"path": '),
        Finished(Finish.LENGTH, "m-1", Usage(7, 2, 5)),
    ]


@spec("TURN-60")
async def test_partly_filtered_text_is_kept_and_nothing_left_is_an_error() -> None:
    filtered = completed(kind="incomplete", incomplete_details={"reason": "content_filter"})
    assert (await answered_by(*text_deltas("Hm"), filtered))[-1] == Finished(
        Finish.FILTER, "m-1", Usage(7, 2, 5)
    )
    assert type(await error_from([filtered])) is ModelFilteredError


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (
            event("failed", response={"error": {"code": "server_error", "message": "x"}}),
            ModelUnavailableError,
        ),
        (event("failed", response={"error": {"code": "invalid_api_key"}}), ModelAccessError),
        (event("failed", response={"error": {"code": "bio_policy"}}), ModelFilteredError),
        (event("cancelled", response={}), ModelUnavailableError),
        ({"type": "error", "code": "rate_limit_exceeded", "message": "x"}, ModelRateLimitedError),
        ({"type": "error", "error": {"type": "authentication_error"}}, ModelAccessError),
    ],
)
@spec("TURN-62")
async def test_a_response_that_the_provider_ended_is_typed_and_not_resumed(
    end: Json, kind: type[ModelError]
) -> None:
    async with responses_server([*text_deltas("Hel"), end]) as server, model_at(server) as model:
        with pytest.raises(ModelError) as caught:
            await events_of_model(model)
    assert type(caught.value) is kind
    assert [method for method, _ in server.asked] == ["POST"]


async def test_model_settings_are_in_the_request() -> None:
    settings = ModelSettings(temperature=0.0, tokens_max=9, seed=1, forced_tool="read")
    async with responses_server(HELLO) as server, model_at(server) as model:
        await events_of_model(model, ModelRequest("", REQUEST.history, (READ,), settings=settings))
    body = server.bodies[0]
    assert (body["temperature"], body["max_output_tokens"]) == (0.0, 9)
    assert body["tool_choice"] == {"type": "function", "name": "read"}
    assert "seed" not in body


async def test_the_request_carries_the_whole_conversation() -> None:
    step = Step(Response((ToolCall("a", "read", '{"path": "x"}'),)), (ToolResult("a", "X"),))
    request = ModelRequest("Be brief.", REQUEST.history.then(step), (READ,), attempt=2, key="s1/1/2")
    async with responses_server(HELLO) as server, model_at(server) as model:
        await events_of_model(model, request)
    body, headers = server.bodies[0], server.headers[0]
    assert [item.get("role") or item["type"] for item in body["input"]] == [
        "system",
        "user",
        "function_call",
        "function_call_output",
    ]
    assert body["tools"][0]["name"] == "read"
    assert (body["stream"], body["background"], body["store"]) == (True, True, True)
    assert (headers["authorization"], headers["idempotency-key"]) == ("Bearer key", "s1/1/2/2")


@spec("REUSE-58", "REUSE-60")
async def test_a_longer_conversation_starts_with_the_bytes_of_the_shorter_and_carries_its_key() -> None:
    step = Step(Response((ToolCall("a", "read", '{"path": "x"}'),)), (ToolResult("a", "X"),))
    write = ToolSpec("write", "Write a file.")
    shorter = ModelRequest("Be brief.", REQUEST.history, (READ, write), session="s1")
    longer = ModelRequest("Be brief.", REQUEST.history.then(step), (write, READ), session="s1")
    async with (
        responses_server(HELLO, HELLO) as server,
        OpenAIResponses(server.url, "m", has_cache_key=True) as model,
    ):
        await events_of_model(model, shorter)
        await events_of_model(model, longer)
    before, now = (body.removesuffix(b"]}") for body in server.raw_bodies)
    assert now.startswith(before)
    assert [body["prompt_cache_key"] for body in server.bodies] == [cache_key_of("s1")] * 2


@pytest.mark.parametrize(("status", "kind"), [(401, ModelAccessError), (503, ModelOverloadedError)])
async def test_a_refusal_is_typed(status: int, kind: type[ModelError]) -> None:
    assert type(await error_from(HELLO, Link(status=status))) is kind


def test_an_invalid_address_is_refused_at_once() -> None:
    with pytest.raises(UsageError):
        OpenAIResponses("example.org", "m")


# --- broken connections
# -----------------------------------------------------------------------------------------


@spec("TURN-61")
@pytest.mark.parametrize("ending", ["end", "cut"])
@pytest.mark.parametrize("events_max", range(1, 7))
async def test_a_stream_broken_anywhere_continues_after_its_last_event(ending: str, events_max: int) -> None:
    links = [Link(events_max, ending), Link(0, "cut"), Link(1, ending)]
    async with responses_server(HELLO, links=links) as server, model_at(server) as model:
        events = await events_of_model(model)
    assert text_of(events) == HELLO_TEXT
    assert [type(each) for each in events].count(Resumable) == 1
    assert events[-1] == END
    assert resume_positions(server)[:2] == [str(events_max - 1)] * 2


async def test_silence_counts_as_a_break() -> None:
    async with (
        responses_server(HELLO, links=[Link(3, "hang")]) as server,
        model_at(server, limits=SHORT) as model,
    ):
        assert text_of(await events_of_model(model)) == HELLO_TEXT
    assert resume_positions(server) == ["2"]


async def test_a_server_that_is_briefly_down_is_called_again() -> None:
    links = [Link(3, "cut"), Link(status=503), Link(status=502)]
    async with responses_server(HELLO, links=links) as server, model_at(server) as model:
        assert text_of(await events_of_model(model)) == HELLO_TEXT


async def test_a_long_delay_requested_by_a_server_falls_between_attempts() -> None:
    error = await error_from(HELLO, Link(3, "cut"), Link(status=503, retry_after="31"))
    assert (type(error), error.retry_after_s) == (ModelCutError, 31.0)


async def test_connections_without_events_are_bounded() -> None:
    links = [Link(3, "cut"), *[Link(0, "cut")] * 10]
    async with responses_server(HELLO, links=links) as server, model_at(server) as model:
        with pytest.raises(ModelCutError):
            await events_of_model(model)
    assert len(server.asked) == RESPONSE_RECONNECTS_MAX + 1


async def test_a_provider_that_hangs_on_every_connection_is_a_stall() -> None:
    assert type(await error_from(HELLO, *[Link(0, "hang")] * 10, limits=SHORT)) is ModelStalledError
    assert (
        type(await error_from(HELLO, Link(3, "hang"), *[Link(0, "hang")] * 10, limits=SHORT))
        is ModelStalledError
    )


@spec("TURN-62")
async def test_a_response_that_the_server_lost_has_its_own_error() -> None:
    assert type(await error_from(HELLO, Link(3, "cut"), Link(status=404))) is ModelForgotError
    async with responses_server(HELLO) as server, model_at(server) as model:
        request = ModelRequest("", REQUEST.history, resume="resp_gone")
        with pytest.raises(ModelForgotError):
            await events_of_model(model, request)
    assert server.asked == [("GET", "/responses/resp_gone?stream=true")]


async def test_without_background_a_cut_response_is_requested_again_and_nothing_is_stored() -> None:
    error = await error_from(HELLO, Link(3, "cut"), is_background=False)
    assert type(error) is ModelUnavailableError
    async with responses_server(HELLO) as server, model_at(server, is_background=False) as model:
        events = await events_of_model(model)
    assert not any(isinstance(each, Resumable) for each in events)
    assert (server.bodies[0]["store"], "background" in server.bodies[0]) == (False, False)


async def test_stopping_a_response_cancels_it_at_the_server() -> None:
    async with responses_server(HELLO) as server, model_at(server) as model:
        await model.stop("resp_1")
    assert server.cancelled == ["resp_1"]
    with pytest.raises(ModelUnavailableError):
        await model.stop("resp_1")


# --- sessions -------------------------------------------------------------------------------------------------


def _journal(memory: Memory) -> list[object]:
    return [decode(each.body) for each in memory.sessions["s"].records]


@spec("TURN-63")
async def test_a_cancel_stops_the_response_at_the_provider() -> None:
    async with responses_server(HELLO, links=[Link(3, "hang")]) as server, model_at(server) as model:
        host = Host(Agent(model), MemoryStore())
        await host.start()
        runner = await host.session("s", create=True)
        async with asyncio.timeout(WAIT_S):
            await runner.submit(SendMessage(UserMessage.of("hi")))
            position = 0
            while not any(
                isinstance(decode(each.body), Delta) for each in await runner.read(after=0, limit=99)
            ):
                position = runner.newest.position
                await runner.wait(position)
            await runner.submit(Cancel())
            await server.left.wait()
            await host.stop()
    assert server.cancelled == list(server.kept)


@spec("TURN-61", "TURN-62")
@pytest.mark.parametrize("is_deleted", [False, True])
async def test_the_next_node_resumes_the_response_or_requests_it_again(*, is_deleted: bool) -> None:
    memory = Memory()
    async with responses_server(HELLO, HELLO, links=[Link(4, "hang")]) as server, model_at(server) as model:
        first = Host(Agent(model), MemoryStore(memory))
        await first.start()
        runner = await first.session("s", create=True)
        async with asyncio.timeout(WAIT_S):
            await runner.submit(SendMessage(UserMessage.of("hi")))
            while not any(isinstance(each, Delta) for each in _journal(memory)):
                await runner.wait(runner.newest.position)
            await first.stop()
            if is_deleted:
                server.delete_responses()
            second = Host(Agent(model), MemoryStore(memory))
            await second.start()
            runner = await second.session("s")
            while runner.state.is_live:
                await runner.wait(runner.newest.position)
            await second.stop()
    journal = _journal(memory)
    (whole,) = (each for each in journal if isinstance(each, ResponseCompleted))
    assert (whole.body.text, whole.attempt) == (HELLO_TEXT, 2 if is_deleted else 1)
    shown = [each.text for each in journal if isinstance(each, Delta) and each.attempt == whole.attempt]
    assert "".join(shown) == HELLO_TEXT
    assert [each.number for each in journal if isinstance(each, AttemptContinued)] == [1]
    assert [each.attempt for each in journal if isinstance(each, AttemptStarted)] == [1, 2][: 1 + is_deleted]
    assert [method for method, _ in server.asked] == ["POST", "GET", *(["POST"] if is_deleted else [])]
    assert server.cancelled == []


async def test_a_turn_over_bad_connections_shows_every_word_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_responses, "RESPONSE_RECONNECTS_MAX", 0)
    monkeypatch.setattr(deciding, "MODEL_BACKOFF", Backoff(first_s=0.01, most_s=0.01))
    links = [Link(3, "cut"), Link(5, "cut")]
    memory = Memory()
    async with responses_server(HELLO, links=links) as server, model_at(server) as model:
        host = Host(Agent(model), MemoryStore(memory))
        await host.start()
        await run_turn(host, "s", "hi")
        await host.stop()
    journal = _journal(memory)
    assert "".join(each.text for each in journal if isinstance(each, Delta)) == HELLO_TEXT
    assert [each.attempt for each in journal if isinstance(each, AttemptStarted)] == [1]
    assert len(server.bodies) == 1
