"""Each answer of the gateway counts once: by user, model and day, also when gateways are killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
import pytest

from midstream.dialects.usage_ledger import read_usage
from midstream.dialects.usage_totals import Totals, group_lines
from midstream.environment import World
from midstream.history.messages import Usage
from midstream.models.responses import Finished, TextDelta
from midstream.store.sqlite import SQLiteStore
from midstream.store.store_registry import read_store
from midstream.testing.scripted_model import ScriptedModel
from tests.dialects.gateway_serving import WAIT_S, asgi_client, chat_request, make_gateway
from tests.dialects.usage_upstream import (
    COMPLETION,
    PROMPT,
    TEXT,
    UserGateway,
    usage_upstream,
    user_gateway,
)
from tests.fault.stored import use_postgres
from tests.spec import spec

T = TypeVar("T")
LOOKS, PAUSE_S = 600, 0.1
ASK: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "gateway.db")
    return use_postgres(tmp_path, request.getfixturevalue("engine"))


def counts(report: list[dict[str, Any]]) -> dict[str, tuple[int, int, int]]:
    """Return the requests, and the tokens in and out, of each user."""
    return {line["user"]: (line["requests"], line["input_tokens"], line["output_tokens"]) for line in report}


async def await_counts(gateway: UserGateway, expected: dict[str, tuple[int, int, int]]) -> None:
    """Wait until the report has these counts."""
    found = {}
    for _ in range(LOOKS):
        found = counts(await asyncio.to_thread(gateway.usage, "--by", "user"))
        if found == expected:
            return
        await World().sleep(PAUSE_S)
    assert found == expected


async def test_answers_of_every_api_count_for_their_user_with_cost(tmp_path: Path) -> None:
    prices = ("--input-price", "2", "--output-price", "10")
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream, *prices) as [gateway]:
        ada = await asyncio.to_thread(gateway.command, "keys", "add", "ada")
        eve = await asyncio.to_thread(gateway.command, "keys", "add", "eve")
        async with gateway.openai(ada) as client:
            await client.chat.completions.create(model="m", messages=ASK)
            response = await client.responses.create(model="m", input="hi")
            assert response.output_text == TEXT
            background = await client.responses.create(model="m", input="later", background=True)
            following = await client.responses.retrieve(background.id, stream=True)
            assert [event.type async for event in following][-1] == "response.completed"
            await client.responses.create(model="m", input="secret", store=False)
            await client.post("/responses/compact", body={"model": "m", "input": "a b c"}, cast_to=object)
        async with gateway.anthropic(eve) as other:
            await other.messages.create(model="m", max_tokens=9, messages=ASK)
        await await_counts(
            gateway,
            {"ada": (5, 5 * PROMPT, 5 * COMPLETION), "eve": (1, PROMPT, COMPLETION)},
        )
        [line] = await asyncio.to_thread(gateway.usage, "--by", "model")
        assert (line["requests"], line["cost"], line["unpriced_requests"]) == (6, 6 * 0.0003, 0)
        assert upstream.requests == 6
        table = await asyncio.to_thread(gateway.command, "usage")
        assert [row.split("\t")[1] for row in table.splitlines()] == ["ada", "eve"]
        assert await asyncio.to_thread(gateway.usage, "--since", "2999-01-01") == []


@spec("REUSE-88")
async def test_a_joined_repetition_counts_once(tmp_path: Path) -> None:
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream) as [gateway]:
        ada = await asyncio.to_thread(gateway.command, "keys", "add", "ada")
        key = {"Idempotency-Key": "one"}
        async with gateway.openai(ada) as client:
            for _ in range(3):
                await client.chat.completions.create(model="m", messages=ASK, extra_headers=key)
        await await_counts(gateway, {"ada": (1, PROMPT, COMPLETION)})


@spec("REUSE-88")
async def test_an_unstored_answer_counts_although_its_gateway_is_killed_after_its_last_byte(
    tmp_path: Path,
) -> None:
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream) as [gateway]:
        ada = await asyncio.to_thread(gateway.command, "keys", "add", "ada")
        for count in range(1, 4):
            async with gateway.openai(ada) as client:
                answer = await client.responses.create(model="m", input=f"hi {count}", store=False)
            gateway.kill()
            assert answer.output_text == TEXT
            await await_counts(gateway, {"ada": (count, count * PROMPT, count * COMPLETION)})
            await asyncio.to_thread(gateway.start)


async def ask_until_answered(
    gateways: list[UserGateway], key: str, words: str, chance: random.Random
) -> None:
    """Request one answer by a program that repeats its request until it has the whole of it."""
    async with asyncio.timeout(4 * WAIT_S):
        while True:
            gateway = chance.choice(gateways)
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError, httpx2.HTTPError):
                async with gateway.openai(key) as client:
                    stream = await client.chat.completions.create(
                        model="m",
                        messages=[{"role": "user", "content": words}],
                        stream=True,
                        extra_headers={"Idempotency-Key": words},
                    )
                    text = "".join(
                        [each.choices[0].delta.content or "" async for each in stream if each.choices]
                    )
                assert text == TEXT
                return
            await World().sleep(0.05)


@spec("REUSE-88")
@pytest.mark.fault
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.long), 2])
async def test_gateways_that_are_killed_at_random_count_every_answer_once(
    store: str, nodes: int, tmp_path: Path
) -> None:
    seed, asked, kills = 20, 16, 4
    chance = random.Random(seed)
    sys.stdout.write(f"seed {seed}\n")
    async with (
        usage_upstream() as upstream,
        user_gateway(tmp_path, upstream, "--store", store, "--grace", "30", count=nodes) as gateways,
    ):
        upstream.pause_s = 0.02
        keys = [await asyncio.to_thread(gateways[0].command, "keys", "add", name) for name in ("ada", "eve")]

        async def ask(name: str, key: str) -> None:
            for number in range(asked // 4):
                await ask_until_answered(gateways, key, f"{name} {number}", chance)

        async def kill() -> None:
            for _ in range(kills):
                await World().sleep(chance.uniform(0.1, 0.8))
                gateway = chance.choice(gateways)
                gateway.kill()
                await asyncio.to_thread(gateway.start)

        killing = asyncio.create_task(kill())
        await asyncio.gather(*(ask(f"{who} {key[:4]}", key) for key in keys for who in "ab"))
        await killing
        half = asked // 2
        tokens = (half, half * PROMPT, half * COMPLETION)
        for gateway in gateways:  # uncounted answers are counted at a start
            gateway.kill()
        await asyncio.to_thread(gateways[0].start)
        await await_counts(gateways[0], {"ada": tokens, "eve": tokens})


async def test_workers_share_one_count(tmp_path: Path) -> None:
    async with usage_upstream() as upstream, user_gateway(tmp_path, upstream, "--workers", "2") as [gateway]:
        ada = await asyncio.to_thread(gateway.command, "keys", "add", "ada")

        async def ask(number: int) -> None:
            async with gateway.openai(ada) as client:
                await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": f"{number}"}]
                )

        await asyncio.gather(*map(ask, range(12)))
        await await_counts(gateway, {"ada": (12, 12 * PROMPT, 12 * COMPLETION)})


class DyingWorld(World):
    """The world of a process that dies between the end of an answer and its count."""

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        if not name.startswith("usage of"):
            return super().spawn(work, name=name)
        work.close()
        return super().spawn(self._die(), name=name)

    async def _die(self) -> Any:  # noqa: ANN401 - of any task
        await asyncio.Event().wait()


@spec("REUSE-88")
async def test_an_answer_whose_process_died_before_its_count_is_counted_by_the_next_one(
    tmp_path: Path,
) -> None:
    store = str(tmp_path / "gateway.db")
    model = ScriptedModel(lambda _: [TextDelta("yes"), Finished(usage=Usage(7, 3))])
    async with asgi_client(make_gateway(model, store=SQLiteStore(store), world=DyingWorld())) as client:
        assert (await client.post("/v1/chat/completions", json=chat_request("hi"))).status_code == 200
        tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith("usage of")]
        assert len(tasks) == 1
        tasks[0].cancel()
    assert _totals(store) == Totals()
    for _ in range(2):  # the third one finds it counted
        app = make_gateway(model, store=SQLiteStore(store))
        async with asgi_client(app) as client:
            await client.post("/v1/conversations", json={})
            for _ in range(LOOKS):
                if _totals(store).tokens:
                    break
                await World().sleep(PAUSE_S)
        assert _totals(store) == Totals(1, Usage(7, 3))


def _totals(store: str) -> Totals:
    with read_store(store) as found:
        found_lines = group_lines(found.ask(read_usage).lines(), ())
    return found_lines[0].totals if found_lines else Totals()
