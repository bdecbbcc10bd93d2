"""Plain streams: each is a separate journal in the store, which any node can read and write.

A write claims the journal, folds new records, appends one synced record, and releases the journal. So a producer's
request is decided with all accepted appends, and a retry after a crash is recognized as a duplicate. Waiting writes of
one node share a claim.

A fork reads inherited content from its source's journal. The source records a fork before the fork is created. A
deleted source stays in the store, and answers 410, until its last fork is deleted.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice

import msgspec
from msgspec import Struct

from midstream.dialects.durable_stream_state import (
    Appended,
    Created,
    Deleted,
    Forked,
    PlainStream,
    StreamRecord,
    decode_record,
    encode_record,
)
from midstream.dialects.durable_streams import cut
from midstream.engine.host import Host
from midstream.errors import (
    EntryMovedError,
    LeaseHeldError,
    LeaseLostError,
    NotFoundError,
    RecordUndecodableError,
    StoreDamagedError,
    UnavailableError,
)
from midstream.retries import FORWARDED_WITHIN_S, Backoff
from midstream.session.records import Sync
from midstream.store.contract import STREAM_READS, Batch, SessionListing, StoredRecord
from midstream.store.guard.guarded_store import claim_guarded

STREAMS_MAX = 512
"""Streams whose state is in memory; the least recently used ones are dropped."""
READERS = 64
"""Journals that are read concurrently."""
PAGE_RECORDS = 256
"""Records of one read of a journal."""
PAGE_BYTES = 4 * 1024 * 1024
"""Bytes after which a response ends; the reader continues at the next offset."""
RECENT_BYTES = 64 * 1024
"""Bytes of a stream's newest appends in memory."""
HELD_BACKOFF = Backoff(first_s=0.005, most_s=0.05, jitter=0.5)
"""Pauses between attempts to claim a stream to which another node writes."""
TURN_S = 0.2
"""Seconds for which a node keeps a stream for its own waiting writes, before other nodes can write."""
FORK_S = 60.0
"""Seconds for which a recorded fork that does not exist yet keeps its source: its node may have died."""
MAKING_S = FORK_S / 2
"""Time limit in seconds for creating a fork."""
SLIDE = 0.05
"""Part of a sliding lifetime by which a read must extend it; smaller extensions are not stored."""


class StreamGoneError(NotFoundError):
    """The stream was deleted or has expired, but still has forks."""

    code = "stream_gone"


class KnownStream:
    """State of a stream as far as its journal was read here, with an index of its units.

    Args:
        journal: Name of the journal.
        created: The first record.
        epoch: Epoch of the first record, which distinguishes it from earlier streams of this name.
    """

    def __init__(self, journal: str, created: Created, epoch: int) -> None:
        self.journal = journal
        self.created = created
        self.birth = epoch
        self.state = PlainStream.of(created)
        self.position, self.epoch = 1, epoch
        self._recent: deque[bytes] = deque()
        """Bodies of the newest appends, so that readers that follow the stream need no read from the store."""
        self._recent_bytes = 0
        self._ends = array("Q")
        """Number of units up to the end of each append, in order."""
        self._positions = array("Q")

    def apply(self, stored: StoredRecord) -> None:
        """Fold the next record."""
        record = _decode(self.journal, stored)
        if isinstance(record, Created):
            raise RecordUndecodableError(f"journal {self.journal!r} begins twice")
        self.state.apply(record)
        self.position, self.epoch = stored.position, stored.epoch
        if isinstance(record, Appended) and record.units:
            self._ends.append(self.state.units)
            self._positions.append(stored.position)
            self._recent.append(record.body)
            self._recent_bytes += len(record.body)
            while self._recent_bytes > RECENT_BYTES:
                self._recent_bytes -= len(self._recent.popleft())

    def recent(self, units: int) -> list[bytes]:
        """Return the bodies from the append with the next unit after `units`; empty if they are not all in memory."""
        back = len(self._ends) - bisect_right(self._ends, units)
        return list(islice(self._recent, len(self._recent) - back, None)) if back <= len(self._recent) else []

    def place_of(self, units: int) -> int:
        """Return the position of the append that contains the next unit after `units`; 0 if there is none."""
        index = bisect_right(self._ends, units)
        return self._positions[index] if index < len(self._positions) else 0

    def span_at(self, units: int) -> tuple[int, int] | None:
        """Return begin and end of the append that contains the next unit after `units`; None if there is none."""
        index = bisect_right(self._ends, units)
        if units < self.created.inherited or index == len(self._ends):
            return None
        return self._ends[index - 1] if index else self.created.inherited, self._ends[index]


