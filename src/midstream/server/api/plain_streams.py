"""The plain streams of this server: each is a journal of its own in the store, which any node reads and writes.

A write claims the journal, folds what others appended, appends one record, synced, and gives the journal back. So the
decision about a producer's request is made on all that was accepted before it, and one whose answer was lost in a crash
is a duplicate after it. While writes of this node wait they follow under one claim.

A fork reads what it inherits in its source's journal. Before it is made, the source has a record of it. A deleted
source stays, and answers that it is gone, until its last fork is deleted.
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

STREAMS_MAX = 512
"""Streams whose folds are in memory; those not used longest are read again."""
READERS = 64
"""Journals that are read at once."""
PAGE_RECORDS = 256
"""Records of a journal that are read at once."""
PAGE_BYTES = 4 * 1024 * 1024
"""Bytes after which a response ends; its reader goes on at the next offset."""
RECENT_BYTES = 64 * 1024
"""Bytes of the newest appends of a stream that are in memory."""
HELD_BACKOFF = Backoff(first_s=0.005, most_s=0.05, jitter=0.5)
"""Between attempts to claim a stream to which another node writes."""
TURN_S = 0.2
"""Seconds that a node keeps a stream while writes of its own wait, before another node has its turn."""
FORK_S = 60.0
"""Seconds for which a fork that is not there yet keeps its source: the node that makes it may have died."""
MAKING_S = FORK_S / 2
"""Seconds within which a fork is made, or not at all."""
SLIDE = 0.05
"""Share of a sliding lifetime by which a read must extend it to be stored."""


class StreamGoneError(NotFoundError):
    """The stream was deleted, or has expired, and has forks."""

    code = "stream_gone"


class KnownStream:
    """A stream as far as its journal was read here: its fold, and where its units are.

    Args:
        journal: Its name in the store.
        created: The first record.
        epoch: That of the first record, which no stream of this name had before.
    """

    def __init__(self, journal: str, created: Created, epoch: int) -> None:
        self.journal = journal
        self.created = created
        self.birth = epoch
        self.state = PlainStream.of(created)
        self.position, self.epoch = 1, epoch
        self._recent: deque[bytes] = deque()
        """Bodies of the newest appends, for readers that follow: 500 of them would read each append from the store."""
        self._recent_bytes = 0
        self._ends = array("Q")
        """Units behind each append, in order."""
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
        """Return the bodies of the appends from the one with the unit behind so many, if all of them are in memory."""
        back = len(self._ends) - bisect_right(self._ends, units)
        return list(islice(self._recent, len(self._recent) - back, None)) if back <= len(self._recent) else []

    def place_of(self, units: int) -> int:
        """Return the position of the append with the unit behind so many; 0 where there is none."""
        index = bisect_right(self._ends, units)
        return self._positions[index] if index < len(self._positions) else 0

    def span_at(self, units: int) -> tuple[int, int] | None:
        """Return where the append begins and ends that has the unit behind so many; None where there is none."""
        index = bisect_right(self._ends, units)
        if units < self.created.inherited or index == len(self._ends):
            return None
        return self._ends[index - 1] if index else self.created.inherited, self._ends[index]


class StreamPart(Struct, frozen=True):
    """Appends of a stream, or parts of them, and the offset behind them."""

    bodies: list[bytes]
    end: int


Decision = Callable[[KnownStream | None], Awaitable[Sequence[StreamRecord]]]
"""Returns the records to append to a stream as it is now, all or none of them."""


class _Writing:
    """The writes of this node to one stream, in turn."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0
        self.epoch = 0
        self.until = 0.0


