"""One session's journal as this process sees it: appends, the tail in memory, and who waits for more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

from msgspec.structs import replace

from midstream.environment import Fault, World
from midstream.errors import (
    EventGoneError,
    JournalMovedError,
    LeaseHeldError,
    LeaseLostError,
    MidstreamError,
    RecordUndecodableError,
    StoreBusyError,
    UsageError,
)
from midstream.observability.observers import Observers
from midstream.protocol.frames import START, EventId
from midstream.protocol.stream_settings import TAIL_BYTES
from midstream.session.journal_reading import JournalReader
from midstream.session.records import JournalPruned, OutcomeDamaged, Record, encode, is_pruned
from midstream.session.session import Session, restore_session
from midstream.store.contract import Attempt, Batch, SessionInfo, Store, StoredRecord

TAIL_RECORDS_MAX = 4096
"""Newest records kept in memory for the readers at the tail; others read pages from the store."""
SESSION_BYTES = 12 * 1024
"""Bytes that an awake session with an empty journal costs."""
TAIL_RECORD_BYTES = 120
"""Bytes that a record in memory costs besides its body."""
FOLDED_SHARE = 1
"""Bytes of folded state for each byte of the journal."""
PAGE_RECORDS = 1000
"""Records read at once when a journal is folded or a reader is far behind."""
CLAIMS_MAX = 10
"""Claims of a session that other nodes claim, give up or delete at the same moment."""

_log = logging.getLogger(__name__)

_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


def require_session_id(session_id: str) -> None:
    """Refuse what no session can be called.

    Raises:
        UsageError: The id is not 1 to 128 of letters, digits and `._:-`.
    """
    if not _SESSION_ID.fullmatch(session_id):
        raise UsageError(f"a session id has 1 to 128 of letters, digits and '._:-'; got {session_id[:40]!r}")


class Journal:
    """Append to a session's journal and let readers follow it. Readers are positions, never queues.

    Args:
        store, session_id: Where it lies.
        world: Clock and fault points.
        observers: Notified of appends.
        tail_bytes_max: Bytes of the newest records that are kept in memory, the last one besides.
        is_new: Its name was drawn at random just now, so that no other process has it: nothing of it is read before the
            first append, which fails where there are records after all.
    """

    def __init__(
        self,
        store: Store,
        session_id: str,
        world: World,
        observers: Observers | None = None,
        *,
        tail_bytes_max: int = TAIL_BYTES,
        is_new: bool = False,
    ) -> None:
        self.session_id = session_id
        self.newest = START
        self.pruned_to = START
        """The last event that was pruned, as far as is known here: what follows it can be read."""
        self.epoch = 0
        """The epoch this process writes under; 0 while it has not claimed the session."""
        self.is_handed_over = False
        """Whether the last node had given the session up before it was claimed here."""
        self.is_new = is_new
        """Whether nothing was appended to a session that no other process knows."""
        self._claiming: _Claim | None = None
        """The claim by which this process has the lease, or may have it: it is under way, or its outcome unknown."""
        self._cut_claim: SessionInfo | None = None
        """The line of a session that was given up, from before a claim that has not returned."""
        self.held_at = -math.inf
        """When it was last certain that this process owns the session, on its own clock."""
        self._store = store
        self._world = world
        self._observers = observers
        self._reader = JournalReader()
        self._damaged: dict[int, StoredRecord] = {}
        """What stands for outcomes that cannot be read any more, by position."""
        self._tail: list[StoredRecord] = []
        self._tail_bytes = 0
        self._tail_bytes_max = tail_bytes_max
        self.bytes_held = SESSION_BYTES
        """Bytes of memory that this session costs, estimated: its tail, and what its records fold to."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Who waits; who waits longest is woken first."""
        self.ended: MidstreamError | None = None
        """What it was closed with here."""

    async def load(self) -> list[tuple[int, Record]]:
        """Read what follows the newest record known here, at first everything; return it with its epochs.

        Of a pruned journal, or one pruned beyond what is known here, a `JournalPruned` comes first. Nothing is claimed.
        All of it is known here, or after an error or a cancellation nothing of it.

        Raises:
            RecordUndecodableError: A record of a newer version, or damage; names session and position. An outcome of a
                call that is damaged costs only itself: a warning, and `OutcomeDamaged` in its place.
        """
        if self.is_new:
            return []
        found: list[StoredRecord] = []
        records: list[tuple[int, Record]] = []
        end = self.newest.position
        while page := await self._store.read(self.session_id, after=end, limit=PAGE_RECORDS):
            if is_pruned(page[0].body):  # also between two pages: it begins anew
                records.clear()
                found.clear()
            records.extend(self._decode_page(page))
            found.extend(page)
            end = page[-1].position
        if found:  # a reader that left during the query must not take with it what is not folded yet
            self._cache_records(self._readable(found))
            self._wake()
        return records

    async def catch_up(self) -> list[tuple[int, Record]]:
        """Return what other nodes appended since `load`; call it under a new claim, so that there is no more.

        Raises:
            JournalMovedError: The session was deleted meanwhile: what is known of it here is void.
            LeaseLostError: A crash of the database lost the last records that are known here.
            RecordUndecodableError: See `load`.
        """
        known = self.newest
        if known.position:
            found = await self._store.read(self.session_id, after=known.position - 1, limit=1)
            is_pruned_further = bool(found) and found[0].position > known.position
            if not is_pruned_further and (not found or found[0].epoch != known.epoch):
                raise await self.find_loss()
        return await self.load()

    async def find_loss(self) -> JournalMovedError | LeaseLostError:
        """Return why the store does not have the records that are known here.

        A session that was deleted and made anew begins above all epochs of before. Any other one that is there was set
        back by a crash of the database: it continues, and clients that reconnect receive `gone`.
        """
        first = await self._store.read(self.session_id, after=0, limit=1)
        if first and first[0].epoch <= self.newest.epoch:
            return self._set_back_error()
        return self._deletion_error()

    def _set_back_error(self) -> LeaseLostError:
        return LeaseLostError(f"the last records of session {self.session_id!r} were lost by its database")

    def _deletion_error(self) -> JournalMovedError:
        return JournalMovedError(f"session {self.session_id!r} was deleted elsewhere")

    def _decode_page(self, page: Sequence[StoredRecord]) -> Iterator[tuple[int, Record]]:
        for stored in page:
            place = f"record {stored.position} of session {self.session_id!r}"
            try:
                record = self._reader.read(stored.body)
            except RecordUndecodableError as error:
                raise RecordUndecodableError(f"{place}: {error.message}") from error
            if isinstance(record, OutcomeDamaged):
                _log.warning("%s is damaged: the outcome of a call is lost", place)
                self._damaged[stored.position] = replace(stored, body=encode(record))
            yield stored.epoch, record

    def _readable(self, page: Sequence[StoredRecord]) -> Sequence[StoredRecord]:
        if not self._damaged:
            return page
        return [self._damaged.get(stored.position, stored) for stored in page]

    async def claim(self, *, at: float) -> int:
        """Take the session for this process; appends may follow under the returned epoch.

        Raises:
            LeaseHeldError: Another living node has it. Nothing was changed.
            JournalMovedError: The session was deleted meanwhile. Nothing was changed: another one is not begun for it.
            StoreBusyError: Others claimed it and gave it up `CLAIMS_MAX` times meanwhile. Nothing was changed.
        """
        for _ in range(CLAIMS_MAX):
            found = None if self.is_new else await self._store.find(self.session_id)
            if found is None and self.newest.position:
                raise self._deletion_error()
            is_free = None if found is None else found.is_free
            self._cut_claim = found if is_free else None
            if self._claiming is None or not self._claiming.is_early:
                self._claiming = self._begin_claim(at=at, is_free=is_free)
            self._claiming.is_early = False
            try:
                self.epoch = await asyncio.shield(self._claiming.task)
            except JournalMovedError:  # given up since it was found: its mark of a handover depends on that
                self._claiming = None
                continue
            except LeaseHeldError:
                self._claiming = None
                raise
            self._cut_claim = None
            self.is_handed_over = bool(is_free)
            self._world.reach(Fault.AFTER_CLAIM)
            return self.epoch
        raise StoreBusyError(f"session {self.session_id!r} is claimed and given up by others all the time")

    def claim_soon(self, *, at: float) -> None:
        """Begin to claim a session that is new, so that `claim` waits less for it; without effect on any other."""
        if self.is_new and self._claiming is None:
            self._claiming = self._begin_claim(at=at, is_free=None)
            self._claiming.is_early = True
            self._claiming.task.add_done_callback(_see_error)  # `claim` may never be called for it

    async def undo_claim(self) -> None:
        """Remove what a claim has stored of a session that is new; without effect on any other."""
        if not self.is_new or self._claiming is None:
            return
        claiming = self._claiming.task
        await asyncio.wait({claiming})
        is_first = _see_error(claiming) is None and claiming.result() == 1
        await self.release()
        if is_first:  # else there was a session of this name after all
            await self._store.delete(self.session_id)

    def _begin_claim(self, *, at: float, is_free: bool | None) -> _Claim:
        self._world.reach(Fault.BEFORE_CLAIM)
        claiming = self._store.claim(self.session_id, at=at, is_free=is_free)
        # One that is cancelled may happen all the same, and later than `release` looks.
        return _Claim(self._world.spawn(claiming, name=f"claim {self.session_id}"))

    @property
    def has_unused_claim(self) -> bool:
        """Whether this process may have the lease, and has appended nothing under it.

        No other node resumes a turn that is open in the session, and none reports it.
        """
        return self._claiming is not None and not 0 < self.epoch == self.newest.epoch

    @property
    def hides_no_death(self) -> bool:
        """Whether the session may be given up: the next node learns of each death of a node from the journal."""
        return self.is_handed_over or self._cut_claim is not None or 0 < self.epoch == self.newest.epoch

    async def release(self) -> None:
        """Release the session, where it was claimed here, so that any node may claim it; calling it again is
        harmless.
        """
        if (claiming := self._claiming) is not None:
            if not claiming.task.done():
                await asyncio.wait({claiming.task})
            if claiming.is_early and _see_error(claiming.task) is None:
                self.epoch = claiming.task.result()
            claiming.is_early = False
        if self.epoch:
            await self._store.release(self.session_id, epoch=self.epoch)
            self.epoch = 0
            self._claiming = None
        elif self._cut_claim is not None:
            before, self._cut_claim = self._cut_claim, None
            found = await self._store.find(self.session_id)
            if found is not None and found.epoch > before.epoch and not found.is_free:
                with contextlib.suppress(LeaseHeldError):  # by another node
                    self.epoch = await self._store.claim(self.session_id, at=found.created_at, is_free=False)
                await self.release()

    async def disown(self, *, at: float) -> None:
        """Give the session up also where an older journal of this process had claimed it, and failed before it slept.

        Raises:
            LeaseHeldError: Another living node has it by now. Nothing was changed.
        """
        found = None if self.epoch else await self._store.find(self.session_id)
        if found is not None and not found.is_free:
            self.epoch = await self._store.claim(self.session_id, at=at)
        await self.release()

    async def confirm(self) -> None:
        """Ask whether this process still owns the session.

        Raises:
            LeaseLostError: It does not.
        """
        asked_at = self._world.monotonic()
        found = await self._store.find(self.session_id)
        if found is None or found.epoch != self.epoch:
            raise LeaseLostError(f"session {self.session_id!r} is now run by another node")
        self.held_at = asked_at

    async def forward(self, body: bytes) -> bytes:
        """Forward a command to the node with the session's lease, and return the answer."""
        return await self._store.forward(self.session_id, body)

    @property
    def death_noticed_s(self) -> float:
        """See `Store.death_noticed_s`."""
        return self._store.death_noticed_s

    @property
    def is_transactional(self) -> bool:
        """Whether `append_within` may be called."""
        return self._store.transactional is not None

    async def append(self, batch: Batch) -> None:
        """Append, then publish: readers are woken when the records are as durable as the batch requires.

        Raises:
            LeaseLostError: Another node has the lease, or a crash of the database lost the last records.
            UnavailableError: The store is busy, full or away. Nothing was written.
        """
        self._world.reach(Fault.BEFORE_APPEND)
        asked_at = self._world.monotonic()
        try:
            await self._store.append(self.session_id, batch)
        except JournalMovedError as error:  # under our own epoch no other node appends
            raise self._set_back_error() from error
        self.held_at = asked_at
        self._publish(batch)

    @property
    def is_ready(self) -> bool:
        """Whether `append_now` may append."""
        immediate = self._store.immediate
        return immediate is not None and immediate.is_ready

    def append_now(self, batch: Batch) -> bool:
        """Append what need not be synced here and now, then publish; return whether that could be done.

        Where it could not, nothing was written: call `append`.
        """
        immediate = self._store.immediate
        if immediate is None:
            return False
        self._world.reach(Fault.BEFORE_APPEND)
        asked_at = self._world.monotonic()
        if immediate.append_now(self.session_id, batch) is None:
            return False
        self.held_at = asked_at
        self._publish(batch)
        return True

    async def append_within(self, work: Callable[[Attempt], Batch]) -> None:
        """Let `work` write in the transaction of the append of what it returns, then publish."""
        transactional = self._store.transactional
        assert transactional is not None, "see `is_transactional`"
        self._world.reach(Fault.BEFORE_APPEND)
        asked_at = self._world.monotonic()
        try:
            batch = await transactional.append_within(
                self.session_id, work, expected=self.newest.position, epoch=self.epoch
            )
        except JournalMovedError as error:
            raise self._set_back_error() from error
        self.held_at = asked_at
        self._publish(batch)

    def introduce(self, agent: str, model: str) -> None:
        """Inform observers which agent answers in this session."""
        if self._observers is not None:
            self._observers.answers(self.session_id, agent, model)

    def _publish(self, batch: Batch) -> None:
        self.is_new = False
        self._world.reach(Fault.AFTER_APPEND)
        positions = range(batch.expected + 1, batch.end + 1)
        self._cache_records([*map(StoredRecord, positions, repeat(batch.epoch), batch.bodies)])
        self._wake()
        if self._observers is not None:
            self._observers.on_append(self.session_id, batch.bodies)
        self._world.reach(Fault.AFTER_PUBLISH)

    async def blob(self, digest: str) -> bytes | None:
        """Return a large result that a record names, or None where it is not there."""
        return await self._store.blob(self.session_id, digest)

    def near(self, *, after: int, limit: int) -> Sequence[StoredRecord]:
        """Return up to `limit` records after a position, where they are in memory; nothing where they are not."""
        skip = after + 1 - self._tail[0].position if self._tail else -1
        return self._tail[skip : skip + limit] if skip >= 0 else ()

    async def read(self, *, after: int, limit: int) -> Sequence[StoredRecord]:
        """Return up to `limit` records after a position: from memory near the tail, else from the store.

        Raises:
            EventGoneError: What follows `after` was pruned: see `beginning`.
        """
        if after >= self.newest.position:
            return ()
        if found := self.near(after=after, limit=limit):
            return found
        page = await self._store.read(self.session_id, after=after, limit=limit)
        if page and (page[0].position != after + 1 or is_pruned(page[0].body)):
            self.pruned_to = EventId(page[0].epoch, page[0].position)
            oldest = self.pruned_to.position + 1
            message = f"events of session {self.session_id!r} before position {oldest} are no longer kept"
            raise EventGoneError(message, oldest=oldest)
        return self._readable(page)

    async def epoch_at(self, position: int) -> int | None:
        """Return the epoch of a record that is an event, or was the last one to be pruned; None of any other."""
        if position > self.newest.position:
            return None
        if self._tail and position >= self._tail[0].position:
            return self._tail[position - self._tail[0].position].epoch
        found = await self._store.read(self.session_id, after=position - 1, limit=1)
        return found[0].epoch if found and found[0].position == position else None

    async def beginning(self) -> tuple[EventId, Session]:
        """Return what a pruned journal begins with, and the event it is the state at.

        Raises:
            RecordUndecodableError: It cannot be read.
        """
        found = await self._store.read(self.session_id, after=0, limit=1)
        if not found or not is_pruned(found[0].body):
            return START, Session()
        record = self._reader.read(found[0].body)
        assert isinstance(record, JournalPruned)
        self.pruned_to = EventId(found[0].epoch, found[0].position)
        return self.pruned_to, restore_session(record)

    async def wait(self, after: int) -> None:
        """Wait until there is a record after `after`.

        Raises:
            MidstreamError: The journal was closed here (draining, lease lost, store failed): what was given
                to `close`.
        """
        while self.newest.position <= after:
            if self.ended is not None:
                raise self.ended.again()
            waiting = self.expect()
            try:
                await waiting
            finally:
                self.stop_waiting(waiting)

    def expect(self) -> asyncio.Future[None]:
        """Return a future that is done with the next append or a close of the journal; pass it to `stop_waiting`."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        return waiting

    def stop_waiting(self, waiting: asyncio.Future[None]) -> None:
        """Drop a future that is not awaited any more: readers come and go while a session is silent."""
        self._waiting.pop(waiting, None)

    def shorten_tail(self, bytes_max: int) -> None:
        """Keep at most so many bytes of the newest records in memory from now on, the last one besides."""
        if bytes_max < self._tail_bytes_max:
            self._tail_bytes_max = bytes_max
            if self._tail_bytes > bytes_max:
                self._shorten_tail()

    def close(self, error: MidstreamError) -> None:
        """Let every present and later waiter end with `error`. Records already here can still be read."""
        self.ended = self.ended or error.again()
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def _cache_records(self, records: Sequence[StoredRecord]) -> None:
        if is_pruned(records[0].body):  # it is no event, and what was known before does not stand next to it
            self.pruned_to = EventId(records[0].epoch, records[0].position)
            self.bytes_held = SESSION_BYTES + FOLDED_SHARE * len(records[0].body)
            self._tail, self._tail_bytes, records = [], 0, records[1:]
            self.newest = self.pruned_to
        if not records:
            return
        self._tail.extend(records)
        size = sum(len(each.body) for each in records)
        self._tail_bytes += size
        self.bytes_held += (1 + FOLDED_SHARE) * size + TAIL_RECORD_BYTES * len(records)
        self.newest = EventId(records[-1].epoch, records[-1].position)
        if len(self._tail) > 2 * TAIL_RECORDS_MAX or self._tail_bytes > self._tail_bytes_max:
            self._shorten_tail()

    def _shorten_tail(self) -> None:
        """Keep half of what may be kept, so that this is not done with each append; the newest record in any case."""
        kept = size = 0
        for each in reversed(self._tail):
            size += len(each.body)
            if kept and (size > self._tail_bytes_max // 2 or kept == TAIL_RECORDS_MAX):
                size -= len(each.body)
                break
            kept += 1
        self.bytes_held -= self._tail_bytes - size + TAIL_RECORD_BYTES * (len(self._tail) - kept)
        del self._tail[:-kept]
        self._tail_bytes = size


class _Claim:
    """A claim of a session that has begun."""

    __slots__ = ("is_early", "task")

    def __init__(self, task: asyncio.Task[int]) -> None:
        self.task = task
        self.is_early = False
        """Whether it was begun by `claim_soon`, and `claim` was not called for it yet."""


def _see_error(claiming: asyncio.Task[int]) -> BaseException | None:
    """Return what ended a claim without the lease; seen, it is not logged as a defect."""
    return asyncio.CancelledError() if claiming.cancelled() else claiming.exception()
