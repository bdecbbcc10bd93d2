"""Several processes on one file: the sessions of a killed node are free at once, living nodes share."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from midstream.errors import LeaseHeldError
from midstream.session.records import Sync
from midstream.store.contract import Batch, StoredRecord
from midstream.store.sqlite import SQLiteStore
from tests.store.stores import found_in

PROGRAM = Path(__file__).with_name("node_process.py")
TAKEOVER_MAX_S = 30.0
"""Limit in seconds: it takes milliseconds on an idle machine; this one is shared."""


async def _start(path: Path, session: str, *, appends: int) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, PROGRAM, path, session, str(appends), stdin=PIPE, stdout=PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        assert await process.stdout.readline() == b"owns\n"
    return process


async def test_the_session_of_a_killed_node_is_taken_over_at_once(
    folder: Path,
) -> None:
    store = SQLiteStore(folder / "x.db")
    await store.open()
    node = await _start(folder / "x.db", "s", appends=0)
    with pytest.raises(LeaseHeldError):
        await store.claim("s", at=2.0)

    node.kill()
    killed_at = time.monotonic()
    epoch = None
    while epoch is None and time.monotonic() < killed_at + TAKEOVER_MAX_S:
        try:
            epoch = await store.claim("s", at=2.0)
        except LeaseHeldError:
            await asyncio.sleep(0)
    logging.getLogger(__name__).info("taken over %.4f s after the kill", time.monotonic() - killed_at)

    assert epoch == 2
    assert await store.read("s", after=0, limit=10) == [StoredRecord(1, 1, b"0")]
    assert await store.append("s", Batch([b"1"], expected=1, epoch=epoch, sync=Sync.FULL)) == 2
    assert len(list((folder / "x.db.nodes").glob("*.lock"))) == 1, "the dead one's file is gone"
    await node.wait()
    await store.close()


async def test_processes_share_a_file(folder: Path) -> None:
    store = SQLiteStore(folder / "x.db")
    await store.open()
    processes = [await _start(folder / "x.db", session, appends=100) for session in ("s", "t")]
    epoch = await store.claim("ours", at=1.0)
    for end in range(100):
        await store.append("ours", Batch([b"%d" % end], expected=end, epoch=epoch, sync=Sync.FULL))
    assert [await process.wait() for process in processes] == [0, 0]
    for session in ("s", "t", "ours"):
        journal = await store.read(session, after=0, limit=1000)
        assert [record.body for record in journal] == [b"%d" % number for number in range(100)]
    await store.close()


APPENDER = """
import asyncio, os, signal, sys
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.sqlite import SQLiteStore

async def main():
    store = SQLiteStore(sys.argv[1])
    await store.open()
    epoch = await store.claim("s", at=1.0)
    for end in range(10):
        sync = Sync.NORMAL if end else Sync.FULL
        await store.append("s", Batch([b"%d" % end], end, epoch, sync))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_a_killed_process_leaves_only_the_files_of_sqlite(folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", APPENDER, folder / "x.db")
    async with asyncio.timeout(60):
        assert await process.wait() == -signal.SIGKILL
    (folder / "copy").mkdir()
    for name in ("x.db", "x.db-wal"):
        shutil.copy(folder / name, folder / "copy" / name)
    assert await found_in(folder / "copy" / "x.db") == [b"%d" % end for end in range(10)]
