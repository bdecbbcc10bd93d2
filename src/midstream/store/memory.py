"""The reference store, in dictionaries. Tests compare every other store with it; nothing survives the process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from itertools import repeat
from typing import NoReturn

from msgspec import Struct, field
from msgspec.structs import replace
from typing_extensions import override

from midstream.environment import World
from midstream.errors import JournalMovedError, LeaseHeldError, LeaseLostError, UsageError
from midstream.session.child_names import PART_MARK
from midstream.store.contract import (
    OF_SESSIONS,
    Batch,
    ForwardedCommand,
    Immediate,
    KeyValue,
    KeyValueEntry,
    ListPlace,
    News,
    SessionInfo,
    SessionListing,
    Store,
    StoredRecord,
    require_as_found,
    require_version,
)
from midstream.store.store_registry import Backend


class _Session(Struct):
    epoch: int
    node: str | None
    created_at: float
    mark: SessionListing
    number: int
    records: list[StoredRecord] = field(default_factory=list)
    """Without gap, up to the end; the first one is not at 1 if the journal was pruned."""
    blobs: dict[str, bytes] = field(default_factory=dict)
    seal: bytes = b""

    @property
    def end(self) -> int:
        return self.records[-1].position if self.records else 0

    @property
    def oldest(self) -> int:
        return self.records[0].position if self.records else 0


class _StoredCommand(Struct):
    sender: str
    forwarded: ForwardedCommand
    answer: asyncio.Future[bytes]


class MemoryKeyValue(KeyValue):
    """Small values in the memory of this process."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, KeyValueEntry]] = {}
        self._versions_spent = 0
        """The highest version of any deleted entry: a new one starts above it."""

    @override
    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        return self.values.get(namespace, {}).get(key)

    @override
    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        return sorted(self.values.get(namespace, {}).values(), key=lambda entry: (-entry.at, entry.key))

    async def kv_namespaces(self) -> Sequence[str]:
        """See `StoreReader.kv_namespaces`."""
        return [namespace for namespace, entries in self.values.items() if entries]

    @override
    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        entries = self.values.setdefault(namespace, {})
        found = entries[key].version if key in entries else 0
        require_version(key, found, expected)
        version = 1 + (found or self._versions_spent)
        entries[key] = KeyValueEntry(key, version, body, at)
        return version

    @override
    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        found = self.values.get(namespace, {}).get(key)
        if found is None or found.version != expected:
            return False
        self.remove(namespace, key)
        return True

    def remove(self, namespace: str, key: str) -> None:
        """Remove an entry, if there is one."""
        found = self.values.get(namespace, {}).pop(key, None)
        if found is not None:
            self._versions_spent = max(self._versions_spent, found.version)


class Memory(MemoryKeyValue):
    """State that several stores share, like processes that share a file."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: dict[str, _Session] = {}
        self.living: set[str] = set()
        self.epochs_spent = 0
        """The highest epoch of any deleted session: a new one starts above it."""
        self.numbers = 0
        self.forwarded_commands: dict[int, _StoredCommand] = {}
        self._watching: set[asyncio.Future[None]] = set()

    def kill(self, node: str) -> None:
        """Simulate the death of a node: its sessions are free for the next claim."""
        self.living.discard(node)
        self.wake_watchers()

    def wake_watchers(self) -> None:
        """Wake all watchers."""
        for each in self._watching:
            if not each.done():
                each.set_result(None)

    async def change(self) -> None:
        """Wait until `wake_watchers` is called."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching.add(waiter)
        try:
            await waiter
        finally:
            self._watching.discard(waiter)


