"""One of several servers on one database: `python -m tests.fault.worker_process FOLDER [OPTIONS]`.

Its tools' work and its model's last text wait until the file `go` is in the folder.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

from midstream.engine import session_work
from midstream.engine.agent import Agent
from midstream.environment import Fault
from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta
from midstream.server.app import App, asgi
from midstream.server.uvicorn_server import serve
from midstream.session.turn.commands import SendMessage
from midstream.store.sqlite.store import LEASE_S
from midstream.testing.fake_worlds import KillingWorld
from midstream.testing.scripted_model import ScriptedModel, ScriptedStep, calls, steps_since_user, text
from midstream.tools.function_tools import Tool, tool
from tests.fault.stored import make_store
from tests.fault.turn import EffectLedger

POLL_S = 0.005
WORDS, WORD_S = 10, 0.01
TALK = ("work", "look")


class WorkerWorld(KillingWorld):
    """Dies, or freezes, at a named point. Its wall clock may be wrong."""

    freeze_at: tuple[Fault | None, int] = (None, 1)
    clock_error_s = 0.0

    def now(self) -> float:
        return time.time() + self.clock_error_s

    def die_at_next(self, point: Fault) -> None:
        """Die when this point is reached once more."""
        self._death = (point, self.reached[point] + 1)

    def jump(self, by_s: float) -> None:
        """Set the wall clock, as an operator or a resumed virtual machine does."""
        self.clock_error_s += by_s

    def reach(self, point: Fault) -> None:
        super().reach(point)
        if self.freeze_at == (point, self.reached[point]):
            os.kill(os.getpid(), signal.SIGSTOP)


class Go:
    """Whether the file exists; one task checks for any number of waiting ones."""

    def __init__(self, path: Path, world: WorkerWorld) -> None:
        self._path = path
        self._world = world
        self._waiting: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(there)
        await there

    async def look(self) -> None:
        while True:
            await self._world.sleep(POLL_S)
            if self._waiting and os.access(self._path, os.F_OK):
                waiting, self._waiting = self._waiting, []
                for each in waiting:
                    if not each.done():
                        each.set_result(None)


class WorkerModel(ScriptedModel):
    """Any tool's name: calls it, then sends done. "think": sends half, waits, sends the rest.

    "kill": calls it in each response. "talk": sends some words, calls `work`, then `look`, and sends done.
    """

    def __init__(self, go: Go, world: WorkerWorld) -> None:
        super().__init__(self._response)
        self._go = go
        self._world = world

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        if _user_text(request) == "think":
            yield TextDelta("half ")
            await self._go.wait()
            yield TextDelta("and half")
            yield Finished()
            return
        if _user_text(request) == "talk":
            for number in range(WORDS):
                await self._world.sleep(WORD_S)
                yield TextDelta(f"{number} ")
        async for event in super().stream(request):
            yield event

    @staticmethod
    def _response(request: ModelRequest) -> list[ScriptedStep]:
        words, ended = _user_text(request), steps_since_user(request.history)
        if words == "talk" and ended < len(TALK):
            return calls(("a", TALK[ended], "{}"))
        if words == "talk" or (ended and words != "kill"):
            return text("done")
        return calls(("a", words, "{}"))


def _user_text(request: ModelRequest) -> str:
    message = next(each for each in reversed(request.history.entries) if isinstance(each, UserMessage))
    return message.parts[0].text  # type: ignore[union-attr] # words


def tools(folder: Path, go: Go) -> list[Tool]:
    ledger = EffectLedger(folder / "ledger")

    async def work() -> str:
        """Work, once."""
        ledger.note("work", "began")
        await go.wait()
        ledger.note("work", "ended")
        return "worked"

    async def look() -> str:
        """Look, as often as you like."""
        ledger.note("look", "began")
        await go.wait()
        ledger.note("look", "ended")
        return "looked"

    async def kill() -> str:
        """Kill the server, as a tool that takes all its memory does."""
        ledger.note("kill", "began")
        os.kill(os.getpid(), signal.SIGKILL)
        return "not reached"

    return [tool(work), tool(has_effects=False)(look), tool(kill)]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--store", default="", help="another address of the store of this folder")
    parser.add_argument("--lease", type=float, default=LEASE_S)
    parser.add_argument("--begin", type=int, default=0, help="sessions to begin a turn in")
    parser.add_argument("--kill-at", type=Fault)
    parser.add_argument("--armed", type=Fault, help="the point at which it dies next, from SIGUSR1 on")
    parser.add_argument("--freeze-at", type=Fault)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument(
        "--clock-error", type=float, default=0.0, help="seconds by which its wall clock is wrong"
    )
    parser.add_argument(
        "--jump", type=float, default=0.0, help="seconds by which SIGUSR2 sets its wall clock"
    )
    given = parser.parse_args()
    session_work.HELD_FOR_S = given.lease / 4
    world = WorkerWorld(given.kill_at, given.count)
    world.freeze_at = (given.freeze_at, given.count)
    world.clock_error_s = given.clock_error
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, world.jump, given.jump)
    if given.armed:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, world.die_at_next, given.armed)
    store = make_store(given.folder, world, name=given.store, lease_s=given.lease)
    go = Go(given.folder / "go", world)
    looking = world.spawn(go.look(), name="go")
    app = asgi(Agent(WorkerModel(go, world), tools=tools(given.folder, go)), store=store, world=world)
    if given.begin:
        await app.start()
        await asyncio.gather(*(_begin(app, number) for number in range(given.begin)))
    await serve(app, port=given.port, on_listening=lambda url: print(url, flush=True))  # noqa: T201 - for the driver
    looking.cancel()


async def _begin(app: App, number: int) -> None:
    words = ("work", "think", "look")[number % 3]
    runner = await app.host.session(f"s{number}", create=True)
    await runner.submit(SendMessage(UserMessage.of(words)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    asyncio.run(main())
