"""A guarded store is a store: it passes the same suite. Changes by another program are detected by the next reader."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import apsw
import pytest
from msgspec.structs import replace
from typing_extensions import override

from midstream.engine.agent import Agent
from midstream.engine.call_cache import CallBook
from midstream.engine.driven_sessions import Driver
from midstream.engine.host import Host
from midstream.engine.pruning import Pruner
from midstream.environment import World
from midstream.errors import EventsLostError, KeyMissingError, StoreDamagedError, UnavailableError, UsageError
from midstream.history.messages import UserMessage
from midstream.session.blobs import Blob, blob_of
from midstream.session.records import Sync
from midstream.session.retention import Retention
from midstream.store.contract import Batch, ForwardedCommand, KeyValueEntry, Store, StoredRecord, StoreReader
from midstream.store.encryption.encrypted_store import encrypt_store
from midstream.store.guard import guarded_store
from midstream.store.guard.append_reads import CheckedPage, read_checked
from midstream.store.guard.chain import COVERED, ChainKeys
from midstream.store.guard.guarded_store import GuardedStore, guard_store
from midstream.store.guard.store_key import FileKeySource
from midstream.store.memory import Memory, MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing import ScriptedModel, run_turn, text
from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage, open_store
from tests.engine.test_host import SlowTo
from tests.spec import spec
from tests.store.keys import keys_in


class GuardedFile:
    """A file, without the check of large results: the suite uses invented digests."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "x.db"

    def store(self) -> Store:
        inner = SQLiteStore(self.path)
        source = FileKeySource(inner.key_file, World())
        return GuardedStore(inner, source, is_plain=False, world=World())

    def kill(self, store: Store) -> None:
        assert isinstance(store, GuardedStore)
        assert isinstance(store._store, SQLiteStore)
        assert store._store._opened is not None
        store._store._opened.lock.drop()


class TestGuardedFile(StoreContract):
    @pytest.fixture
    def place(self, folder: Path) -> Storage:
        return GuardedFile(folder)


class GuardedMemory:
    def __init__(self, folder: Path) -> None:
        self.memory = Memory()
        self._key = folder / "key"

    def store(self) -> GuardedStore:
        source = FileKeySource(self._key, World())
        return GuardedStore(MemoryStore(self.memory), source, is_plain=True, world=World())

    def kill(self, store: Store) -> None:
        self.memory.kill(store.node)

    @property
    def records(self) -> list[StoredRecord]:
        return self.memory.sessions["s"].records


class SameFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def store(self) -> Store:
        return guard_store(SQLiteStore(self._path))

    def kill(self, store: Store) -> None:
        raise AssertionError("no node of this file is killed")


async def append(store: Store, *bodies: bytes, expected: int, epoch: int) -> None:
    await store.append("s", Batch(bodies, expected, epoch, Sync.FULL))


@pytest.fixture
async def place(folder: Path) -> GuardedMemory:
    """Return a place with a journal of two epochs, 1 to 3 and 4 to 6."""
    place = GuardedMemory(folder)
    for expected in (0, 3):
        async with open_store(place) as store:
            epoch = await store.claim("s", at=1.0)
            await append(store, b"1", b"2", b"3", expected=expected, epoch=epoch)
    return place


async def read_bodies(place: GuardedMemory, after: int = 0, limit: int = 100) -> list[bytes]:
    async with open_store(place) as store:
        return [each.body for each in await store.read("s", after=after, limit=limit)]


def test_only_a_store_that_other_programs_can_write_to_is_guarded(folder: Path) -> None:
    memory, file = MemoryStore(), SQLiteStore(folder / "x.db")
    assert guard_store(memory) is memory
    guarded = guard_store(file)
    assert isinstance(guarded, GuardedStore)
    assert guard_store(guarded) is guarded


@spec("SEC-43")
@pytest.mark.parametrize("number", range(6))
async def test_a_changed_record_is_refused_from_any_start_of_the_read(
    place: GuardedMemory, number: int
) -> None:
    place.records[number] = replace(place.records[number], body=b"x")
    end = 3 if number < 3 else 6
    for after in range(end):
        with pytest.raises(
            StoreDamagedError, match=f"the append of records {end - 2} to {end} of session 's'"
        ):
            await read_bodies(place, after)
    assert len(await read_bodies(place, end)) == 6 - end


