"""Processes killed around a transaction: the effect and its outcome are both stored, once, or neither is."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest

from midstream.environment import Fault
from midstream.history.messages import Outcome
from midstream.session.records import CallEnded, CallStarted, TurnEnded, TurnStatus, decode
from tests.fault import starting
from tests.fault.extent import select_cases
from tests.fault.stored import name_of, read_session, use_postgres
from tests.fault.transaction_process import SESSION, WHATS, WITHIN
from tests.postgres_engine import Engine
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
"""Appends: the message, the response with its starts, each outcome with its following records."""
IN_A_ROW: list[tuple[Death, ...]] = [
    ((WITHIN, 1), (WITHIN, 1)),
    ((Fault.AFTER_TOOL, 1), (Fault.AFTER_APPEND, 3)),
    ((Fault.BEFORE_TOOL, 1), (Fault.AFTER_TOOL, 2)),
]
CASES = select_cases([*((each,) for each in AROUND), *IN_A_ROW], 1, 3, 7, 10, 11, 12)
ON_POSTGRES = select_cases([((WITHIN, 2),), ((Fault.AFTER_APPEND, 3),), IN_A_ROW[0]], 1, 2)


async def _live(folder: Path, death: Death | None) -> int:
    arguments = [str(folder)] if death is None else [str(folder), str(death[0]), str(death[1])]
    process = await starting.start("tests.fault.transaction_process", *arguments)
    try:
        await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return await process.wait()


@spec("TURN-13", "TURN-67")
@pytest.mark.parametrize("deaths", CASES, ids=str)
async def test_effect_and_outcome_agree_whenever_a_process_is_killed(
    tmp_path: Path, deaths: tuple[Death, ...]
) -> None:
    await _live_and_die(tmp_path, deaths)


@spec("TURN-13", "TURN-67")
@pytest.mark.parametrize("deaths", ON_POSTGRES, ids=str)
async def test_effect_and_outcome_agree_on_postgresql(
    tmp_path: Path, deaths: tuple[Death, ...], engine: Engine
) -> None:
    use_postgres(tmp_path, engine)
    operator = await asyncpg.connect(engine.url)
    try:
        await operator.execute("drop table if exists app_note")
        await _live_and_die(tmp_path, deaths)
    finally:
        await operator.close()


async def _live_and_die(folder: Path, deaths: tuple[Death, ...]) -> None:
    async with asyncio.timeout(CASE_S):
        for death in deaths:
            assert await _live(folder, death) == -signal.SIGKILL, f"{death} was not reached"
            noted, ended, _ = await _look(folder)
            assert noted == ended, "at the moment of the death"
        assert await _live(folder, None) == 0
    noted, ended, records = await _look(folder)
    assert noted == ended
    assert [key.rpartition("/")[2] for key in noted] == ["c1", "c2", "c1"]
    results = [record.result for record in records if isinstance(record, CallEnded)]
    assert [result.outcome for result in results] == [Outcome.OK] * len(WHATS)
    (end,) = [record for record in records if isinstance(record, TurnEnded)]
    assert end.status is TurnStatus.COMPLETED
    runs = [record.run for record in records if isinstance(record, CallStarted)]
    assert max(runs) <= 1 + len(deaths)


async def _look(folder: Path) -> tuple[list[str], list[str], list[object]]:
    """Return the effect keys of the notes, both halves, and of the calls with an outcome; and the records."""
    rows = await _notes(folder)
    records = [decode(each.body) for each in read_session(folder, SESSION)]
    keys = [key for key, half in rows if half == 1]
    assert rows == [(key, half) for key in keys for half in (1, 2)], "half an effect"
    ended = [f"s/{r.turn}/{r.response}/{r.result.call_id}" for r in records if isinstance(r, CallEnded)]
    return keys, ended, [*records]


async def _notes(folder: Path) -> list[tuple[str, int]]:
    """Return the notes of the tool, in order."""
    name = name_of(folder)
    if not name.startswith("postgresql:"):
        with closing(sqlite3.connect(name)) as db:
            is_made = db.execute("select 1 from sqlite_schema where name = 'app_note'").fetchone()
            return db.execute("select key, half from app_note order by rowid").fetchall() if is_made else []
    operator = await asyncpg.connect(name.partition("&schema")[0])
    try:
        is_made = await operator.fetchval("select to_regclass('public.app_note')")
        rows = await operator.fetch("select key, half from app_note order by ctid") if is_made else []
        return [tuple(row) for row in rows]
    finally:
        await operator.close()
