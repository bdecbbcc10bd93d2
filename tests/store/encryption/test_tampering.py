"""Rows removed, moved and swapped by a writer to the database: the next node detects it.

Two undetectable cases are shown too: a database set back as a whole, and the loss that a power cut permits.
The changes are made by another process: two SQLites in one process may not have one file open.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.errors import EventsLostError, KeyMissingError, StoreDamagedError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.encryption.escrow import escrow_store
from midstream.store.sqlite import SQLiteStore
from midstream.testing import ScriptedModel, run_turn, text
from tests.spec import spec
from tests.store.keys import keys_in

SECRET = "s" * 43
TAMPER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.executescript(sys.stdin.read())
db.close()
"""
S = "(select id from session where name = 's')"
T = "(select id from session where name = 't')"
OF_S = f"session_id = {S}"
END = f"(select max(position) from record where {OF_S})"


def _tamper(path: Path, script: str) -> None:
    command = [sys.executable, "-I", "-c", TAMPER, str(path)]
    subprocess.run(command, input=script, text=True, check=True, timeout=60, capture_output=True)


def _host(path: Path) -> Host:
    store = encrypt_store(SQLiteStore(path), keys_in(path.parent))
    return Host(Agent(ScriptedModel([text("hello"), text("again")])), store)


async def _two_turns(path: Path) -> int:
    """Run two turns in each of two sessions; return the end position of the first one."""
    host = _host(path)
    await host.start()
    for session in ("s", "t"):
        for number in range(2):
            await run_turn(host, session, f"question {number}")
    end = (await host.session("s")).newest.position
    await host.stop(grace_s=0.1)
    return end


def _body(of: str) -> str:
    return f"(select body from record where {of})"


CUT = {
    "the last record": f"delete from record where {OF_S} and position = {END}",
    "the last turn": f"delete from record where {OF_S} and position > {END} / 2",
    "all but one": f"delete from record where {OF_S} and position > 1",
    "all": f"delete from record where {OF_S}",
    "the first record": f"delete from record where {OF_S} and position = 1",
    "the first turn": f"delete from record where {OF_S} and position < {END} / 2",
    "one in the middle": f"delete from record where {OF_S} and position = 4",
    "the seal": f"update session set seal = x'' where id = {S}",
    "records and seal": f"""
        delete from record where {OF_S} and position > 3;
        update session set seal = x'' where id = {S};
    """,
}
CUT_INSIDE = {"the last record", "the last turn", "all but one"}
"""Those of them that cut an append: that is damage, like every change, and not a loss (SEC-43)."""
CHANGED = {
    "moved": f"update record set body = {_body(f'{OF_S} and position = 2')} where {OF_S} and position = 3",
    "closed up": f"""
        delete from record where {OF_S} and position = 3;
        update record set position = -position where {OF_S} and position > 3;
        update record set position = -position - 1 where {OF_S} and position < 0;
    """,
    "swapped": f"""
        update record set position = -2 where {OF_S} and position = 2;
        update record set position = 2 where {OF_S} and position = 3;
        update record set position = 3 where {OF_S} and position = -2;
    """,
    "of another epoch": f"update record set epoch = epoch + 1 where {OF_S} and position = {END}",
    "of another session": f"""
        delete from record where {OF_S};
        update record set session_id = {S} where session_id = {T};
    """,
    "with another session's seal": f"""
        update session set seal = (select seal from session where name = 't') where id = {S};
    """,
    "without its key": f"delete from blob where {OF_S} and digest like 'key-%'",
    "with the key of another session": f"""
        delete from blob where {OF_S};
        update blob set session_id = {S} where session_id = {T};
    """,
    "put there": f"""
        insert into record (session_id, position, epoch, body) values ({S}, {END} + 1, 1, cast('{{}}' as blob));
    """,
}


@pytest.mark.slow
@spec("STREAM-86", "STREAM-99")
async def test_the_next_node_detects_cut_moved_swapped_or_inserted_rows(folder: Path) -> None:
    path = folder / "x.db"
    await _two_turns(path)
    for what, script in (CUT | CHANGED).items():
        shutil.copy(path, folder / "copy.db")
        _tamper(folder / "copy.db", script)
        host = _host(folder / "copy.db")
        await host.start()
        with pytest.raises(StoreDamagedError) as caught:
            pytest.fail(f"nobody noticed: {what} {(await host.session('s')).newest}")
        is_loss = what in CUT and what not in CUT_INSIDE
        assert isinstance(caught.value, EventsLostError) is is_loss, (what, caught.value.code)
        assert not isinstance(caught.value, KeyMissingError), what
        if T not in script:
            assert (await host.session("t")).newest.position > 0, what
        await host.stop(grace_s=0.1)


