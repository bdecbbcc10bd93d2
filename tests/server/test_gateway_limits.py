"""Limits of the gateway's users, as the SDKs of OpenAI and Anthropic receive them from a running gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from midstream.environment import World
from tests.dialects.gateway_serving import WAIT_S
from tests.dialects.usage_upstream import COMPLETION, PROMPT, TEXT, UserGateway, usage_upstream, user_gateway

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
LOOKS, PAUSE_S = 600, 0.1


async def key_of(gateway: UserGateway, *words: object) -> str:
    return await asyncio.to_thread(gateway.command, "keys", "add", *words)


async def send(gateway: UserGateway, key: str, words: str = "hi", model: str = "m") -> None:
    async with gateway.openai(key) as client:
        await client.chat.completions.create(model=model, messages=[{"role": "user", "content": words}])


async def refused(gateway: UserGateway, key: str) -> openai.RateLimitError:
    for number in range(LOOKS):  # Counts of another process arrive a little later.
        try:
            await send(gateway, key, f"more {number}")
        except openai.RateLimitError as error:
            return error
        await World().sleep(PAUSE_S)
    raise AssertionError("no request was refused")


async def test_requests_per_minute_are_limited_with_the_error_of_each_api(tmp_path: Path) -> None:
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream) as [gateway]:
        ada = await key_of(gateway, "ada", "--requests-per-minute", 2)
        eve = await key_of(gateway, "eve")
        for number in range(2):
            await send(gateway, ada, f"hi {number}")
        async with gateway.openai(ada) as client, gateway.anthropic(ada) as other:
            with pytest.raises(openai.RateLimitError) as chat:
                await client.chat.completions.create(model="m", messages=MESSAGES)
            with pytest.raises(openai.RateLimitError) as response:
                await client.responses.create(model="m", input="hi")
            with pytest.raises(anthropic.RateLimitError) as message:
                await other.messages.create(model="m", max_tokens=9, messages=MESSAGES)
        for error in (chat.value, response.value):
            assert (error.code, error.type) == ("rate_limit_exceeded", "rate_limit_error")
            assert "may begin 2 requests in one minute; try again in" in error.message
        body: Any = message.value.body
        assert body["error"]["type"] == "rate_limit_error"
        for each in (chat.value, response.value, message.value):
            assert 1 <= int(each.response.headers["retry-after"]) <= 31
            assert each.response.headers["x-should-retry"] == "true"
        await send(gateway, eve)
        assert upstream.requests == 3


async def test_a_repeated_request_joins_its_answer_although_the_limit_is_reached(tmp_path: Path) -> None:
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream) as [gateway]:
        ada = await key_of(gateway, "ada", "--requests-per-minute", 1)
        async with gateway.openai(ada) as client:
            for _ in range(3):
                answer = await client.responses.create(
                    model="m", input="hi", extra_headers={"Idempotency-Key": "1"}
                )
                assert answer.output_text == TEXT
        assert upstream.requests == 1


async def test_concurrent_answers_are_limited_also_in_the_background_and_the_sdk_waits_for_them(
    tmp_path: Path,
) -> None:
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream) as [gateway]:
        ada = await key_of(gateway, "ada", "--concurrent-requests", 2)
        upstream.gate.clear()
        async with gateway.openai(ada) as client, gateway.openai(ada, max_retries=9) as patient:
            begun = await client.responses.create(model="m", input="later", background=True)
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            with pytest.raises(
                openai.RateLimitError, match="2 answers for this key are in progress"
            ) as error:
                await client.responses.create(model="m", input="third")
            assert error.value.response.headers["retry-after"] == "1"
            third = asyncio.create_task(patient.responses.create(model="m", input="third"))
            upstream.gate.set()
            assert (await third).output_text == TEXT
            words = [each.choices[0].delta.content or "" async for each in stream if each.choices]
            assert "".join(words) == TEXT
            following = await client.responses.retrieve(begun.id, stream=True)
            assert [event.type async for event in following][-1] == "response.completed"
            for number in range(3):  # Those that have ended count no more.
                await client.responses.create(model="m", input=f"again {number}")


async def test_an_answer_that_continues_after_a_kill_counts_without_a_reader(tmp_path: Path) -> None:
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream) as [gateway]:
        ada = await key_of(gateway, "ada", "--concurrent-requests", 1)
        upstream.gate.clear()
        async with gateway.openai(ada) as client:
            await client.responses.create(model="m", input="later", background=True)
        gateway.kill()
        await asyncio.to_thread(gateway.start)
        async with asyncio.timeout(WAIT_S), httpx2.AsyncClient(base_url=gateway.url) as health:
            while not (await health.get("/health")).json()["answers"]:
                await World().sleep(PAUSE_S)
        async with gateway.openai(ada) as client:
            with pytest.raises(openai.RateLimitError, match="1 answers for this key are in progress"):
                await client.responses.create(model="m", input="second")
            upstream.gate.set()
        async with gateway.openai(ada, max_retries=9) as patient:
            assert (await patient.responses.create(model="m", input="second")).output_text == TEXT


async def test_daily_and_monthly_tokens_and_a_budget_are_limits_that_survive_a_kill(
    tmp_path: Path,
) -> None:
    prices = ("--input-price", "1000", "--output-price", "10000")  # 0.2 for an answer.
    one = PROMPT + COMPLETION
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream, *prices) as [gateway]:
        of_day = await key_of(gateway, "day", "--tokens-per-day", 2 * one - 1)
        of_month = await key_of(gateway, "month", "--tokens-per-month", 2 * one)
        of_budget = await key_of(gateway, "budget", "--budget-per-month", 0.3)
        for key in (of_day, of_month, of_budget):
            await send(gateway, key, "first")
            await send(gateway, key, "second")
        for is_killed in (False, True):
            if is_killed:
                gateway.kill()
                await asyncio.to_thread(gateway.start)
            error = await refused(gateway, of_day)
            assert (error.code, error.type) == ("rate_limit_exceeded", "rate_limit_error")
            headers = error.response.headers
            assert 1 <= int(headers["retry-after"]) <= 24 * 3600
            assert headers["x-should-retry"] == "false"
            for key, what in ((of_month, "tokens"), (of_budget, "budget")):
                error = await refused(gateway, key)
                assert (error.code, error.type) == ("insufficient_quota", "insufficient_quota")
                assert what in error.message
                assert error.response.headers["x-should-retry"] == "false"
                assert "retry-after" not in error.response.headers
                async with gateway.anthropic(key) as other:
                    with pytest.raises(anthropic.APIStatusError) as message:
                        await other.messages.create(model="m", max_tokens=9, messages=MESSAGES)
                body: Any = message.value.body
                assert (message.value.status_code, body["error"]["type"]) == (402, "billing_error")


@pytest.mark.long
async def test_limits_hold_for_two_workers_together(tmp_path: Path) -> None:
    one = PROMPT + COMPLETION
    options = ("--workers", "2")
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream, *options) as [gateway]:
        of_day = await key_of(gateway, "day", "--tokens-per-day", 2 * one)
        assert (await refused(gateway, of_day)).code == "rate_limit_exceeded"
        at_once = await key_of(gateway, "busy", "--concurrent-requests", 2)
        upstream.gate.clear()
        before = upstream.requests + 2
        async with gateway.openai(at_once) as client:
            for number in range(2):
                await client.responses.create(model="m", input=f"later {number}", background=True)
            async with asyncio.timeout(WAIT_S):
                while upstream.requests < before:  # Both are at the upstream, and count as its requests.
                    await World().sleep(PAUSE_S)
            for _ in range(20):  # Each is a connection of its own, to either worker.
                await World().sleep(PAUSE_S)
                async with gateway.openai(at_once) as other:
                    try:
                        await other.responses.create(model="m", input="more", background=True)
                    except openai.RateLimitError:
                        continue
            assert upstream.requests - before <= 2  # Passed before the workers exchanged their counts.
        upstream.gate.set()


async def test_a_user_gets_only_the_models_that_the_key_permits(tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    tables = "".join(f'[models.{name}]\nupstream = "scripted:{name}"\n' for name in ("one", "two"))
    models.write_text(tables)
    gateway = UserGateway(tmp_path, ("--config", str(models)))
    ada = await key_of(gateway, "ada", "--model", "two")
    eve = await key_of(gateway, "eve")
    await asyncio.to_thread(gateway.start)
    try:
        async with gateway.openai(ada) as client, gateway.openai(eve) as unlimited:
            assert [each.id async for each in await client.models.list()] == ["two"]
            assert [each.id async for each in await unlimited.models.list()] == ["one", "two"]
            await send(gateway, ada, model="two")
            for call in (
                client.responses.create(model="one", input="hi"),
                client.embeddings.create(model="one", input="hi"),
                client.models.retrieve("one"),
            ):
                with pytest.raises(openai.NotFoundError) as error:
                    await call
                assert (error.value.code, "available: two" in error.value.message) == (
                    "model_not_found",
                    True,
                )
        async with gateway.anthropic(ada) as other:
            with pytest.raises(anthropic.NotFoundError):
                await other.messages.create(model="one", max_tokens=9, messages=MESSAGES)
        await send(gateway, eve, model="one")
    finally:
        await asyncio.to_thread(gateway.stop)


async def test_a_user_whose_models_are_not_served_sees_none(tmp_path: Path) -> None:
    async with (
        usage_upstream() as upstream,
        user_gateway(tmp_path, upstream, "--serve-as", "fast") as [gateway],
    ):
        ada = await key_of(gateway, "ada", "--model", "deep")
        async with gateway.openai(ada) as client, gateway.anthropic(ada) as other:
            assert (await client.models.list()).data == []
            assert (await other.models.list()).data == []
