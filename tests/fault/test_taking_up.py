"""A process is killed in the middle of a response that its provider stores: the next one continues, word for word."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from midstream.environment import Fault, World
from midstream.session.records import (
    AttemptContinued,
    AttemptResumable,
    AttemptStarted,
    Delta,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.store.sqlite import SQLiteStore
from tests.fault import starting
from tests.fault.extent import select_cases
from tests.models.responses_server import Link, ResponsesServer, completed, responses_server, text_deltas
from tests.spec import spec

pytestmark = pytest.mark.fault
WAIT_S = 60.0
PIECES = [f"{number} " for number in range(60)]
RESPONSE = [*text_deltas("hm", kind="reasoning_summary_text"), *text_deltas(*PIECES), completed()]
POINTS = [Fault.BEFORE_APPEND, Fault.AFTER_APPEND, Fault.AFTER_PUBLISH]
TIMES = (3, 6, 12)
DEATHS = [(point, time) for point in POINTS for time in TIMES]


async def _live(path: Path, server: ResponsesServer, *death: str) -> int:
    """Run one process to its end and return its exit status."""
    process = await starting.start("tests.fault.stored_response_process", path, server.url, *death)
    try:
        async with asyncio.timeout(WAIT_S):
            await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return await process.wait()


async def _journal(path: Path) -> list[Record]:
    store = SQLiteStore(path, world=World())
    await store.open()
    try:
        return [decode(each.body) for each in await store.read("s", after=0, limit=10_000)]
    finally:
        await store.close()


def _words_of_last_attempt(journal: list[Record]) -> str:
    attempt = max(each.attempt for each in journal if isinstance(each, AttemptStarted))
    deltas = (each for each in journal if isinstance(each, Delta) and each.kind == "text")
    return "".join(each.text for each in deltas if each.attempt == attempt)


def _check(journal: list[Record], server: ResponsesServer, *, was_kept: bool, deaths: int) -> None:
    (whole,) = (each for each in journal if isinstance(each, ResponseCompleted))
    assert whole.body.text == _words_of_last_attempt(journal) == "".join(PIECES)
    assert isinstance(journal[-1], TurnEnded)
    assert journal[-1].status is TurnStatus.COMPLETED
    if was_kept:
        assert len(server.bodies) == 1, "nobody pays for the response twice"
        assert [each.attempt for each in journal if isinstance(each, AttemptStarted)] == [1]
        continued = [each.number for each in journal if isinstance(each, AttemptContinued)]
        assert continued == list(range(1, deaths + 1))


@spec("TURN-61")
@pytest.mark.parametrize(("point", "time"), select_cases(DEATHS, 4))
async def test_a_killed_process_loses_no_text_and_causes_no_second_response(
    tmp_path: Path, point: Fault, time: int
) -> None:
    path = tmp_path / "server.db"
    async with responses_server(RESPONSE, RESPONSE, pace_s=0.003) as server:
        assert await _live(path, server, point.value, str(time)) == -signal.SIGKILL
        before = await _journal(path)
        assert not any(isinstance(each, ResponseCompleted) for each in before), "it died in the middle"
        was_kept = any(isinstance(each, AttemptResumable) for each in before)
        assert was_kept or time == min(TIMES)
        assert await _live(path, server) == 0
        journal = await _journal(path)
    assert journal[: len(before)] == before
    _check(journal, server, was_kept=was_kept, deaths=1)


@spec("TURN-61")
async def test_two_deaths_and_broken_connections_lose_no_text_either(tmp_path: Path) -> None:
    path = tmp_path / "server.db"
    links = [Link(), Link(30, "cut"), Link(), Link(40, "cut"), Link(10, "end")]
    async with responses_server(RESPONSE, RESPONSE, links=links, pace_s=0.003) as server:
        for time in ("6", "4"):
            assert await _live(path, server, Fault.AFTER_APPEND.value, time) == -signal.SIGKILL
        assert await _live(path, server) == 0
        journal = await _journal(path)
    _check(journal, server, was_kept=True, deaths=2)


@spec("TURN-62")
async def test_a_response_that_the_provider_deleted_is_requested_again(tmp_path: Path) -> None:
    path = tmp_path / "server.db"
    async with responses_server(RESPONSE, RESPONSE, pace_s=0.003) as server:
        assert await _live(path, server, Fault.AFTER_APPEND.value, "6") == -signal.SIGKILL
        server.delete_responses()
        assert await _live(path, server) == 0
        journal = await _journal(path)
    _check(journal, server, was_kept=False, deaths=1)
    assert [each.attempt for each in journal if isinstance(each, AttemptStarted)] == [1, 2]
