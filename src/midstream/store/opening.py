"""The store that a caller names: one of its own, or a path."""

from __future__ import annotations

from pathlib import Path

from midstream.store.contract import Store
from midstream.world import World


def store_of(named: Store | str | Path, *, world: World) -> Store:
    """Return the store that `named` stands for, not opened yet.

    Args:
        named: A store, or the path of a SQLite file.
        world: Clock and ids of a store that is made here.
    """
    if isinstance(named, str | Path):
        from midstream.store.sqlite import SQLiteStore  # noqa: PLC0415 - a store of one's own needs no SQLite

        return SQLiteStore(named, world=world)
    return named
