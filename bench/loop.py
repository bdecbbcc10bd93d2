"""The native loop as a contestant of `bench.steps`: model, journal, tool, journal, all of the runtime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from bench.steps import Step
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.history.messages import Finish, UserMessage
from midstream.models.responses import Finished, ModelEvent, ModelRequest, ToolCallRequested
from midstream.session.turn.commands import SendMessage
from midstream.store.sqlite import SQLiteStore
from midstream.tools.function_tools import tool

CALL = ToolCallRequested(
    "call_0123456789abcdef01234567", "run_command", '{"command": "make test", "cwd": "."}'
)


@tool
async def run_command(command: str, cwd: str) -> str:  # noqa: ARG001 - it does nothing, at once
    """Run a command."""
    return "collected 311 items; 311 passed in 4.2 s. " * 6


class OnDemand:
    """A model that asks for one tool call each time its session is told to go on."""

    name = "on demand"

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Event] = {}
        self._go: dict[str, asyncio.Queue[ToolCallRequested]] = {}

    def of(self, session: str) -> tuple[asyncio.Event, asyncio.Queue[ToolCallRequested]]:
        """Return what says that the session waits for its model, and what lets the model answer."""
        if session not in self._asked:
            self._asked[session], self._go[session] = asyncio.Event(), asyncio.Queue()
        return self._asked[session], self._go[session]

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Wait to be told, then ask for a tool."""
        asked, go = self.of(request.key.partition("/")[0])
        asked.set()
        yield await go.get()
        yield Finished(Finish.CALLS)


@asynccontextmanager
async def native_loop(path: Path, vfs: str | None) -> AsyncIterator[Step]:
    """A step is: the model asks for a tool, the tool runs, the model is asked again. Two appends, as below it."""
    model = OnDemand()
    host = Host(Agent(model, tools=[run_command]), SQLiteStore(path, vfs=vfs))
    await host.start()
    sessions: set[str] = set()

    async def step(session: str) -> None:
        asked, go = model.of(session)
        if session not in sessions:
            sessions.add(session)
            runner = await host.session(session, create=True)
            await runner.submit(SendMessage(UserMessage.of("go on until I say stop")))
        await asked.wait()
        asked.clear()
        go.put_nowait(CALL)
        await asked.wait()

    try:
        yield step
    finally:
        await host.stop(grace_s=1.0)
