from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from midstream.engine import journal as journal_module
from midstream.engine.journal import FOLDED_SHARE, SESSION_BYTES, TAIL_RECORD_BYTES, Journal
from midstream.environment import Fault, World
from midstream.errors import (
    DrainingError,
    EventGoneError,
    JournalMovedError,
    LeaseLostError,
    RecordUndecodableError,
    StoreBusyError,
)
from midstream.history.messages import ToolResult
from midstream.protocol.frames import START, EventId
from midstream.session.records import (
    VERSION,
    CallEnded,
    EpochStarted,
    OutcomeDamaged,
    StepCommitted,
    Sync,
    encode,
)
from midstream.session.session import Session, prune_session
from midstream.store.contract import Batch, StoredRecord
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.store_fakes import StoreInFront
from tests.spec import spec


class NotingWorld(World):
    def __init__(self) -> None:
        self.reached: list[Fault] = []

    def reach(self, point: Fault) -> None:
        self.reached.append(point)


async def _open(store: MemoryStore, world: World | None = None) -> Journal:
    await store.open()
    journal = Journal(store, "s", world or World())
    assert await journal.load() == []
    await journal.claim(at=1.0)
    return journal


def _bodies(*numbers: int) -> Sequence[bytes]:
    return [encode(StepCommitted(1, number)) for number in numbers]


def _batch(journal: Journal, bodies: Sequence[bytes], sync: Sync) -> Batch:
    return Batch(bodies, journal.newest.position, journal.epoch, sync)


