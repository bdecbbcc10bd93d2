"""Durable Streams: the public suite on each store, and servers that are killed under producers and readers."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from midstream.environment import World
from tests.dialects.plain_streams import (
    HOME,
    counts_of,
    failures_of,
    follow_session,
    judge,
    kill,
    lacking,
)
from tests.dialects.subscribers import kill_subscribed
from tests.dialects.ui_stream import run_node, run_servers
from tests.fault.extent import IS_FULL
from tests.guides.guide_programs import URL
from tests.nats_engine import NatsCluster
from tests.postgres_engine import Engine

pytestmark = pytest.mark.fault
KILLS = 6
POLL_S = 0.005
ORDERS = 10
MESSAGE = {"type": "send", "parts": [{"type": "text", "text": "hi"}]}
GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "durable-streams.md").read_text(encoding="utf-8")
SHORT = "Append Operations|Idempotent Producer|Stream Closure|Fork - |Reserved subscription"
"""Groups of the suite with the most writes: the short form, for PostgreSQL and JetStream.

`make dialects` runs the whole suite on each store.
"""
SHORT_COUNT = 130
"""The minimum number of tests of the short form."""


async def test_nothing_is_lost_or_duplicated_when_the_server_is_killed(tmp_path: Path) -> None:
    result = await kill(tmp_path, KILLS // 2, 1)
    assert result["messages"] > KILLS // 2


async def test_nothing_is_lost_or_duplicated_when_two_servers_on_postgres_are_killed(
    tmp_path: Path, engine: Engine
) -> None:
    result = await kill(tmp_path, KILLS // 2, 1, "--store", f"{engine.url}&schema=plain_kills", count=2)
    assert result["messages"] > KILLS // 2


@pytest.mark.long
@pytest.mark.skipif(bool(lacking()), reason=lacking())
async def test_the_conformance_suite_passes(tmp_path: Path) -> None:
    report = await judge(tmp_path)
    assert counts_of(report) == (338, 0, 0), failures_of(report)


@pytest.mark.long
@pytest.mark.skipif(bool(lacking()), reason=lacking())
async def test_the_short_suite_passes_on_postgres(tmp_path: Path, engine: Engine) -> None:
    report = await judge(tmp_path, "--store", f"{engine.url}&schema=plain_suite", only=SHORT)
    assert counts_of(report)[1] == 0, failures_of(report)
    assert counts_of(report)[0] >= SHORT_COUNT


@pytest.mark.long
@pytest.mark.skipif(bool(lacking()), reason=lacking())
async def test_the_short_suite_passes_on_jetstream(tmp_path: Path, nats_server: NatsCluster) -> None:
    report = await judge(tmp_path, "--store", nats_server.url("streams"), only=SHORT)
    assert counts_of(report)[1] == 0, failures_of(report)
    assert counts_of(report)[0] >= SHORT_COUNT


@pytest.mark.skipif(bool(lacking()), reason=lacking())
async def test_the_program_of_the_guide_appends_each_message_once_through_kills(tmp_path: Path) -> None:
    found = re.search(r"^```js\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    assert found is not None
    async with run_servers(tmp_path, 1) as [server]:
        url = server.url
        assert URL in found[1]
        playing = asyncio.create_task(run_node(found[1].replace(URL, url), home=HOME))
        async with asyncio.timeout(100), httpx2.AsyncClient() as client:
            for kills in (1, 2):
                while not await _has_more(client, url, kills) and not playing.done():
                    await World().sleep(POLL_S)
                await server.kill()
                await server.start()
            assert (await playing).split() == [str(number) for number in range(ORDERS)]


@pytest.mark.skipif(bool(lacking()), reason=lacking())
async def test_the_guide_reads_a_session_and_makes_a_subscription(tmp_path: Path) -> None:
    [_, reading] = re.findall(r"^```js\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    asked = re.search(r"curl -X PUT (\S+) .*?-d '(.*?)'", GUIDE, re.DOTALL)
    assert asked is not None
    async with run_servers(tmp_path, 1, "--allow-webhook", "https://worker.example") as [server]:
        url = server.url
        async with asyncio.timeout(100), httpx2.AsyncClient() as client:
            command = {"type": "command", "seqno": 0, "payload": MESSAGE}
            keys = {"x-idempotency-key": "k", "x-idempotent-encryption-key": "s" * 43}
            sent = await client.post(f"{url}/v1/sessions/hello/commands", json=command, headers=keys)
            assert sent.status_code == 200, sent.text
            records = f"{url}/v1/sessions/hello/records"
            while "turn_ended" not in (words := (await client.get(records)).text):
                await World().sleep(POLL_S)
            lines = (await run_node(reading.replace(URL, url), home=HOME)).splitlines()
            found = [json.loads(line) for line in words.splitlines()]
            assert lines == [f"{each['id']} {each['record']['type']}" for each in found]
            for expected in (201, 200):
                made = await client.put(asked[1].replace(URL, url), json=json.loads(asked[2]))
                assert made.status_code == expected, made.text


@pytest.mark.parametrize("live", ["long-poll", "sse"])
async def test_a_session_is_followed_as_a_stream_through_kills(live: str, tmp_path: Path) -> None:
    async with run_servers(tmp_path, 300, count=2) as servers:
        urls = [each.url for each in servers]
        async with asyncio.timeout(120), httpx2.AsyncClient(timeout=60) as client:
            command = {"type": "command", "seqno": 0, "payload": MESSAGE}
            keys = {"x-idempotency-key": "k", "x-idempotent-encryption-key": "s" * 43}
            sent = await client.post(f"{urls[0]}/v1/sessions/hello/commands", json=command, headers=keys)
            assert sent.status_code == 200, sent.text
            seen: list[dict[str, Any]] = []
            following = asyncio.create_task(follow_session(client, urls, "hello", live, seen))
            for number, server in enumerate(servers):
                wanted = len(seen) + 5
                while len(seen) < wanted and not following.done():
                    await World().sleep(POLL_S)
                assert number or not following.done(), "the first kill is in the answer"
                await server.kill()
                await server.start()
            await following
            words = (await client.get(f"{urls[0]}/v1/sessions/hello/records")).text
            assert seen == [json.loads(line) for line in words.splitlines()]


async def _has_more(client: httpx2.AsyncClient, url: str, count: int) -> bool:
    response = await client.get(f"{url}/v1/stream/orders")
    return response.status_code == 200 and len(response.json()) >= count


async def test_webhooks_deliver_each_message_when_the_server_is_killed(tmp_path: Path) -> None:
    result = await kill_subscribed(tmp_path, 2, 1, count=1)
    assert result["wakes"] > 1


async def test_webhooks_deliver_each_message_when_two_servers_on_postgres_are_killed(
    tmp_path: Path, engine: Engine
) -> None:
    result = await kill_subscribed(tmp_path, 2, 1, "--store", f"{engine.url}&schema=plain_hooks", count=2)
    assert result["wakes"] > 1


@pytest.mark.skipif(not IS_FULL, reason="the webhooks on JetStream are in `make fault`")
async def test_webhooks_deliver_each_message_when_two_servers_on_jetstream_are_killed(
    tmp_path: Path, nats_server: NatsCluster
) -> None:
    result = await kill_subscribed(tmp_path, 2, 1, "--store", nats_server.url("hooks"), count=2)
    assert result["wakes"] > 1
