"""Readers of responses at two gateways on one store: which equal requests are repetitions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2

from midstream.dialects.reader_marks import DELIVERED, READERS
from midstream.environment import World
from midstream.server.gateway_app import Gateway
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.scripted_model import Gate, ScriptedModel, text
from tests.dialects.gateway_serving import WAIT_S, asgi_client, chat_request, make_gateway
from tests.dialects.test_live_responses import POLL_S, RETRY, until
from tests.spec import spec

PATH = "/v1/chat/completions"
ASK = chat_request("hi")


class Pair:
    """Two gateways on one store, each with a model, and a client for each."""

    def __init__(self, memory: Memory, models: list[ScriptedModel], gateways: list[Gateway]) -> None:
        self.store = MemoryStore(memory)
        self.models = models
        self.gateways = gateways
        self.clients: list[httpx2.AsyncClient] = []

    async def keys(self, namespace: str) -> list[str]:
        """Return the keys of the entries of a namespace."""
        return [entry.key for entry in await self.store.kv_list(namespace)]

    async def begin(self) -> asyncio.Task[httpx2.Response]:
        """Send the request to the first gateway; return its task when the model has received the request."""
        asking = asyncio.create_task(self.clients[0].post(PATH, json=ASK))
        await until(lambda: self.requests == [1, 0])
        return asking

    @property
    def requests(self) -> list[int]:
        """The number of requests to each model."""
        return [len(model.requests) for model in self.models]


@contextlib.asynccontextmanager
async def pair(*scripts: Any) -> AsyncIterator[Pair]:  # noqa: ANN401 - steps of a scripted model
    """Serve two gateways that know of each other; each model has its own script."""
    memory = Memory()
    models = [ScriptedModel(script) for script in scripts]
    made = Pair(memory, models, [make_gateway(model, store=MemoryStore(memory)) for model in models])
    async with contextlib.AsyncExitStack() as stack:
        made.clients = [await stack.enter_async_context(asgi_client(each)) for each in made.gateways]
        for each in made.gateways:
            await each.start()
        await made.store.open()
        stack.push_async_callback(made.store.close)
        await until(lambda: all(each._durable.host.has_peers for each in made.gateways))
        yield made


@spec("REUSE-71")
async def test_a_request_whose_answer_was_received_is_a_new_run_at_another_node() -> None:
    async with pair([text("one")], [text("two")]) as on:
        asked = [await client.post(PATH, json=ASK) for client in (*on.clients, *on.clients)]
        assert len({answer.json()["id"] for answer in asked}) == 4
        assert on.requests == [2, 2]


@spec("REUSE-71")
async def test_equal_requests_at_the_same_time_are_two_runs_at_two_nodes() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    async with pair(*([[Gate(gate), *text(word)]] for gate, word in zip(gates, "01", strict=True))) as on:
        asking = [asyncio.create_task(client.post(PATH, json=ASK)) for client in on.clients]
        await until(lambda: on.requests == [1, 1])
        for gate in gates:
            gate.set()
        async with asyncio.timeout(WAIT_S):
            answers = [(await each).json() for each in asking]
        assert [each["choices"][0]["message"]["content"] for each in answers] == ["0", "1"]
        assert answers[0]["id"] != answers[1]["id"]


@spec("REUSE-70")
async def test_a_marked_retry_joins_a_response_that_is_read_at_another_node() -> None:
    gate = asyncio.Event()
    async with pair([[Gate(gate), *text("one")]], []) as on:
        first = await on.begin()
        retry = asyncio.create_task(on.clients[1].post(PATH, json=ASK, headers=RETRY))
        gate.set()
        async with asyncio.timeout(WAIT_S):
            assert (await retry).json() == (await first).json()
        assert on.requests == [1, 0]


@spec("REUSE-70")
async def test_a_request_whose_reader_left_joins_at_another_node() -> None:
    gate = asyncio.Event()
    async with pair([[Gate(gate), *text("one")]], []) as on:
        first = await on.begin()
        first.cancel()
        await asyncio.wait([first])
        again = asyncio.create_task(on.clients[1].post(PATH, json=ASK))
        gate.set()
        async with asyncio.timeout(WAIT_S):
            assert (await again).json()["choices"][0]["message"]["content"] == "one"
        assert on.requests == [1, 0]


async def test_only_the_received_end_of_a_response_is_marked() -> None:
    async with pair([text("one")], []) as on:
        answer = await on.clients[0].post(PATH, json=ASK)
        live = on.gateways[0].responses.get(answer.json()["id"])
        assert live is not None
        async with asyncio.timeout(WAIT_S):
            while await on.keys(DELIVERED) != [live.id] or await on.keys(READERS):
                await World().sleep(POLL_S)
