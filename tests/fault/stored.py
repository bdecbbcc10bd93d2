"""The store of a case: a SQLite file in its folder, or that of a server whose URL is in a file there."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from midstream.environment import World
from midstream.errors import UnavailableError
from midstream.store.blocking_reads import ClosedStore
from midstream.store.contract import Store, StoredRecord
from midstream.store.jetstream import JetStreamStore
from midstream.store.postgres import PostgresStore
from midstream.store.sqlite import SQLiteStore
from midstream.store.sqlite.store import LEASE_S
from midstream.store.store_registry import read_store
from tests.nats_engine import NatsCluster
from tests.postgres_engine import Engine

URL_FILE = "store.url"
FILE = "server.db"
ANSWERS_WITHIN_S = 30.0
"""Seconds for servers to elect a leader, without which nothing can be read; an idle machine needs one or two of them.
"""

LOCKED_S = 0.5
"""Seconds for a commit of a living process; an idle machine needs a hundredth of them."""

_Found = TypeVar("_Found")
_NEVER = threading.Event()
_numbers = itertools.count(1)


def use_postgres(folder: Path, engine: Engine) -> str:
    """Let all processes of a folder use a new schema of this server, and return its URL."""
    url = f"{engine.url}&schema=fault_{next(_numbers)}"
    (folder / URL_FILE).write_text(url)
    return url


def use_jetstream(folder: Path, cluster: NatsCluster) -> str:
    """Let all processes of a folder use new streams of these servers, and return their URL."""
    url = cluster.url(f"fault_{next(_numbers)}", streams=2)
    (folder / URL_FILE).write_text(url)
    return url


def name_of(folder: Path) -> str:
    """Return the URL or the path of the store of a folder."""
    url = folder / URL_FILE
    return url.read_text() if url.exists() else str(folder / FILE)


def make_store(folder: Path, world: World, *, name: str = "", lease_s: float = LEASE_S) -> Store:
    """Return the store of a folder, not open; with a name, that store."""
    name = name or name_of(folder)
    if name.startswith("postgresql:"):
        return PostgresStore(name, lease_s=lease_s, world=world)
    if name.startswith("nats:"):
        return JetStreamStore(name, lease_s=lease_s, world=world)
    return SQLiteStore(name, lease_s=lease_s, world=world)


async def is_writable(folder: Path) -> bool:
    """Return whether no transaction of another process blocks writes to the store of a folder."""
    name = name_of(folder)
    if name.startswith("nats:"):
        return True
    if name.startswith("postgresql:"):
        return await _has_no_open_transaction(name.partition("&schema=")[0])
    with contextlib.closing(sqlite3.connect(name, timeout=LOCKED_S, isolation_level=None)) as database:
        try:
            database.execute("begin immediate")
        except sqlite3.OperationalError:
            return False
        database.execute("rollback")
    return True


async def _has_no_open_transaction(url: str) -> bool:
    import asyncpg  # not installed everywhere

    operator = await asyncpg.connect(url)
    try:
        return bool(await operator.fetchval(_NO_OPEN_TRANSACTION))
    finally:
        await operator.close()


_NO_OPEN_TRANSACTION = """
select not exists (
    select 1 from pg_stat_activity
    where application_name like 'midstream %' and state like 'idle in transaction%'
)
"""


def read_session(folder: Path, session: str) -> list[StoredRecord]:
    """Read a whole journal without being a node.

    Raises:     NotFoundError: There is no store yet.
    """
    return _read(folder, lambda reader: reader.read(session, after=0, limit=100_000))


def read_all(folder: Path) -> dict[str, list[StoredRecord]]:
    """Read all journals."""

    def journals(reader: ClosedStore) -> dict[str, list[StoredRecord]]:
        return {line.session: reader.read(line.session, after=0, limit=100_000) for line in [*reader.list()]}

    return _read(folder, journals)


def _read(folder: Path, read: Callable[[ClosedStore], _Found]) -> _Found:
    """Read from a store, whose servers may be electing a leader."""
    until = time.monotonic() + ANSWERS_WITHIN_S
    while True:
        try:
            with read_store(name_of(folder)) as reader:
                return read(reader)
        except UnavailableError:
            if time.monotonic() > until:
                raise
        _NEVER.wait(0.05)
