"""Programs that follow the guides of frameworks, with a ledger of effects: `tests.frameworks.guide_kills` kills them.

A program is the code of a guide, block by block, in which the agent has a scripted model and tools that write
to the ledger. For each message the model requests one call, then three at once, then it answers. All names
contain the message's name, so that the ledger line alone identifies an effect.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from msgspec import Struct

from midstream.environment import World
from midstream.errors import LeaseHeldError, SessionBusyError
from tests.guides.blocks import all_blocks

os.environ.setdefault("OPENAI_API_KEY", "k")
SESSION = "chat-42"
CALLS = ("c1", "p1", "p2", "p3")
"""The calls of a message, in the order in which the model requests them: the first alone, the others at once."""
PAUSE_S = 0.004
"""The longest pause of a model or a tool."""
REFUSED_TRIES_MAX = 2000
_BLOCKS = {(block.page, block.number): block.code for block in all_blocks() if block.language == "python"}
_compiled: dict[tuple[str, int], CodeType] = {}


class GuidePlay:
    """The behaviour of the tools and the model of one process.


    Args:
        folder: Where the ledger is; the folder of the program.     seed: Where the pauses come from.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.chance = random.Random(seed)
        self._world = World()
        self._ledger = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, line: str) -> None:
        """Write a line that survives the process."""
        os.write(self._ledger, f"{line}\n".encode())

    async def pause(self) -> None:
        """Wait a little, as a network does."""
        await self._world.sleep(self.chance.random() * PAUSE_S)

    async def act(self, name: str) -> str:
        """Have an effect."""
        await self.pause()
        self.note(f"effect {name}")
        await self.pause()
        return f"result of {name}"

    async def next_calls(self, message: str, responses: int) -> Sequence[str]:
        """Return the calls that the model requests after this many responses to a message; none for the answer."""
        self.note(f"model {message} {responses + 1}")
        await self.pause()
        batches = (CALLS[:1], CALLS[1:], ())
        return [f"{message}-{call}" for call in batches[min(responses, 2)]]


class FinalState(Struct):
    """The final state of a program: the results of calls as the model reads them, and the answers."""

    results: dict[str, str] = {}
    answers: list[str] = []


Program = Callable[[GuidePlay], Coroutine[Any, Any, FinalState]]


def run_guide(page: str, *blocks: int) -> dict[str, Any]:
    """Run blocks of a guide and return the names that they define."""
    names: dict[str, Any] = {}
    for number in blocks:
        code = _compiled.get((page, number))
        if code is None:
            code = _compiled[page, number] = compile(_BLOCKS[page, number], f"{page} {number}", "exec")
        exec(code, names)  # it is our own guide
    return names


async def until_free(act: Callable[[], Awaitable[Any]], play: GuidePlay) -> Any:
    """Repeat an action that is refused because another process, or a run of this one, is active."""
    for _ in range(REFUSED_TRIES_MAX):
        try:
            return await act()
        except (LeaseHeldError, SessionBusyError) as error:
            play.note(f"refused {type(error).__name__}")
            await play.pause()
    raise AssertionError("the session never became free")


async def cancel_and_repeat(act: Callable[[], Awaitable[Any]], play: GuidePlay) -> Any:
    """Cancel the running action at a random moment and run it again at once, three times; then let it end."""
    cancelled: list[asyncio.Task[Any]] = []
    for _ in range(3):
        running = asyncio.ensure_future(act())
        await asyncio.wait([running], timeout=play.chance.random() * 0.04)
        if running.done():
            cancelled.append(running)
            break
        running.cancel()
        cancelled.append(running)
    result = await act()
    for each in cancelled:
        try:
            await each
        except asyncio.CancelledError:
            play.note("cancelled")
    return result


async def converse(play: GuidePlay, names: dict[str, Any]) -> Any:
    """Send two messages as a guide's `answer` with a history does, and return the application's final history."""
    for message in ("m1", "m2"):
        await until_free(functools.partial(names["answer"], SESSION, message, message), play)
    (after,) = names["chats"].execute("SELECT after FROM message ORDER BY rowid DESC LIMIT 1").fetchone()
    return after


def cancel_at_random(names: dict[str, Any], play: GuidePlay) -> dict[str, Any]:
    """Cancel each message of a guide's `answer` at random and repeat it at once, in one process."""
    answer = names["answer"]

    async def repeat(*given: Any) -> Any:
        return await cancel_and_repeat(lambda: answer(*given), play)

    names["answer"] = repeat
    return names


def store(file: Path, text: str) -> None:
    """Write a file whole or not at all, as an application's database does."""
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(text)
    draft.replace(file)


def write_report(folder: Path, report: FinalState) -> None:
    """Write a program's final state where its judge reads it."""
    store(folder / "report", json.dumps([report.results, report.answers]))
