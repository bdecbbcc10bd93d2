"""Copies of stores, from any kind to any other one, with the same positions, epochs and bytes.

A copy can be interrupted, and repeated after its source has grown: it continues at the end of the target. The line of a
session is written last, so that no server takes up an incomplete session. Only the contract of stores is used: claims
raise the epoch, and pruned records make the beginning of a pruned journal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby

from msgspec import Struct

from midstream.errors import EventsLostError, UsageError
from midstream.session.blobs import Blob
from midstream.session.records import Sync
from midstream.store.contract import Batch, SessionInfo, Store, StoredRecord, StoreReader
from midstream.store.node_reports import NODES

PAGE_RECORDS = 500
"""Records that are read and appended in one step."""


class Copied(Struct, frozen=True):
    """Result of a copy: counts, and the digest of all compared data."""

    sessions: int
    records: int
    blobs: int
    entries: int
    digest: str


async def copy_store(source: StoreReader, target: Store) -> Copied:
    """Copy everything that the target lacks, then compare each session with its source.

    Args:
        source: A server may use it; later appends are copied by the next call.
        target: An open store that no server uses. Both stores are guarded, or neither: see `store_registry.copy_named`.

    Raises:
        UsageError: The target has other records under the name of a session, or another entry under a key.
        EventsLostError: After the copy, a session of the target differs from that of the source.
    """
    digest = hashlib.sha256()
    records = blobs = 0
    names = [line.session async for line in source.list()]
    for name in reversed(names):
        line = await source.find(name)
        if line is None:
            continue  # it was deleted meanwhile
        copy = _SessionCopy(source, target, line)
        await copy.make()
        digest.update(await copy.verify())
        records += line.end - max(line.oldest - 1, 0)
        blobs += len(await target.blob_digests(name))
    entries = await _copy_entries(source, target)
    return Copied(len(names), records, blobs, entries, digest.hexdigest())


class _SessionCopy:
    """The copy of one session."""

    def __init__(self, source: StoreReader, target: Store, line: SessionInfo) -> None:
        self._source = source
        self._target = target
        self._line = line
        self._name = line.session
        self._end = 0
        self._epoch = 0

    async def make(self) -> None:
        """Append the missing records, and write the line of the session."""
        there = await self._target.find(self._name)
        if there is not None:
            self._end, self._epoch = there.end, there.epoch
        if self._end > self._line.end or self._epoch > self._line.epoch:
            raise UsageError(
                f"the target has another session {self._name!r}, or a server has used it: choose an empty target"
            )
        if self._line.oldest > 1 and (there is None or there.oldest < self._line.oldest):
            await self._begin_pruned()
        while self._end < self._line.end:
            limit = min(PAGE_RECORDS, self._line.end - self._end)
            page = await self._source.read(self._name, after=self._end, limit=limit)
            if not page or page[0].position != self._end + 1:
                raise UsageError(f"session {self._name!r} was pruned meanwhile: copy it again")
            for epoch, records in groupby(page, key=lambda record: record.epoch):
                await self._reach(epoch)
                await self._append([*records])
        await self._reach(self._line.epoch)
        await self._copy_blobs()
        if there is None or (there.mark, there.seal, there.end) != (
            self._line.mark,
            self._line.seal,
            self._line.end,
        ):
            mark, seal = self._line.mark, self._line.seal
            batch = Batch((), self._end, self._epoch, Sync.FULL, mark, seal=seal)
            await self._target.append(self._name, batch)
        if self._line.is_free:
            await self._target.release(self._name, epoch=self._epoch)

    async def verify(self) -> bytes:
        """Return the digest of the session, which is equal in source and target.

        Raises:
            EventsLostError: They differ.
        """
        of_source = await _digest_of(self._source, self._name, self._line.end)
        of_target = await _digest_of(self._target, self._name, self._line.end)
        if of_source != of_target:
            raise EventsLostError(f"the copy of session {self._name!r} differs from its source")
        return of_source

    async def _begin_pruned(self) -> None:
        """Write the first record of a pruned journal, at its position."""
        oldest = self._line.oldest
        [first] = await self._source.read(self._name, after=0, limit=1)
        await self._reach(first.epoch)
        while self._end < oldest:
            count = min(PAGE_RECORDS, oldest - self._end)
            await self._append([StoredRecord(0, 0, b"{}")] * count)
        link = first.link or None
        if not await self._target.prune(
            self._name, first.body, position=oldest, epoch=first.epoch, link=link
        ):
            raise UsageError(f"the target has another session {self._name!r}: choose an empty target")

    async def _reach(self, epoch: int) -> None:
        """Raise the target's epoch to this one."""
        while self._epoch < epoch:
            self._epoch = await self._target.claim(self._name, at=self._line.created_at)
        if self._epoch > epoch:
            raise UsageError(
                f"session {self._name!r} has epoch {self._epoch} in the target, not {epoch}: "
                "sessions were deleted there, or a server has worked on it; choose an empty target"
            )

    async def _append(self, records: Sequence[StoredRecord]) -> None:
        links = [record.link for record in records]
        bodies = [record.body for record in records]
        batch = Batch(bodies, self._end, self._epoch, Sync.FULL, links=links if any(links) else ())
        self._end = await self._target.append(self._name, batch)

    async def _copy_blobs(self) -> None:
        there = {*await self._target.blob_digests(self._name)}
        for digest in await self._source.blob_digests(self._name):
            body = None if digest in there else await self._source.blob(self._name, digest)
            if body is not None:
                batch = Batch((), self._end, self._epoch, Sync.FULL, blobs=[Blob(digest, body)])
                await self._target.append(self._name, batch)


async def _copy_entries(source: StoreReader, target: Store) -> int:
    count = 0
    for namespace in await source.kv_namespaces():
        if namespace == NODES:  # reports of the source's servers
            continue
        there = {entry.key: entry for entry in await target.kv_list(namespace)}
        for entry in await source.kv_list(namespace):
            count += 1
            found = there.get(entry.key)
            if found is not None and (found.body, found.at) == (entry.body, entry.at):
                continue
            if found is not None and found.at > entry.at:
                raise UsageError(f"the target has another entry {entry.key!r}: choose an empty target")
            version = 0 if found is None else found.version
            await target.kv_put(namespace, entry.key, entry.body, expected=version, at=entry.at)
    return count


async def _digest_of(reader: StoreReader, session: str, end: int) -> bytes:
    """Return the digest of a session: its records up to `end`, and its large results."""
    digest = hashlib.sha256(session.encode())
    after = 0
    while page := [
        record
        for record in await reader.read(session, after=after, limit=PAGE_RECORDS)
        if record.position <= end
    ]:
        for record in page:
            digest.update(_head_of(record))
            digest.update(record.body + record.link)
        after = page[-1].position
    for name in sorted(await reader.blob_digests(session)):
        body = await reader.blob(session, name) or b""
        digest.update(b"blob %d %b " % (len(body), name.encode()))
        digest.update(body)
    return digest.digest()


def _head_of(record: StoredRecord) -> bytes:
    return b"record %d %d %d %d " % (record.position, record.epoch, len(record.body), len(record.link))
