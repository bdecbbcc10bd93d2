"""Processes killed around a transaction: the effect and its outcome are there together, once, or neither is."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from midstream.environment import Fault
from midstream.history.messages import Outcome
from midstream.session.records import CallEnded, CallStarted, TurnEnded, TurnStatus, decode
from tests.fault import starting
from tests.fault.transaction_process import WHATS, WITHIN
from tests.spec import spec

pytestmark = pytest.mark.fault

CASE_S = 60.0
Death = tuple[str, int]

AROUND: list[Death] = [
    (Fault.BEFORE_TOOL, 1),
    (Fault.BEFORE_TOOL, 3),
    (WITHIN, 1),
    (WITHIN, 2),
    (Fault.AFTER_TOOL, 1),
    (Fault.AFTER_TOOL, 3),
    *((Fault.AFTER_APPEND, count) for count in (2, 3, 4, 5)),
    (Fault.AFTER_PUBLISH, 3),
]
"""Appends: the message, the response with its starts, each outcome with what follows."""
IN_A_ROW: list[tuple[Death, ...]] = [
    ((WITHIN, 1), (WITHIN, 1)),
    ((Fault.AFTER_TOOL, 1), (Fault.AFTER_APPEND, 3)),
    ((Fault.BEFORE_TOOL, 1), (Fault.AFTER_TOOL, 2)),
]


async def _live(path: Path, death: Death | None) -> int:
    arguments = [str(path)] if death is None else [str(path), str(death[0]), str(death[1])]
    process = await starting.start("tests.fault.transaction_process", *arguments)
    try:
        await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return await process.wait()


@spec("TURN-13", "TURN-67")
@pytest.mark.parametrize("deaths", [*((each,) for each in AROUND), *IN_A_ROW], ids=str)
async def test_effect_and_outcome_agree_whenever_a_process_is_killed(
    tmp_path: Path, deaths: tuple[Death, ...]
) -> None:
    path = tmp_path / "x.db"
    async with asyncio.timeout(CASE_S):
        for death in deaths:
            assert await _live(path, death) == -signal.SIGKILL, f"{death} was not reached"
            noted, ended, _ = _look(path)
            assert noted == ended, "at the moment of the death"
        assert await _live(path, None) == 0
    noted, ended, records = _look(path)
    assert noted == ended
    assert [key.rpartition("/")[2] for key in noted] == ["c1", "c2", "c1"]
    results = [record.result for record in records if isinstance(record, CallEnded)]
    assert [result.outcome for result in results] == [Outcome.OK] * len(WHATS)
    (end,) = [record for record in records if isinstance(record, TurnEnded)]
    assert end.status is TurnStatus.COMPLETED
    runs = [record.run for record in records if isinstance(record, CallStarted)]
    assert max(runs) <= 1 + len(deaths)


def _look(path: Path) -> tuple[list[str], list[str], list[object]]:
    """Return the effect keys of what was noted, both halves of it, and of what has an outcome; and the records."""
    with closing(sqlite3.connect(path)) as db:
        bodies = db.execute("select body from record order by position").fetchall()
        is_made = db.execute("select 1 from sqlite_schema where name = 'app_note'").fetchone()
        rows = db.execute("select key, half from app_note order by rowid").fetchall() if is_made else []
    records = [decode(body) for (body,) in bodies]
    keys = [key for key, half in rows if half == 1]
    assert rows == [(key, half) for key in keys for half in (1, 2)], "half an effect"
    ended = [f"s/{r.turn}/{r.response}/{r.result.call_id}" for r in records if isinstance(r, CallEnded)]
    return keys, ended, [*records]