class MemoryStore(Store):
    """A store without a disk: `Store` in its simplest form, for tests and short scripts.

    Args:
        memory: The state of the store. Several stores with the same memory are nodes of one place.
        world: Source of the node's id.
    """

    def __init__(self, memory: Memory | None = None, *, world: World = World()) -> None:
        self.node = ""
        self._memory = Memory() if memory is None else memory
        self._world = world
        self._reported: set[tuple[str | int, int]] = set()
        """Orphans and forwarded commands, each with the epoch under which it was reported."""
        self._peers_reported = -1

    @override
    async def open(self) -> None:
        if not self.node:
            self.node = self._world.new_id("node")
            self._memory.living.add(self.node)
            self._memory.wake_watchers()

    @override
    async def close(self) -> None:
        self._memory.kill(self.node)
        self.node = ""

    @override
    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        sessions = self._require_open().sessions
        found = sessions.get(session)
        require_as_found(session, is_free=is_free, now=None if found is None else found.node is None)
        if found is None:
            self._memory.numbers += 1
            found = sessions[session] = _Session(
                epoch=self._memory.epochs_spent,
                node=None,
                created_at=at,
                mark=SessionListing(is_live=False, at=at),
                number=self._memory.numbers,
            )
        self._refuse_if_held(session, found)
        found.node = self.node
        found.epoch += 1
        return found.epoch

    @override
    async def release(self, session: str, *, epoch: int) -> None:
        found = self._require_open().sessions.get(session)
        if found is not None and found.epoch == epoch:
            found.node = None
            self._memory.wake_watchers()

    @override
    async def append(self, session: str, batch: Batch) -> int:
        found = self._require_open().sessions.get(session)
        if found is None or found.epoch != batch.epoch:
            raise LeaseLostError(f"session {session!r} has another epoch than {batch.epoch}")
        if found.end != batch.expected:
            raise JournalMovedError(f"session {session!r} ends at {found.end}, not at {batch.expected}")
        return self._append(found, batch)

    @property
    @override
    def immediate(self) -> Immediate:
        return self

    @property
    def is_ready(self) -> bool:
        """See `Immediate.is_ready`."""
        return bool(self.node)

    def append_now(self, session: str, batch: Batch) -> int | None:
        """See `Immediate.append_now`: every valid batch is appended."""
        found = self._memory.sessions.get(session) if self.node else None
        if found is None or (found.epoch, found.end) != (batch.epoch, batch.expected):
            return None
        return self._append(found, batch)

    @override
    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        found = self._require_open().sessions.get(session)
        if found is None:
            return False
        going = found.records[: position - found.oldest + 1]
        if not going or (going[-1].position, going[-1].epoch) != (position, epoch):
            return False
        kept = going[-1].link if link is None else link
        found.records[: len(going)] = [StoredRecord(position, epoch, body, kept)]
        return True

    @override
    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        found = self._require_open().sessions.get(session)
        if found is None:
            return []
        skip = max(0, after + 1 - found.oldest)
        return found.records[skip : skip + limit]

    @override
    async def blob(self, session: str, digest: str) -> bytes | None:
        found = self._require_open().sessions.get(session)
        return None if found is None else found.blobs.get(digest)

    @override
    async def blob_digests(self, session: str) -> Sequence[str]:
        found = self._require_open().sessions.get(session)
        return [] if found is None else [*found.blobs]

    @override
    async def find(self, session: str) -> SessionInfo | None:
        found = self._require_open().sessions.get(session)
        return None if found is None else replace(_line_of(session, found), seal=found.seal)

    @override
    async def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        lines = [
            (found.mark.at, session, _line_of(session, found))
            for session, found in self._require_open().sessions.items()
            if (live is None or found.mark.is_live == live) and (of is None or _is_of(session, of))
        ]
        if after is not None:
            lines = [line for line in lines if line[:2] < (after.at, after.session)]
        for _, _, line in sorted(lines, key=lambda line: line[:2], reverse=True)[:limit]:
            yield line

    @override
    async def delete(self, session: str) -> bool:
        sessions = self._require_open().sessions
        going = {
            name: found
            for name, found in sessions.items()
            if name == session or name.startswith(f"{session}{PART_MARK}")
        }
        for name, found in going.items():
            self._refuse_if_held(name, found)
        for name, found in going.items():
            self._memory.epochs_spent = max(self._memory.epochs_spent, found.epoch)
            del sessions[name]
            for namespace in OF_SESSIONS:
                self._memory.remove(namespace, name)
        for number, handed in [*self._memory.forwarded_commands.items()]:
            if handed.forwarded.session in going:
                del self._memory.forwarded_commands[number]
        self._memory.wake_watchers()
        return bool(going)

    @override
    async def watch(self, followed: Mapping[str, int]) -> News:
        while True:
            sessions = self._require_open().sessions
            free = {name: each.epoch for name, each in sessions.items() if self._is_free(each)}
            orphans = {(name, epoch) for name, epoch in free.items() if sessions[name].mark.is_live}
            forwarded_commands = {
                (number, self._epoch_for(each.forwarded))
                for number, each in self._memory.forwarded_commands.items()
                if each.sender in self._memory.living
            }
            forwarded_commands = {each for each in forwarded_commands if each[1] >= 0}
            new_commands = sorted(forwarded_commands - self._reported)
            news = News(
                frozenset(name for name, end in followed.items() if self._end_of(name) != end),
                tuple(self._memory.forwarded_commands[number].forwarded for number, _ in new_commands),
                tuple(sorted(name for name, _ in orphans - self._reported)),
                len(self._memory.living - {self.node}),
            )
            if news != News(peers=self._peers_reported):
                self._reported = {*forwarded_commands, *orphans}
                self._peers_reported = news.peers
                return news
            await self._memory.change()

    @override
    async def is_held_elsewhere(self, session: str) -> bool:
        found = self._require_open().sessions.get(session)
        return found is not None and found.node != self.node and not self._is_free(found)

    @override
    async def forward(self, session: str, body: bytes) -> bytes:
        self._require_open().numbers += 1
        number = self._memory.numbers
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._memory.forwarded_commands[number] = _StoredCommand(
            self.node, ForwardedCommand(number, session, body, self.node), answer
        )
        self._memory.wake_watchers()
        try:
            return await answer
        finally:
            self._memory.forwarded_commands.pop(number, None)

    @override
    async def answer(self, forwarded: int, body: bytes) -> None:
        sessions = self._require_open().sessions
        handed = self._memory.forwarded_commands.get(forwarded)
        if handed is None or handed.answer.done():
            return
        found = sessions.get(handed.forwarded.session)
        if found is None or found.node == self.node or self._is_free(found):
            del self._memory.forwarded_commands[forwarded]
            handed.answer.set_result(body)

    @override
    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        return await self._require_open().kv_get(namespace, key)

    @override
    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        return await self._require_open().kv_list(namespace)

    @override
    async def kv_namespaces(self) -> Sequence[str]:
        return await self._require_open().kv_namespaces()

    @override
    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        return await self._require_open().kv_put(namespace, key, body, expected=expected, at=at)

    @override
    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        return await self._require_open().kv_delete(namespace, key, expected=expected)

    def _append(self, found: _Session, batch: Batch) -> int:
        positions = range(batch.expected + 1, batch.end + 1)
        links = batch.links or repeat(b"")
        found.records += map(StoredRecord, positions, repeat(batch.epoch), batch.bodies, links)
        found.blobs |= {blob.digest: blob.body for blob in batch.blobs}
        if batch.mark is not None:
            found.mark = replace(batch.mark, title=batch.mark.title or found.mark.title)
        found.seal = batch.seal or found.seal
        if len(self._memory.living) > 1:  # its node does not wait for its own appends
            self._memory.wake_watchers()
        return found.end

    def _is_free(self, found: _Session) -> bool:
        return found.node not in self._memory.living

    def _end_of(self, session: str) -> int:
        found = self._memory.sessions.get(session)
        return found.end if found else 0

    def _epoch_for(self, forwarded: ForwardedCommand) -> int:
        """Return the epoch of the command's session, or -1 if another node must decide it."""
        found = self._memory.sessions.get(forwarded.session)
        if found is None:
            return 0
        return found.epoch if found.node == self.node or self._is_free(found) else -1

    def _require_open(self) -> Memory:
        if not self.node:
            raise UsageError("the store is not open; call `await store.open()` first")
        return self._memory

    def _refuse_if_held(self, session: str, found: _Session) -> None:
        if found.node != self.node and found.node in self._memory.living:
            message = f"session {session!r} belongs to {found.node!r}, which is alive"
            raise LeaseHeldError(message, session=session)


class MemoryBackend(Backend):
    """See `store_registry.Backend`. The only address is the empty one; each opened store is a new one."""

    @override
    def open(self, address: str, *, world: World) -> MemoryStore:
        if address:
            raise UsageError(
                f"'memory:{address}' has an address, but a store in memory has none; write 'memory:'"
            )
        return MemoryStore(world=world)

    def read(self, address: str) -> NoReturn:
        """Refuse: see `Backend.read`."""
        raise UsageError(f"'memory:{address}' is readable only in the process that opened it")

    def file(self, _address: str) -> None:
        """See `Backend.file`."""


def _is_of(session: str, roots: Collection[str]) -> bool:
    return session in roots or any(session.startswith(f"{root}{PART_MARK}") for root in roots)


def _line_of(session: str, found: _Session) -> SessionInfo:
    return SessionInfo(
        session, found.end, found.epoch, found.created_at, found.mark, found.node is None, found.oldest
    )
