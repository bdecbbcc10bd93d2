"""One question, one run: clients with a lost connection join it, repeated questions do not."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import openai
import pytest

from midstream.dialects import live_responses
from midstream.environment import World
from midstream.errors import ModelUnavailableError
from midstream.models import responses
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta
from midstream.testing.scripted_model import Gate, ScriptedStep, text
from tests.dialects.gateway_serving import (
    WAIT_S,
    Json,
    ServedGateway,
    chat_request,
    make_gateway,
    served,
    serving,
    words_of,
)
from tests.spec import spec

WORDS = "one two three four"
POLL_S = 0.002
RETRY = {"x-stainless-retry-count": "1"}
ASK: list[Any] = [{"role": "user", "content": "hi"}]


def gated_response(event: asyncio.Event) -> list[ScriptedStep]:
    """Return a response that waits for the test after its second word."""
    steps = text(WORDS)
    return [*steps[:2], Gate(event), *steps[2:]]


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await World().sleep(POLL_S)


async def read(gateway: ServedGateway, body: Json, **headers: str) -> list[Json]:
    """Send a request and read the stream to its end."""
    async with gateway.http.stream(
        "POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers
    ) as answer:
        assert answer.status_code == 200
        lines = [line async for line in answer.aiter_lines()]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


async def cut_after_two_words(gateway: ServedGateway, body: Json, **headers: str) -> None:
    """Send a request through the relay, read two words, and lose the connection."""
    received = ""
    async with gateway.openai(url=gateway.cutter.url, max_retries=0, default_headers=headers) as client:
        stream = await client.chat.completions.create(**{**body, "stream": True})
        with contextlib.suppress(openai.APIConnectionError):
            async for chunk in stream:
                received += (chunk.choices and chunk.choices[0].delta.content) or ""
                if len(received.split()) >= 2:
                    gateway.cutter.cut()
    assert len(received.split()) >= 2
    await until(lambda: not any(live.readers for live in gateway.gateway.responses.all()))


@spec("REUSE-70")
async def test_a_client_that_lost_its_connection_gets_the_whole_answer_of_the_same_run() -> None:
    may_continue = asyncio.Event()
    async with served([gated_response(may_continue)]) as gateway:
        await cut_after_two_words(gateway, chat_request("hi"))
        may_continue.set()
        async with gateway.openai(url=gateway.cutter.url) as client:
            body: Any = {**chat_request("hi"), "stream": True}
            stream = await client.chat.completions.create(**body)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == WORDS
        assert len(gateway.model.requests) == 1


@spec("REUSE-70")
async def test_the_retries_of_openais_client_are_one_run() -> None:
    """The connection is cut before the status, when the SDK retries by itself."""
    may_continue = asyncio.Event()
    async with served([[Gate(may_continue), *text(WORDS)]]) as gateway:
        async with gateway.openai(url=gateway.cutter.url, max_retries=3) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
            for number in (1, 2):
                await until(lambda: len(gateway.cutter.accepted_at) == number)  # noqa: B023 - awaited here
                await until(lambda: any(live.readers for live in gateway.gateway.responses.all()))
                assert gateway.cutter.cut() == 1
                await until(lambda: not any(live.readers for live in gateway.gateway.responses.all()))
            await until(lambda: len(gateway.cutter.accepted_at) == 3)
            may_continue.set()
            answer = await asyncio.wait_for(asking, WAIT_S)
        assert answer.choices[0].message.content == WORDS
        assert len(gateway.model.requests) == 1


@spec("REUSE-70")
async def test_a_retry_joins_while_the_first_connection_still_seems_open() -> None:
    may_continue = asyncio.Event()
    async with served([gated_response(may_continue)]) as gateway:
        first = asyncio.create_task(read(gateway, chat_request("hi")))
        await until(lambda: len(gateway.model.requests) == 1)
        second = asyncio.create_task(read(gateway, chat_request("hi"), **RETRY))
        await until(lambda: any(live.readers == 2 for live in gateway.gateway.responses.all()))
        may_continue.set()
        received = await asyncio.gather(first, second)
        assert [words_of(chunks) for chunks in received] == [WORDS, WORDS]
        assert received[0] == received[1]
        assert len(gateway.model.requests) == 1


@spec("REUSE-71")
async def test_a_repeated_question_after_the_answer_gets_another_one() -> None:
    async with served([text("done")]) as gateway:
        for count in (1, 2):
            assert words_of(await read(gateway, chat_request("hi"))) == "done"
            assert len(gateway.model.requests) == count
        answer = await gateway.http.post("/v1/chat/completions", json=chat_request("hi"))
        assert "x-midstream-replayed" not in answer.headers


@spec("REUSE-71")
async def test_two_equal_concurrent_questions_are_two_runs() -> None:
    async with served([text("done")]) as gateway:
        await asyncio.gather(read(gateway, chat_request("hi")), read(gateway, chat_request("hi")))
        assert len(gateway.model.requests) == 2


@spec("REUSE-71")
async def test_in_a_named_conversation_two_equal_concurrent_questions_are_one_run() -> None:
    may_continue = asyncio.Event()
    async with served([gated_response(may_continue)]) as gateway:
        named = {"x-midstream-session": "s1"}
        both = [asyncio.create_task(read(gateway, chat_request("hi"), **named)) for _ in range(2)]
        await until(lambda: any(live.readers == 2 for live in gateway.gateway.responses.all()))
        may_continue.set()
        assert [words_of(chunks) for chunks in await asyncio.gather(*both)] == [WORDS, WORDS]
        assert len(gateway.model.requests) == 1


@spec("REUSE-70")
async def test_an_idempotency_key_is_one_run_and_no_other_requests() -> None:
    async with served([text("done")]) as gateway:
        key = {"idempotency-key": "k1"}
        first = await gateway.http.post("/v1/chat/completions", json=chat_request("hi"), headers=key)
        again = await gateway.http.post("/v1/chat/completions", json=chat_request("hi"), headers=key)
        assert (again.content, again.headers["x-midstream-replayed"]) == (first.content, "true")
        other = await gateway.http.post("/v1/chat/completions", json=chat_request("ho"), headers=key)
        assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
        assert len(gateway.model.requests) == 1


@spec("REUSE-70")
async def test_a_failure_is_not_replayed_to_a_retry() -> None:
    responses: list[Sequence[ScriptedStep]] = [[ModelUnavailableError("not now")], text("done")]

    def script(_: ModelRequest) -> Sequence[ScriptedStep]:
        return responses.pop(0)

    async with served(script) as gateway, gateway.openai(max_retries=1) as client:
        answer = await client.chat.completions.create(model="m", messages=ASK)
        assert answer.choices[0].message.content == "done"
        assert len(gateway.model.requests) == 2


class Endless:
    """Sends words until it is closed, and then sets an event."""

    name = "endless"

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.asked = 0

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        del request
        self.asked += 1
        try:
            while True:
                yield TextDelta("word ")
                await asyncio.sleep(0)
        finally:
            self.closed.set()


@spec("REUSE-72")
async def test_an_unread_answer_is_cancelled_after_the_grace() -> None:
    model: Any = Endless()
    async with serving(make_gateway(model, grace_s=0.0), model) as gateway:
        await cut_after_two_words(gateway, chat_request("hi"))
        await asyncio.wait_for(model.closed.wait(), WAIT_S)


@spec("REUSE-72")
async def test_the_next_message_of_a_person_cancels_an_unread_answer() -> None:
    model: Any = Endless()
    async with serving(make_gateway(model, grace_s=600.0), model) as gateway:
        named = {"x-midstream-session": "s1"}
        await cut_after_two_words(gateway, chat_request("hi"), **named)
        assert not model.closed.is_set()
        await cut_after_two_words(gateway, chat_request("no, stop"), **named)
        await asyncio.wait_for(model.closed.wait(), WAIT_S)
        assert model.asked == 2


async def test_an_endless_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "RESPONSE_CHARS_MAX", 10_000)
    model: Any = Endless()
    async with serving(make_gateway(model), model) as gateway:
        last = (await read(gateway, chat_request("hi")))[-1]
        assert last["error"]["code"] == "model_unavailable"


async def test_answers_above_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_responses, "OPEN_MAX", 1)
    may_continue = asyncio.Event()
    async with served([gated_response(may_continue)]) as gateway:
        first = asyncio.create_task(read(gateway, chat_request("hi")))
        await until(lambda: len(gateway.gateway.responses) == 1)
        answer = await gateway.http.post("/v1/chat/completions", json=chat_request("ho"))
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        may_continue.set()
        assert words_of(await first) == WORDS


async def test_finished_responses_are_removed_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served([text("done")]) as gateway:
        for number in range(3):
            await read(gateway, chat_request(f"question {number}"))
        assert len(gateway.gateway.responses.all()) == 3
        monkeypatch.setattr(live_responses, "KEPT_S", -1.0)
        await read(gateway, chat_request("the last"))
        assert len(gateway.gateway.responses.all()) == 1


async def test_a_response_without_its_end_is_an_error() -> None:
    async with served([[TextDelta("Hel")]]) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json=chat_request("hi"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_unavailable")


async def test_a_run_can_be_cancelled_before_it_starts() -> None:
    async with served([[Finished()]]) as gateway:
        asking = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=chat_request("hi")))
        await until(gateway.gateway.responses.all)
        for live in gateway.gateway.responses.all():
            await live.cancel()
        assert (await asking).status_code in (200, 499)
