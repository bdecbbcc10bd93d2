"""One of several servers on one database: `python -m tests.fault.worker_process FOLDER [OPTIONS]`.

What its tools do, and what its model says last, waits until the file `go` is in the folder.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

from midstream.core.messages import UserMessage
from midstream.core.replies import Finished, ModelEvent, ModelRequest, TextDelta
from midstream.core.turn import SendMessage
from midstream.runtime import runner as runner_module
from midstream.runtime.agent import Agent
from midstream.server.app import asgi
from midstream.server.serve import serve
from midstream.store.sqlite import LEASE_S, SQLiteStore
from midstream.testing.models import ScriptedModel, Step, calls, exchanges_since_user, text
from midstream.testing.worlds import KillingWorld
from midstream.tools import Tool, tool
from midstream.world import Fault
from tests.fault.turn import Ledger

POLL_S = 0.005


class WorkerWorld(KillingWorld):
    """Dies, or stands still, at a named point."""

    freeze_at: tuple[Fault | None, int] = (None, 1)

    def reach(self, point: Fault) -> None:
        super().reach(point)
        if self.freeze_at == (point, self.reached[point]):
            os.kill(os.getpid(), signal.SIGSTOP)


class Model(ScriptedModel):
    """Any tool's name: asks for it, then says done. "think": says half, waits, says the rest."""

    def __init__(self, go: Path, world: WorkerWorld) -> None:
        super().__init__(self._reply, world=world)
        self._go = go
        self._clock = world

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        if _said(request) == "think":
            yield TextDelta("half ")
            await until(self._go, self._clock)
            yield TextDelta("and half")
            yield Finished()
            return
        async for event in super().stream(request):
            yield event

    @staticmethod
    def _reply(request: ModelRequest) -> list[Step]:
        if exchanges_since_user(request.history):
            return text("done")
        return calls(("a", _said(request), "{}"))


def _said(request: ModelRequest) -> str:
    message = next(each for each in reversed(request.history.entries) if isinstance(each, UserMessage))
    return message.parts[0].text  # type: ignore[union-attr] # words


async def until(go: Path, world: WorkerWorld) -> None:
    while not os.access(go, os.F_OK):
        await world.sleep(POLL_S)


def tools(folder: Path, world: WorkerWorld) -> list[Tool]:
    ledger = Ledger(folder / "ledger")

    async def work() -> str:
        """Work, once."""
        ledger.note("work", "began")
        await until(folder / "go", world)
        ledger.note("work", "ended")
        return "worked"

    async def look() -> str:
        """Look, as often as you like."""
        ledger.note("look", "began")
        await until(folder / "go", world)
        ledger.note("look", "ended")
        return "looked"

    return [tool(work), tool(has_effects=False)(look)]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--lease", type=float, default=LEASE_S)
    parser.add_argument("--begin", type=int, default=0, help="sessions to begin a turn in")
    parser.add_argument("--kill-at", type=Fault)
    parser.add_argument("--freeze-at", type=Fault)
    parser.add_argument("--count", type=int, default=1)
    given = parser.parse_args()
    runner_module.HELD_FOR_S = given.lease / 4
    world = WorkerWorld(given.kill_at, given.count)
    world.freeze_at = (given.freeze_at, given.count)
    store = SQLiteStore(given.folder / "server.db", lease_s=given.lease, world=world)
    agent = Agent(Model(given.folder / "go", world), tools=tools(given.folder, world))
    app = asgi(agent, store=store, world=world)
    if given.begin:
        await app.start()
        for number in range(given.begin):
            words = ("work", "think", "look")[number % 3]
            runner = await app.host.session(f"s{number}", create=True)
            await runner.submit(SendMessage(UserMessage.of(words)))
    await serve(app, port=given.port, on_listening=lambda url: print(url, flush=True))  # noqa: T201 - for the driver


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    asyncio.run(main())
