"""One answer for clients of four APIs: started through `openai`, followed by the AI SDK, `langgraph_sdk` and AG-UI."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from midstream.dialects.application_sessions import session_of_response
from midstream.environment import World
from tests.dialects import ag_ui_cuts
from tests.dialects.gateway_serving import WAIT_S
from tests.dialects.langgraph_stream import JOINS_MAX, RunReader, sdk
from tests.dialects.test_killed import CONTINUATION, CUT, FIRST, REST, KillableGateway, run_killable
from tests.dialects.ui_stream import CuttingRelay, KillableServer, lacking, run_client
from tests.ports import held_port
from tests.postgres_engine import Engine

WORLD = World()
pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store that several processes share."""
    if request.param == "sqlite":
        return str(tmp_path / "shared.db")
    engine: Engine = request.getfixturevalue("engine")
    return f"{engine.url}&schema=one_log"


class Followers:
    """Clients of `midstream serve` that follow the session of a gateway's response."""

    def __init__(self, url: str, session: str) -> None:
        self._url = url
        self._session = session
        self._graph = RunReader()
        self._page = asyncio.create_task(run_client(url, "resume", id=session))
        self._ag_ui = asyncio.create_task(ag_ui_cuts.run_client(url, "follow", id=session))
        self._joined = asyncio.create_task(self._join())

    async def wait_until_there(self) -> None:
        """Wait until all of them read."""
        async with httpx.AsyncClient(base_url=self._url) as http, asyncio.timeout(WAIT_S):
            while True:
                nodes = (await http.get("/v1/nodes")).json()["nodes"]
                if max(node["streams"] for node in nodes) >= 3 and self._graph.words:
                    return
                await WORLD.sleep(0.05)

    async def texts(self) -> dict[str, str]:
        """Return the whole answer of each client."""
        page, ag_ui = await self._page, await self._ag_ui
        await self._joined
        parts = page["messages"][-1]["parts"]
        output_texts = [each["content"] for each in self._graph.values["messages"] if each["type"] == "ai"]
        return {
            "AI SDK": "".join(part["text"] for part in parts if part["type"] == "text"),
            "AG-UI": "".join(each["content"] for each in ag_ui["messages"] if each["role"] == "assistant"),
            "langgraph_sdk, values": "".join(output_texts),
            "langgraph_sdk, words": "".join(self._graph.words.values()),
        }

    async def _join(self) -> None:
        async with sdk(self._url) as client:
            [run, *_] = await client.runs.list(self._session)
            modes: Any = ["values", "messages-tuple"]
            for _ in range(JOINS_MAX):
                after = self._graph.ids[-1] if self._graph.ids else "-1"
                try:
                    async for part in client.runs.join_stream(
                        self._session, run["run_id"], stream_mode=modes, last_event_id=after
                    ):
                        self._graph.take(part)
                except httpx.HTTPError:
                    continue
                if (await client.runs.get(self._session, run["run_id"]))["status"] == "success":
                    return


async def _begin(gateway: KillableGateway) -> list[Any]:
    """Start a background response, and return its events up to the first words."""
    seen: list[Any] = []
    async with (
        gateway.openai() as client,
        await client.responses.create(model="m", input="hi", background=True, stream=True) as stream,
    ):
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                return seen
    raise AssertionError("no words")


async def _read_on(gateway: KillableGateway, seen: list[Any]) -> str:
    """Read the rest of a response after its last event; return all its words."""
    async with gateway.openai() as client:
        after = seen[-1].sequence_number
        rest = await client.responses.retrieve(seen[0].response.id, stream=True, starting_after=after)
        events = [*seen, *[event async for event in rest]]
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


@pytest.mark.parametrize(
    ("store", "killed_too"),
    [("postgresql", False), pytest.param("sqlite", True, marks=pytest.mark.long)],
    indirect=["store"],
)
async def test_an_answer_whose_server_is_killed_ends_equally_for_clients_of_four_apis(
    tmp_path: Path,
    store: str,
    killed_too: bool,  # noqa: FBT001 - whether the server of the followers is killed with the gateway
) -> None:
    with held_port() as port:
        server = KillableServer(tmp_path, port, 0, "--store", store)
        async with (
            run_killable(tmp_path, CUT, CONTINUATION, options=("--store", store)) as gateway,
            CuttingRelay(port, random.Random(1), 0, (0, 1)) as relay,
        ):
            await server.start()
            try:
                async with asyncio.timeout(WAIT_S):
                    seen = await _begin(gateway)
                    session = session_of_response(seen[0].response.id)
                    followers = Followers(relay.url, session)
                    await followers.wait_until_there()
                    await asyncio.to_thread(gateway.kill)
                    if killed_too:
                        relay.is_up.clear()
                        await server.kill()
                        await server.start()
                        relay.is_up.set()
                    await asyncio.to_thread(gateway.start)
                    texts = {"openai": await _read_on(gateway, seen), **await followers.texts()}
            finally:
                await server.stop()
        assert texts == dict.fromkeys(texts, FIRST + REST)
        assert len(gateway.upstream.bodies) == 2
