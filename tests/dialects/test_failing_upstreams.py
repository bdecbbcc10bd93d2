"""Failures of a provider as the unmodified SDKs of OpenAI and Anthropic receive them through a gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest

from midstream.agents import Pooled
from midstream.agents.openai_conversation import OpenAIChain
from midstream.models.http_limits import HttpLimits
from midstream.models.model import Model
from midstream.models.openai_compatible import OpenAICompatible
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel
from tests.dialects.gateway_serving import ServedGateway, make_gateway, serving
from tests.models.chat_server import Answer, ChatServer, Hasty, chat_server, refusal, silence
from tests.models.responses_server import HELLO, Link, responses_server
from tests.spec import spec

pytestmark = pytest.mark.slow

ASK: list[Any] = [{"role": "user", "content": "hi"}]
SDK_RETRIES = 2
TRIES_MAX = 1 + SDK_RETRIES


@contextlib.asynccontextmanager
async def serve_before_provider(
    *answers: Answer, limits: HttpLimits | None = None
) -> AsyncIterator[tuple[ServedGateway, ChatServer]]:
    """Serve a gateway in front of a provider with a script."""
    async with (
        chat_server(*answers) as server,
        serve_before(OpenAICompatible(server.url, "m", "key", limits=limits)) as gateway,
    ):
        yield gateway, server


@contextlib.asynccontextmanager
async def serve_before(model: Model) -> AsyncIterator[ServedGateway]:
    async with serving(make_gateway(model), ScriptedModel(())) as gateway:
        yield gateway


async def failure_in_chat(gateway: ServedGateway, *, retries: int = 0) -> openai.APIStatusError:
    async with gateway.openai(max_retries=retries) as client:
        with pytest.raises(openai.APIStatusError) as met:
            await client.chat.completions.create(model="m", messages=ASK)
    return met.value


async def failure_in_responses(gateway: ServedGateway) -> openai.APIStatusError:
    async with gateway.openai(max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as met:
            await client.responses.create(model="m", input="hi")
    return met.value


async def failure_in_messages(gateway: ServedGateway, *, retries: int = 0) -> anthropic.APIStatusError:
    async with gateway.anthropic(max_retries=retries) as client:
        with pytest.raises(anthropic.APIStatusError) as met:
            await client.messages.create(model="m", max_tokens=9, messages=ASK)
    return met.value


TABLE = [
    # The provider's status and error; status and code of OpenAI's APIs; status and type of Messages.
    pytest.param(500, {"type": "server_error"}, (500, "model_unavailable"), (500, "api_error"), id="500"),
    pytest.param(502, None, (500, "model_unavailable"), (500, "api_error"), id="502"),
    pytest.param(503, None, (503, "model_overloaded"), (529, "overloaded_error"), id="503"),
    pytest.param(
        529, {"type": "overloaded_error"}, (503, "model_overloaded"), (529, "overloaded_error"), id="529"
    ),
    pytest.param(429, {"type": "tokens"}, (429, "rate_limit_exceeded"), (429, "rate_limit_error"), id="429"),
    pytest.param(
        429, {"code": "insufficient_quota"}, (429, "insufficient_quota"), (402, "billing_error"), id="quota"
    ),
    pytest.param(
        402, {"type": "billing_error"}, (429, "insufficient_quota"), (402, "billing_error"), id="402"
    ),
    pytest.param(
        404, {"code": "model_not_found"}, (404, "model_not_found"), (404, "not_found_error"), id="model"
    ),
    pytest.param(
        401, {"code": "invalid_api_key"}, (403, "model_access"), (403, "permission_error"), id="401"
    ),
    pytest.param(
        400,
        {"message": "no", "type": "invalid_request_error"},
        (400, "model_rejected"),
        (400, "invalid_request_error"),
        id="400",
    ),
]


@spec("REUSE-68")
@pytest.mark.parametrize(("status", "error", "at_openai", "at_anthropic"), TABLE)
async def test_each_failure_of_a_provider_has_the_status_and_the_name_of_each_api(
    status: int, error: dict[str, str] | None, at_openai: tuple[int, str], at_anthropic: tuple[int, str]
) -> None:
    async with serve_before_provider(*[refusal(status, error) for _ in range(3)]) as (gateway, server):
        in_chat = await failure_in_chat(gateway)
        in_responses = await failure_in_responses(gateway)
        in_messages = await failure_in_messages(gateway)
    assert (in_chat.status_code, in_chat.code) == at_openai
    assert (in_responses.status_code, in_responses.code) == at_openai
    kind = in_messages.response.json()["error"]["type"]
    assert (in_messages.status_code, kind) == at_anthropic
    assert len(server.bodies) == 3


@spec("REUSE-68")
async def test_an_account_without_credit_is_not_retried() -> None:
    script = [refusal(429, {"code": "insufficient_quota", "message": "pay"}) for _ in range(2)]
    async with serve_before_provider(*script) as (gateway, server):
        in_chat = await failure_in_chat(gateway, retries=SDK_RETRIES)
        await failure_in_messages(gateway, retries=SDK_RETRIES)
    assert isinstance(in_chat, openai.RateLimitError)
    assert in_chat.type == "insufficient_quota"
    assert len(server.bodies) == 2


OVERFLOWS = [
    (
        {"code": "context_length_exceeded", "message": "too long"},
        ("prompt is too long", "maximum context length is", "exceeds the context window"),
    ),
    (
        {
            "message": "This model's maximum context length is 8192 tokens. However, your messages have 9000 tokens."
        },
        (
            "prompt is too long: 9000 tokens > 8192 maximum",
            "This model's maximum context length is 8192 tokens",
        ),
    ),
    (
        {"message": "prompt is too long: 210000 tokens > 200000 maximum"},
        ("prompt is too long: 210000 tokens > 200000 maximum", "maximum context length is 200000 tokens"),
    ),
    (
        {
            "message": "input length and `max_tokens` exceed context limit: 188059 + 20000 > 200000, decrease it"
        },
        ("input length and `max_tokens` exceed context limit: 188059 + 20000 > 200000",),
    ),
]


@spec("REUSE-68")
@pytest.mark.parametrize(("error", "words"), OVERFLOWS)
async def test_a_too_long_conversation_has_the_words_that_clients_match(
    error: dict[str, str], words: tuple[str, ...]
) -> None:
    async with serve_before_provider(*[refusal(400, error) for _ in range(4)]) as (gateway, _):
        in_chat = await failure_in_chat(gateway)
        in_responses = await failure_in_responses(gateway)
        in_messages = await failure_in_messages(gateway)
        async with gateway.openai(max_retries=0) as client:
            events = [
                each async for each in await client.responses.create(model="m", input="hi", stream=True)
            ]
    assert (in_chat.status_code, in_chat.code) == (400, "context_length_exceeded")
    assert (in_responses.status_code, in_responses.code) == (400, "context_length_exceeded")
    assert in_messages.response.json()["error"]["type"] == "invalid_request_error"
    for each in words:
        for met in (in_chat, in_responses, in_messages):
            assert each in met.response.json()["error"]["message"]
    # Codex finds it in the stream only.
    last: Any = events[-1]
    assert events[0].type == "response.created"
    assert (last.type, last.response.error.code) == ("response.failed", "context_length_exceeded")


@spec("REUSE-68")
@pytest.mark.parametrize("status", [500, 503, 429])
async def test_a_failing_provider_receives_only_the_retries_of_the_sdk(status: int) -> None:
    async with serve_before_provider(*[refusal(status) for _ in range(20)]) as (gateway, server):
        await failure_in_chat(gateway, retries=SDK_RETRIES)
    assert len(server.bodies) == TRIES_MAX


@spec("REUSE-68")
@pytest.mark.parametrize("status", [500, 503, 429])
async def test_a_pool_does_not_multiply_the_retries_of_an_sdk(status: int) -> None:
    links = [Link(status=status) for _ in range(30)]
    async with responses_server(HELLO, links=links) as server:
        upstream = OpenAIChain("m", api_key="key", base_url=f"{server.url}", world=Hasty())
        async with serve_before(Pooled(upstream, MemoryStore(), world=Hasty())) as gateway:
            await failure_in_chat(gateway, retries=SDK_RETRIES)
            assert len(server.asked) == TRIES_MAX


@spec("REUSE-68")
async def test_a_conversation_whose_provider_fails_later_gets_one_fresh_agent_at_most() -> None:
    links = [Link(), *[Link(status=500) for _ in range(30)]]
    async with responses_server(HELLO, links=links) as server:
        upstream = OpenAIChain("m", api_key="key", base_url=f"{server.url}", world=Hasty())
        async with serve_before(Pooled(upstream, MemoryStore(), world=Hasty())) as gateway:
            headers = {"x-midstream-session": "s"}
            async with gateway.openai(max_retries=SDK_RETRIES, default_headers=headers) as client:
                first = await client.chat.completions.create(model="m", messages=ASK)
                answer = first.choices[0].message.content
                later: list[Any] = [
                    *ASK,
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": "so?"},
                ]
                with pytest.raises(openai.InternalServerError):
                    await client.chat.completions.create(model="m", messages=later)
            assert len(server.asked) - 1 <= TRIES_MAX + 1


@spec("REUSE-68")
async def test_a_provider_that_is_silent_beyond_the_limit_is_a_timeout() -> None:
    limits = HttpLimits(connect_s=0.5, first_byte_s=0.25, between_bytes_s=0.25)
    async with serve_before_provider(*[silence() for _ in range(2)], limits=limits) as (gateway, _):
        async with asyncio.timeout(60):
            assert (await failure_in_chat(gateway)).status_code == 504
            assert (await failure_in_messages(gateway)).response.json()["error"]["type"] == "timeout_error"
