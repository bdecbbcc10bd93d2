"""Another agent is served for a while: the client keeps what it has, and its tools run once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from midstream import Agent, asgi
from midstream.client import connect
from midstream.errors import AgentMismatchError
from midstream.server.app import App
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.scripted_model import ScriptedModel, calls, text
from midstream.tools.function_tools import tool
from tests.server.serving import served
from tests.spec import spec

WAIT_S = 60.0


def _serve(memory: Memory, name: str) -> App:
    model = ScriptedModel([calls(("look", "{}")), text("done")])
    return asgi(Agent(model, name=name), store=MemoryStore(memory))


@spec("STREAM-28", "TURN-86")
async def test_the_outcome_of_a_call_survives_that_another_agent_is_served(tmp_path: Path, port: int) -> None:
    memory, runs, has_begun, may_end = Memory(), 0, asyncio.Event(), asyncio.Event()

    @tool
    async def look() -> str:
        """Look."""
        nonlocal runs
        runs += 1
        has_begun.set()
        await may_end.wait()
        return "seen"

    state = tmp_path / "state.db"
    async with asyncio.timeout(WAIT_S):
        async with connect(f"http://127.0.0.1:{port}", state=state, tools=[look]) as client:
            async with served(_serve(memory, "cook"), port=port):
                asking = asyncio.create_task(client.ask("s", "go"))
                await has_begun.wait()
            async with served(_serve(memory, "waiter"), port=port):
                may_end.set()
                with pytest.raises(AgentMismatchError):
                    await asking
        async with (
            served(_serve(memory, "cook"), port=port) as server,
            connect(server.url, state=state, tools=[look]) as client,
        ):
            (turn,) = await client.resume_interrupted()
            answer = "".join([event.text async for event in turn])
        assert (answer, runs) == ("done", 1)
