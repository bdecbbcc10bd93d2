"""Stores in the PostgreSQL of the tests, and the death of one without a close."""

from __future__ import annotations

import itertools
from contextlib import closing

import asyncpg

from midstream.environment import World
from midstream.store.blocking_reads import LoopThread
from midstream.store.contract import Store
from midstream.store.postgres import PostgresStore
from tests.postgres_engine import Engine

_numbers = itertools.count(1)


class PostgresPlace:
    """A schema of its own in a running server."""

    def __init__(self, engine: Engine, *, lease_s: float = 20.0) -> None:
        self.engine = engine
        self.schema = f"test_{next(_numbers)}"
        self.url = f"{engine.url}&schema={self.schema}"
        self._lease_s = lease_s

    def store(self, world: World = World()) -> PostgresStore:
        return PostgresStore(self.url, lease_s=self._lease_s, world=world)

    def kill(self, store: Store) -> None:
        assert isinstance(store, PostgresStore)
        die(store)


def die(store: PostgresStore) -> None:
    """End a node as with its process: its tasks stop and its connections are cut, without a message to the server."""
    opened = store._opened
    assert opened is not None
    tasks = [
        *opened.lock._tasks,
        opened._neighbours._watching,
        opened._listener._keeping,
        opened.watcher._looking,
        opened.appends._working,
        opened.notifier._sending,
    ]
    for task in tasks:
        if task is not None:
            task.cancel()
    opened.lock._heartbeat_thread._is_over.set()
    links = (opened.appends._link, opened.notifier._link, opened._listener._link, opened._neighbours._link)
    connections = [opened.lock._connection, *(link._connection for link in links)]
    pids = [each.get_server_pid() for each in connections if each is not None and not each.is_closed()]
    with closing(LoopThread()) as loop:  # This event loop does nothing meanwhile: the process is dead.
        loop.run(_end_backends(store._postgres.address.dsn, pids))
    for each in connections:
        if each is not None:
            each.terminate()
    opened.pool._pool.terminate()


async def _end_backends(dsn: str, pids: list[int]) -> None:
    """Close the connections of a dead process, as the kernel does."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        "select pg_terminate_backend(pid, 10000) from unnest($1::integer[]) as pid", pids
    )
    await connection.close()
