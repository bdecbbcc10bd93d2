"""Branches of checked reads that the tests of the guarded store do not reach."""

from __future__ import annotations

from pathlib import Path

from midstream.environment import World
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.guard.append_reads import link_at
from midstream.store.guard.chain import COVERED, LINK_BYTES
from midstream.store.guard.guarded_store import GuardedStore
from midstream.store.guard.store_key import FileKeySource
from midstream.store.memory import Memory, MemoryStore


async def test_the_link_of_an_append_is_that_of_its_last_record(tmp_path: Path) -> None:
    memory = Memory()
    inner = MemoryStore(memory)
    source = FileKeySource(tmp_path / "key", World())
    store = GuardedStore(inner, source, is_plain=True, world=World())
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await store.append("s", Batch((b"1", b"2", b"3"), 0, epoch, Sync.FULL))
    *covered, last = memory.sessions["s"].records
    assert [each.link for each in covered] == [COVERED, COVERED]
    assert await link_at(inner, "s", 3) == last.link[:LINK_BYTES]
    assert await link_at(inner, "s", 4) is None, "there is no such record"
    assert await link_at(inner, "other", 1) is None
    await store.close()
