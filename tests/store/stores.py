"""Helpers for tests of the SQLite store."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from midstream.environment import World
from midstream.session.records import Sync
from midstream.store.contract import Batch, Store
from midstream.store.sqlite import SQLiteStore
from midstream.testing.fake_worlds import FakeWorld


class Impatient(World):
    """A world with the shortest waits between attempts."""

    def chance(self) -> float:
        return 0.0


async def append(
    store: Store,
    *bodies: bytes,
    expected: int,
    epoch: int,
    sync: Sync = Sync.FULL,
    session: str = "s",
) -> int:
    return await store.append(session, Batch(bodies, expected=expected, epoch=epoch, sync=sync))


async def bodies(store: Store, session: str = "s") -> list[bytes]:
    return [record.body for record in await store.read(session, after=0, limit=10_000)]


async def found_in(path: Path) -> list[bytes]:
    store = SQLiteStore(path)
    await store.open()
    try:
        return await bodies(store)
    finally:
        await store.close()


def copy_as_it_lies(folder: Path, copy: Path) -> None:
    """Copy the database and its companions while they are in use, as a dead process leaves them.

    In another process: to close a file of SQLite's releases this process' locks on it.
    """
    copy.mkdir()
    files = [str(folder / name) for name in ("x.db", "x.db-wal")]
    assert os.spawnlp(os.P_WAIT, "cp", "cp", "-r", *files, str(copy)) == 0


@asynccontextmanager
async def claimed(
    path: Path, world: World | None = None, *, vfs: str | None = None, first: bytes = b"0"
) -> AsyncIterator[tuple[SQLiteStore, int]]:
    """Yield a store with a session `s` of one record, and the epoch that may append to it."""
    store = SQLiteStore(path, world=world or FakeWorld(), vfs=vfs)
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await store.append("s", Batch([first], expected=0, epoch=epoch, sync=Sync.FULL))
    try:
        yield store, epoch
    finally:
        await store.close()
