"""A store as CONTRIBUTING describes one: one folder, one row in a registry, no change of the package.

All content is in one file, which each change writes completely. Nodes live in one process and die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import JournalMovedError, LeaseHeldError, LeaseLostError, NotFoundError, UsageError
from midstream.session.child_names import PART_MARK
from midstream.store.contract import (
    OF_SESSIONS,
    Batch,
    ForwardedCommand,
    KeyValueEntry,
    ListPlace,
    News,
    SessionInfo,
    SessionListing,
    Store,
    StoredRecord,
    StoreReader,
    require_as_found,
    require_version,
)


class Journal(Struct):
    number: int
    created_at: float
    epoch: int
    mark: SessionListing
    node: str = ""
    records: list[StoredRecord] = []
    blobs: dict[str, bytes] = {}
    seal: bytes = b""

    @property
    def end(self) -> int:
        return self.records[-1].position if self.records else 0


class Content(Struct):
    """The content of the file."""

    journals: dict[str, Journal] = {}
    entries: dict[str, dict[str, KeyValueEntry]] = {}
    numbers: int = 0
    epochs_spent: int = 0
    versions_spent: int = 0


class Command(Struct):
    forwarded: ForwardedCommand
    sender: str
    answer: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ToyFile:
    """One file, and the nodes of this process that share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content = msgspec.msgpack.decode(path.read_bytes(), type=Content) if path.exists() else Content()
        self.living: set[str] = set()
        self.commands: dict[int, Command] = {}
        self.changed = asyncio.Event()

    def save(self) -> None:
        beside = self.path.with_suffix(".new")
        beside.write_bytes(msgspec.msgpack.encode(self.content))
        beside.replace(self.path)
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def kill(self, node: str) -> None:
        self.living.discard(node)
        self.notify()

    def number(self) -> int:
        self.content.numbers += 1
        return self.content.numbers


class ToyReader(StoreReader):
    def __init__(self, place: ToyFile) -> None:
        self.place = place

    @property
    def _content(self) -> Content:
        return self.place.content

    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        journal = self._content.journals.get(session)
        return [each for each in journal.records if each.position > after][:limit] if journal else []

    async def blob(self, session: str, digest: str) -> bytes | None:
        journal = self._content.journals.get(session)
        return journal.blobs.get(digest) if journal else None

    async def find(self, session: str) -> SessionInfo | None:
        journal = self._content.journals.get(session)
        return replace(_line(session, journal), seal=journal.seal) if journal else None

    async def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        journals = sorted(
            ((journal.mark.at, session, journal) for session, journal in self._content.journals.items()),
            key=lambda item: item[:2],
            reverse=True,
        )
        found = [
            _line(session, journal)
            for at, session, journal in journals
            if (of is None or any(_is_part(session, each) for each in of))
            and live in (None, journal.mark.is_live)
            and (after is None or (at, session) < (after.at, after.session))
        ]
        for line in found[:limit]:
            yield line

    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        return self._content.entries.get(namespace, {}).get(key)

    async def blob_digests(self, session: str) -> Sequence[str]:
        journal = self._content.journals.get(session)
        return [*journal.blobs] if journal else []

    async def kv_namespaces(self) -> Sequence[str]:
        return [name for name, entries in self._content.entries.items() if entries]

    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        return sorted(
            self._content.entries.get(namespace, {}).values(), key=lambda each: (-each.at, each.key)
        )


