"""A failing store fails by its script and is a store otherwise."""

from __future__ import annotations

import pytest

from midstream.errors import LeaseLostError, StoreBusyError, StoreFullError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.memory import MemoryStore
from midstream.testing.store_fakes import FailingStore


async def _append(store: FailingStore, epoch: int, end: int, body: bytes = b"{}") -> int:
    return await store.append("s", Batch([body], expected=end, epoch=epoch, sync=Sync.FULL))


async def test_the_scripted_append_fails_and_writes_nothing() -> None:
    store = FailingStore(MemoryStore(), {2: StoreFullError("full"), 3: LeaseLostError("gone")})
    await store.open()
    epoch = await store.claim("s", at=0.0)
    assert await _append(store, epoch, 0) == 1
    with pytest.raises(StoreFullError):
        await _append(store, epoch, 1)
    with pytest.raises(LeaseLostError):
        await _append(store, epoch, 1)
    assert await _append(store, epoch, 1) == 2
    assert store.appends == 4
    assert [each.position for each in await store.read("s", after=0, limit=9)] == [1, 2]
    await store.close()


async def test_during_an_outage_nothing_is_written_and_everything_can_be_read() -> None:
    store = FailingStore(MemoryStore())
    await store.open()
    epoch = await store.claim("s", at=0.0)
    await _append(store, epoch, 0)
    store.outage = StoreBusyError("locked")
    with pytest.raises(StoreBusyError):
        await _append(store, epoch, 1)
    with pytest.raises(StoreBusyError):
        await store.claim("t", at=0.0)
    assert len(await store.read("s", after=0, limit=9)) == 1
    found = await store.find("s")
    assert found is not None
    assert found.end == 1
    assert [line.session async for line in store.list()] == ["s"]

    store.outage = None
    assert await _append(store, epoch, 1) == 2
    await store.release("s", epoch=epoch)
    assert await store.delete("s")
    await store.close()
