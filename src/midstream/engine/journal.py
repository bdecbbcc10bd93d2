"""One session's journal as this process sees it: appends, the newest records in memory, and waiting readers."""

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
from midstream.store.guard.guarded_store import claim_guarded

TAIL_RECORDS_MAX = 4096
"""Newest records in memory, for readers near the end; other readers read pages from the store."""
SESSION_BYTES = 12 * 1024
"""Bytes of memory for an awake session with an empty journal."""
TAIL_RECORD_BYTES = 120
"""Bytes of memory for a record in addition to its body."""
FOLDED_SHARE = 1
"""Bytes of folded state for each byte of the journal."""
PAGE_RECORDS = 1000
"""Records read at once when a journal is folded or a reader is far behind."""
CLAIMS_MAX = 10
"""Claims of a session that other nodes claim, release or delete at the same moment."""

_log = logging.getLogger(__name__)

_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


def require_session_id(session_id: str, what: str = "a session id") -> None:
    """Check that a session id, or another id of the same form, is valid.

    Raises:
        UsageError: It is not; the message calls it `what`.
    """
    if not _SESSION_ID.fullmatch(session_id):
        raise UsageError(f"{what} has 1 to 128 of letters, digits and '._:-'; got {session_id[:40]!r}")


class Journal:
    """A session's journal: appends, and reads that follow them. A reader is a position, not a queue.

    Args:
        store, session_id: The place of the journal.
        world: Clock and fault points.
        observers: Notified of appends.
        tail_bytes_max: Bytes of the newest records that stay in memory, without the last one.
        is_new: The session's name is new and random: the first append fails if the journal has records.
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
        """The last pruned event that is known here. Later events can be read."""
        self.epoch = 0
        """The epoch of this process's appends; 0 while it has not claimed the session."""
        self.is_handed_over = False
        """Whether the previous node had released the session before this process claimed it."""
        self.is_new = is_new
        """Whether the session is new and nothing was appended to it."""
        self._claiming: _Claim | None = None
        """The claim by which this process has the lease, or may have it: under way, or with an unknown outcome."""
        self._cut_claim: SessionInfo | None = None
        """The line of a released session, from before a claim that has not returned."""
        self.held_at = -math.inf
        """The last time on this process's clock when it certainly had the lease."""
        self._store = store
        self._world = world
        self._observers = observers
        self._reader = JournalReader()
        self._damaged: dict[int, StoredRecord] = {}
        """Replacements of outcomes that cannot be read, by position."""
        self._tail: list[StoredRecord] = []
        self._tail_bytes = 0
        self._tail_bytes_max = tail_bytes_max
        self.bytes_held = SESSION_BYTES
        """Estimated bytes of memory for this session: the newest records and the folded state."""
        self._waiting: dict[asyncio.Future[None], None] = {}
        """Waiting readers; the longest waiting is woken first."""
        self.ended: MidstreamError | None = None
        """The error with which the journal was closed."""

    async def load(self) -> list[tuple[int, Record]]:
        """Read the records after the newest one in memory, at first all; return them with their epochs.

        If newer records than those in memory were pruned, a `JournalPruned` comes first. Nothing is claimed. After an
        error or a cancellation, none of the records are in memory.

        Raises:
            RecordUndecodableError: A record is damaged or of a newer version; the message has session and position. A
                damaged outcome of a call is replaced by `OutcomeDamaged`, with a warning.
        """
        if self.is_new:
            return []
        found: list[StoredRecord] = []
        records: list[tuple[int, Record]] = []
        end = self.newest.position
        while page := await self._store.read(self.session_id, after=end, limit=PAGE_RECORDS):
            if is_pruned(page[0].body):  # also between two pages: the journal has a new beginning
                records.clear()
                found.clear()
            records.extend(self._decode_page(page))
            found.extend(page)
            end = page[-1].position
        if found:  # only now: a reader during the query must not receive records that are not folded yet
            self._cache_records(self._readable(found))
            self._wake()
        return records

    async def catch_up(self) -> list[tuple[int, Record]]:
        """Return all records that other nodes appended since `load`. Call it after a claim.

        Raises:
            JournalMovedError: The session was deleted meanwhile; its state in memory is void.
            LeaseLostError: A crash of the database lost the last records that are in memory.
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
        """Return the reason why the store lacks records that are in memory.

        A session that was deleted and created again begins above all earlier epochs. Otherwise a crash of the database
        set the session back: it continues, and clients that reconnect receive `gone`.
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
        """Claim the session for this process, and return the epoch for its appends.

        Raises:
            LeaseHeldError: Another living node has the session. Nothing was changed.
            JournalMovedError: The session was deleted meanwhile, and is not created again. Nothing was changed.
            StoreBusyError: Other nodes claimed and released it `CLAIMS_MAX` times meanwhile. Nothing was changed.
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
            except JournalMovedError:  # released since it was found: the mark of a handover depends on that
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
        """Begin to claim a new session, so that `claim` returns sooner; without effect on other sessions."""
        if self.is_new and self._claiming is None:
            self._claiming = self._begin_claim(at=at, is_free=None)
            self._claiming.is_early = True
            self._claiming.task.add_done_callback(_see_error)  # `claim` may never be called

    async def undo_claim(self) -> None:
        """Undo the claim of a new session; without effect on other sessions."""
        if not self.is_new or self._claiming is None:
            return
        claiming = self._claiming.task
        await asyncio.wait({claiming})
        is_first = _see_error(claiming) is None and claiming.result() == 1
        await self.release()
        if is_first:  # else the session had existed before
            await self._store.delete(self.session_id)

    def _begin_claim(self, *, at: float, is_free: bool | None) -> _Claim:
        self._world.reach(Fault.BEFORE_CLAIM)
        claiming = claim_guarded(self._store, self.session_id, at=at, is_free=is_free)
        # A cancelled claim may still happen, after `release` has read the session; so it is a task.
        return _Claim(self._world.spawn(claiming, name=f"claim {self.session_id}"))

    @property
    def has_unused_claim(self) -> bool:
        """Whether this process may have the lease without an append under it.

        No other node resumes or reports an open turn of the session.
        """
        return self._claiming is not None and not 0 < self.epoch == self.newest.epoch

    @property
    def hides_no_death(self) -> bool:
        """Whether the session may be released: the next node can see each death of a node in the journal."""
        return self.is_handed_over or self._cut_claim is not None or 0 < self.epoch == self.newest.epoch

    async def release(self) -> None:
        """Release the session if it was claimed here. A second call has no effect."""
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
                with contextlib.suppress(LeaseHeldError):  # another node has the lease
                    self.epoch = await self._store.claim(self.session_id, at=found.created_at, is_free=False)
                await self.release()

    async def disown(self, *, at: float) -> None:
        """Release the session, also if an earlier `Journal` of this process had claimed it and failed to release it.

        Raises:
            LeaseHeldError: Another living node has the session. Nothing was changed.
        """
        found = None if self.epoch else await self._store.find(self.session_id)
        if found is not None and not found.is_free:
            self.epoch = await self._store.claim(self.session_id, at=at)
        await self.release()

    async def confirm(self) -> None:
        """Check that this process still has the lease.

        Raises:
            LeaseLostError: It has not.
        """
        asked_at = self._world.monotonic()
        found = await self._store.find(self.session_id)
        if found is None or found.epoch != self.epoch:
            raise LeaseLostError(f"session {self.session_id!r} is now run by another node")
        self.held_at = asked_at

    async def forward(self, body: bytes) -> bytes:
        """Forward a command to the node with the session's lease, and return the answer."""
        return await self._store.forward(self.session_id, body)

    def was_held(self, *, within_s: float) -> bool:
        """Whether this process certainly had the lease in the last `within_s` seconds, and has been a node since."""
        is_recent = self._world.monotonic() - self.held_at <= within_s
        return is_recent and self._store.joined_at <= self.held_at

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
            UnavailableError: The store is busy, full or unreachable. Nothing was written.
        """
        self._world.reach(Fault.BEFORE_APPEND)
        asked_at = self._world.monotonic()
        try:
            await self._store.append(self.session_id, batch)
        except JournalMovedError as error:  # no other node appends under this epoch
            raise self._set_back_error() from error
        self.held_at = asked_at
        self._publish(batch)

    @property
    def is_ready(self) -> bool:
        """Whether `append_now` may append."""
        immediate = self._store.immediate
        return immediate is not None and immediate.is_ready

    def append_now(self, batch: Batch) -> bool:
        """Append records that need no sync, in this call, then publish; return whether that was possible.

        If not, nothing was written: call `append`.
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
        """Run `work` in the transaction that appends the records it returns, then publish."""
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
        """Notify observers of the agent of this session."""
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
        """Return a large result that a record names, or None if it does not exist."""
        return await self._store.blob(self.session_id, digest)

    def near(self, *, after: int, limit: int) -> Sequence[StoredRecord]:
        """Return up to `limit` records after a position if they are in memory; else nothing."""
        skip = after + 1 - self._tail[0].position if self._tail else -1
        return self._tail[skip : skip + limit] if skip >= 0 else ()

    async def read(self, *, after: int, limit: int) -> Sequence[StoredRecord]:
        """Return up to `limit` records after a position: from memory near the end, else from the store.

        Raises:
            EventGoneError: The record after `after` was pruned: see `beginning`.
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
        """Return the epoch of a record that is an event, or the last pruned one; None for any other."""
        if position > self.newest.position:
            return None
        if self._tail and position >= self._tail[0].position:
            return self._tail[position - self._tail[0].position].epoch
        found = await self._store.read(self.session_id, after=position - 1, limit=1)
        return found[0].epoch if found and found[0].position == position else None

    async def beginning(self) -> tuple[EventId, Session]:
        """Return the first state of a pruned journal, and its event id.

        Raises:
            RecordUndecodableError: The state cannot be read.
        """
        found = await self._store.read(self.session_id, after=0, limit=1)
        if not found or not is_pruned(found[0].body):
            return START, Session()
        record = self._reader.read(found[0].body)
        assert isinstance(record, JournalPruned)
        self.pruned_to = EventId(found[0].epoch, found[0].position)
        return self.pruned_to, restore_session(record)

    async def wait(self, after: int) -> None:
        """Wait for a record after `after`.

        Raises:
            MidstreamError: The journal was closed (draining, lease lost, store failed): the error passed to `close`.
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
        """Return a future that is done with the next append or close of the journal. Pass it to `stop_waiting`."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = None
        return waiting

    def stop_waiting(self, waiting: asyncio.Future[None]) -> None:
        """Drop a future that no reader awaits: readers come and go while a session is silent."""
        self._waiting.pop(waiting, None)

    def shorten_tail(self, bytes_max: int) -> None:
        """Keep at most so many bytes of the newest records in memory from now on, without the last one."""
        if bytes_max < self._tail_bytes_max:
            self._tail_bytes_max = bytes_max
            if self._tail_bytes > bytes_max:
                self._shorten_tail()

    def close(self, error: MidstreamError) -> None:
        """End all present and later waits with `error`. Records in memory can still be read."""
        self.ended = self.ended or error.again()
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def _cache_records(self, records: Sequence[StoredRecord]) -> None:
        if is_pruned(records[0].body):  # no event; earlier records are not adjacent to it
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
        """Keep half of the permitted records, so that this is rare, but at least the newest."""
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
    """A claim that is under way or has ended."""

    __slots__ = ("is_early", "task")

    def __init__(self, task: asyncio.Task[int]) -> None:
        self.task = task
        self.is_early = False
        """Whether `claim_soon` began it, and `claim` was not called since."""


def _see_error(claiming: asyncio.Task[int]) -> BaseException | None:
    """Return the error of a claim, so that the event loop does not log it as unhandled."""
    return asyncio.CancelledError() if claiming.cancelled() else claiming.exception()
