"""Anthropic's Messages API, against a scripted server and against the types of the real SDK."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anthropic
import msgspec
import pydantic
import pytest
from anthropic.types import message_create_params
from hypothesis import given, settings

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelNotFoundError,
    ModelOverloadedError,
    ModelRateLimitedError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UsageError,
)
from midstream.history.messages import (
    Entry,
    Finish,
    History,
    Outcome,
    Response,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    ToolSpec,
    UpstreamCall,
    Usage,
    UserMessage,
)
from midstream.models.anthropic_messages import TOKENS_MAX, AnthropicMessages
from midstream.models.http_limits import HttpLimits
from midstream.models.model import Model
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    UpstreamCallEnded,
    UpstreamCallStarted,
    is_progress,
)
from midstream.session.model_settings import ModelSettings
from midstream.session.records import ResponseCompleted, TurnEnded, TurnStatus, decode
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import run_turn
from midstream.tools.function_tools import tool
from tests.history.codecs.messages_wire import (
    PING,
    Json,
    call,
    message_end,
    message_start,
    redacted,
    result,
    text,
    thought,
    wire,
)
from tests.history.histories import MODEL, histories
from tests.models.chat_server import WAIT_S, Answer, ChatServer, chat_server, refusal, silence
from tests.search import tried
from tests.spec import spec

READ = ToolSpec("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
WRITE = ToolSpec("write", "Write a file.")
REQUEST = ModelRequest("Be brief.", History((UserMessage.of("hi"),)), (READ,), key="s1/1/1")
CALL_STEP = Step(Response((ToolCall("a", "read", '{"path": "x"}'),)), (ToolResult("a", "X"),))
TEXT_STEP = Step(Response((Text("It says X."),)))
EPHEMERAL = {"type": "ephemeral"}
SHORT = HttpLimits(connect_s=1, first_byte_s=0.25, between_bytes_s=0.25)


def stream(*events: Json | bytes, ending: str = "end") -> Answer:
    """Answer with a stream of events, each in its own piece; bytes are sent unchanged."""
    return Answer([each if isinstance(each, bytes) else wire([each]) for each in events], ending=ending)


HELLO = stream(message_start(), PING, *text(0, "Hel", "lo"), *message_end())
END = Finished(Finish.STOP, "claude-1", Usage(7, 9))


def messages_server(*answers: Answer) -> contextlib.AbstractAsyncContextManager[ChatServer]:
    return chat_server(*answers, path="/v1/messages")


async def events_of_model(model: Model, request: ModelRequest = REQUEST) -> list[ModelEvent]:
    """Return the events of a model, without keep-alives and empty pieces."""
    async with asyncio.timeout(WAIT_S):
        events = [event async for event in model.stream(request)]
    return [event for event in events if is_progress(event) and type(event).__name__ != "Working"]


async def error_from(answer: Answer) -> ModelError:
    async with messages_server(answer) as server, AnthropicMessages(server.url, "m") as model:
        with pytest.raises(ModelError) as caught:
            await events_of_model(model)
    return caught.value


@contextlib.asynccontextmanager
async def hello_model(**options: Any) -> AsyncIterator[tuple[ChatServer, AnthropicMessages]]:  # noqa: ANN401 - the model's own
    """Run a server that answers each request with hello, and a model at it."""
    async with (
        messages_server(*[HELLO] * 20) as server,
        AnthropicMessages(server.url, "m", **options) as model,
    ):
        yield server, model


# --- responses
# ------------------------------------------------------------------------------------------------


async def test_text_is_streamed_with_its_usage() -> None:
    async with messages_server(HELLO) as server, AnthropicMessages(server.url, "m") as model:
        assert await events_of_model(model) == [TextDelta("Hel"), TextDelta("lo"), END]


async def test_thinking_hosted_tools_and_calls_arrive_in_order() -> None:
    answer = stream(
        message_start(),
        *thought(0, "hm", signature="c2ln=="),
        *redacted(1, "c2VhbGVk"),
        *call(2, '{"query": "q"}', call_id="srvtoolu_1", name="web_search", kind="server_tool_use"),
        *result(3, [], call_id="srvtoolu_1", kind="web_search_tool_result"),
        *text(4, "I look."),
        *call(5, '{"path": ', '"x"}'),
        *message_end("tool_use"),
    )
    async with messages_server(answer) as server, AnthropicMessages(server.url, "m") as model:
        assert await events_of_model(model) == [
            ThinkingDelta("hm"),
            ThinkingDelta("", "c2ln=="),
            ThinkingDelta("", "c2VhbGVk", is_redacted=True),
            UpstreamCallStarted("srvtoolu_1", "web_search", '{"query": "q"}'),
            UpstreamCallEnded("srvtoolu_1", ""),
            TextDelta("I look."),
            ToolCallRequested("toolu_1", "read", '{"path": "x"}'),
            Finished(Finish.CALLS, "claude-1", Usage(7, 9)),
        ]


async def test_a_ping_and_a_partial_event_are_keep_alives() -> None:
    begun, *rest = HELLO.pieces
    gate = asyncio.Event()
    answer = Answer([begun, b"event: ping\n", b'data: {"type": "ping"}\n\n' + b"".join(rest)], gate=gate)
    async with messages_server(answer) as server, AnthropicMessages(server.url, "m") as model:
        events: AsyncGenerator[ModelEvent, None] = model.stream(REQUEST)
        async with asyncio.timeout(WAIT_S), contextlib.aclosing(events):
            assert await anext(events) == KeepAlive()
            gate.set()
            assert [event async for event in events][-1] == END


# --- requests
# -------------------------------------------------------------------------------------------------


async def test_the_request_has_all_content_with_key_and_version() -> None:
    request = ModelRequest("Be brief.", REQUEST.history.then(CALL_STEP), (READ,), key="s1/1/2")
    search = {"type": "web_search_20250305", "name": "web_search"}
    options = {"extra": {"temperature": 0.5}, "upstream_tools": [search], "is_cached": False}
    async with hello_model(api_key="secret", **options) as (server, model):
        await events_of_model(model, request)
    body, headers = server.bodies[0], server.headers[0]
    assert [message["role"] for message in body.pop("messages")] == ["user", "assistant", "user"]
    assert body == {
        "model": "m",
        "max_tokens": TOKENS_MAX,
        "stream": True,
        "tools": [{"name": "read", "description": "Read a file.", "input_schema": READ.parameters}, search],
        "system": [{"type": "text", "text": "Be brief."}],
        "temperature": 0.5,
    }
    assert (headers["x-api-key"], headers["anthropic-version"]) == ("secret", "2023-06-01")
    assert headers["idempotency-key"] == "s1/1/2"
    assert "authorization" not in headers


async def test_model_settings_are_in_the_request() -> None:
    settings = ModelSettings(
        temperature=0.5, top_k=3, tokens_max=9, seed=1, stop=("END",), forced_tool="read"
    )
    async with hello_model() as (server, model):
        await events_of_model(model, ModelRequest("", REQUEST.history, (READ,), settings=settings))
    body = server.bodies[0]
    assert (body["temperature"], body["top_k"], body["max_tokens"]) == (0.5, 3, 9)
    assert (body["stop_sequences"], body["tool_choice"]) == (["END"], {"type": "tool", "name": "read"})
    assert "seed" not in body


@pytest.mark.parametrize(
    "options", [{"thinking": {"type": "adaptive"}}, {"headers": {"Anthropic-Version": "2026-10-21"}}]
)
async def test_settings_that_the_api_refuses_with_thinking_are_not_sent(options: dict[str, Any]) -> None:
    settings = ModelSettings(temperature=0.5, tokens_max=9, stop=("END",), forced_tool="read")
    async with hello_model(**options) as (server, model):
        await events_of_model(model, ModelRequest("", REQUEST.history, (READ,), settings=settings))
        assert model.grants == {"stop"}
    body = server.bodies[0]
    assert (body["max_tokens"], body["stop_sequences"]) == (TOKENS_MAX, ["END"])
    assert not body.keys() & {"temperature", "tool_choice"}


async def test_other_servers_receive_their_headers_and_fields() -> None:
    headers = {"Authorization": "Bearer secret", "Anthropic-Version": "2024-01-01", "anthropic-beta": "x"}
    async with hello_model(headers=headers, extra={"max_tokens": None}, tokens_max=5) as (server, model):
        await events_of_model(model, ModelRequest("", REQUEST.history))
    assert set(server.bodies[0]) == {"model", "messages", "stream"}
    shown = server.headers[0]
    assert (shown["authorization"], shown["anthropic-version"]) == ("Bearer secret", "2024-01-01")
    assert (shown["anthropic-beta"], "x-api-key" in shown, "idempotency-key" in shown) == ("x", False, False)


@pytest.mark.parametrize("options", [{}, {"is_cached": False}, {"cache_ttl": "1h"}])
async def test_the_request_fits_the_types_of_the_sdk(options: dict[str, Any]) -> None:
    thinking = {"type": "enabled", "budget_tokens": 2000}
    signed = Response(
        (Thinking("hm", "c2ln"), Thinking("", "c2VhbGVk", is_redacted=True), ToolCall("a", "read")), model="m"
    )
    history = REQUEST.history.then(Step(signed, (ToolResult("a", "X"),))).then(UserMessage.of("thanks"))
    async with hello_model(thinking=thinking, **options) as (server, model):
        await events_of_model(model, ModelRequest("Be brief.", history, (READ, WRITE)))
    adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(
        message_create_params.MessageCreateParamsStreaming
    )
    read = adapter.validate_python(server.bodies[0])
    (_, responded, _, _) = read["messages"]
    assert [block["type"] for block in responded["content"]] == ["thinking", "redacted_thinking", "tool_use"]


# --- signed thinking --------------------------------------------------------------------------------------------

SIGNED = stream(
    message_start("claude-1-20260101"),
    *thought(0, "Let me ", "see…", signature="Eqo/+BCg=="),
    *redacted(1, "EmwKAhgB+/=="),
    *text(2, "I look."),
    *call(3, '{"path": "x"}'),
    *message_end("tool_use"),
)


async def test_signed_thinking_is_sent_back_byte_for_byte_to_the_same_model_only() -> None:
    @tool
    async def read(path: str) -> str:
        """Read a file."""
        return f"the words of {path}"

    memory = Memory()
    async with messages_server(SIGNED, HELLO) as server, AnthropicMessages(server.url, "claude-1") as model:
        host = Host(Agent(model, tools=[read]), MemoryStore(memory))
        await host.start()
        records = await run_turn(host, "s", "what is in x?")
        await host.stop()
    assert isinstance(records[-1], TurnEnded)
    assert records[-1].status is TurnStatus.COMPLETED
    (_, responded, _) = server.bodies[1]["messages"]
    assert responded["content"] == [
        {"type": "thinking", "thinking": "Let me see…", "signature": "Eqo/+BCg=="},
        {"type": "redacted_thinking", "data": "EmwKAhgB+/=="},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "x"}},
    ]

    kept = [decode(each.body) for each in memory.sessions["s"].records]
    response = next(each.body for each in kept if isinstance(each, ResponseCompleted))
    history = REQUEST.history.then(Step(response, (ToolResult("toolu_1", "X"),)))
    async with hello_model() as (another, model):
        await events_of_model(model, ModelRequest("", history, (READ,)))
    (_, responded, _) = another.bodies[0]["messages"]
    assert [block["type"] for block in responded["content"]] == ["text", "tool_use"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {"type": "disabled"}),
        ({"extra": {"thinking": {"type": "adaptive"}}}, {"type": "disabled"}),
        ({"thinking": {"type": "disabled"}}, {"type": "disabled"}),
        ({}, None),
    ],
)
async def test_a_tool_loop_that_lost_its_thinking_continues_without_it(
    options: dict[str, Any], expected: object
) -> None:
    request = ModelRequest("", REQUEST.history.then(CALL_STEP), (READ,))
    async with hello_model(**options) as (server, model):
        await events_of_model(model, request)
        await events_of_model(model)
    assert server.bodies[0].get("thinking") == expected
    own = options.get("thinking") or options.get("extra", {}).get("thinking")
    assert server.bodies[1].get("thinking") == own


@spec("REUSE-56")
async def test_a_hosted_call_is_described_in_text_in_the_next_request() -> None:
    ran = Response(
        (UpstreamCall("s", "web_search", '{"query": "q"}', "T", Outcome.OK), Text("T says so.")), model="m"
    )
    history = REQUEST.history.then(Step(ran)).then(UserMessage.of("thanks"))
    async with hello_model() as (server, model):
        await events_of_model(model, ModelRequest("", history))
    (_, responded, _) = server.bodies[0]["messages"]
    assert [block["type"] for block in responded["content"]] == ["text", "text"]
    assert "ran elsewhere: web_search" in responded["content"][0]["text"]


# --- the prefix -------------------------------------------------------------------------------------------------


def marks(body: Json) -> list[str]:
    """Return the places of the cache marks in a body."""
    groups = {"tools": body.get("tools", []), "system": body.get("system", [])}
    for number, message in enumerate(body["messages"]):
        groups[f"messages[{number}]"] = message["content"] if isinstance(message["content"], list) else []
    return [
        f"{name}[{place}]"
        for name, blocks in groups.items()
        for place, block in enumerate(blocks)
        if "cache_control" in block
    ]


@spec("REUSE-61")
async def test_four_cache_marks_are_set_and_none_for_side_calls_or_where_disabled() -> None:
    history = REQUEST.history.then(CALL_STEP)
    asked = ModelRequest("Be brief.", history, (WRITE, READ))
    async with hello_model(cache_ttl="1h") as (server, model):
        await events_of_model(model, asked)
        await events_of_model(model, msgspec.structs.replace(asked, is_ephemeral=True))
    assert marks(server.bodies[0]) == ["tools[1]", "system[0]", "messages[0][0]", "messages[2][0]"]
    assert server.bodies[0]["system"][0]["cache_control"] == {**EPHEMERAL, "ttl": "1h"}
    assert marks(server.bodies[1]) == []

    async with hello_model(is_cached=False) as (server, model):
        await events_of_model(model, asked)
    assert marks(server.bodies[0]) == []

    async with hello_model(extra={"cache_control": EPHEMERAL}) as (server, model):
        await events_of_model(model, asked)
    assert (marks(server.bodies[0]), server.bodies[0]["cache_control"]) == ([], EPHEMERAL)


def without_marks(raw: bytes) -> bytes:
    return raw.replace(b',"cache_control":{"type":"ephemeral"}', b"")


@spec("REUSE-58", "REUSE-59", "REUSE-61")
async def test_the_body_of_a_turn_starts_with_the_bytes_of_the_turn_before_but_for_the_marks() -> None:
    first = REQUEST.history
    second = first.then(CALL_STEP)
    third = second.then(TEXT_STEP).then(UserMessage.of("thanks"))
    tools = [(READ, WRITE), (WRITE, READ), (READ, WRITE)]
    async with hello_model(extra={"temperature": 0.5}) as (server, model):
        for history, ordered in zip((first, second, third), tools, strict=True):
            await events_of_model(model, ModelRequest("Be brief.", history, ordered))
    bodies = [without_marks(raw).removesuffix(b"]}") for raw in server.raw_bodies]
    assert all(now.startswith(before) for before, now in itertools.pairwise(bodies))
    # The second request has all the bytes of the first, marks and all: only its own anchors are new.
    assert server.raw_bodies[1].startswith(server.raw_bodies[0].removesuffix(b"]}"))
    places = [marks(body) for body in server.bodies]
    assert [each[-2] for each in places[1:]] == [each[-1] for each in places[:-1]]


@spec("REUSE-58", "REUSE-61")
@settings(max_examples=tried(25))
@given(histories(8))
def test_two_requests_share_their_bytes_up_to_the_first_moved_anchor(
    history: History,
) -> None:
    """Three laws of every request and its successor.

    All bytes before the messages are the same. So are the messages of the earlier request, all of them, but
    for marks. With marks, the later body begins with the earlier one up to the first mark among its messages.
    """
    ends = [end for end in range(1, len(history.entries) + 1) if needs_response(history.entries[:end])]
    for before, now in itertools.pairwise(asyncio.run(bodies_of(history, ends))):
        start = before.index(b'"messages":[')
        assert now[:start] == before[:start]
        assert without_marks(now).startswith(without_marks(before).removesuffix(b"]}"))
        place = before.find(b',"cache_control"', start)
        assert now.startswith(before[:place] if place >= 0 else before.removesuffix(b"]}"))


async def bodies_of(history: History, ends: list[int]) -> list[bytes]:
    async with messages_server(*[HELLO] * len(ends)) as server:
        async with AnthropicMessages(server.url, MODEL) as model:
            for end in ends:
                asked = ModelRequest("Be brief.", History(history.entries[:end]), (READ, WRITE))
                await events_of_model(model, asked)
        return server.raw_bodies


def needs_response(entries: tuple[Entry, ...]) -> bool:
    """Return whether a model is called here: after a user message, or after the results of its calls."""
    last = entries[-1]
    return isinstance(last, UserMessage) or bool(last.results)


# --- faults -----------------------------------------------------------------------------------------------------


def error_event(kind: str, message: str = "x") -> Json:
    return {"type": "error", "error": {"type": kind, "message": message}}


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refusal(400, {"type": "invalid_request_error", "message": "x"}), ModelRejectedError),
        (
            refusal(
                400, {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"}
            ),
            ContextOverflowError,
        ),
        (refusal(401, {"type": "authentication_error", "message": "x"}), ModelAccessError),
        (refusal(404, {"type": "not_found_error", "message": "model: m"}), ModelNotFoundError),
        (refusal(413, {"type": "request_too_large", "message": "x"}), ContextOverflowError),
        (refusal(429, {"type": "rate_limit_error", "message": "x"}), ModelRateLimitedError),
        (refusal(529, {"type": "overloaded_error", "message": "Overloaded"}), ModelOverloadedError),
        (stream(message_start(), *text(0, "Hel"), ending="cut"), ModelUnavailableError),
        (stream(message_start(), *text(0, "Hel")), ModelUnavailableError),
        (stream(), ModelUnavailableError),
        (stream(message_start(), b"data: <html>\n\n"), ModelUnavailableError),
        (
            Answer([b'{"type": "message", "content": []}'], 200, "application/json"),
            ModelUnavailableError,
        ),
        (stream(message_start(), error_event("overloaded_error")), ModelOverloadedError),
        (stream(message_start(), error_event("invalid_request_error")), ModelRejectedError),
        (stream(message_start(), *message_end("refusal")), ModelFilteredError),
    ],
)
@spec("TURN-62")
async def test_every_unsuccessful_end_is_typed(answer: Answer, kind: type[ModelError]) -> None:
    assert type(await error_from(answer)) is kind


async def test_the_delay_requested_by_the_server_is_kept() -> None:
    error = await error_from(refusal(529, {"type": "overloaded_error"}, **{"retry-after": "2.5"}))
    assert error.retry_after_s == 2.5


async def test_silence_is_a_stall_and_no_later_request_uses_the_connection() -> None:
    async with (
        messages_server(silence(), HELLO) as server,
        AnthropicMessages(server.url, "m", limits=SHORT) as model,
    ):
        with pytest.raises(ModelStalledError):
            await events_of_model(model)
        async with asyncio.timeout(WAIT_S):
            await server.left.wait()
        assert END in await events_of_model(model)
    assert len(set(server.connections)) == 2


async def test_closing_the_iterator_closes_the_connection() -> None:
    half = stream(message_start(), *text(0, "Hel"), ending="hang")
    async with messages_server(half) as server, AnthropicMessages(server.url, "m") as model:
        events: AsyncGenerator[ModelEvent, None] = model.stream(REQUEST)
        async with asyncio.timeout(WAIT_S):
            async with contextlib.aclosing(events):
                await anext(events)
            await server.left.wait()


async def test_connections_are_kept_between_responses() -> None:
    async with hello_model() as (server, model):
        await events_of_model(model)
        await events_of_model(model)
    assert len(set(server.connections)) == 1


def test_an_invalid_address_is_refused_at_once() -> None:
    with pytest.raises(UsageError):
        AnthropicMessages("example.org", "m")


# --- the real SDK at the same server ----------------------------------------------------------------------------


async def test_the_sdk_decodes_the_same_response_from_the_same_server() -> None:
    async with messages_server(SIGNED, SIGNED) as server, AnthropicMessages(server.url, "m") as model:
        events = await events_of_model(model)
        client = anthropic.AsyncAnthropic(api_key="k", base_url=server.url.removesuffix("/v1"), max_retries=0)
        asked: list[Any] = server.bodies[0]["messages"]
        async with client, client.messages.stream(model="m", max_tokens=9, messages=asked) as reading:
            message = await reading.get_final_message()
    thinking, sealed, given, called = message.content
    assert thinking.type == "thinking"
    assert sealed.type == "redacted_thinking"
    assert given.type == "text"
    assert called.type == "tool_use"
    words = "".join(each.text for each in events if isinstance(each, TextDelta))
    thoughts = "".join(each.text for each in events if isinstance(each, ThinkingDelta))
    signatures = [each.signature for each in events if isinstance(each, ThinkingDelta) and each.signature]
    (asks,) = (each for each in events if isinstance(each, ToolCallRequested))
    assert (words, thoughts) == (given.text, thinking.thinking)
    assert signatures == [thinking.signature, sealed.data]
    assert (asks.id, asks.name, json.loads(asks.arguments)) == (called.id, called.name, called.input)
