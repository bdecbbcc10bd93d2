"""Reads of a store in JetStream."""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence

from msgspec import Struct
from typing_extensions import override

from midstream.environment import World
from midstream.errors import StoreBusyError
from midstream.store.contract import (
    KeyValueEntry,
    ListPlace,
    SessionInfo,
    StoredRecord,
    StoreReader,
)
from midstream.store.jetstream.jetstream_link import PAGE_MESSAGES, JetStreamLink
from midstream.store.jetstream.journal_messages import (
    PART,
    BlobHead,
    Entry,
    Fold,
    JournalHead,
    SpentLedger,
    decode,
    join_head,
)
from midstream.store.jetstream.listing_view import ListingView
from midstream.store.jetstream.stored_values import read_body, read_value
from midstream.store.jetstream.stream_subjects import SessionPlace, StreamSubjects

CURSORS_MAX = 5000
"""Sessions whose known positions are in memory."""
MARKS_MAX = 64
"""Known positions of each of them."""
TRIES_MAX = 20
"""Times that a journal is read again because it was pruned meanwhile."""
SEEK_FROM = 4 * PAGE_MESSAGES
"""Messages of a stream that are read rather than searched."""


class NewestMessage(Struct, frozen=True):
    """The last message of a journal, without the records of a split append."""

    seq: int
    head: JournalHead


class _Marks(Struct):
    """Positions of one journal, each with a sequence number from which later records are found."""

    birth: int
    positions: list[int]
    starts: list[int]

    def add(self, position: int, start: int) -> None:
        if not self.positions or position > self.positions[-1]:
            self.positions.append(position)
            self.starts.append(start)
            if len(self.positions) > MARKS_MAX:  # every second one is sufficient
                self.positions, self.starts = self.positions[::2], self.starts[::2]

    def find(self, after: int) -> int:
        place = bisect_right(self.positions, after)
        return self.starts[place - 1] if place else 1


