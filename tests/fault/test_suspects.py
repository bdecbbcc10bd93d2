"""Servers that die again and again: what cannot have killed them goes on, and what did is not resumed for ever."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from functools import partial
from pathlib import Path

import httpx2
import pytest

from midstream.core.records import EpochStarted, TurnEnded
from midstream.core.turn import SUSPECTED_CODE
from tests.fault.workers import WAIT_S, Worker, ends, lines, problems, records, until
from tests.spec import spec

pytestmark = pytest.mark.fault

IS_FULL = os.environ.get("MIDSTREAM_FAULT_FULL") == "1"
KILLS = int(os.environ.get("MIDSTREAM_KILLS", "100" if IS_FULL else "8"))
SESSIONS = [f"s{number}" for number in range(12)]
STARTS_MAX = 4
KILL_WITHIN_S = 1.0


@pytest.mark.timeout(60 + 10 * KILLS)
@spec("TURN-18", "TURN-84")
async def test_deaths_at_random_moments_end_no_turn(tmp_path: Path) -> None:
    seed = int(os.environ.get("MIDSTREAM_SEED", "1"))
    print(f"seed {seed}")  # noqa: T201 - to repeat a failure
    chance = random.Random(seed)
    (tmp_path / "go").touch()
    workers = _Successors(tmp_path)
    is_over = asyncio.Event()

    async def talk(session: str) -> int:
        turn = 0
        while not is_over.is_set():
            async with asyncio.timeout(2 * WAIT_S + 10 * KILLS):  # a turn may meet each of the deaths
                while not await workers.is_said(session, f"{session}-{turn}"):
                    pass
                while not _has_ended(tmp_path, session, turn + 1):
                    with contextlib.suppress(TimeoutError):
                        await until(partial(_has_ended, tmp_path, session, turn + 1))
            turn += 1
        return turn

    async with workers:
        talking = asyncio.gather(*map(talk, SESSIONS))
        for _ in range(KILLS):
            with contextlib.suppress(TimeoutError):  # a moment by chance, also in the middle of a start
                async with asyncio.timeout(chance.random() * KILL_WITHIN_S):
                    await asyncio.shield(talking)
            await workers.replace()
        is_over.set()
        turns = await talking
    print(f"{KILLS} kills, {sum(turns)} turns")  # noqa: T201 - how much was tried
    assert sum(turns) >= len(SESSIONS)
    for session, count in zip(SESSIONS, turns, strict=True):
        assert ends(tmp_path, session) == ["completed"] * count
    assert problems(tmp_path, SESSIONS) == []


@spec("TURN-84", "TURN-85")
async def test_a_tool_that_kills_its_server_is_started_four_times_at_most_and_others_are_answered(
    tmp_path: Path,
) -> None:
    others = {f"s{number}": ("work", "look", "think")[number % 3] for number in range(12)}
    everyone = ["killer", *others]
    starts = 1
    async with Worker(tmp_path) as first:
        for session, words in others.items():
            assert (await first.say(session, words)).status_code == 200
        await until(lambda: len(lines(tmp_path)) == sum(each != "think" for each in others.values()))
        with contextlib.suppress(httpx2.HTTPError):  # it may be dead before it has answered
            await first.say("killer", "kill")
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


def _has_ended(folder: Path, session: str, turns: int) -> bool:
    return len(ends(folder, session)) >= turns


class _Successors:
    """One server after another on one database."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worker: Worker | None = None

    async def __aenter__(self) -> None:
        await self._start()

    async def __aexit__(self, *_: object) -> None:
        if self._worker is not None:
            await self._worker.kill()

    async def _start(self) -> None:
        self._worker = await Worker(self._folder).__aenter__()

    async def replace(self) -> None:
        assert self._worker is not None
        await self._worker.kill()
        await self._start()

    async def is_said(self, session: str, stream: str) -> bool:
        with contextlib.suppress(httpx2.HTTPError):
            assert self._worker is not None
            return (await self._worker.say(session, "talk", stream=stream)).status_code == 200
        return False
