"""The output on one connection, and the keep-alives of a silent one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from midstream.dialects import response_reader
from midstream.errors import ModelUnavailableError
from midstream.models.responses import Finished, TextDelta
from midstream.testing.scripted_model import Gate, ScriptedModel, Stall
from tests.dialects.gateway_serving import TOKEN, chat_request, make_gateway, served


@pytest.mark.parametrize(("path", "sign"), [("chat/completions", ": waiting"), ("messages", "event: ping")])
async def test_a_silent_stream_gets_a_keep_alive(
    path: str, sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_reader, "QUIET_S", 0.01)
    may_continue = asyncio.Event()
    async with served([[TextDelta("a"), Gate(may_continue), TextDelta("b"), Finished()]]) as gateway:
        body = chat_request("hi", stream=True)
        async with gateway.http.stream("POST", f"/v1/{path}", json=body) as answer:
            lines = answer.aiter_lines()
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            received: list[str] = []
            async for line in lines:
                received.append(line)
                if received.count(sign) == 2 + (path == "messages"):  # it opens with one
                    may_continue.set()
        assert received.count(sign) >= 2


async def test_a_stream_without_any_output_opens_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_reader, "QUIET_S", 0.01)
    may_continue = asyncio.Event()
    async with (
        served([[Gate(may_continue), TextDelta("b"), Finished()]]) as gateway,
        gateway.openai() as client,
    ):
        asks: Any = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(model="m", messages=asks, stream=True)
        may_continue.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "b"


@pytest.mark.parametrize(
    ("path", "first", "last"),
    [
        ("chat/completions", '"role":"assistant"', 'data: {"error":{"message":"'),
        ("messages", "event: message_start", 'data: {"type":"error","error":{"type":"'),
        ("responses", "event: response.created", "event: response.failed"),
    ],
)
async def test_a_failure_after_a_silence_ends_the_stream_with_a_typed_error(
    path: str, first: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_reader, "QUIET_S", 0.01)
    fail = asyncio.Event()
    async with served([[Gate(fail), ModelUnavailableError("overloaded")]]) as gateway:
        body = {"input": "hi"} if path == "responses" else chat_request("hi")
        body |= {"model": "m", "stream": True, "max_tokens": 99}
        async with gateway.http.stream("POST", f"/v1/{path}", json=body) as answer:
            fail.set()
            whole = (await answer.aread()).decode()
    assert answer.status_code == 200
    assert first in whole
    assert last in whole.partition(first)[2]


@pytest.mark.parametrize("pause", [1, 2, 3])
async def test_a_reader_that_is_cancelled_twice_is_not_counted_any_more(pause: int) -> None:
    app = make_gateway(ScriptedModel([[TextDelta("a"), Stall()]]))
    begun, may_end = asyncio.Event(), asyncio.Event()
    body = json.dumps(chat_request("hi", stream=True)).encode()
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if requests:
            return requests.pop()
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()  # a server that is slow to end a wait for its client
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        if message.get("body"):
            begun.set()

    headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"host", b"testserver")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
    }
    reading = asyncio.create_task(app(scope, receive, send))
    async with asyncio.timeout(60):
        await begun.wait()
    [live] = app.responses.all()
    assert live.readers == 1
    reading.cancel()
    for _ in range(pause):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading}, timeout=60)
    assert live.readers == 0
    may_end.set()
    await app.stop()
