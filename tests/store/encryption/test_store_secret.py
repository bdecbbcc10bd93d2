from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import EventsLostError, KeyMissingError, StoreDamagedError, UsageError
from midstream.session.records import Sync
from midstream.store.contract import Batch
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.encrypted_store import EncryptedStore, encrypt_store
from midstream.store.encryption.store_secret import WrappedKeySource
from midstream.store.guard.store_marker import KEY, NAMESPACE, read_marker
from midstream.store.memory import Memory, MemoryStore
from midstream.store.node_reports import NODES, REPORT_COUNTS_S
from tests.spec import spec
from tests.store.keys import keys_in


async def _open(memory: Memory, folder: Path, *, is_mixed: bool = False) -> EncryptedStore:
    store = encrypt_store(MemoryStore(memory), keys_in(folder), is_mixed=is_mixed)
    await store.open()
    return store


async def _append(store: EncryptedStore, *bodies: bytes, expected: int = 0) -> None:
    epoch = await store.claim("s", at=1.0)
    await store.append("s", Batch(bodies, expected, epoch, Sync.FULL))


async def _bodies(store: EncryptedStore, after: int = 0) -> list[bytes]:
    return [each.body for each in await store.read("s", after=after, limit=99)]


@spec("SEC-40", "SEC-41")
async def test_a_new_operators_key_wraps_the_secret_again_and_the_old_one_can_be_removed(
    tmp_path: Path,
) -> None:
    memory = Memory()
    store = await _open(memory, tmp_path)
    await _append(store, b"1")
    await store.delete("s")
    await store.close()
    path, old = tmp_path / "keys", (tmp_path / "keys").read_text()
    path.write_text(f"2 {b64encode(bytes(range(32))).decode()}\n{old}")
    store = encrypt_store(MemoryStore(memory), FileKeys(path))
    await store.open()
    found = await read_marker(store._store._store)
    assert found is not None
    assert found.marker.generation == "2"
    await store.close()
    path.write_text(path.read_text().removesuffix(old))
    store = encrypt_store(MemoryStore(memory), FileKeys(path))
    await store.open()
    await _append(store, b"1")
    assert await _bodies(store) == [b"1"]


@spec("SEC-41")
async def test_a_store_with_a_changed_or_removed_marker_does_not_open(tmp_path: Path) -> None:
    memory = Memory()
    store = await _open(memory, tmp_path)
    await _append(store, b"1")
    await store.close()
    kept = memory.values[NAMESPACE][KEY]
    changed = kept.body.replace(b'"is_mixed":false', b'"is_mixed":true')
    assert changed != kept.body
    memory.values[NAMESPACE][KEY] = replace(kept, body=changed)
    with pytest.raises(KeyMissingError, match="not the operator's keys"):
        await _open(memory, tmp_path)
    del memory.values[NAMESPACE][KEY]
    with pytest.raises(StoreDamagedError, match="was removed"):
        await _open(memory, tmp_path)
    memory.values[NAMESPACE][KEY] = kept
    assert await _bodies(await _open(memory, tmp_path)) == [b"1"]


@spec("SEC-41")
async def test_an_unencrypted_store_does_not_open_with_keys(tmp_path: Path) -> None:
    memory = Memory()
    plain = MemoryStore(memory)
    await plain.open()
    epoch = await plain.claim("s", at=1.0)
    await plain.append("s", Batch([b"{}"], 0, epoch, Sync.FULL))
    await plain.close()
    with pytest.raises(UsageError, match="without --key-file"):
        await _open(memory, tmp_path)
    assert memory.values == {}
    mixed = await _open(memory, tmp_path, is_mixed=True)
    await _append(mixed, b"[]", expected=1)
    assert await _bodies(mixed) == [b"{}", b"[]"]


@spec("SEC-42")
async def test_one_bad_row_fails_no_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    store = await _open(memory, tmp_path)
    await _append(store, b"1")
    for key in ("a", "b"):
        await store.kv_put("pool", key, key.encode(), expected=0, at=1.0)
    kept = memory.values["pool"]["a"]
    for body in (b'{"plain": 1}', b"", b"\x02", kept.body[:-1]):
        memory.values["pool"]["a"] = replace(kept, body=body)
        assert [each.key for each in await store.kv_list("pool")] == ["b"]
        assert "omitted" in caplog.text
        with pytest.raises(StoreDamagedError):
            await store.kv_get("pool", "a")
    title = "encrypted:" + "A" * 41
    session = memory.sessions["s"]
    session.mark = replace(session.mark, title=title)
    assert [line.mark.title async for line in store.list()] == [""]


@spec("SEC-43")
async def test_a_record_of_a_rolled_back_timeline_is_refused(tmp_path: Path) -> None:
    memory = Memory()
    store = await _open(memory, tmp_path)
    await _append(store, b"1", b"2")
    session = memory.sessions["s"]
    before = (session.epoch, [*session.records], session.seal)
    await _append(store, b"3 of the first", b"4 of the first", expected=2)
    first, blobs = [*session.records], {**session.blobs}
    session.epoch, session.records[:], session.seal = before
    await store.close()
    store = await _open(memory, tmp_path)
    await _append(store, b"3 of the second", b"4 of the second", expected=2)
    session.blobs |= blobs  # With the key of the first.
    second = [*session.records]
    assert [each.epoch for each in first] == [each.epoch for each in second]
    for number in (2, 3):
        session.records[:] = second
        session.records[number] = first[number]
        with pytest.raises(StoreDamagedError, match="changed, moved or inserted"):
            await _bodies(await _open(memory, tmp_path))
    session.records[:] = first[:3]
    with pytest.raises(EventsLostError, match="records were removed"):
        await _bodies(await _open(memory, tmp_path), after=3)


@spec("SEC-50")
async def test_a_restored_used_entry_is_refused(tmp_path: Path) -> None:
    memory = Memory()
    store = await _open(memory, tmp_path)
    version = await store.kv_put("login", "word", b"for ada", expected=0, at=1.0)
    used = memory.values["login"]["word"]
    assert await store.kv_delete("login", "word", expected=version)
    memory.values["login"]["word"] = replace(used, version=99)
    with pytest.raises(StoreDamagedError, match="put back"):
        await store.kv_get("login", "word")
    assert await store.kv_list("login") == []


async def test_a_store_from_before_the_marker_has_no_keys_for_a_reader(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.open()
    source = WrappedKeySource(keys_in(tmp_path), is_mixed=False, world=World())
    keys = await source.find(store)
    assert keys.is_mixed
    assert keys.find(b"1234") is None


@spec("SEC-41")
@pytest.mark.parametrize("is_mixed", [False, True])
async def test_a_store_is_not_marked_while_a_server_without_keys_uses_it(
    tmp_path: Path, *, is_mixed: bool
) -> None:
    memory = Memory()
    plain = MemoryStore(memory)
    await plain.open()
    reported_at = World().now()
    await plain.kv_put(NODES, "plain", b"{}", expected=0, at=reported_at)
    with pytest.raises(UsageError, match="without --key-file use this store: stop them first"):
        await _open(memory, tmp_path, is_mixed=is_mixed)
    assert list(memory.values) == [NODES]
    await plain.kv_put(NODES, "plain", b"{}", expected=1, at=reported_at - REPORT_COUNTS_S)  # it was killed
    marked = await _open(memory, tmp_path, is_mixed=is_mixed)
    await marked.kv_put(NODES, "marked", b"{}", expected=0, at=World().now())
    await _open(memory, tmp_path)  # the second server with the keys
