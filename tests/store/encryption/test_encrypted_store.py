"""An encrypted store is a store: it passes the same suites, and the store behind it has no readable content."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import apsw
import pytest
from msgspec.structs import replace

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.pruning import Pruner
from midstream.errors import KeyMissingError, StoreDamagedError, UsageError
from midstream.session.blobs import Blob
from midstream.session.records import Sync
from midstream.session.retention import Retention
from midstream.store.contract import Attempt, Batch, SessionListing, Store, StoredRecord
from midstream.store.encryption import encrypted_store as encrypted_module
from midstream.store.encryption.encrypted_store import EncryptedStore, encrypt_store
from midstream.store.memory import Memory, MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing import FailingStore, ScriptedModel, calls, run_turn, text
from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage
from midstream.tools.function_tools import tool
from tests.store.keys import keys_in

CANARY = "canary-7f3a"


class EncryptedPlace:
    def __init__(self, folder: Path) -> None:
        self.memory = Memory()
        self._keys = keys_in(folder)
        self._inner: dict[Store, MemoryStore] = {}

    def store(self) -> Store:
        inner = MemoryStore(self.memory)
        store = encrypt_store(inner, self._keys)
        self._inner[store] = inner
        return store

    def kill(self, store: Store) -> None:
        self.memory.kill(self._inner[store].node)


class TestEncryptedStore(StoreContract):
    @pytest.fixture
    def place(self, folder: Path) -> Storage:
        return EncryptedPlace(folder)


class EncryptedFilePlace:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "x.db"
        self._keys = keys_in(folder)

    def store(self) -> Store:
        return encrypt_store(SQLiteStore(self._path), self._keys)

    def kill(self, store: Store) -> None:
        assert isinstance(store, EncryptedStore)
        assert isinstance(store._store._store, SQLiteStore)
        assert store._store._store._opened is not None
        store._store._store._opened.lock.drop()


class TestEncryptedFile(StoreContract):
    @pytest.fixture
    def place(self, folder: Path) -> Storage:
        return EncryptedFilePlace(folder)


def test_an_encrypted_store_has_the_abilities_of_the_store_behind_it(folder: Path) -> None:
    keys = keys_in(folder)
    one, other = encrypt_store(SQLiteStore(folder / "x.db"), keys), encrypt_store(MemoryStore(), keys)
    third = encrypt_store(FailingStore(MemoryStore()), keys)
    assert (one.immediate, one.transactional, one.escrow) == (one, one, None)
    assert (other.immediate, other.transactional) == (other, None)
    assert (third.immediate, third.transactional) == (None, None)


def _holding(folder: Path, words: str) -> list[str]:
    """Return the files that contain this text."""
    files = [file for file in folder.iterdir() if file.is_file()]
    return [file.name for file in files if words.encode() in file.read_bytes()]


@tool
async def read(path: str) -> str:
    """Read a file."""
    return f"{CANARY} result of {path} " * 4000


async def test_the_file_contains_no_readable_content(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    path = folder / "x.db"
    model = ScriptedModel([calls(("read", f'{{"path": "{CANARY}"}}'), text=CANARY), text(f"{CANARY} words")])
    store = encrypt_store(SQLiteStore(path), keys_in(folder))
    host = Host(Agent(model, tools=[read]), store)
    await host.start()
    await run_turn(host, "s", f"{CANARY} question")
    before = (await host.session("s")).state
    [line] = [info async for info in store.list()]
    assert line.mark.title == f"{CANARY} question"
    await store.kv_put("pool", "k", CANARY.encode(), expected=0, at=1.0)
    await Pruner(host, store, host.world, Retention(events_for_s=None, events_max=1)).sweep()
    await host.stop(grace_s=0.1)
    assert _holding(folder, CANARY) == []
    assert CANARY not in caplog.text

    again = Host(Agent(model, tools=[read]), encrypt_store(SQLiteStore(path), keys_in(folder)))
    await again.start()
    after = (await again.session("s")).state
    assert (after.history, after.turns) == (before.history, before.turns)
    [result] = [each for entry in after.history.entries for each in getattr(entry, "results", ())]
    whole = await again.store.blob("s", result.blob)
    assert whole is not None
    assert whole.startswith(CANARY.encode())
    await again.stop(grace_s=0.1)


async def _two_epochs(folder: Path) -> tuple[Memory, EncryptedStore]:
    memory = Memory()
    store = encrypt_store(MemoryStore(memory), keys_in(folder))
    await store.open()
    for number in range(2):
        epoch = await store.claim("s", at=1.0)
        bodies = [b'{"number":%d}' % each for each in range(3)]
        blobs = [Blob("d" * 64, b"large")]
        await store.append("s", Batch(bodies, expected=3 * number, epoch=epoch, sync=Sync.FULL, blobs=blobs))
    return memory, store


@pytest.mark.parametrize("what", ["moved", "swapped", "older", "taken out", "shortened", "plain", "key"])
async def test_moved_swapped_cut_or_inserted_rows_are_detected(folder: Path, what: str) -> None:
    memory, store = await _two_epochs(folder)
    found = memory.sessions["s"]
    rows = found.records
    match what:
        case "moved":
            rows[1] = replace(rows[1], body=rows[0].body)
        case "swapped":
            rows[4], rows[5] = replace(rows[4], body=rows[5].body), replace(rows[5], body=rows[4].body)
        case "older":
            rows[3] = replace(rows[3], epoch=rows[0].epoch)
        case "taken out":
            del rows[2]
        case "shortened":
            rows[2] = replace(rows[2], body=rows[2].body[:-1])
        case "plain":
            rows[2] = replace(rows[2], body=b'{"type":"delta"}')
        case _:
            one, other = [name for name in found.blobs if name.startswith("key-")]
            found.blobs[one], found.blobs[other] = found.blobs[other], found.blobs[one]
    again = encrypt_store(MemoryStore(memory), keys_in(folder))
    await again.open()
    with pytest.raises(StoreDamagedError):
        await again.read("s", after=0, limit=100)
    await store.close()


async def test_a_journal_cannot_be_moved_to_another_session(folder: Path) -> None:
    memory, store = await _two_epochs(folder)
    memory.sessions["t"] = memory.sessions["s"]
    with pytest.raises(StoreDamagedError):
        await store.read("t", after=0, limit=100)
    with pytest.raises(StoreDamagedError):
        await store.blob("t", "d" * 64)


async def test_without_the_operators_key_the_store_does_not_open(folder: Path) -> None:
    memory, _ = await _two_epochs(folder)
    stranger = encrypt_store(MemoryStore(memory), keys_in(folder, "others"))
    with pytest.raises(KeyMissingError, match="not the operator's keys of this store"):
        await stranger.open()


async def test_each_epoch_has_its_own_key_stored_with_its_first_append(folder: Path) -> None:
    memory, store = await _two_epochs(folder)
    names = [name for name in memory.sessions["s"].blobs if name.startswith("key-")]
    assert len(names) == 2
    assert [await store.blob("s", name) for name in names] == [None, None]
    ids = [row.body[1:9].hex() for row in memory.sessions["s"].records]
    assert ids == [names[0][4:]] * 3 + [names[1][4:]] * 3
    numbers = [row.body[9:17] for row in memory.sessions["s"].records]
    assert len(set(numbers[:3])) == len(set(numbers[3:])) == 3


async def test_a_refused_append_leaves_no_nonce_for_reuse(folder: Path) -> None:
    memory = Memory()
    failing = FailingStore(MemoryStore(memory), {1: StoreDamagedError("no")})
    store = encrypt_store(failing, keys_in(folder))
    await store.open()
    epoch = await store.claim("s", at=1.0)
    with pytest.raises(StoreDamagedError):
        await store.append("s", Batch([b"a", b"b"], expected=0, epoch=epoch, sync=Sync.FULL))
    await store.append("s", Batch([b"a"], expected=0, epoch=epoch, sync=Sync.FULL))
    [row] = memory.sessions["s"].records
    assert int.from_bytes(row.body[9:17]) == 4  # Two records and the seal used theirs.
    assert [each.body for each in await store.read("s", after=0, limit=9)] == [b"a"]


async def test_immediate_appends_are_encrypted_too(folder: Path) -> None:
    path = folder / "x.db"
    store = encrypt_store(SQLiteStore(path), keys_in(folder))
    await store.open()
    epoch = await store.claim("s", at=1.0)
    assert store.append_now("s", Batch([b"a word"], 0, epoch, Sync.NORMAL)) is None, "its key is not kept"
    await store.append("s", Batch([b"first"], expected=0, epoch=epoch, sync=Sync.FULL))
    assert store.append_now("s", Batch([b"a word"], 1, epoch, Sync.NORMAL)) == 2
    assert [each.body for each in await store.read("s", after=0, limit=9)] == [b"first", b"a word"]
    await store.close()
    assert _holding(folder, "a word") == []


async def test_records_from_before_encryption_are_readable_only_in_a_mixed_store(folder: Path) -> None:
    path = folder / "x.db"
    plain = SQLiteStore(path)
    await plain.open()
    epoch = await plain.claim("s", at=1.0)
    mark = SessionListing(is_live=False, at=1.0, title="before")
    await plain.append("s", Batch([b"{}"], expected=0, epoch=epoch, sync=Sync.FULL, mark=mark))
    await plain.close()
    strict = encrypt_store(SQLiteStore(path), keys_in(folder))
    mixed = encrypt_store(SQLiteStore(path), keys_in(folder), is_mixed=True)
    with pytest.raises(UsageError, match="unencrypted"):
        await strict.open()
    await mixed.open()
    epoch = await mixed.claim("s", at=2.0)
    await mixed.append("s", Batch([b"[]"], expected=1, epoch=epoch, sync=Sync.FULL))
    assert [each.body for each in await mixed.read("s", after=0, limit=9)] == [b"{}", b"[]"]
    found = await mixed.find("s")
    assert found is not None
    assert found.mark.title == "before"
    await mixed.close()


async def test_the_effect_of_a_tool_is_committed_with_its_encrypted_outcome(folder: Path) -> None:
    store = encrypt_store(SQLiteStore(folder / "x.db"), keys_in(folder))
    await store.open()
    epoch = await store.claim("s", at=1.0)
    await store.append("s", Batch([b"{}"], expected=0, epoch=epoch, sync=Sync.FULL))

    def work(attempt: Attempt) -> Batch:
        attempt(lambda transaction: transaction.execute("create table t (a)"), within_s=60.0)
        return Batch([CANARY.encode()], 1, epoch, Sync.FULL)

    assert (await store.append_within("s", work, expected=1, epoch=epoch)).bodies == [CANARY.encode()]
    assert (await store.read("s", after=1, limit=9)) == [StoredRecord(2, epoch, CANARY.encode())]
    await store.close()
    db = apsw.Connection(str(folder / "x.db"))
    assert CANARY.encode() not in b"".join(body for (body,) in db.execute("select body from record"))
    db.close()


async def test_keys_in_memory_are_limited_and_loaded_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encrypted_module, "KEYS_KNOWN_MAX", 1)
    _, store = await _two_epochs(folder)
    bodies = [each.body for each in await store.read("s", after=0, limit=9)]
    assert bodies == [b'{"number":%d}' % (each % 3) for each in range(6)]
    assert len(store._known) == 1


async def test_an_unreadable_command_affects_no_other(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory()
    plain, store = MemoryStore(memory), encrypt_store(MemoryStore(memory), keys_in(folder))
    await plain.open()
    await store.open()
    epoch = await store.claim("s", at=1.0)
    sending = asyncio.ensure_future(plain.forward("s", b"not encrypted"))
    await asyncio.sleep(0)
    news = await asyncio.wait_for(store.watch({}), 60)
    assert (news.forwarded_commands, epoch) == ((), 1)
    assert "was refused" in caplog.text
    sending.cancel()