@spec("STREAM-99")
async def test_rows_cut_while_their_node_lives_are_detected_too(folder: Path) -> None:
    path = folder / "x.db"
    node = encrypt_store(SQLiteStore(path), keys_in(folder))
    await node.open()
    epoch = await node.claim("s", at=1.0)
    await node.append("s", Batch([b"1", b"2"], expected=0, epoch=epoch, sync=Sync.FULL))
    await node.append("s", Batch([b"3"], expected=2, epoch=epoch, sync=Sync.FULL))
    _tamper(path, f"delete from record where {OF_S} and position = 3")
    other = encrypt_store(SQLiteStore(path), keys_in(folder))
    await other.open()
    assert len(await other.read("s", after=0, limit=9)) == 2
    with pytest.raises(
        EventsLostError, match="ends with record 2, and was sealed with 3: records were removed"
    ):
        await other.read("s", after=2, limit=9)
    await node.append("s", Batch([b"4"], expected=3, epoch=epoch, sync=Sync.NORMAL))
    with pytest.raises(EventsLostError, match="has no record 3: it was removed"):
        await other.read("s", after=2, limit=9)
    await other.close()
    await node.close()


@spec("STREAM-99")
async def test_losses_within_the_sync_promise_are_accepted_and_others_detected(folder: Path) -> None:
    path = folder / "x.db"
    store = encrypt_store(SQLiteStore(path), keys_in(folder))
    await store.open()
    epoch = await store.claim("s", at=1.0)
    for number, sync in enumerate((Sync.NORMAL, Sync.NORMAL, Sync.FULL, Sync.NORMAL, Sync.NORMAL)):
        await store.append("s", Batch([b"x"], expected=number, epoch=epoch, sync=sync))
    await store.close()
    for left in (4, 3):
        _tamper(path, f"delete from record where {OF_S} and position > {left}")
        await store.open()
        assert await store.read("s", after=left, limit=9) == []
        await store.close()
    _tamper(path, f"delete from record where {OF_S} and position > 2")
    await store.open()
    with pytest.raises(EventsLostError):
        await store.read("s", after=2, limit=9)
    await store.close()


@spec("STREAM-99")
async def test_an_older_copy_of_the_whole_database_looks_intact(folder: Path) -> None:
    path = folder / "x.db"
    end = await _two_turns(path)
    shutil.copy(path, folder / "older.db")
    host = _host(path)
    await host.start()
    await run_turn(host, "s", "one more")
    await host.stop(grace_s=0.1)
    shutil.copy(folder / "older.db", path)
    host = _host(path)
    await host.start()
    assert (await host.session("s")).newest.position == end
    await host.stop(grace_s=0.1)


@spec("STREAM-99")
async def test_a_session_under_a_client_key_is_sealed_too(folder: Path) -> None:
    path = folder / "x.db"
    store = escrow_store(SQLiteStore(path), keys_in(folder))
    await store.open()
    await store.escrow.open("s", SECRET, begins=True)
    epoch = await store.claim("s", at=1.0)
    await store.append("s", Batch([b"1", b"2"], expected=0, epoch=epoch, sync=Sync.FULL))
    await store.close()
    _tamper(path, f"delete from record where {OF_S} and position = 2")
    await store.open()
    assert await store.read("s", after=2, limit=9) == []  # No client whose key could read it is connected.
    await store.escrow.open("s", SECRET)
    with pytest.raises(EventsLostError):
        await store.read("s", after=1, limit=9)
    await store.close()


async def test_records_from_before_the_seals_are_readable_only_in_a_mixed_store(folder: Path) -> None:
    path = folder / "x.db"
    end = await _two_turns(path)
    _tamper(path, "update session set seal = x''")
    store = encrypt_store(SQLiteStore(path), keys_in(folder))
    await store.open()
    with pytest.raises(EventsLostError, match="is_mixed"):
        await store.read("s", after=end, limit=9)
    await store.close()
    mixed = encrypt_store(SQLiteStore(path), keys_in(folder), is_mixed=True)
    await mixed.open()
    assert await mixed.read("s", after=end, limit=9) == []
    await mixed.close()
