"""Deletion of a session with its parts: one batch of deletion marks, then the removal of its messages.

The batch is the deletion: all journals of the family are in one stream. If the process dies before the removal, the
next claim or deletion of the name finishes it. The stream's ledger has the used epochs and versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec import Struct

from midstream.environment import World
from midstream.errors import LeaseHeldError
from midstream.session.child_names import PART_MARK
from midstream.store.jetstream.entry_writes import spend
from midstream.store.jetstream.jetstream_link import JetStreamLink, SubjectWrite
from midstream.store.jetstream.journal_messages import Entry, JournalHead, decode, encode
from midstream.store.jetstream.journal_writes import line_of
from midstream.store.jetstream.node_presence import NodePresence
from midstream.store.jetstream.session_reader import NewestMessage, SessionReader
from midstream.store.jetstream.stream_subjects import SessionPlace, StreamSubjects
from midstream.store.jetstream.write_tries import WriteTries

BATCH_SESSIONS_MAX = 150
"""Sessions in one batch, which has at most 1000 messages. A larger family needs several; the session itself is last."""


class _Member(Struct, frozen=True):
    """A session of a family."""

    place: SessionPlace
    newest: NewestMessage


class SessionRemoval:
    """Deletions of one node.

    Args:
        new_op: Returns a unique id for a write.
        on_moved: Called with each session that was deleted, and 0.
    """

    def __init__(
        self,
        link: JetStreamLink,
        subjects: StreamSubjects,
        reader: SessionReader,
        presence: NodePresence,
        world: World,
        *,
        new_op: Callable[[], str],
        on_moved: Callable[[str, int], Awaitable[None]],
    ) -> None:
        self._link = link
        self._subjects = subjects
        self._reader = reader
        self._presence = presence
        self._world = world
        self._new_op = new_op
        self._on_moved = on_moved

    async def delete(self, session: str) -> bool:
        """See `Store.delete`."""
        births: dict[str, int] | None = None
        tries = WriteTries(self._link, self._world, f"session {session!r}")
        while True:
            family = (
                await self._link.settle(lambda: self._find_family(session))
                if births
                else (await self._find_family(session))
            )
            heads = {each.newest.head.session: each.newest.head.birth for each in family}
            if births is None:
                births = heads
            # A session that was created meanwhile under a deleted name is another one.
            family = [
                each for each in family if births.get(each.newest.head.session) == each.newest.head.birth
            ]
            if not family:
                return bool(births)
            for each in family:
                await self._require_free(each.newest.head)
            await tries.begin(tuple(each.newest.seq for each in family))
            if await self._remove_all(family, tries):
                return True

    async def _find_family(self, session: str) -> list[_Member]:
        """Return the session and its parts, the session last; finish incomplete deletions."""
        place = self._subjects.session(session)
        family: list[_Member] = []
        for subject in sorted(await self._link.subjects(place.stream, place.family), reverse=True):
            found = await self._link.last(place.stream, subject)
            if found is None:
                continue
            head = decode(found.data, JournalHead)
            if head.session == session or head.session.startswith(f"{session}{PART_MARK}"):
                member = _Member(self._subjects.session(head.session), NewestMessage(found.seq, head))
                if head.is_gone:
                    await self._link.purge(place.stream, member.place.everything, below=found.seq + 1)
                else:
                    family.append(member)
        return sorted(family, key=lambda each: -len(each.newest.head.session))

    async def _require_free(self, head: JournalHead) -> None:
        if head.node and await self._is_held(head.node):
            message = f"session {head.session!r} belongs to {head.node!r}, which is alive"
            raise LeaseHeldError(message, session=head.session)

    async def _is_held(self, node: str) -> bool:
        return node != self._presence.node and not await self._presence.is_dead(node)

    async def _remove_all(self, family: Sequence[_Member], tries: WriteTries) -> bool:
        for start in range(0, len(family), BATCH_SESSIONS_MAX):
            if not await self._remove(family[start : start + BATCH_SESSIONS_MAX], tries):
                return False
        return True

    async def _remove(self, members: Sequence[_Member], tries: WriteTries) -> bool:
        """Delete some sessions, all or none; False: their state has changed."""
        stream = members[0].place.stream
        writes, versions = await tries.read(lambda: self._entry_writes(members))
        epochs = max(each.newest.head.epoch for each in members)
        writes += await tries.read(
            lambda: spend(self._reader, self._subjects, stream, epochs=epochs, versions=versions)
        )
        op = self._new_op()
        for each in members:
            gone = msgspec.structs.replace(
                each.newest.head, op=op, node="", is_gone=True, seal=b"", parts=0, bodies=(), links=()
            )
            writes.append(line_of(each.place, gone))
            writes.append(SubjectWrite(each.place.journal, encode(gone), each.newest.seq))
        last = await tries.commit(stream, writes)
        if last is None:
            return False
        await asyncio.gather(
            *(self._link.tidy(stream, each.place.everything, below=last + 1) for each in members)
        )
        for each in members:
            await self._on_moved(each.newest.head.session, 0)
        return True

    async def _entry_writes(self, members: Sequence[_Member]) -> tuple[list[SubjectWrite], int]:
        """Return the writes that delete the entries of sessions, and the highest of their versions."""
        writes: list[SubjectWrite] = []
        versions = 0
        for each in members:
            for subject in await self._link.subjects(each.place.stream, each.place.entries):
                found = await self._link.last(each.place.stream, subject)
                entry = None if found is None else decode(found.data, Entry)
                if found is None or entry is None or entry.is_gone:
                    continue
                versions = max(versions, entry.version)
                gone = msgspec.structs.replace(entry, op=self._new_op(), is_gone=True, parts=0, body=b"")
                writes.append(SubjectWrite(subject, encode(gone), found.seq))
        return writes, versions