@spec("SEC-43")
@pytest.mark.parametrize("is_appended", [False, True])
@pytest.mark.parametrize("first", range(3, 6))
async def test_a_read_from_the_middle_or_an_append_does_not_hide_an_earlier_change(
    place: GuardedMemory, first: int, *, is_appended: bool
) -> None:
    place.records[1] = replace(place.records[1], body=b"x")
    async with open_store(place) as store:
        if is_appended:
            epoch = await store.claim("s", at=2.0)
            await append(store, b"7", expected=6, epoch=epoch)
        later = await store.read("s", after=first, limit=100)
        assert [each.position for each in later] == [*range(first + 1, 8 if is_appended else 7)]
        for after in range(3):
            with pytest.raises(StoreDamagedError, match="records 1 to 3"):
                await store.read("s", after=after, limit=100)


@spec("SEC-43")
async def test_ranges_that_were_read_separately_are_checked_once_they_meet(
    place: GuardedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []

    async def counted(
        reader: StoreReader, keys: ChainKeys, session: str, *, after: int, limit: int
    ) -> CheckedPage | None:
        checks.append(after)
        return await read_checked(reader, keys, session, after=after, limit=limit)

    monkeypatch.setattr(guarded_store, "read_checked", counted)
    async with open_store(place) as store:
        for after, limit in ((5, 1), (0, 3), (3, 3), (0, 3), (0, 100), (4, 100)):
            await store.read("s", after=after, limit=limit)
    assert checks == [5, 0, 3, 0]


@spec("SEC-43")
async def test_a_page_of_any_size_and_start_is_checked_with_its_whole_appends(
    place: GuardedMemory,
) -> None:
    bodies = [each.body for each in place.records]
    for after in range(6):
        for limit in range(1, 8):
            async with open_store(place) as store:
                found: list[bytes] = []
                while page := await store.read("s", after=after + len(found), limit=limit):
                    assert len(page) <= limit
                    found += [each.body for each in page]
            assert found == bodies[after:]
    await _append_after(place, 6, *[b"%d" % number for number in range(40)])
    place.records[-1] = replace(place.records[-1], body=b"x")
    assert await read_bodies(place, 0, 7) == bodies
    for after, limit in ((6, 1), (20, 1), (45, 1)):
        with pytest.raises(StoreDamagedError, match="records 7 to 46"):
            await read_bodies(place, after, limit)


@spec("SEC-43")
async def test_a_cut_append_is_refused_also_at_the_end_of_a_journal(place: GuardedMemory) -> None:
    del place.records[5]
    assert await read_bodies(place, 0, 5) == [b"1", b"2", b"3"]
    for after in (3, 4):
        with pytest.raises(StoreDamagedError, match="an append was cut"):
            await read_bodies(place, after)
    del place.records[3:]
    assert await read_bodies(place) == [b"1", b"2", b"3"]


@spec("SEC-43", "STREAM-99")
async def test_records_appended_inserted_or_removed_by_others_are_refused(
    place: GuardedMemory, caplog: pytest.LogCaptureFixture
) -> None:
    whole = [*place.records]
    for link in (b"", COVERED):
        place.records[6:] = [StoredRecord(7, 2, b"forged", link)]
        with pytest.raises(StoreDamagedError, match="has no link"):
            await read_bodies(place, 6)
    place.records[-1] = StoredRecord(7, 2, b"forged", whole[-1].link)
    with pytest.raises(StoreDamagedError, match="changed, moved or inserted"):
        await read_bodies(place, 6)
    for cut in (whole[1:], [*whole[:2], *whole[3:]]):
        place.records[:] = cut
        with pytest.raises(EventsLostError, match="was removed"):
            await read_bodies(place)
    assert [each.levelno for each in caplog.records] == [logging.ERROR] * 5


@spec("SEC-43")
async def test_a_record_of_a_rolled_back_timeline_is_refused(folder: Path) -> None:
    place = GuardedMemory(folder)
    async with open_store(place) as store:
        epoch = await store.claim("s", at=1.0)
        await append(store, b"1", b"2", expected=0, epoch=epoch)
        session = place.memory.sessions["s"]
        before = (session.epoch, [*session.records])
        await append(store, b"3 of the first", b"4 of the first", expected=2, epoch=epoch)
    first = [*place.records]
    session.epoch, session.records[:] = before
    async with open_store(place) as store:
        session.epoch -= 1  # As if the store had been set back before the claim.
        epoch = await store.claim("s", at=2.0)
        await append(store, b"3 of the second", b"4 of the second", expected=2, epoch=epoch)
    assert await read_bodies(place) == [b"1", b"2", b"3 of the second", b"4 of the second"]
    for number in (2, 3):
        spliced = [*place.records]
        spliced[number] = first[number]
        kept, place.records[:] = [*place.records], spliced
        with pytest.raises(StoreDamagedError):
            await read_bodies(place)
        place.records[:] = kept


@spec("SEC-43")
async def test_a_session_begun_again_is_read_also_where_the_old_one_was_cached(folder: Path) -> None:
    place = GuardedMemory(folder)
    async with open_store(place) as store, open_store(place) as reader:
        for bodies in ((b"1", b"2"), (b"a", b"b")):
            epoch = await store.claim("s", at=1.0)
            await append(store, *bodies, expected=0, epoch=epoch)
            assert [each.body for each in await reader.read("s", after=0, limit=9)] == [*bodies]
            await append(store, b"3", expected=2, epoch=epoch)
            assert [each.body for each in await reader.read("s", after=2, limit=9)] == [b"3"]
            await store.delete("s")


@spec("SEC-44")
async def test_pruning_leaves_the_later_links_unchanged(place: GuardedMemory) -> None:
    links = [each.link for each in place.records]
    async with open_store(place) as store:
        assert await store.prune("s", b"fold", position=4, epoch=2)
        assert not await store.prune("s", b"fold", position=3, epoch=1)
    assert await read_bodies(place) == [b"fold", b"2", b"3"]
    assert [each.link for each in place.records[1:]] == links[4:]
    async with open_store(place) as store:
        assert await store.prune("s", b"fold again", position=5, epoch=2)
        assert await store.prune("s", b"fold once more", position=5, epoch=2)
    assert await read_bodies(place) == [b"fold once more", b"3"]
    for after in (0, 4, 5):
        assert (await read_bodies(place, after))[-1:] == [b"3"]
    records = [*place.records]
    for number, where in ((0, "record 5"), (1, "record 6")):
        place.records[:] = records
        place.records[number] = replace(place.records[number], body=b"x")
        with pytest.raises(StoreDamagedError, match=where):
            await read_bodies(place)
    place.records[:] = records
    async with open_store(place) as store:
        assert await store.prune("s", b"fold of all", position=6, epoch=2)
    await _append_after(place, 6, b"7")
    assert await read_bodies(place) == [b"fold of all", b"7"]


async def _append_after(place: GuardedMemory, end: int, *bodies: bytes) -> None:
    async with open_store(place) as store:
        epoch = await store.claim("s", at=1.0)
        await append(store, *bodies, expected=end, epoch=epoch)


@spec("SEC-44")
@pytest.mark.parametrize("number", [3, 4, 5])
async def test_pruning_within_a_changed_append_is_refused(place: GuardedMemory, number: int) -> None:
    """Otherwise the link of the fold would authenticate the change."""
    place.records[number] = replace(place.records[number], body=b"x")
    async with open_store(place) as store:
        with pytest.raises(StoreDamagedError):
            await store.prune("s", b"fold", position=4, epoch=2)
    assert len(place.records) == 6


@spec("SEC-51")
async def test_a_changed_large_result_is_refused(folder: Path) -> None:
    place, blob = GuardedMemory(folder), blob_of("large")
    async with open_store(place) as store:
        epoch = await store.claim("s", at=1.0)
        await store.append("s", Batch([b"1"], 0, epoch, Sync.FULL, blobs=[blob]))
        assert await store.blob("s", blob.digest) == b"large"
        place.memory.sessions["s"].blobs[blob.digest] = b"forged"
        with pytest.raises(StoreDamagedError, match="was changed"):
            await store.blob("s", blob.digest)
        assert await store.blob("s", "0" * 64) is None
        await store.append("s", Batch([b"2"], 1, epoch, Sync.FULL, blobs=[Blob("not a digest", b"x")]))
        assert await store.blob("s", "not a digest") == b"x"


@spec("SEC-48", "SEC-49")
async def test_a_forged_command_is_removed_and_the_next_one_delivered(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = GuardedMemory(folder)
    node, sender = place.store(), place.store()
    async with contextlib.AsyncExitStack() as closing:
        for each in (node, sender):
            await each.open()
            closing.push_async_callback(each.close)
        epoch = await node.claim("s", at=1.0)
        await append(node, b"1", expected=0, epoch=epoch)
        forging = asyncio.ensure_future(sender._store.forward("s", b"approve"))
        await asyncio.sleep(0)
        sending = asyncio.ensure_future(sender.forward("s", b"say hi"))
        delivered: list[ForwardedCommand] = []
        while not delivered:
            delivered = [*(await asyncio.wait_for(node.watch({}), 60)).forwarded_commands]
        assert [each.body for each in delivered] == [b"say hi"]
        assert "no node of this store sealed it" in caplog.text
        assert await asyncio.wait_for(forging, 60) == b""
        await node.answer(delivered[0].number, b"done")
        assert await asyncio.wait_for(sending, 60) == b"done"
        sending = asyncio.ensure_future(sender.forward("s", b"say hi"))
        delivered = []
        while not delivered:
            delivered = [*(await asyncio.wait_for(node.watch({}), 60)).forwarded_commands]
        await node._store.answer(delivered[0].number, b'{"position":7}')
        with pytest.raises(UnavailableError, match="not authentic"):
            await asyncio.wait_for(sending, 60)


async def test_a_guarded_store_that_is_not_open_raises_a_usage_error(folder: Path) -> None:
    store = GuardedMemory(folder).store()
    with pytest.raises(UsageError, match="not open"):
        await store.forward("s", b"")
    with pytest.raises(UsageError, match="not open"):
        _ = store.chain_keys


@spec("SEC-45", "SEC-54")
async def test_a_file_of_the_older_schema_continues_with_a_chain(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    path = folder / "x.db"
    old = SQLiteStore(path)
    await old.open()
    epoch = await old.claim("s", at=1.0)
    await append(old, b"1", b"2", expected=0, epoch=epoch)
    await old.close()
    with apsw.Connection(str(path)) as db:
        db.execute("drop view journal; alter table record drop column link; drop index session_changed")
        db.execute("pragma user_version = 1")
    db.close()
    store = guard_store(SQLiteStore(path))
    assert isinstance(store, GuardedStore)
    await store.open()
    assert "not authenticated" in caplog.text
    epoch = await store.claim("s", at=2.0)
    await append(store, b"3", expected=2, epoch=epoch)
    assert len(await store.read("s", after=0, limit=9)) == 3
    found = await store._store.read("s", after=0, limit=9)
    assert [(each.body, bool(each.link)) for each in found] == [(b"1", False), (b"2", False), (b"3", True)]
    assert await store.prune("s", b"fold", position=1, epoch=1)
    await store.close()
    async with open_store(SameFile(path)) as again:
        found = await again.read("s", after=0, limit=9)
    assert [each.body for each in found] == [b"fold", b"2", b"3"]


@spec("SEC-43", "SEC-44")
async def test_a_host_continues_a_pruned_journal_of_a_guarded_file(folder: Path) -> None:
    path = folder / "x.db"
    model = ScriptedModel([text(f"answer {number}") for number in range(9)])
    for number in range(3):
        async with Host(Agent(model), path) as host:
            assert isinstance(host.store, GuardedStore)
            await run_turn(host, "s", f"question {number}")
            retention = Retention(events_for_s=None, events_max=1)
            await Pruner(host, host.store, host.world, retention).sweep()
            assert (await host.session("s")).state.turns == number + 1
    assert path.with_name("x.db.store-key").exists()


@spec("SEC-40")
async def test_an_encrypted_store_does_not_open_without_keys(folder: Path) -> None:
    path = folder / "x.db"
    plain = SQLiteStore(path)
    await plain.open()
    epoch = await plain.claim("s", at=1.0)
    await append(plain, b"\x01 encrypted before there were markers", expected=0, epoch=epoch)
    await plain.close()
    with pytest.raises(KeyMissingError, match="--key-file"):
        await guard_store(SQLiteStore(path)).open()
    assert not path.with_name("x.db.store-key").exists()


@spec("SEC-40")
async def test_a_host_without_keys_refuses_an_encrypted_store_that_has_no_guard(folder: Path) -> None:
    memory = Memory()  # as a database without `store_key`
    encrypted = encrypt_store(MemoryStore(memory), keys_in(folder))
    async with Host(Agent(ScriptedModel([text("hello")])), encrypted) as host:
        await run_turn(host, "s", "question")
    ways = (
        Host(Agent(ScriptedModel([])), MemoryStore(memory)).start(),
        Driver("a framework", MemoryStore(memory)).open(),
        CallBook("a framework", MemoryStore(memory)).begin_run("s"),
    )
    for opening in ways:
        with pytest.raises(KeyMissingError, match="--key-file"):
            await opening
    async with Host(Agent(ScriptedModel([text("again")])), encrypted) as host:
        await run_turn(host, "s", "question")


@spec("SEC-40")
@pytest.mark.parametrize("is_file", [False, True])
async def test_a_running_host_without_keys_writes_nothing_after_the_store_was_marked(
    folder: Path, *, is_file: bool
) -> None:
    memory = Memory()

    def store() -> Store:
        return SQLiteStore(folder / "x.db") if is_file else MemoryStore(memory)

    plain = Host(Agent(ScriptedModel([text("in plain text")])), store())
    driver = Driver("a framework", store())
    await plain.start()
    await driver.open()
    encrypted = encrypt_store(store(), keys_in(folder))
    async with Host(Agent(ScriptedModel([text("hello"), text("again")])), encrypted) as host:
        with pytest.raises(KeyMissingError, match="--key-file"):
            await run_turn(plain, "s", "question")
        with pytest.raises(KeyMissingError, match="--key-file"):
            await driver.begin("driven", UserMessage.of("question"))
        await run_turn(host, "s", "question")
        await run_turn(host, "s", "question")
        assert [line.session async for line in host.store.list()] == ["s"]
    await plain.stop()
    await driver.close()


class ReadLate(MemoryStore):
    """A store that returns its reads after a gate has opened."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.gate = asyncio.Event()

    @override
    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        found = await super().kv_get(namespace, key)
        await self.gate.wait()
        return found

    @override
    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        found = await super().kv_list(namespace)
        await self.gate.wait()
        return found


@spec("SEC-50")
async def test_an_entry_replaced_during_its_read_is_not_damage(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = ReadLate(Memory())
    source = FileKeySource(folder / "key", World())
    store = GuardedStore(inner, source, is_plain=True, world=World())
    await store.open()
    version = await store.kv_put("n", "a", b"old", expected=0, at=1.0)
    getting = asyncio.create_task(store.kv_get("n", "a"))
    listing = asyncio.create_task(store.kv_list("n"))
    await asyncio.sleep(0)  # Both have read.
    await store.kv_put("n", "a", b"new", expected=version, at=2.0)
    inner.gate.set()
    one, several = await getting, await listing
    assert one is not None
    assert [one.body, *(each.body for each in several)] == [b"old", b"old"]
    assert "left out" not in caplog.text
    newest = await store.kv_get("n", "a")
    assert newest is not None
    assert newest.body == b"new"
    await store.close()


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_cancelled_open_leaves_the_store_behind_closed(tmp_path: Path, *, is_encrypted: bool) -> None:
    behind = SQLiteStore(tmp_path / "x.db")
    slow = SlowTo("kv_get" if is_encrypted else "list", behind)
    store = encrypt_store(slow, keys_in(tmp_path)) if is_encrypted else guard_store(slow)
    opening = asyncio.create_task(store.open())
    async with asyncio.timeout(60):
        await slow.was_called.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert behind.node == ""