class StreamPart(Struct, frozen=True):
    """Appends of a stream, or parts of them, and the offset after them."""

    bodies: list[bytes]
    end: int


Decision = Callable[[KnownStream | None], Awaitable[Sequence[StreamRecord]]]
"""Returns the records to append to the current state of a stream."""


class _Writing:
    """Queue of this node's writes to one stream."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0
        self.epoch = 0
        self.until = 0.0


class PlainStreams:
    """Reads and writes the plain streams of a store."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._store = host.store
        self._world = host.world
        self._known: OrderedDict[str, KnownStream] = OrderedDict()
        self._reading = [asyncio.Lock() for _ in range(READERS)]
        """Locks for reading, each shared by several journals."""
        self._writing: dict[str, _Writing] = {}
        self.on_change: Callable[[str], None] = _ignore
        """Called with each journal to which this node appended, or that it deleted."""

    # --- reading

    async def find(self, journal: str) -> KnownStream | None:
        """Return a stream, or None if it does not exist. An expired stream is removed.

        Raises:
            StreamGoneError: The stream was deleted or has expired, but has forks.
        """
        known = await self.refresh(journal)
        if known is None or not await self._is_over(known):
            return known
        if await self._has_forks(known):
            raise StreamGoneError("this stream was deleted or has expired; its forks remain")
        await self._remove(journal)
        return None

    async def read(self, known: KnownStream, units: int, *, limit: int | None = None) -> StreamPart:
        """Return the content of one response after an offset, and not beyond `limit` units."""
        part, limit = StreamPart([], units), known.state.units if limit is None else limit
        if units < (inherited := known.created.inherited):
            source = await self.refresh(known.created.source)
            if source is None:
                raise StoreDamagedError(f"the source of journal {known.journal!r} is missing")
            part = await self.read(source, units, limit=min(inherited, limit))
            if part.end < inherited:
                return part
        bodies, end = part.bodies, part.end
        size = sum(map(len, bodies))
        while end < limit and size < PAGE_BYTES and (place := known.place_of(end)):
            appends = known.recent(end) or await self._stored(known, place)
            if not appends:
                break  # deleted meanwhile
            for body in appends:
                span = known.span_at(end)
                if end >= limit or size >= PAGE_BYTES or span is None:
                    break
                stop = None if span[1] <= limit else limit - span[0]
                part_of = cut(body, first=end - span[0], end=stop, is_json=known.state.settings.is_json)
                bodies.append(part_of)
                size += len(part_of)
                end = min(span[1], limit)
        return StreamPart(bodies, end)

    async def _stored(self, known: KnownStream, place: int) -> list[bytes]:
        """Read the bodies of appends from a position on from the store; empty if the stream was deleted."""
        page = await self._store.read(known.journal, after=place - 1, limit=PAGE_RECORDS)
        if not page or page[0].position != place:
            return []
        records = [_decode(known.journal, stored) for stored in page]
        return [record.body for record in records if isinstance(record, Appended) and record.units]

    async def span_at(self, known: KnownStream, units: int) -> tuple[int, int] | None:
        """Return begin and end of the append that contains the next unit after `units`, also an inherited one."""
        if units >= known.created.inherited:
            return known.span_at(units)
        source = await self.refresh(known.created.source)
        span = None if source is None else await self.span_at(source, units)
        return None if span is None else (span[0], min(span[1], known.created.inherited))

    async def wait(self, known: KnownStream) -> KnownStream | None:
        """Wait until a stream may have new records, and return its current state; None if it was deleted."""
        position = known.position
        await self._host.journals.wait(known.journal, position)
        if self._has_grown(known, position):
            return known
        async with self._reading[hash(known.journal) % READERS]:
            if self._has_grown(known, position):  # another reader has already read them
                return known
            return await self._refresh(known.journal)

    def _has_grown(self, known: KnownStream, position: int) -> bool:
        return known.position > position and self._known.get(known.journal) is known

    async def note_use(self, known: KnownStream) -> None:
        """Extend a sliding lifetime after a read or a repeated write."""
        ttl_s = known.state.settings.ttl_s
        if ttl_s is None:
            return
        used_at, version = await self._last_use(known)
        now = self._world.now()
        if now - used_at > ttl_s * SLIDE:
            with suppress(EntryMovedError):  # another request extended it
                body = msgspec.json.encode(now)
                await self._store.kv_put(STREAM_READS, known.journal, body, expected=version, at=now)

    async def refresh(self, journal: str) -> KnownStream | None:
        """Read new records of a journal; return the stream, or None if the journal is empty."""
        async with self._reading[hash(journal) % READERS]:
            return await self._refresh(journal)

    async def _refresh(self, journal: str) -> KnownStream | None:
        known = self._known.get(journal)
        after = 0 if known is None else known.position - 1
        page = await self._store.read(journal, after=after, limit=PAGE_RECORDS)
        if known is not None:
            if page and (page[0].position, page[0].epoch) == (known.position, known.epoch):
                page = page[1:]
            else:  # deleted, and perhaps created again
                known = None
                self._known.pop(journal, None)
                page = await self._store.read(journal, after=0, limit=PAGE_RECORDS)
        while page:
            for stored in page:
                if known is None:
                    known = _begin(journal, stored)
                else:
                    known.apply(stored)
            page = await self._store.read(journal, after=page[-1].position, limit=PAGE_RECORDS)
        if known is not None:
            self._known[journal] = known
            self._known.move_to_end(journal)
            if len(self._known) > STREAMS_MAX:
                self._known.popitem(last=False)
        return known

    # --- lifetime

    async def ends_at(self, known: KnownStream) -> float | None:
        """Return the time at which a stream expires without further use, in seconds since 1970; None for never."""
        settings = known.state.settings
        if settings.ttl_s is None:
            return settings.expires_at_s
        used_at, _ = await self._last_use(known)
        return settings.ends_at(used_at)

    async def _is_over(self, known: KnownStream) -> bool:
        state, now = known.state, self._world.now()
        if state.is_deleted or not state.settings.has_expired(used_at=state.written_at, now=now):
            return state.is_deleted
        used_at, _ = await self._last_use(known)
        return state.settings.has_expired(used_at=used_at, now=now)

    async def _last_use(self, known: KnownStream) -> tuple[float, int]:
        """Return the time of the last use of a stream, and the version of its entry about reads (0 without one)."""
        kept = await self._store.kv_get(STREAM_READS, known.journal)
        if kept is None:
            return known.state.written_at, 0
        return max(known.state.written_at, msgspec.json.decode(kept.body, type=float)), kept.version

    async def _has_forks(self, known: KnownStream) -> bool:
        for fork, asked_at in known.state.forks.items():
            if self._world.now() - asked_at < FORK_S:
                return True
            found = await self.refresh(fork)
            if found is not None and found.created.source == known.journal:
                return True
        return False

    async def delete(self, journal: str) -> bool:
        """Delete a stream; return whether there was one.

        Raises:
            StreamGoneError: The stream was already deleted, but has forks.
        """
        if await self.find(journal) is None:
            return False

        async def decide(known: KnownStream | None) -> Sequence[StreamRecord]:
            has_forks = known is not None and not known.state.is_deleted and await self._has_forks(known)
            return [Deleted()] if has_forks else []

        await self.write(journal, decide)
        known = await self.refresh(journal)
        if known is not None and not known.state.is_deleted:
            await self._remove(journal, is_requested=True)
        return True

    async def _remove(self, journal: str, *, is_requested: bool = False) -> None:
        """Remove a stream that has no forks, and then sources that only it needed."""
        async with self._held(journal):
            known = await self.refresh(journal)
            if known is None or await self._has_forks(known):
                return
            if not is_requested and not await self._is_over(known):
                return
            await self._delete_held(journal)
        self._note_change(journal)
        if source := known.created.source:
            await self._end_fork(source, journal)

    async def _delete_held(self, journal: str) -> None:
        await self._store.delete(journal)
        self._known.pop(journal, None)
        self._writing[journal].epoch = 0

    async def _end_fork(self, source: str, fork: str) -> None:
        async def decide(known: KnownStream | None) -> Sequence[StreamRecord]:
            has_it = known is not None and fork in known.state.forks
            return [Forked(fork, self._world.now(), is_over=True)] if has_it else []

        await self.write(source, decide)
        with suppress(StreamGoneError):  # the source has another fork
            await self.find(source)

    # --- writing

    async def write(self, journal: str, decide: Decision) -> KnownStream | None:
        """Append the decided records, and return the stream; None if it does not exist.

        Raises:
            UnavailableError: Other nodes keep the stream, or the store cannot be used. The append may have succeeded.
        """
        work = self._world.spawn(self._write(journal, decide), name=f"write {journal}")
        return await asyncio.shield(work)

    async def _write(self, journal: str, decide: Decision) -> KnownStream | None:
        async with self._held(journal) as epoch:
            known = await self.refresh(journal)
            records: Sequence[StreamRecord] = ()
            try:
                records = await decide(known)
            finally:
                if known is None and not records:  # the claim created an empty journal
                    await self._delete_held(journal)
            if not records:
                return known
            now = self._world.now()
            title = journal if known is None else ""
            batch = Batch(
                [encode_record(record) for record in records],
                0 if known is None else known.position,
                epoch,
                Sync.FULL,
                SessionListing(is_live=False, at=now, title=title),
            )
            await self._store.append(journal, batch)
            known = await self.refresh(journal)
        self._note_change(journal)
        return known

    def _note_change(self, journal: str) -> None:
        self._host.journals.wake([journal])
        self.on_change(journal)

    @asynccontextmanager
    async def _held(self, journal: str) -> AsyncIterator[int]:
        """Hold the exclusive right to write to a journal, in this node and among nodes."""
        writing = self._writing.setdefault(journal, _Writing())
        writing.waiting += 1
        try:
            async with writing.lock:
                if not writing.epoch:
                    writing.epoch = await self._claim(journal)
                    writing.until = self._world.monotonic() + TURN_S
                is_sound = False
                try:
                    yield writing.epoch
                    is_sound = True
                except LeaseLostError as error:
                    raise UnavailableError(
                        "another node has claimed this stream: retry", retry_after_s=0.1
                    ) from error
                finally:
                    is_last = writing.waiting == 1 or self._world.monotonic() >= writing.until
                    if writing.epoch and (is_last or not is_sound):
                        epoch, writing.epoch = writing.epoch, 0
                        await self._store.release(journal, epoch=epoch)
                        if writing.waiting > 1 and self._host.has_peers:
                            await self._world.sleep(HELD_BACKOFF.most_s)
        finally:
            writing.waiting -= 1
            if not writing.waiting:
                del self._writing[journal]

    async def _claim(self, journal: str) -> int:
        until = self._world.monotonic() + FORWARDED_WITHIN_S + self._store.death_noticed_s
        failures = 0
        while True:
            try:
                return await claim_guarded(self._store, journal, at=self._world.now())
            except LeaseHeldError as error:
                failures += 1
                if self._world.monotonic() >= until:
                    raise UnavailableError(
                        "another node writes to this stream: retry", retry_after_s=1.0
                    ) from error
            await self._world.sleep(HELD_BACKOFF.wait_s(failures, chance=self._world.chance()))


def _ignore(_: str) -> None:
    """Do nothing."""


def _begin(journal: str, stored: StoredRecord) -> KnownStream:
    record = _decode(journal, stored)
    if not isinstance(record, Created) or stored.position != 1:
        raise RecordUndecodableError(f"journal {journal!r} does not begin with the record of a stream")
    return KnownStream(journal, record, stored.epoch)


def _decode(journal: str, stored: StoredRecord) -> StreamRecord:
    try:
        return decode_record(stored.body)
    except msgspec.DecodeError as error:
        raise RecordUndecodableError(f"record {stored.position} of journal {journal!r}: {error}") from error
