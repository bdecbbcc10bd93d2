"""What goes over one connection, and how a silent one is kept alive."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from midstream.dialects import response_reader
from midstream.models.responses import Finished, TextDelta
from midstream.testing.scripted_model import Gate
from tests.dialects.serving import say, served


@pytest.mark.parametrize(("path", "sign"), [("chat/completions", ": waiting"), ("messages", "event: ping")])
async def test_a_stream_without_a_word_gets_a_sign_of_life(
    path: str, sign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_reader, "QUIET_S", 0.01)
    go_on = asyncio.Event()
    async with served([[TextDelta("a"), Gate(go_on), TextDelta("b"), Finished()]]) as gateway:
        body = say("hi", stream=True)
        async with gateway.http.stream("POST", f"/v1/{path}", json=body) as answer:
            lines = answer.aiter_lines()
            assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
            heard: list[str] = []
            async for line in lines:
                heard.append(line)
                if heard.count(sign) == 2 + (path == "messages"):  # it opens with one
                    go_on.set()
        assert heard.count(sign) >= 2


async def test_a_stream_opens_after_a_while_without_a_word_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_reader, "QUIET_S", 0.01)
    go_on = asyncio.Event()
    async with served([[Gate(go_on), TextDelta("b"), Finished()]]) as gateway, gateway.openai() as client:
        asks: Any = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(model="m", messages=asks, stream=True)
        go_on.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "b"