class PlainStreams:
    """The streams of a store, as this node reads and writes them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._store = host.store
        self._world = host.world
        self._known: OrderedDict[str, KnownStream] = OrderedDict()
        self._reading = [asyncio.Lock() for _ in range(READERS)]
        """Each journal is read by one task at a time, as some others are."""
        self._writing: dict[str, _Writing] = {}
        self.on_change: Callable[[str], None] = _ignore
        """Called with the journal that this node appended to, or deleted."""

    # --- reading

    async def find(self, journal: str) -> KnownStream | None:
        """Return a stream, or None where there is none; one that has expired is removed.

        Raises:
            StreamGoneError: It was deleted, or has expired, and has forks.
        """
        known = await self.look(journal)
        if known is None or not await self._is_over(known):
            return known
        if await self._has_forks(known):
            raise StreamGoneError("this stream is gone; its forks go on")
        await self._remove(journal)
        return None

    async def read(self, known: KnownStream, units: int, *, limit: int | None = None) -> StreamPart:
        """Return what follows an offset, as much as one response has, and nothing behind `limit` units."""
        part, limit = StreamPart([], units), known.state.units if limit is None else limit
        if units < (inherited := known.created.inherited):
            source = await self.look(known.created.source)
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
        """Return the bodies of appends from this position on, as the store has them; empty where they are gone."""
        page = await self._store.read(known.journal, after=place - 1, limit=PAGE_RECORDS)
        if not page or page[0].position != place:
            return []
        records = [_decode(known.journal, stored) for stored in page]
        return [record.body for record in records if isinstance(record, Appended) and record.units]

    async def span_at(self, known: KnownStream, units: int) -> tuple[int, int] | None:
        """Return where the append begins and ends that has the unit behind so many, also one that is inherited."""
        if units >= known.created.inherited:
            return known.span_at(units)
        source = await self.look(known.created.source)
        span = None if source is None else await self.span_at(source, units)
        return None if span is None else (span[0], min(span[1], known.created.inherited))

    async def wait(self, known: KnownStream) -> KnownStream | None:
        """Wait until there may be more of a stream than is known, and return it as it is; None where it is gone."""
        position = known.position
        await self._host.journals.wait(known.journal, position)
        if self._has_grown(known, position):
            return known
        async with self._reading[hash(known.journal) % READERS]:
            if self._has_grown(known, position):  # another reader was woken before
                return known
            return await self._look(known.journal)

    def _has_grown(self, known: KnownStream, position: int) -> bool:
        return known.position > position and self._known.get(known.journal) is known

    async def note_use(self, known: KnownStream) -> None:
        """Extend a sliding lifetime, from a read or a repeated write."""
        ttl_s = known.state.settings.ttl_s
        if ttl_s is None:
            return
        used_at, version = await self._last_use(known)
        now = self._world.now()
        if now - used_at > ttl_s * SLIDE:
            with suppress(EntryMovedError):  # another read was faster
                body = msgspec.json.encode(now)
                await self._store.kv_put(STREAM_READS, known.journal, body, expected=version, at=now)

    async def look(self, journal: str) -> KnownStream | None:
        """Return a stream as its journal is now, or None where that is empty."""
        async with self._reading[hash(journal) % READERS]:
            return await self._look(journal)

    async def _look(self, journal: str) -> KnownStream | None:
        known = self._known.get(journal)
        after = 0 if known is None else known.position - 1
        page = await self._store.read(journal, after=after, limit=PAGE_RECORDS)
        if known is not None:
            if page and (page[0].position, page[0].epoch) == (known.position, known.epoch):
                page = page[1:]
            else:  # deleted, and perhaps made anew
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
        """Return when a stream expires if it is not used again, in seconds since 1970; None for never."""
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
        """Return when a stream was last written or read, and the version of the entry about reads; 0 without one."""
        kept = await self._store.kv_get(STREAM_READS, known.journal)
        if kept is None:
            return known.state.written_at, 0
        return max(known.state.written_at, msgspec.json.decode(kept.body, type=float)), kept.version

    async def _has_forks(self, known: KnownStream) -> bool:
        for fork, asked_at in known.state.forks.items():
            if self._world.now() - asked_at < FORK_S:
                return True
            found = await self.look(fork)
            if found is not None and found.created.source == known.journal:
                return True
        return False

    async def delete(self, journal: str) -> bool:
        """Delete a stream; return whether there was one.

        Raises:
            StreamGoneError: It is gone and has forks.
        """
        if await self.find(journal) is None:
            return False

        async def decide(known: KnownStream | None) -> Sequence[StreamRecord]:
            has_forks = known is not None and not known.state.is_deleted and await self._has_forks(known)
            return [Deleted()] if has_forks else []

        await self.write(journal, decide)
        known = await self.look(journal)
        if known is not None and not known.state.is_deleted:
            await self._remove(journal, is_asked=True)
        return True

    async def _remove(self, journal: str, *, is_asked: bool = False) -> None:
        """Remove a stream for good where nothing needs it any more, and then what it alone kept."""
        async with self._held(journal):
            known = await self.look(journal)
            if known is None or await self._has_forks(known):
                return
            if not is_asked and not await self._is_over(known):
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
        with suppress(StreamGoneError):  # it has another fork
            await self.find(source)

    # --- writing

    async def write(self, journal: str, decide: Decision) -> KnownStream | None:
        """Append what is decided, and return the stream with it; None where there is none.

        Raises:
            UnavailableError: Other nodes write to it all the time, or the store cannot be used; what was to be
                appended may have been.
        """
        work = self._world.spawn(self._write(journal, decide), name=f"write {journal}")
        return await asyncio.shield(work)

    async def _write(self, journal: str, decide: Decision) -> KnownStream | None:
        async with self._held(journal) as epoch:
            known = await self.look(journal)
            records: Sequence[StreamRecord] = ()
            try:
                records = await decide(known)
            finally:
                if known is None and not records:  # the claim has made an empty journal
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
            known = await self.look(journal)
        self._note_change(journal)
        return known

    def _note_change(self, journal: str) -> None:
        self._host.journals.wake([journal])
        self.on_change(journal)

    @asynccontextmanager
    async def _held(self, journal: str) -> AsyncIterator[int]:
        """Hold a journal: no other writer, of this node or another, is in it meanwhile."""
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
                        "another node has this stream by now: retry", retry_after_s=0.1
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
                return await self._store.claim(journal, at=self._world.now())
            except LeaseHeldError as error:
                failures += 1
                if self._world.monotonic() >= until:
                    raise UnavailableError(
                        "another node writes to this stream: retry", retry_after_s=1.0
                    ) from error
            await self._world.sleep(HELD_BACKOFF.wait_s(failures, chance=self._world.chance()))


def _ignore(_: str) -> None:
    """Notify no listener."""


def _begin(journal: str, stored: StoredRecord) -> KnownStream:
    record = _decode(journal, stored)
    if not isinstance(record, Created) or stored.position != 1:
        raise RecordUndecodableError(f"journal {journal!r} does not begin as a stream does")
    return KnownStream(journal, record, stored.epoch)


def _decode(journal: str, stored: StoredRecord) -> StreamRecord:
    try:
        return decode_record(stored.body)
    except msgspec.DecodeError as error:
        raise RecordUndecodableError(f"record {stored.position} of journal {journal!r}: {error}") from error
