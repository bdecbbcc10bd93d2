"""The native loop as a contestant of `bench.steps`: the whole engine with model, journal and tool."""

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
async def run_command(command: str, cwd: str) -> str:  # noqa: ARG001 - a tool without work
    """Run a command."""
    return "collected 311 items; 311 passed in 4.2 s. " * 6


class OnDemand:
    """A model that returns one tool call each time the bench releases its session."""

    name = "on demand"

    def __init__(self) -> None:
        self._requested: dict[str, asyncio.Event] = {}
        self._calls: dict[str, asyncio.Queue[ToolCallRequested]] = {}

    def of(self, session: str) -> tuple[asyncio.Event, asyncio.Queue[ToolCallRequested]]:
        """Return the event that is set while the session waits for its model, and the queue of calls."""
        if session not in self._requested:
            self._requested[session], self._calls[session] = asyncio.Event(), asyncio.Queue()
        return self._requested[session], self._calls[session]

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        """Wait for a call in the queue, and return it."""
        requested, calls = self.of(request.key.partition("/")[0])
        requested.set()
        yield await calls.get()
        yield Finished(Finish.CALLS)


@asynccontextmanager
async def native_loop(path: Path, vfs: str | None) -> AsyncIterator[Step]:
    """Yield a step: the model requests a tool, the tool runs, the model is called again. A step has two appends."""
    model = OnDemand()
    host = Host(Agent(model, tools=[run_command]), SQLiteStore(path, vfs=vfs))
    await host.start()
    sessions: set[str] = set()

    async def step(session: str) -> None:
        requested, calls = model.of(session)
        if session not in sessions:
            sessions.add(session)
            runner = await host.session(session, create=True)
            await runner.submit(SendMessage(UserMessage.of("continue until I stop you")))
        await requested.wait()
        requested.clear()
        calls.put_nowait(CALL)
        await requested.wait()

    try:
        yield step
    finally:
        await host.stop(grace_s=1.0)
