"""Processes with one session on one SQLite file, killed within a turn: the next one sends each message once.

Their provider is in the test's process, and has a real memory. Whenever a process is killed, another one that
was running all along sends the same request, and a third one continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from midstream.agents.openai_conversation import Memory
from midstream.environment import World
from tests.agents.openai_memory import OpenAIMemory, openai_memory
from tests.fault.extent import IS_FULL
from tests.fault.pool_process import PoolPoint, Turns, live
from tests.forked import PROCESSES
from tests.spec import spec

pytestmark = pytest.mark.fault

WAIT_S = 60.0
"""Seconds for an action of another process; an idle machine needs a tenth of one."""
TOKEN = re.compile(r"\bword-\d+\b")

BEFORE: dict[str, tuple[Turns, list[str]]] = {
    "first": ([], ["say word-1"]),
    "continued": ([["say word-1"], ["say word-2"]], ["say word-3"]),
    "queued": ([["say word-1"]], ["say word-2", "say word-3"]),
    "edited": ([["say word-1"], ["say word-0"]], ["say word-3"]),
}
"""Answered turns, and the message of the turn that is killed; an edit replaces the last turn."""
POINTS = [point for point in PoolPoint if point is not PoolPoint.NEVER]
SHORT = [
    ("conversation", "continued", PoolPoint.BEFORE_RECORD),
    ("conversation", "continued", PoolPoint.CONFIRMED),
    ("conversation", "continued", PoolPoint.ANSWERED),
    ("conversation", "edited", PoolPoint.AFTER_RECORD),
    ("conversation", "queued", PoolPoint.SPEAKING),
    ("responses", "continued", PoolPoint.OPENED),
]
FULL = [
    (memory, situation, point)
    for memory in ("conversation", "responses")
    for situation in BEFORE
    for point in POINTS
]


class PoolServer:
    """One process with a pool."""

    def __init__(self, folder: Path, peer: OpenAIMemory, point: PoolPoint) -> None:
        self._link, theirs = PROCESSES.Pipe()
        arguments = (theirs, str(folder / "x.db"), peer.url, peer.memory, point)
        self.process = PROCESSES.Process(target=live, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, turns: Turns) -> None:
        self._link.send(turns)

    async def answer(self) -> str:
        return await asyncio.to_thread(self._received)

    async def ask(self, turns: Turns) -> list[str]:
        """Return the user messages that the answering agent has, in order."""
        self.begin(turns)
        return TOKEN.findall(await self.answer())

    async def await_end(self) -> int | None:
        await asyncio.to_thread(self.process.join, WAIT_S)
        return self.process.exitcode

    async def end(self) -> None:
        with contextlib.suppress(OSError):
            self._link.send(None)
        if await self.await_end() is None:
            self.process.kill()
            await self.await_end()
        self._link.close()
        self.process.close()

    def _received(self) -> str:
        assert self._link.poll(WAIT_S), "it does not answer"
        words = self._link.recv()
        assert isinstance(words, str)
        return words


@contextlib.asynccontextmanager
async def server(
    folder: Path, peer: OpenAIMemory, point: PoolPoint = PoolPoint.NEVER
) -> AsyncIterator[PoolServer]:
    started = PoolServer(folder, peer, point)
    try:
        yield started
    finally:
        await started.end()


def _words(turns: Turns) -> list[str]:
    return [token for texts in turns for text in texts for token in TOKEN.findall(text)]


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await World().sleep(0.01)


async def _continue(folder: Path, peer: OpenAIMemory, elder: PoolServer, turns: Turns) -> None:
    """Get the answer of the killed turn from a living process, and then the next one from a new process."""
    before = len(peer.messages())
    assert await elder.ask(turns) == _words(turns)
    replays = [received for received in peer.messages()[before:] if "word-1" in received.text]
    assert len(replays) <= 1
    then = [*turns, ["say word-9"]]
    before = len(peer.messages())
    async with server(folder, peer) as youngest:
        assert await youngest.ask(then) == _words(then)
    assert [received.text for received in peer.messages()[before:]] == ["say word-9"]


@spec("REUSE-36", "REUSE-37", "REUSE-50", "REUSE-51")
@pytest.mark.parametrize(("memory", "situation", "point"), FULL if IS_FULL else SHORT)
async def test_a_killed_process_loses_and_duplicates_nothing(
    tmp_path: Path, memory: Memory, situation: str, point: PoolPoint
) -> None:
    answered, content = BEFORE[situation]
    async with openai_memory(memory) as peer, server(tmp_path, peer) as elder:
        for count in range(1, len(answered) + 1):
            await elder.ask(answered[:count])
        turns = [*(answered[:-1] if situation == "edited" else answered), content]
        async with server(tmp_path, peer, point) as victim:
            victim.begin(turns)
            assert await victim.await_end() == -signal.SIGKILL, f"{point} was not reached"
        await _continue(tmp_path, peer, elder, turns)


@spec("REUSE-37", "REUSE-51")
@pytest.mark.parametrize("memory", ["conversation", "responses"] if IS_FULL else ["conversation"])
async def test_a_process_is_killed_before_the_first_output_of_its_upstream(
    tmp_path: Path, memory: Memory
) -> None:
    turns: Turns = [["say word-1"], ["say word-2"]]
    async with openai_memory(memory) as peer, server(tmp_path, peer) as elder:
        await elder.ask(turns[:1])
        peer.hang_unopened()
        async with server(tmp_path, peer) as victim:
            victim.begin(turns)
            await _until(lambda: len(peer.messages()) == 2)
            victim.process.kill()
            assert await victim.await_end() == -signal.SIGKILL
        await _continue(tmp_path, peer, elder, turns)
