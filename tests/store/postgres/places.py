"""Stores in the PostgreSQL of the tests, and how one of them dies without being closed."""

from __future__ import annotations

import itertools

from midstream.environment import World
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
    """Let a node end as with its process: its tasks stop and its connections are cut, without a word to the server."""
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
    assert opened.lock._connection is not None
    opened.lock._connection.terminate()
    for link in (
        opened.appends._link,
        opened.notifier._link,
        opened._listener._link,
        opened._neighbours._link,
    ):
        link.drop()
    opened.pool._pool.terminate()
