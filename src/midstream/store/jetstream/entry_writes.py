"""Writes of key-value entries, each under the condition that the entry's last message has not changed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from midstream.environment import World
from midstream.store.contract import require_version
from midstream.store.jetstream.jetstream_link import JetStreamLink, SubjectWrite
from midstream.store.jetstream.journal_messages import Entry, SpentLedger, encode
from midstream.store.jetstream.session_reader import SessionReader
from midstream.store.jetstream.stored_values import write_value
from midstream.store.jetstream.stream_subjects import StreamSubjects
from midstream.store.jetstream.write_tries import WriteTries


class EntryWrites:
    """Writes of one node to the key-value part.

    Args:
        new_op: Returns a unique id for a write.
    """

    def __init__(
        self,
        link: JetStreamLink,
        subjects: StreamSubjects,
        reader: SessionReader,
        world: World,
        new_op: Callable[[], str],
    ) -> None:
        self._link = link
        self._subjects = subjects
        self._reader = reader
        self._world = world
        self._new_op = new_op

    async def put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        """See `KeyValue.kv_put`."""
        stream, subject = self._subjects.entry(namespace, key)
        op = self._new_op()
        tries = WriteTries(self._link, self._world, f"entry {key!r}")
        while True:
            found = await tries.read(lambda: self._reader.entry_head(namespace, key))
            seq, old = found or (0, None)
            if old is not None and old.op == op:
                return old.version
            version = await self._next_version(stream, key, old, expected, tries)
            await tries.begin(seq)
            head = Entry(namespace, key, version, at, op)
            writes = write_value(subject, head, body, expected=seq)
            last = await tries.commit(stream, writes)
            if last is None:
                continue
            if old is not None and old.parts:
                await self._link.tidy(stream, f"{subject}.p.*", below=last - len(writes) + 1)
            return version

    async def _next_version(
        self, stream: str, key: str, old: Entry | None, expected: int, tries: WriteTries
    ) -> int:
        if old is not None and not old.is_gone:
            require_version(key, old.version, expected)
            return expected + 1
        require_version(key, 0, expected)
        _, ledger = await tries.read(lambda: self._reader.ledger(stream))
        return max(ledger.versions, 0 if old is None else old.version) + 1

    async def delete(self, namespace: str, key: str, *, expected: int) -> bool:
        """See `KeyValue.kv_delete`."""
        stream, subject = self._subjects.entry(namespace, key)
        op = self._new_op()
        tries = WriteTries(self._link, self._world, f"entry {key!r}")
        while True:
            found = await tries.read(lambda: self._reader.entry_head(namespace, key))
            if found is None or found[1].is_gone or found[1].version != expected:
                return found is not None and found[1].op == op
            spent = await tries.read(lambda: spend(self._reader, self._subjects, stream, versions=expected))
            await tries.begin(found[0])
            gone = msgspec.structs.replace(found[1], op=op, is_gone=True, parts=0, body=b"")
            writes = [*spent, SubjectWrite(subject, encode(gone), found[0])]
            last = await tries.commit(stream, writes)
            if last is not None:
                await self._link.tidy(stream, subject, below=last + 1)
                if found[1].parts:
                    await self._link.tidy(stream, f"{subject}.p.*", below=last + 1)
                return True


async def spend(
    reader: SessionReader, subjects: StreamSubjects, stream: str, *, epochs: int = 0, versions: int = 0
) -> list[SubjectWrite]:
    """Return the write that makes new sessions and entries of a stream start above these numbers, if one is needed."""
    seq, ledger = await reader.ledger(stream)
    after = SpentLedger(max(ledger.epochs, epochs), max(ledger.versions, versions))
    return (
        [] if after == ledger else [SubjectWrite(subjects.ledger(stream), encode(after), seq, is_only=True)]
    )
