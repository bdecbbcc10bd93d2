"""Writes into journals: appends, claims, releases and pruning.

Each write names the last message of its session's journal that this process has seen. The server refuses it if there is
a newer message. This one condition fences both the position and the epoch.

If a server dies, the answer may be lost. Then the last message of the journal is read. If it is this write, the write
has happened. If it is another new one, this write is fenced for ever. If it is the one before, the same write is sent
again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec import Struct

from midstream.environment import World
from midstream.errors import (
    JournalMovedError,
    LeaseHeldError,
    LeaseLostError,
    MidstreamError,
    StoreBusyError,
    UsageError,
)
from midstream.retries import APPEND_BACKOFF
from midstream.store.contract import Batch, SessionListing, require_as_found
from midstream.store.jetstream.jetstream_errors import SubjectMovedError, UnknownOutcomeError
from midstream.store.jetstream.jetstream_link import JetStreamLink, SubjectWrite
from midstream.store.jetstream.journal_messages import (
    BlobHead,
    Fold,
    JournalHead,
    Line,
    ValuePart,
    decode,
    encode,
    split_body,
    split_head,
)
from midstream.store.jetstream.node_presence import NodePresence
from midstream.store.jetstream.session_reader import NewestMessage, SessionReader
from midstream.store.jetstream.stored_values import write_value
from midstream.store.jetstream.stream_subjects import SessionPlace, StreamSubjects

JOURNALS_KNOWN_MAX = 20_000
"""Sessions whose last message is in memory."""
TRIES_MAX = 30
"""Times that a write is decided again because of concurrent writes."""
UNKNOWN_PAUSE_S = 0.05

_log = logging.getLogger(__name__)


class _JournalLane(Struct, eq=False):
    """Writes of this process to one session, one after another."""

    lock: asyncio.Lock
    newest: NewestMessage | None = None
    """The last message, if this process wrote it."""


class JournalWrites:
    """Writes of one node.

    Args:
        on_moved: Called with a session and its new end after each write.
        on_freed: Called when a session with an open turn was released.
    """

    def __init__(
        self,
        link: JetStreamLink,
        subjects: StreamSubjects,
        reader: SessionReader,
        presence: NodePresence,
        world: World,
        *,
        on_moved: Callable[[str, int], Awaitable[None]],
        on_freed: Callable[[], Awaitable[None]],
    ) -> None:
        self._link = link
        self._subjects = subjects
        self._reader = reader
        self._presence = presence
        self._world = world
        self._on_moved = on_moved
        self._on_freed = on_freed
        self._journals: OrderedDict[str, _JournalLane] = OrderedDict()
        self._ops = itertools.count(1)

    def new_op(self) -> str:
        """Return a unique id for a write."""
        return f"{self._presence.number}.{next(self._ops)}"

    # --- appends

    async def append(self, session: str, batch: Batch) -> int:
        """See `Store.append`."""
        for body in batch.bodies:
            if not isinstance(body, bytes):
                raise UsageError("a record's body is bytes")
        lane = self._journal_lane(session)
        async with lane.lock:
            newest, lane.newest = lane.newest, None
            for _ in range(TRIES_MAX):
                is_known = newest is not None and bool(batch.bodies)
                if newest is None or not is_known or not _fits(newest.head, batch):
                    newest = await self._reader.present(session)
                    lane.newest = newest
                    _require_fitting(session, newest, batch)
                assert newest is not None
                lane.newest = None
                lane.newest = await self._append(session, newest, batch)
                if lane.newest is not None:
                    await self._on_moved(session, batch.end)
                    return batch.end
                newest = None
            raise _busy(session)

    async def _append(self, session: str, newest: NewestMessage, batch: Batch) -> NewestMessage | None:
        if not (batch.bodies or batch.mark or batch.blobs or batch.seal):
            return newest
        head, place = newest.head, self._subjects.session(session)
        mark = head.mark
        if batch.mark is not None:
            mark = msgspec.structs.replace(batch.mark, title=batch.mark.title or head.mark.title)
        after = msgspec.structs.replace(
            head,
            op=self.new_op(),
            end=batch.end,
            mark=mark,
            seal=batch.seal or head.seal,
            parts=0,
            bodies=tuple(batch.bodies),
            links=tuple(batch.links),
        )
        writes = await self._blob_writes(place, head.birth, batch)
        if batch.mark is not None:
            writes.append(line_of(place, after))
        return await self._commit(place, newest, after, writes)

    async def _blob_writes(self, place: SessionPlace, birth: int, batch: Batch) -> list[SubjectWrite]:
        writes: list[SubjectWrite] = []
        for blob in {blob.digest: blob for blob in batch.blobs}.values():
            subject = place.blob(blob.digest)
            found = await self._link.last(place.stream, subject)
            if found is not None and decode(found.data, BlobHead).birth == birth:
                continue
            parts = split_body(blob.body)
            head = BlobHead(blob.digest, birth, self.new_op(), len(parts))
            writes += [
                SubjectWrite(f"{subject}.p.{number}", encode(ValuePart(head.op, part)), is_only=True)
                for number, part in enumerate(parts)
            ]
            writes.append(SubjectWrite(subject, encode(head), is_only=True))
        return writes

    # --- leases

    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        """See `Store.claim`."""
        lane, place = self._journal_lane(session), self._subjects.session(session)
        async with lane.lock:
            lane.newest = None
            for _ in range(TRIES_MAX):
                newest = await self._reader.newest(session)
                is_there = newest is not None and not newest.head.is_gone
                require_as_found(
                    session, is_free=is_free, now=not newest.head.node if newest and is_there else None
                )
                if newest is None or newest.head.is_gone:
                    newest, head = None, await self._new_session(session, place, newest, at)
                else:
                    await self._require_free(session, newest.head.node)
                    head = msgspec.structs.replace(
                        newest.head,
                        op=self.new_op(),
                        epoch=newest.head.epoch + 1,
                        node=self._presence.node,
                        parts=0,
                        bodies=(),
                        links=(),
                    )
                line = [line_of(place, head)] if newest is None or head.mark.is_live else []
                lane.newest = await self._commit(place, newest, head, line)
                if lane.newest is not None:
                    await self._on_moved(session, head.end)
                    return head.epoch
            raise _busy(session)

    async def _new_session(
        self, session: str, place: SessionPlace, gone: NewestMessage | None, at: float
    ) -> JournalHead:
        if gone is not None:  # its deletion was not finished
            await self._link.purge(place.stream, place.everything, below=gone.seq + 1)
        _, ledger = await self._reader.ledger(place.stream)
        epoch = max(ledger.epochs, 0 if gone is None else gone.head.epoch) + 1
        return JournalHead(
            session,
            self.new_op(),
            epoch,
            epoch,
            0,
            self._presence.node,
            at,
            SessionListing(is_live=False, at=at),
        )

    async def is_held_elsewhere(self, session: str) -> bool:
        """See `Store.is_held_elsewhere`: as of the last check of the nodes."""
        newest = await self._reader.present(session)
        return newest is not None and newest.head.node in self._presence.others

    async def _require_free(self, session: str, node: str) -> None:
        if node and node != self._presence.node and not await self._presence.is_dead(node):
            message = f"session {session!r} belongs to {node!r}, which is alive"
            raise LeaseHeldError(message, session=session)

    async def release(self, session: str, *, epoch: int) -> None:
        """See `Store.release`."""
        lane, place = self._journal_lane(session), self._subjects.session(session)
        async with lane.lock:
            for _ in range(TRIES_MAX):
                newest = lane.newest or await self._reader.present(session)
                lane.newest = None
                if newest is None or newest.head.epoch != epoch or not newest.head.node:
                    return
                head = msgspec.structs.replace(
                    newest.head, op=self.new_op(), node="", parts=0, bodies=(), links=()
                )
                line = [line_of(place, head)] if head.mark.is_live else []
                if await self._commit(place, newest, head, line) is not None:
                    await self._on_moved(session, head.end)
                    if head.mark.is_live:
                        await self._on_freed()
                    return
            raise _busy(session)

    # --- pruning

    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        """See `Store.prune`."""
        place = self._subjects.session(session)
        for _ in range(TRIES_MAX):
            newest, folded = await asyncio.gather(self._reader.present(session), self._reader.fold(session))
            if newest is None or position < 1:
                return False
            expected, old = folded or (0, None)
            if old is not None and old.birth != newest.head.birth:
                old = None
            if old is not None and position <= old.position:
                if (position, epoch) != (old.position, old.epoch):
                    return False
                start, kept = old.seq, old.link
            else:
                found = await self._reader.find_record(session, newest, position)
                if found is None or found[1].epoch != epoch:
                    return False
                start, kept = found[0], found[1].link
            fold = Fold(
                newest.head.birth, position, epoch, kept if link is None else link, self.new_op(), start
            )
            if await self._commit_value(place, place.fold, fold, body, expected):
                await self._link.tidy(place.stream, place.journal, below=start)
                return True
        raise _busy(session)

    async def _commit_value(
        self, place: SessionPlace, subject: str, fold: Fold, body: bytes, expected: int
    ) -> bool:
        """Write a value; return False if another value was written first."""
        writes = write_value(subject, fold, body, expected=expected)
        is_unknown = False
        while True:
            try:
                seq = await self._link.commit(place.stream, writes)
            except SubjectMovedError:
                pass
            except UnknownOutcomeError:
                is_unknown = True
                await self._world.sleep(UNKNOWN_PAUSE_S)
            except StoreBusyError:
                if not is_unknown:
                    raise
                await self._world.sleep(UNKNOWN_PAUSE_S)
            else:
                await self._link.tidy(place.stream, f"{subject}.p.*", below=seq - len(writes) + 1)
                return True
            found = await self._link.settle(lambda: self._reader.fold_head(place))
            if found is not None and found[1].op == fold.op:
                return True
            if (0 if found is None else found[0]) != expected:
                return False

    # --- commits

    async def _commit(
        self,
        place: SessionPlace,
        newest: NewestMessage | None,
        head: JournalHead,
        others: Sequence[SubjectWrite],
    ) -> NewestMessage | None:
        """Write a message after the newest one, and return it; None if another one was written first.

        Raises:
            MidstreamError: The server refused. Nothing was written.
        """
        expected = 0 if newest is None else newest.seq
        first, *rest = split_head(head)
        writes = [
            *others,
            SubjectWrite(place.journal, first, expected),
            *(SubjectWrite(place.journal, part) for part in rest),
        ]
        state = msgspec.structs.replace(head, parts=0, bodies=(), links=())
        is_unknown = False
        for failures in itertools.count(1):
            try:
                seq = await self._link.commit(place.stream, writes)
            except SubjectMovedError:
                pass
            except UnknownOutcomeError as error:
                _log.debug("the outcome of a write is unknown: %s", error)
                is_unknown = True
            except MidstreamError:
                if not is_unknown:
                    raise
            else:
                return NewestMessage(seq, state)
            found = await self._find_newest(head.session, failures)
            if found is not None and found.head.op == head.op:
                return NewestMessage(found.seq, state)
            if (0 if found is None else found.seq) != expected:
                return None
        raise AssertionError

    async def _find_newest(self, session: str, failures: int) -> NewestMessage | None:
        """Return the last message; retry as long as the servers cannot be reached."""
        while True:
            if failures > 1:
                await self._world.sleep(APPEND_BACKOFF.wait_s(failures - 1, chance=self._world.chance()))
            try:
                return await self._reader.newest(session)
            except StoreBusyError as error:
                _log.debug("still unknown: %s", error)
                failures += 1

    def _journal_lane(self, session: str) -> _JournalLane:
        lane = self._journals.get(session)
        if lane is None:
            lane = self._journals[session] = _JournalLane(asyncio.Lock())
            if len(self._journals) > JOURNALS_KNOWN_MAX:
                idle = next((name for name, each in self._journals.items() if not each.lock.locked()), None)
                if idle is not None:
                    del self._journals[idle]
        self._journals.move_to_end(session)
        return lane


def line_of(place: SessionPlace, head: JournalHead) -> SubjectWrite:
    """Return the message for a session's line."""
    line = Line(head.session, head.epoch, head.node, head.mark.is_live, head.mark.at, head.is_gone)
    return SubjectWrite(place.line, encode(line), is_only=True)


def _fits(head: JournalHead, batch: Batch) -> bool:
    return (head.epoch, head.end) == (batch.epoch, batch.expected)


def _require_fitting(session: str, newest: NewestMessage | None, batch: Batch) -> None:
    if newest is None or newest.head.epoch != batch.epoch:
        raise LeaseLostError(f"session {session!r} has another epoch than {batch.epoch}")
    if newest.head.end != batch.expected:
        raise JournalMovedError(f"session {session!r} ends at {newest.head.end}, not at {batch.expected}")


def _busy(session: str) -> StoreBusyError:
    return StoreBusyError(f"other nodes write to session {session!r} at the same moment", retry_after_s=1.0)