class SessionReader(StoreReader):
    """The reading half of a store, on one connection."""

    def __init__(self, link: JetStreamLink, subjects: StreamSubjects, world: World) -> None:
        self.lines = ListingView(link, subjects)
        self._link = link
        self._subjects = subjects
        self._world = world
        self._marks: OrderedDict[str, _Marks] = OrderedDict()

    async def newest(self, session: str) -> NewestMessage | None:
        """Return the last message of a journal, also that of a deletion; None if there is none."""
        place = self._subjects.session(session)
        found = await self._link.last(place.stream, place.journal)
        return None if found is None else NewestMessage(found.seq, decode(found.data, JournalHead))

    async def present(self, session: str) -> NewestMessage | None:
        """Return the last message of a journal; None if there is no such session."""
        newest = await self.newest(session)
        return None if newest is None or newest.head.is_gone else newest

    async def fold(self, session: str) -> tuple[int, Fold] | None:
        """Return the record that replaces a pruned beginning, with its sequence number."""
        place = self._subjects.session(session)
        found = await read_value(self._link, place.stream, place.fold, Fold)
        if found is None:
            return None
        seq, fold, body = found
        return seq, Fold(fold.birth, fold.position, fold.epoch, fold.link, fold.op, fold.seq, body=body)

    async def fold_head(self, place: SessionPlace) -> tuple[int, Fold] | None:
        """Return the result of `fold` without a large body."""
        found = await self._link.last(place.stream, place.fold)
        return None if found is None else (found.seq, decode(found.data, Fold))

    async def ledger(self, stream: str) -> tuple[int, SpentLedger]:
        """Return the ledger of a stream, with the sequence number of its message; 0 if there is none."""
        found = await self._link.last(stream, self._subjects.ledger(stream))
        return (0, SpentLedger()) if found is None else (found.seq, decode(found.data, SpentLedger))

    @override
    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        for _ in range(TRIES_MAX):
            newest, folded = await asyncio.gather(self.present(session), self.fold(session))
            if newest is None or limit <= 0:
                return []
            records: list[StoredRecord] = []
            behind = after
            if folded is not None and folded[1].birth == newest.head.birth and after < folded[1].position:
                fold = folded[1]
                records.append(StoredRecord(fold.position, fold.epoch, fold.body, fold.link))
                behind = fold.position
            if len(records) < limit and behind < newest.head.end:
                start = folded[1].seq if folded is not None and behind == folded[1].position else 1
                found = await self._read_behind(session, newest, behind, limit - len(records), start)
                if not found or found[0].position != max(behind, 0) + 1:
                    continue  # it was pruned or deleted meanwhile
                records += found
            return records[:limit]
        raise StoreBusyError(f"session {session!r} is pruned all the time", retry_after_s=1.0)

    async def _read_behind(
        self, session: str, newest: NewestMessage, after: int, limit: int, start: int
    ) -> list[StoredRecord]:
        head = newest.head
        if not head.parts and head.bodies and head.first <= after + 1:
            return head.records(after=after)
        marks = self._marks_of(session, head.birth)
        place = self._subjects.session(session)
        start = max(start, marks.find(after))
        start = await self._seek(place, head.birth, after, start, newest.seq)
        records: list[StoredRecord] = []
        async for seq, each in self._heads(place, start, newest.seq):
            if each.birth == head.birth:
                records += each.records(after=after)
                marks.add(each.end, seq + 1)
            if len(records) >= limit:
                break
        return records

    async def _seek(self, place: SessionPlace, birth: int, after: int, start: int, end: int) -> int:
        """Return a sequence number near the first record after a position, and not above it."""
        while end - start > SEEK_FROM and after > 0:
            middle = (start + end) // 2
            found = await self._link.next(place.stream, place.journal, start=middle)
            each = None
            if found is not None and not found.data.startswith(PART):
                each = decode(found.data, JournalHead)
            if found is not None and each is not None and (each.birth, each.end) <= (birth, after):
                start = found.seq + 1
            else:
                end = middle
        return start

    async def _heads(
        self, place: SessionPlace, start: int, until: int
    ) -> AsyncIterator[tuple[int, JournalHead]]:
        """Yield the messages of a journal, each with all its records."""
        parts: list[bytes] = []
        while page := await self._link.page(place.stream, place.journal, start=start, until=until):
            for message in page:
                if message.data.startswith(PART):
                    parts.append(message.data)
                    continue
                yield message.seq, join_head(decode(message.data, JournalHead), parts)
                parts = []
            start = page[-1].seq + 1

    async def find_record(
        self, session: str, newest: NewestMessage, position: int
    ) -> tuple[int, StoredRecord] | None:
        """Return a record, with the sequence number of the first message that contains it or a part of it."""
        place = self._subjects.session(session)
        marks = self._marks_of(session, newest.head.birth)
        start = await self._seek(place, newest.head.birth, position - 1, marks.find(position - 1), newest.seq)
        begin = start
        async for seq, each in self._heads(place, start, newest.seq):
            if each.birth == newest.head.birth and each.bodies and each.first <= position <= each.end:
                return begin, each.records(after=position - 1)[0]
            begin = seq + 1
        return None

    def _marks_of(self, session: str, birth: int) -> _Marks:
        marks = self._marks.get(session)
        if marks is None or marks.birth != birth:
            marks = self._marks[session] = _Marks(birth, [], [])
            if len(self._marks) > CURSORS_MAX:
                self._marks.popitem(last=False)
        self._marks.move_to_end(session)
        return marks

    @override
    async def find(self, session: str) -> SessionInfo | None:
        return await self._find(session, has_seal=True)

    async def _find(self, session: str, *, has_seal: bool) -> SessionInfo | None:
        newest, folded = await asyncio.gather(self.present(session), self.fold(session))
        if newest is None:
            return None
        oldest = min(newest.head.end, 1)
        if folded is not None and folded[1].birth == newest.head.birth:
            oldest = folded[1].position
        return newest.head.info(oldest=oldest, has_seal=has_seal)

    @override
    async def blob(self, session: str, digest: str) -> bytes | None:
        place = self._subjects.session(session)
        newest, found = await asyncio.gather(
            self.present(session), read_value(self._link, place.stream, place.blob(digest), BlobHead)
        )
        if newest is None or found is None or found[1].birth != newest.head.birth:
            return None
        return found[2]

    @override
    async def blob_digests(self, session: str) -> Sequence[str]:
        place = self._subjects.session(session)
        newest = await self.present(session)
        if newest is None:
            return []
        messages = await self._link.scan(place.stream, f"{place.subject}.b.*")
        heads = [decode(message.data, BlobHead) for message in messages]
        return [head.digest for head in heads if head.birth == newest.head.birth]

    async def entry_head(self, namespace: str, key: str) -> tuple[int, Entry] | None:
        """Return the sequence number and the head of an entry, also of a deleted one."""
        stream, subject = self._subjects.entry(namespace, key)
        found = await self._link.last(stream, subject)
        return None if found is None else (found.seq, decode(found.data, Entry))

    @override
    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        stream, subject = self._subjects.entry(namespace, key)
        found = await read_value(self._link, stream, subject, Entry)
        return None if found is None or found[1].is_gone else found[1].value(found[2])

    @override
    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        entries = await asyncio.gather(
            *(self._list_entries(*where) for where in self._subjects.entries(namespace))
        )
        return sorted(itertools.chain(*entries), key=lambda entry: (-entry.at, entry.key))

    async def _list_entries(self, stream: str, pattern: str) -> list[KeyValueEntry]:
        found: list[KeyValueEntry] = []
        for message in await self._link.scan(stream, pattern):
            head = decode(message.data, Entry)
            if head.is_gone:
                continue
            body = await read_body(self._link, stream, message.subject, head)
            entry = head.value(body) if body is not None else await self.kv_get(head.namespace, head.key)
            found += [] if entry is None else [entry]
        return found

    @override
    async def kv_namespaces(self) -> Sequence[str]:
        found = set()
        for stream, pattern in self._subjects.entries(None):
            for message in await self._link.scan(stream, pattern):
                head = decode(message.data, Entry)
                if not head.is_gone:
                    found.add(head.namespace)
        return sorted(found)

    async def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        """See `StoreReader.list`."""

        def find(session: str) -> Awaitable[SessionInfo | None]:
            return self._find(session, has_seal=False)

        async for info in self.lines.list(find, live=live, of=of, after=after, limit=limit):
            yield info
