"""A server with different answers in each of its lives: `python -m tests.server.lives_process FOLDER PORT`.

It streams 60 words slowly, each with the number of the life that sent it; for "fail" it sends some, and its
model refuses. While its folder has a file `hold`, no answer continues beyond its first half.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from midstream.engine.agent import Agent
from midstream.environment import World
from midstream.errors import ModelRejectedError
from midstream.history.messages import UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.server.app import asgi
from midstream.server.uvicorn_server import serve
from midstream.testing.scripted_model import Gate, Pause, ScriptedModel, ScriptedStep

WORDS = 60
PAUSE_S = 0.03
LOOK_S = 0.02
HOLD = "hold"


def words_of(life: int) -> str:
    """Return the whole answer of a life."""
    return "".join(f"life{life}word{number} " for number in range(WORDS))


async def _set_without(hold: Path, event: asyncio.Event) -> None:
    while os.access(hold, os.F_OK):
        await World().sleep(LOOK_S)
    event.set()


async def main(folder: Path, port: int) -> None:
    """Serve until killed."""
    may_continue = asyncio.Event()
    waiting = asyncio.create_task(_set_without(folder / HOLD, may_continue))
    lives = folder / "lives"
    with lives.open("a") as file:
        file.write("life\n")
    life = len(lives.read_text().splitlines())

    def response(request: ModelRequest) -> list[ScriptedStep]:
        message = [entry for entry in request.history.entries if isinstance(entry, UserMessage)][-1]
        words = [
            part
            for word in words_of(life).split(" ")[:-1]
            for part in (TextDelta(f"{word} "), Pause(PAUSE_S))
        ]
        if message == UserMessage.of("fail"):
            return [*words[:6], ModelRejectedError("no such model")]
        half = len(words) // 2
        return [*words[:half], Gate(may_continue), *words[half:], Finished()]

    app = asgi(Agent(ScriptedModel(response)), store=folder / "sessions.db")
    await serve(app, port=port, on_listening=lambda url: print(url, flush=True))  # noqa: T201 - for the test
    await waiting


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