class RecordingStore(StoreInFront):
    """A store that records its operations."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(MemoryStore(memory))
        self.operations: list[str] = []

    async def before_operation(self, operation: str, session: str) -> None:
        self.operations.append(operation)


async def test_a_new_session_reads_only_the_marker_before_its_first_append() -> None:
    store = RecordingStore(Memory())
    await store.open()
    journal = Journal(store, "s", World(), is_new=True)
    assert await journal.load() == []
    journal.claim_soon(at=1.0)
    journal.claim_soon(at=1.0)
    assert await journal.claim(at=2.0) == 1
    assert journal.has_unused_claim
    await journal.append(_batch(journal, _bodies(1), Sync.FULL))
    assert (journal.is_new, journal.has_unused_claim) == (False, False)
    assert store.operations == ["open", "kv_get", "claim", "append"]
    await journal.release()
    assert await journal.claim(at=3.0) == 2, "from its first append on it is a session like any other"
    assert store.operations[4:] == ["release", "find", "kv_get", "claim"]


async def test_an_unused_early_claim_is_given_up() -> None:
    memory = Memory()
    store, other = RecordingStore(memory), MemoryStore(memory)
    await store.open()
    await other.open()
    journal = Journal(store, "s", World(), is_new=True)
    journal.claim_soon(at=1.0)
    await journal.release()
    assert await other.claim("s", at=2.0) == 2


@pytest.mark.parametrize("is_there", [False, True])
async def test_an_undone_early_claim_leaves_the_earlier_state(*, is_there: bool) -> None:
    memory = Memory()
    if is_there:
        await _open_and_append(memory)
    store = RecordingStore(memory)
    await store.open()
    journal = Journal(store, "s", World(), is_new=True)
    await journal.undo_claim()
    assert store.operations == ["open"]
    journal.claim_soon(at=1.0)
    await journal.undo_claim()
    found = await store.find("s")
    assert (found is not None) is is_there
    assert found is None or (found.is_free and found.end == 1)


async def test_a_refused_early_claim_is_tried_again() -> None:
    class Busy(RecordingStore):
        async def before_operation(self, operation: str, session: str) -> None:
            await super().before_operation(operation, session)
            if self.operations.count("claim") == 1 and operation == "claim":
                raise StoreBusyError("busy")

    store = Busy(Memory())
    await store.open()
    journal = Journal(store, "s", World(), is_new=True)
    journal.claim_soon(at=1.0)
    with pytest.raises(StoreBusyError):
        await journal.claim(at=1.0)
    assert await journal.claim(at=1.0) == 1


async def test_a_session_wrongly_considered_new_is_not_appended_to() -> None:
    memory = Memory()
    await _open_and_append(memory)
    store = RecordingStore(memory)
    await store.open()
    journal = Journal(store, "s", World(), is_new=True)
    await journal.claim(at=2.0)
    with pytest.raises(LeaseLostError):
        await journal.append(_batch(journal, _bodies(2), Sync.FULL))
    assert [stored.body for stored in await store.read("s", after=0, limit=9)] == _bodies(1)


async def _open_and_append(memory: Memory) -> None:
    before = await _open(MemoryStore(memory))
    await before.append(_batch(before, _bodies(1), Sync.FULL))
    await before.release()


async def test_readers_are_woken_after_the_append_and_not_before() -> None:
    world = NotingWorld()
    journal = await _open(MemoryStore(), world)
    waiting = asyncio.ensure_future(journal.wait(0))
    await asyncio.sleep(0)
    await journal.append(_batch(journal, _bodies(1, 2), Sync.FULL))
    async with asyncio.timeout(60):
        await waiting
    assert [stored.position for stored in await journal.read(after=0, limit=10)] == [1, 2]
    assert world.reached[-3:] == [Fault.BEFORE_APPEND, Fault.AFTER_APPEND, Fault.AFTER_PUBLISH]


async def test_a_reader_far_behind_reads_pages_from_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "TAIL_RECORDS_MAX", 4)
    journal = await _open(MemoryStore())
    for number in range(20):
        await journal.append(_batch(journal, _bodies(number), Sync.NORMAL))
    seen: list[int] = []
    while page := await journal.read(after=seen[-1] if seen else 0, limit=7):
        seen.extend(stored.position for stored in page)
    assert seen == list(range(1, 21))


@pytest.mark.parametrize(("bytes_max", "held_max"), [(10_000, 12_000), (3000, 3000), (0, 2000)])
async def test_the_records_in_memory_are_limited_in_bytes(bytes_max: int, held_max: int) -> None:
    store = MemoryStore()
    await store.open()
    journal = Journal(store, "s", World(), tail_bytes_max=bytes_max)
    await journal.claim(at=1.0)
    for number in range(1, 41):
        await journal.append(_batch(journal, [b"x" * (50 * number)], Sync.NORMAL))
        held = journal.near(after=journal.newest.position - 1, limit=1)
        assert [each.position for each in held] == [number], "the newest one is at hand"
        assert sum(len(each.body) for each in journal._tail) == journal._tail_bytes <= held_max
        folded = sum(50 * each for each in range(1, number + 1))
        tail = journal._tail_bytes + TAIL_RECORD_BYTES * len(journal._tail)
        assert journal.bytes_held == SESSION_BYTES + FOLDED_SHARE * folded + tail
        assert await journal.epoch_at(1) == 1
    seen: list[int] = []
    while page := await journal.read(after=seen[-1] if seen else 0, limit=7):
        seen.extend(stored.position for stored in page)
    assert seen == list(range(1, 41))
    again = Journal(store, "s", World(), tail_bytes_max=bytes_max)
    with pytest.raises(RecordUndecodableError):
        await again.load()
    assert again._tail_bytes == 0


async def test_readers_that_leave_a_silent_session_leave_nothing_behind() -> None:
    store = MemoryStore()
    await store.open()
    journal = Journal(store, "s", World())
    for _ in range(100):
        reading = asyncio.ensure_future(journal.wait(0))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
    assert not journal._waiting


async def test_a_closed_journal_ends_its_waiters_with_the_reason() -> None:
    journal = await _open(MemoryStore())
    waiting = asyncio.ensure_future(journal.wait(0))
    await asyncio.sleep(0)
    journal.close(DrainingError("bye"))
    with pytest.raises(DrainingError):
        await waiting
    with pytest.raises(DrainingError):
        await journal.wait(0)


async def test_a_record_of_a_newer_version_is_reported_with_its_position() -> None:
    store = MemoryStore()
    journal = await _open(store)
    await journal.append(_batch(journal, [b'{"type":"from_the_future"}'], Sync.FULL))
    with pytest.raises(RecordUndecodableError, match="record 1 of session 's'"):
        await Journal(store, "s", World()).load()


@spec("TURN-72")
async def test_a_damaged_outcome_affects_only_itself_and_readers_are_informed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "TAIL_RECORDS_MAX", 1)
    store = MemoryStore()
    journal = await _open(store)
    damaged = encode(CallEnded(1, 1, ToolResult("a", "x"), 1.0))[:-1]
    lost = OutcomeDamaged(1, 1, "a")
    await journal.append(_batch(journal, [damaged, *_bodies(1, 2, 3, 4)], Sync.FULL))
    again = Journal(store, "s", World())
    records = await again.load()
    assert records[0] == (1, lost)
    assert len(records) == 5
    assert "record 1 of session 's' is damaged" in caplog.text
    assert (await again.read(after=0, limit=10))[0].body == encode(lost)


@spec("TURN-72")
async def test_an_outcome_of_a_newer_version_is_refused_and_not_treated_as_damaged() -> None:
    store = MemoryStore()
    journal = await _open(store)
    newer = encode(EpochStarted(1, "o", 1.0, version=VERSION + 1))
    strange = encode(CallEnded(1, 1, ToolResult("a", "x"), 1.0)).replace(b'"content":"x"', b'"content":["x"]')
    await journal.append(_batch(journal, [newer, strange], Sync.FULL))
    with pytest.raises(RecordUndecodableError, match="record 2 of session 's'"):
        await Journal(store, "s", World()).load()


class _YieldingStore(MemoryStore):
    """Lets other tasks run before it returns the following records."""

    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        await asyncio.sleep(0)
        return await super().read(session, after=after, limit=limit)


async def test_a_reader_cancelled_during_a_read_loses_no_records() -> None:
    memory = Memory()
    theirs = await _open(MemoryStore(memory))
    store = _YieldingStore(memory)
    await store.open()
    for steps in range(10):
        ours = Journal(store, "s", World())
        before = len(await ours.load())
        await theirs.append(_batch(theirs, _bodies(1, 2), Sync.FULL))
        loading = asyncio.ensure_future(ours.catch_up())
        for _ in range(steps):
            await asyncio.sleep(0)
        loading.cancel()
        await asyncio.wait([loading])
        found = [] if loading.cancelled() else loading.result()
        assert ours.newest.position == before + len(found), f"cancelled after {steps} steps"
        assert len(found) + len(await ours.catch_up()) == 2


async def _prune(store: MemoryStore, position: int, *, epoch: int = 1) -> None:
    body = encode(prune_session(Session(position=position, epoch=epoch, turns=1), at=1.0))
    assert await store.prune("s", body, position=position, epoch=epoch)


async def _gone(journal: Journal, *, after: int) -> int:
    with pytest.raises(EventGoneError) as gone:
        await journal.read(after=after, limit=10)
    return gone.value.oldest


@spec("STREAM-63")
async def test_a_reader_behind_pruned_records_is_informed_and_one_at_the_end_is_not() -> None:
    memory = Memory()
    store = MemoryStore(memory)
    writer = await _open(store)
    await writer.append(_batch(writer, _bodies(*range(10)), Sync.NORMAL))
    await _prune(store, 6)

    journal = Journal(store, "s", World())
    records = await journal.load()
    assert (len(records), journal.newest, journal.pruned_to) == (5, EventId(1, 10), EventId(1, 6))
    assert await journal.beginning() == (EventId(1, 6), Session(position=6, epoch=1, turns=1))
    assert [stored.position for stored in await journal.read(after=6, limit=2)] == [7, 8]
    assert [await _gone(journal, after=after) for after in (0, 3, 5)] == [7, 7, 7]
    assert [await journal.epoch_at(place) for place in (1, 5, 6, 7, 10, 11)] == [None, None, 1, 1, 1, None]
    assert [stored.position for stored in await writer.read(after=0, limit=3)] == [1, 2, 3], "from memory"


@spec("STREAM-63")
async def test_a_completely_pruned_journal_has_only_its_beginning() -> None:
    store = MemoryStore()
    writer = await _open(store)
    assert await writer.beginning() == (START, Session())
    await writer.append(_batch(writer, _bodies(1, 2, 3), Sync.NORMAL))
    assert await writer.beginning() == (START, Session())
    await _prune(store, 3)
    journal = Journal(store, "s", World())
    await journal.load()
    assert await _gone(journal, after=0) == 4
    assert (await journal.read(after=3, limit=9), journal.newest) == ((), EventId(1, 3))
    journal.epoch = writer.epoch
    await journal.append(_batch(journal, _bodies(4), Sync.NORMAL))
    assert [stored.position for stored in await journal.read(after=3, limit=9)] == [4]
    assert await journal.epoch_at(3) == 1


@spec("STREAM-60")
async def test_a_follower_behind_pruned_records_continues_from_the_remaining_beginning() -> None:
    memory = Memory()
    here, there = MemoryStore(memory), MemoryStore(memory)
    writer = await _open(here)
    await writer.append(_batch(writer, _bodies(1, 2), Sync.NORMAL))
    await there.open()
    follower = Journal(there, "s", World())
    await follower.load()
    await writer.claim(at=2.0)
    await writer.append(_batch(writer, _bodies(3, 4, 5), Sync.NORMAL))
    await _prune(here, 4, epoch=2)
    [(_, begins), (_, last)] = await follower.catch_up()
    assert (type(begins).__name__, last) == ("JournalPruned", StepCommitted(1, 5))
    assert (follower.newest, follower.pruned_to) == (EventId(2, 5), EventId(2, 4))
    assert [stored.position for stored in await follower.read(after=4, limit=9)] == [5]
    assert await _gone(follower, after=2) == 5
    await here.delete("s")
    with pytest.raises(JournalMovedError):
        await follower.catch_up()


async def test_records_pruned_between_two_pages_are_folded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "PAGE_RECORDS", 2)

    class Pruning(MemoryStore):
        async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
            if after == 4:
                await _prune(self, 7)
            return await super().read(session, after=after, limit=limit)

    store = Pruning()
    writer = await _open(store)
    await writer.append(_batch(writer, _bodies(*range(9)), Sync.NORMAL))
    journal = Journal(store, "s", World())
    records = await journal.load()
    assert [type(record).__name__ for _, record in records] == ["JournalPruned"] + 2 * ["StepCommitted"]
    assert [stored.position for stored in await journal.read(after=7, limit=9)] == [8, 9]