class ToyStore(ToyReader, Store):
    def __init__(self, place: ToyFile, world: World) -> None:
        super().__init__(place)
        self.node = ""
        self._world = world
        self._delivered: set[tuple[str | int, int]] = set()
        self._peers = -1

    @property
    def _content(self) -> Content:
        if not self.node:
            raise UsageError("the store is not open; call `await store.open()` first")
        return self.place.content

    async def open(self) -> None:
        self.node = self.node or self._world.new_id("node")
        self.place.living.add(self.node)
        self.place.notify()

    async def close(self) -> None:
        self.place.kill(self.node)
        self.node = ""

    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        journals = self._content.journals
        journal = journals.get(session)
        require_as_found(session, is_free=is_free, now=None if journal is None else not journal.node)
        if journal is None:
            mark = SessionListing(is_live=False, at=at)
            journal = journals[session] = Journal(self.place.number(), at, self._content.epochs_spent, mark)
        self._require_free(session, journal)
        journal.node = self.node
        journal.epoch += 1
        self.place.save()
        return journal.epoch

    async def release(self, session: str, *, epoch: int) -> None:
        journal = self._content.journals.get(session)
        if journal is not None and journal.epoch == epoch:
            journal.node = ""
            self.place.save()

    async def append(self, session: str, batch: Batch) -> int:
        journal = self._content.journals.get(session)
        if journal is None or journal.epoch != batch.epoch:
            raise LeaseLostError(f"session {session!r} has another epoch than {batch.epoch}")
        if journal.end != batch.expected:
            raise JournalMovedError(f"session {session!r} ends at {journal.end}, not at {batch.expected}")
        links = batch.links or [b""] * len(batch.bodies)
        rows = enumerate(zip(batch.bodies, links, strict=True), start=batch.expected + 1)
        for position, (body, link) in rows:
            journal.records.append(StoredRecord(position, batch.epoch, body, link))
        for blob in batch.blobs:
            journal.blobs.setdefault(blob.digest, blob.body)
        if batch.mark is not None:
            journal.mark = replace(batch.mark, title=batch.mark.title or journal.mark.title)
        journal.seal = batch.seal or journal.seal
        self.place.save()
        return batch.end

    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        journal = self._content.journals.get(session)
        records = journal.records if journal else []
        links = [each.link for each in records if (each.position, each.epoch) == (position, epoch)]
        if not links:
            return False
        records[:] = [
            StoredRecord(position, epoch, body, links[0] if link is None else link),
            *(each for each in records if each.position > position),
        ]
        self.place.save()
        return True

    async def delete(self, session: str) -> bool:
        content = self._content
        going = {name: each for name, each in content.journals.items() if _is_part(name, session)}
        for name, journal in going.items():
            self._require_free(name, journal)
        for name, journal in going.items():
            content.epochs_spent = max(content.epochs_spent, journal.epoch)
            del content.journals[name]
            for namespace in OF_SESSIONS:
                self._remove_entry(namespace, name)
        commands = self.place.commands
        for number in [each for each, command in commands.items() if command.forwarded.session in going]:
            del commands[number]
        self.place.save()
        return bool(going)

    async def watch(self, followed: Mapping[str, int]) -> News:
        while True:
            journals, changed = self._content.journals, self.place.changed
            orphans = {
                (name, each.epoch)
                for name, each in journals.items()
                if each.mark.is_live and self._is_free(each)
            }
            forwarded_commands = {
                (number, self._epoch_of(command.forwarded.session))
                for number, command in self.place.commands.items()
                if command.sender in self.place.living and self._may_decide(command.forwarded.session)
            }
            ends = {name: journals[name].end if name in journals else 0 for name in followed}
            news = News(
                frozenset(name for name, end in ends.items() if end != followed[name]),
                tuple(
                    self.place.commands[number].forwarded
                    for number, _ in sorted(forwarded_commands - self._delivered)
                ),
                tuple(sorted(name for name, _ in orphans - self._delivered)),
                len(self.place.living - {self.node}),
            )
            if news != News(peers=self._peers):
                self._delivered, self._peers = {*forwarded_commands, *orphans}, news.peers
                return news
            await changed.wait()

    async def forward(self, session: str, body: bytes) -> bytes:
        self._require_open()
        number = self.place.number()
        command = self.place.commands[number] = Command(
            ForwardedCommand(number, session, body, self.node), self.node
        )
        self.place.notify()
        try:
            return await command.answer
        finally:
            self.place.commands.pop(number, None)

    async def answer(self, forwarded: int, body: bytes) -> None:
        self._require_open()
        command = self.place.commands.get(forwarded)
        if command is not None and self._may_decide(command.forwarded.session):
            del self.place.commands[forwarded]
            if not command.answer.done():
                command.answer.set_result(body)

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        found = await self.kv_get(namespace, key)
        require_version(key, found.version if found else 0, expected)
        version = (found.version if found else self._content.versions_spent) + 1
        self._content.entries.setdefault(namespace, {})[key] = KeyValueEntry(key, version, body, at)
        self.place.save()
        return version

    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        found = await self.kv_get(namespace, key)
        if found is None or found.version != expected:
            return False
        self._remove_entry(namespace, key)
        self.place.save()
        return True

    def _require_open(self) -> None:
        assert self._content is self.place.content

    def _require_free(self, session: str, journal: Journal) -> None:
        if journal.node != self.node and not self._is_free(journal):
            message = f"session {session!r} belongs to {journal.node!r}, which is alive"
            raise LeaseHeldError(message, session=session)

    def _is_free(self, journal: Journal) -> bool:
        return journal.node not in self.place.living

    def _may_decide(self, session: str) -> bool:
        journal = self.place.content.journals.get(session)
        return journal is None or journal.node == self.node or self._is_free(journal)

    def _epoch_of(self, session: str) -> int:
        journal = self.place.content.journals.get(session)
        return journal.epoch if journal else 0

    def _remove_entry(self, namespace: str, key: str) -> None:
        found = self._content.entries.get(namespace, {}).pop(key, None)
        if found is not None:
            self._content.versions_spent = max(self._content.versions_spent, found.version)


class ToyBackend:
    """See `midstream.store.store_registry.Backend`. An address is a path."""

    def open(self, address: str, *, world: World) -> ToyStore:
        return ToyStore(ToyFile(Path(address)), world)

    @contextlib.asynccontextmanager
    async def read(self, address: str) -> AsyncIterator[StoreReader]:
        if not Path(address).exists():  # noqa: ASYNC240 - a local file, at once
            raise NotFoundError(f"there is no toy store {address!r}")
        yield ToyReader(ToyFile(Path(address)))

    def file(self, address: str) -> Path:
        return Path(address)


def _line(session: str, journal: Journal) -> SessionInfo:
    oldest = journal.records[0].position if journal.records else 0
    is_free = not journal.node
    return SessionInfo(session, journal.end, journal.epoch, journal.created_at, journal.mark, is_free, oldest)


def _is_part(session: str, root: str) -> bool:
    return session == root or session.startswith(f"{root}{PART_MARK}")
