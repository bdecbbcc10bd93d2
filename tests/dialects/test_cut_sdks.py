"""OpenAI's and Anthropic's own clients with the gateway, over a relay that cuts: each question is one run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from msgspec import Struct

from midstream.testing.scripted_model import Gate, text
from tests.dialects.gateway_serving import WAIT_S, ServedGateway, served
from tests.dialects.test_live_responses import WORDS, gated_response, until
from tests.spec import spec

ASK: list[Any] = [{"role": "user", "content": "hi"}]
LOST = (openai.APIConnectionError, anthropic.APIConnectionError, httpx2.TransportError)
"""The errors with which these clients report a lost connection; in a stream they pass on httpx's error."""


class SdkApi(Struct, frozen=True):
    """One API as its own client uses it: a client, a whole answer, and the words of a stream."""

    client: Callable[..., contextlib.AbstractAsyncContextManager[Any]]
    whole: Callable[[Any], Any]
    words: Callable[[Any], AsyncGenerator[str]]


async def chat_whole(client: openai.AsyncOpenAI) -> str | None:
    answer = await client.chat.completions.create(model="m", messages=ASK)
    return answer.choices[0].message.content


async def chat_words(client: openai.AsyncOpenAI) -> AsyncGenerator[str]:
    async with await client.chat.completions.create(model="m", messages=ASK, stream=True) as stream:
        async for chunk in stream:
            if chunk.choices and (words := chunk.choices[0].delta.content):
                yield words


async def responses_whole(client: openai.AsyncOpenAI) -> str:
    return (await client.responses.create(model="m", input="hi")).output_text


async def responses_words(client: openai.AsyncOpenAI) -> AsyncGenerator[str]:
    async with client.responses.stream(model="m", input="hi") as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                yield event.delta


async def messages_whole(client: anthropic.AsyncAnthropic) -> str:
    answer = await client.messages.create(model="m", max_tokens=99, messages=ASK)
    return "".join(block.text for block in answer.content if block.type == "text")


async def messages_words(client: anthropic.AsyncAnthropic) -> AsyncGenerator[str]:
    async with client.messages.stream(model="m", max_tokens=99, messages=ASK) as stream:
        async for words in stream.text_stream:
            yield words


APIS = {
    "chat completions": SdkApi(ServedGateway.openai, chat_whole, chat_words),
    "responses": SdkApi(ServedGateway.openai, responses_whole, responses_words),
    "messages": SdkApi(ServedGateway.anthropic, messages_whole, messages_words),
}


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> SdkApi:
    return APIS[request.param]


def readers(gateway: ServedGateway) -> int:
    return sum(run.readers for run in gateway.gateway.responses.all())


async def read(words: AsyncIterator[str]) -> str:
    return "".join([word async for word in words])


@spec("REUSE-66")
async def test_an_sdk_gets_its_answer_through_the_relay(api: SdkApi) -> None:
    async with served([text(WORDS)]) as gateway, api.client(gateway, url=gateway.cutter.url) as client:
        assert await api.whole(client) == WORDS
        assert await read(api.words(client)) == WORDS


@spec("REUSE-70")
async def test_the_retries_of_an_sdk_are_one_run(api: SdkApi) -> None:
    """The connection is cut before the status, when an SDK retries by itself."""
    may_continue = asyncio.Event()
    async with served([[Gate(may_continue), *text(WORDS)]], grace_s=60.0) as gateway:
        async with api.client(gateway, url=gateway.cutter.url, max_retries=3) as client:
            asking = asyncio.create_task(api.whole(client))
            for _ in range(2):
                await until(lambda: readers(gateway) == 1)
                assert gateway.cutter.cut() == 1
                await until(lambda: not readers(gateway))
            await until(lambda: readers(gateway) == 1)
            may_continue.set()
            assert await asyncio.wait_for(asking, WAIT_S) == WORDS
        assert len(gateway.cutter.accepted_at) == 3
        assert len(gateway.model.requests) == 1


@spec("REUSE-70")
async def test_an_sdk_cut_in_the_middle_of_a_stream_repeats_its_request_and_gets_the_same_run(
    api: SdkApi,
) -> None:
    """After the first word no SDK retries by itself: the application does."""
    may_continue = asyncio.Event()
    async with (
        served([gated_response(may_continue)], grace_s=60.0) as gateway,
        api.client(gateway, url=gateway.cutter.url, max_retries=3) as client,
    ):
        async with contextlib.aclosing(api.words(client)) as words:
            received = ""
            while received != "one two":
                received += await anext(words)
            assert gateway.cutter.cut() == 1
            with pytest.raises(LOST):
                await anext(words)
        await until(lambda: not readers(gateway))
        may_continue.set()
        assert await read(api.words(client)) == WORDS
        assert len(gateway.model.requests) == 1
