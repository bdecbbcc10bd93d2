from __future__ import annotations

from pathlib import Path

from midstream.store.memory import MemoryStore
from midstream.store.opening import store_of
from midstream.store.sqlite import SQLiteStore
from midstream.world import World


def test_a_path_is_a_sqlite_file_that_is_made_when_it_is_opened(tmp_path: Path) -> None:
    world, own = World(), MemoryStore()
    assert store_of(own, world=world) is own
    for named in (tmp_path / "s.db", str(tmp_path / "s.db")):
        assert isinstance(store_of(named, world=world), SQLiteStore)
    assert not (tmp_path / "s.db").exists()
