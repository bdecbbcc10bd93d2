"""Webhooks of `midstream serve` while its servers are killed: each message is delivered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
from aiohttp import web

from midstream.environment import World
from tests.dialects.plain_streams import RECEIVERS
from tests.dialects.ui_stream import KillableServer, run_servers

Json = dict[str, Any]
STREAMS = 3
APPENDS_BETWEEN = 6
STORY_S = 240.0
PAUSE_S = 0.05
SUBSCRIPTION = "/v1/stream/__ds/subscriptions/work"


class Receiver:
    """A worker behind a webhook: reads pending messages, and acks them in its answer, by a callback, or not at all."""

    def __init__(self, urls: Sequence[str], chance: random.Random) -> None:
        self._urls = urls
        self._chance = chance
        self.found: set[tuple[str, int]] = set()
        self.wakes: list[tuple[int, str]] = []
        self.signatures: list[str] = []
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        """Serve one delivery."""
        wake: Json = await request.json()
        self.wakes.append((wake["generation"], wake["wake_id"]))
        self.signatures.append(request.headers["webhook-signature"])
        try:
            async with httpx2.AsyncClient(timeout=60) as client:
                for stream in wake["streams"]:
                    await self._read(client, stream["path"], stream["acked_offset"])
                if self._chance.random() < 0.5:
                    return web.json_response({"done": True})
                await self._report(client, wake)
        except httpx2.TransportError:  # the server is unreachable: this wake is repeated
            return web.json_response({}, status=500)
        return web.json_response({})

    async def _read(self, client: httpx2.AsyncClient, path: str, offset: str) -> None:
        response = await client.get(
            f"{self._chance.choice(self._urls)}/v1/stream/{path}", params={"offset": offset}
        )
        assert response.status_code == 200, response.text
        self.found |= {(path, each["n"]) for each in response.json()}

    async def _report(self, client: httpx2.AsyncClient, wake: Json) -> None:
        acks = [{"stream": each["path"], "offset": each["tail_offset"]} for each in wake["streams"]]
        response = await client.post(
            wake["callback_url"],
            headers={"authorization": f"Bearer {wake['callback_token']}"},
            json={
                "wake_id": wake["wake_id"],
                "generation": wake["generation"],
                "acks": acks,
                "done": True,
            },
        )
        assert response.status_code in {200, 409, 503}, response.text


@contextlib.asynccontextmanager
async def receiving(urls: Sequence[str], chance: random.Random) -> AsyncIterator[Receiver]:
    """Serve a receiver on a free port until the end of the block."""
    receiver = Receiver(urls, chance)
    app = web.Application()
    app.router.add_post("/hook", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
        yield receiver
    finally:
        await runner.cleanup()


async def request_until_answered(
    client: httpx2.AsyncClient,
    method: str,
    url: str,
    **more: Any,  # noqa: ANN401
) -> httpx2.Response:
    """Send a request until a server answers it."""
    while True:
        with contextlib.suppress(httpx2.TransportError):
            response = await client.request(method, url, **more)
            if response.status_code != 503:
                return response
        await World().sleep(PAUSE_S)


async def play(
    servers: Sequence[KillableServer], urls: Sequence[str], kills: int, chance: random.Random
) -> Json:
    """Append, and kill the servers in turn; return the counts."""
    async with (
        asyncio.timeout(STORY_S),
        receiving(urls, chance) as receiver,
        httpx2.AsyncClient(timeout=60) as client,
    ):
        body = {
            "type": "webhook",
            "pattern": "events/*",
            "webhook": {"url": receiver.url},
            "lease_ttl_ms": 1000,
        }
        made = await request_until_answered(client, "PUT", f"{urls[0]}{SUBSCRIPTION}", json=body)
        assert made.status_code == 201, made.text
        expected: set[tuple[str, int]] = set()
        for round_ in range(kills + 1):
            for number in range(round_ * APPENDS_BETWEEN, (round_ + 1) * APPENDS_BETWEEN):
                path = f"events/{number % STREAMS}"
                await _append(client, f"{chance.choice(urls)}/v1/stream/{path}", number)
                expected.add((path, number))
            if round_ < kills:
                server = servers[round_ % len(servers)]
                await server.kill()
                await server.start()
        while not await _is_idle(client, f"{urls[0]}{SUBSCRIPTION}"):
            await World().sleep(PAUSE_S)
    assert receiver.found == expected, "each message was delivered"
    names: dict[int, str] = {}
    for generation, wake_id in receiver.wakes:
        assert names.setdefault(generation, wake_id) == wake_id, "one wake has one generation"
    return {"kills": kills, "messages": len(expected), "wakes": len(names), "deliveries": len(receiver.wakes)}


async def _append(client: httpx2.AsyncClient, url: str, number: int) -> None:
    json_type = {"content-type": "application/json"}
    made = await request_until_answered(client, "PUT", url, headers=json_type)
    assert made.status_code in {200, 201}, made.text
    place = {"producer-id": f"p{number}", "producer-epoch": "0", "producer-seq": "0"}
    words = await request_until_answered(
        client, "POST", url, content=json.dumps({"n": number}), headers={**json_type, **place}
    )
    assert words.status_code in {200, 204}, words.text


async def _is_idle(client: httpx2.AsyncClient, url: str) -> bool:
    """Return whether all appended messages are acked."""
    response: Json = (await request_until_answered(client, "GET", url)).json()
    origin = url.removesuffix(SUBSCRIPTION)
    for each in response["streams"]:
        head = await request_until_answered(client, "HEAD", f"{origin}/v1/stream/{each['path']}")
        if head.headers["stream-next-offset"] != each["acked_offset"]:
            return False
    return len(response["streams"]) == STREAMS


async def kill_subscribed(folder: Path, kills: int, seed: int, *options: str, count: int = 1) -> Json:
    """Run `count` servers on one store, and kill them in turn."""
    async with run_servers(folder, 1, "--allow-webhook", RECEIVERS, *options, count=count) as servers:
        return await play(servers, [each.url for each in servers], kills, random.Random(seed))
