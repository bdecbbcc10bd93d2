from __future__ import annotations

import pytest

from midstream.errors import EntryMovedError, KeyMissingError, StoreDamagedError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.guard.store_marker import (
    KEY,
    NAMESPACE,
    StoreMarker,
    holds_encrypted,
    is_chained,
    read_marker,
    refuse_encrypted,
    write_marker,
)
from midstream.store.memory import MemoryStore
from tests.spec import spec


async def _store(body: bytes | None = None, link: bytes = b"") -> MemoryStore:
    store = MemoryStore()
    await store.open()
    if body is not None:
        epoch = await store.claim("s", at=1.0)
        await store.append("s", Batch([body], 0, epoch, Sync.FULL, links=[link]))
    return store


@spec("SEC-40")
async def test_a_marked_store_is_refused_without_its_keys() -> None:
    store = await _store()
    await refuse_encrypted(store)
    assert await read_marker(store) is None
    marker = StoreMarker("2026", b"wrapped")
    await write_marker(store, marker, expected=0, at=1.0)
    found = await read_marker(store)
    assert found is not None
    assert found.marker == marker
    with pytest.raises(KeyMissingError, match=r"'2026'.*--key-file"):
        await refuse_encrypted(store)
    with pytest.raises(EntryMovedError):
        await write_marker(store, marker, expected=0, at=1.0)


@spec("SEC-40")
async def test_an_encrypted_store_from_before_the_marker_is_recognised_by_its_records() -> None:
    assert await holds_encrypted(await _store()) is None
    assert await holds_encrypted(await _store(b"{}")) is False
    old = await _store(b"\x01 and more")
    assert await holds_encrypted(old) is True
    assert not await is_chained(old)
    assert await is_chained(await _store(b"{}", b"a link"))
    with pytest.raises(KeyMissingError):
        await refuse_encrypted(old)


def test_the_content_of_the_marker_is_bound_to_the_wrap() -> None:
    marker = StoreMarker("1", b"")
    assert (
        len({marker.context, StoreMarker("2", b"").context, StoreMarker("1", b"", is_mixed=True).context})
        == 3
    )


async def test_an_unreadable_marker_is_damage() -> None:
    store = await _store()
    await store.kv_put(NAMESPACE, KEY, b"[" * 100_000, expected=0, at=1.0)
    with pytest.raises(StoreDamagedError, match="marker"):
        await refuse_encrypted(store)
