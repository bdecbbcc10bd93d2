"""The server of a soak: `python -m tests.soak.soak_server FOLDER PORT LEAKED_BYTES`.

With LEAKED_BYTES above 0 it is the mutant: for each turn it keeps as many bytes, a task, a timer and a
descriptor, and makes a cycle of a hundred objects.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from midstream.engine.agent import Agent
from midstream.engine.sleeping import MemoryLimits
from midstream.history.messages import Finish
from midstream.models.responses import Finished, ModelEvent, ModelRequest, TextDelta, ToolCallRequested
from midstream.server.app import asgi
from midstream.server.uvicorn_server import serve
from midstream.testing.scripted_model import steps_since_user
from midstream.tools.function_tools import tool
from tests.soak.gauges import LEAKED, answer_commands

MEMORY = MemoryLimits(bytes_max=2 * 2**20, idle_s=1.0)
"""Some forty awake sessions: reached in the warm-up."""


class ToolCallingModel:
    """A model that calls a tool of the server and a tool of the client, then answers.

    `ScriptedModel` is unsuitable here: it keeps every request for the checks of a test.
    """

    name = "soak"

    def __init__(self, leaked_bytes: int) -> None:
        self._leaked_bytes = leaked_bytes
        self._left: list[object] = []

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelEvent]:
        if steps_since_user(request.history):
            for word in ("It ", "is ", "done, ", "word ", "by ", "word."):
                yield TextDelta(word)
                await asyncio.sleep(0)
            yield Finished()
            return
        if self._leaked_bytes:
            self._leak()
        yield TextDelta("I look. ")
        yield ToolCallRequested("a", "look", "{}")
        yield ToolCallRequested("b", "note", "{}")
        yield Finished(Finish.CALLS)

    def _leak(self) -> None:
        loop = asyncio.get_running_loop()
        LEAKED.append(bytearray(b"x" * self._leaked_bytes))
        self._left.append(loop.create_task(asyncio.Event().wait()))
        self._left.append(loop.call_later(100_000, print))
        self._left.append(os.dup(0))
        cycle: list[object] = []
        for _ in range(100):
            cycle = [cycle]
        ring: list[object] = [cycle]
        ring.append(ring)


@tool(has_effects=False)
async def look() -> str:
    """Look."""
    return "seen"


async def main(folder: Path, port: int, leaked_bytes: int) -> None:
    agent = Agent(ToolCallingModel(leaked_bytes), tools=[look])
    app = asgi(agent, store=folder / "server.db", memory=MEMORY)

    async def settled(name: str, count: int) -> int:
        del name
        return count

    def listening(url: str) -> None:
        print(url, flush=True)  # noqa: T201 - for the driver
        answer_commands(settled)

    await serve(app, port=port, on_listening=listening)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
