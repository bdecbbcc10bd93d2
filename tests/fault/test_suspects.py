"""Servers that die repeatedly: innocent turns continue, and the cause is not resumed for ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path

import httpx2
import pytest

from midstream.environment import World
from midstream.errors import NotFoundError
from midstream.session.records import EpochStarted, MessageAccepted, TurnEnded, decode
from midstream.session.turn.states import SUSPECTED_CODE
from midstream.store.sqlite.reads import ReadConnection, reading
from tests.fault.extent import IS_FULL
from tests.fault.workers import WAIT_S, Worker, ends, lines, problems, records, until
from tests.spec import spec

pytestmark = pytest.mark.fault

KILLS = int(os.environ.get("MIDSTREAM_KILLS", "100" if IS_FULL else "5"))
SESSIONS = [f"s{number}" for number in range(12)]
STARTS_MAX = 4
KILL_WITHIN_S = 1.0


@pytest.mark.timeout(120 + 10 * KILLS)
@spec("TURN-18", "TURN-84")
async def test_deaths_at_random_moments_end_no_turn(tmp_path: Path) -> None:
    seed = int(os.environ.get("MIDSTREAM_SEED", "1"))
    print(f"seed {seed}")  # noqa: T201 - to repeat a failure
    chance = random.Random(seed)
    (tmp_path / "go").touch()
    workers = _Successors(tmp_path)
    ends_of = _TurnEnds(tmp_path)
    is_over = asyncio.Event()

    async def send_turns(session: str) -> int:
        turn = 0
        while not is_over.is_set():
            async with asyncio.timeout(2 * WAIT_S + 10 * KILLS):  # a turn may meet each of the deaths
                await workers.send_message(session, f"{session}-{turn}")
                await ends_of.wait(session, turn + 1)
            turn += 1
        return turn

    async with workers, ends_of:
        sending = asyncio.gather(*map(send_turns, SESSIONS))
        kills_at_work = 0
        for _ in range(KILLS):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.random() * KILL_WITHIN_S):
                    await asyncio.shield(sending)
            kills_at_work += ends_of.open > 0
            await workers.replace()
        is_over.set()
        turns = await sending
    print(f"{KILLS} kills, {kills_at_work} with open turns, {sum(turns)} turns")  # noqa: T201 - how much was tried
    assert kills_at_work > KILLS / 3
    assert sum(turns) >= len(SESSIONS)
    for session, count in zip(SESSIONS, turns, strict=True):
        assert ends(tmp_path, session) == ["completed"] * count
    assert problems(tmp_path, SESSIONS) == []


@spec("TURN-84", "TURN-85")
async def test_a_tool_that_kills_its_server_is_started_four_times_at_most_and_others_continue(
    tmp_path: Path,
) -> None:
    others = {f"s{number}": ("work", "look", "think")[number % 3] for number in range(12)}
    everyone = ["killer", *others]
    starts = 1
    async with Worker(tmp_path) as first:
        for session, words in others.items():
            assert (await first.send_message(session, words)).status_code == 200
        await until(lambda: len(lines(tmp_path)) == sum(each != "think" for each in others.values()))
        with contextlib.suppress(httpx2.HTTPError):  # it may be dead before it has answered
            await first.send_message("killer", "kill")
        await first.ended()
    (tmp_path / "go").touch()

    def is_answered() -> bool:
        return all(len(ends(tmp_path, each)) == 1 for each in everyone)

    while not is_answered() and starts <= STARTS_MAX:
        async with Worker(tmp_path) as worker:
            starts += 1
            died = asyncio.create_task(worker.process.wait())
            answered = asyncio.create_task(until(is_answered))
            await asyncio.wait({died, answered}, return_when=asyncio.FIRST_COMPLETED)
            answered.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answered
    assert starts <= STARTS_MAX
    assert len([each for each in lines(tmp_path) if each.tool == "kill"]) == STARTS_MAX - 1
    [end] = [each for each in records(tmp_path, "killer") if isinstance(each, TurnEnded)]
    assert (end.status, end.code) == ("interrupted", SUSPECTED_CODE)
    begun = [each for each in records(tmp_path, "killer") if isinstance(each, EpochStarted)]
    assert [each.suspected for each in begun] == [0, 1, 2, 3]
    assert {tuple(ends(tmp_path, each)) for each in others} == {("completed",)}
    assert problems(tmp_path, everyone) == []


class _TurnEnds:
    """The turns that started and ended, read from the journals as they grow."""

    POLL_S = 0.02

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed = asyncio.Condition()
        self._position = dict.fromkeys(SESSIONS, 0)
        self._begun = dict.fromkeys(SESSIONS, 0)
        self._ended = dict.fromkeys(SESSIONS, 0)

    async def __aenter__(self) -> None:
        self._following = asyncio.create_task(self._follow())

    async def __aexit__(self, *_: object) -> None:
        self._following.cancel()

    @property
    def open(self) -> int:
        """Return how many turns are open."""
        return sum(self._begun.values()) - sum(self._ended.values())

    async def wait(self, session: str, turns: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._ended[session] >= turns)

    async def _follow(self) -> None:
        world = World()
        await until((self._folder / "server.db").exists)
        while True:
            await world.sleep(self.POLL_S)
            with contextlib.suppress(NotFoundError), reading(self._folder / "server.db") as reader:
                for session in SESSIONS:
                    self._read(session, reader)
            async with self._changed:
                self._changed.notify_all()

    def _read(self, session: str, reader: ReadConnection) -> None:
        for stored in reader.records(session, self._position[session], 100_000):
            record = decode(stored.body)
            self._begun[session] += isinstance(record, MessageAccepted)
            self._ended[session] += isinstance(record, TurnEnded)
            self._position[session] = stored.position


class _Successors:
    """One server after another on one database."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worker: Worker | None = None
        self._replaced = asyncio.Event()

    async def __aenter__(self) -> None:
        await self._start()

    async def __aexit__(self, *_: object) -> None:
        if self._worker is not None:
            await self._worker.kill()

    async def _start(self) -> None:
        self._worker = await Worker(self._folder).__aenter__()
        self._replaced.set()
        self._replaced = asyncio.Event()

    async def replace(self) -> None:
        assert self._worker is not None
        await self._worker.kill()
        await self._start()

    async def send_message(self, session: str, stream: str) -> None:
        """Send a message until a server has accepted it."""
        while True:
            worker, replaced = self._worker, self._replaced
            assert worker is not None
            with contextlib.suppress(httpx2.HTTPError):
                answer = await worker.send_message(session, "talk", stream=stream)
                assert answer.status_code == 200, answer.text
                return
            if self._worker is worker:
                await replaced.wait()
