from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import EntryMovedError, StoreDamagedError
from midstream.store.encryption.sealed_rows import SealedRow, SealedRows
from midstream.store.guard.chain import ChainKey, ChainKeys
from midstream.store.memory import Memory, MemoryStore
from tests.spec import spec


async def _rows(memory: Memory, *, is_mixed: bool = False) -> SealedRows:
    store = MemoryStore(memory)
    await store.open()
    return SealedRows(store, "n", ChainKeys((ChainKey(b"k" * 32),), is_mixed=is_mixed, place=""), World())


@spec("SEC-50")
async def test_a_row_is_read_as_it_was_written_and_no_other() -> None:
    memory = Memory()
    rows = await _rows(memory)
    assert await rows.get("s") is None
    await rows.put("s", b"{}", expected=0)
    assert await rows.get("s") == SealedRow(1, b"{}")
    with pytest.raises(EntryMovedError):
        await rows.put("s", b"[]", expected=0)
    first = memory.values["n"]["s"]
    await rows.put("s", b"{}", expected=1)
    second = memory.values["n"]["s"]
    assert first.body != second.body
    for body in (first.body, second.body[:-1] + b"]", b"{}", b"", second.body[:20]):
        memory.values["n"]["s"] = replace(second, body=body)
        with pytest.raises(StoreDamagedError):
            await rows.get("s")
    memory.values["n"]["t"] = second
    with pytest.raises(StoreDamagedError, match="changed by another program"):
        await rows.get("t")


@spec("SEC-45", "SEC-50")
async def test_a_row_of_an_older_version_is_read_in_a_store_that_had_it() -> None:
    memory = Memory()
    rows = await _rows(memory, is_mixed=True)
    await rows._store.kv_put("n", "s", b"{}", expected=0, at=1.0)
    assert await rows.get("s") == SealedRow(1, b"{}")
    await rows.put("s", b"[]", expected=1)
    rows.drop("s")
    with pytest.raises(StoreDamagedError, match="put back"):
        await rows.get("s")
