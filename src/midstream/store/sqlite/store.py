"""Journals in one SQLite file: group commit on one connection, a read connection, and nodes with operating-system
locks.

Reads are in `reads.py`, writes in `writes.py`.

Every operation checks first and then writes, so that a refused one does not disturb the others of its commit. The
write-ahead log is copied into the database between commits, never inside one.

The driver is apsw, because of its SQLite: the versions in most Pythons (3.7.0 to 3.51.2) can lose committed pages when
two connections write and checkpoint concurrently.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar, get_args

import apsw
from typing_extensions import override

from midstream.environment import World
from midstream.errors import (
    UsageError,
)
from midstream.number_checks import require_seconds
from midstream.session.records import Sync
from midstream.store.contract import (
    Attempt,
    Batch,
    Immediate,
    News,
    Store,
    Transactional,
)
from midstream.store.sqlite import inbox
from midstream.store.sqlite import liveness as nodes
from midstream.store.sqlite.database import DatabaseFile
from midstream.store.sqlite.group_commit import Commits, Durability
from midstream.store.sqlite.reads import ReadConnection, SQLiteReads
from midstream.store.sqlite.watcher import Watcher
from midstream.store.sqlite.worker_thread import WorkThread
from midstream.store.sqlite.writes import WriteConnection

T = TypeVar("T")

LEASE_S = 20.0
"""Seconds without a touch after which a process that holds its lock counts as frozen: longer than a garbage collection,
a burst of swapping, or a tool that blocks the interpreter."""

NOW_BYTES_MAX = 16 * 1024
"""Bytes of records that may be committed on the event loop: some ten pages."""


class SQLiteStore(SQLiteReads, Store):
    """A store in one file that several processes of one machine may share.

    Args:
        path: The database, created on first use, readable by this user only. Its folder must exist. The files `-wal`
            and `-shm` beside it are parts of it, also of a copy. The folder `.nodes` has the locks. A host adds a key
            (`.store-key`), see `store.guard`.
        durability: "power" syncs every append, "process" none, "default" syncs as the records require.
        lease_s: Seconds after which sessions of a frozen process may be claimed; those of a dead one at once.
        world: Source of the node's id and of jitter.
        vfs: Name of a registered SQLite file system, e.g. one that encrypts; None for the usual one.

    Raises:
        UsageError: `durability` is not valid.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        durability: Durability = "default",
        lease_s: float = LEASE_S,
        world: World = World(),
        vfs: str | None = None,
    ) -> None:
        if durability not in get_args(Durability):
            raise UsageError(f"durability is one of {get_args(Durability)}, not {durability!r}")
        self.node = ""
        self._file = DatabaseFile(Path(path), world, vfs)
        self._durability = durability
        require_seconds("lease_s", lease_s, is_positive=True)
        self._lease_s = lease_s
        self._world = world
        self._opening = asyncio.Lock()
        self._opened: _Opened | None = None

    async def open(self) -> None:
        """See `Store.open`.

        Raises:
            UsageError: The file cannot be created, or belongs to another program. Nothing was changed.
        """
        async with self._opening:
            if self._opened is None:
                node = self._world.new_id("node")
                self._opened = await _Opened.make(self._file, node, self._durability, self._lease_s)
                self.node = self._opened.lock.node

    @override
    async def close(self) -> None:
        async with self._opening:
            if self._opened is not None:
                opened, self._opened = self._opened, None
                self.node = ""
                await self._world.finish(opened.close(), name="close of the store")

    @override
    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        opened = self._require_open(session)
        return await opened.commits.submit(
            partial(opened.writer.claim, session, at=at, is_free=is_free), Sync.NORMAL
        )

    @override
    async def release(self, session: str, *, epoch: int) -> None:
        opened = self._require_open(session)
        opened.synced_epochs.pop(session, None)
        await opened.commits.submit(partial(opened.writer.release, session, epoch), Sync.NORMAL)

    @override
    async def append(self, session: str, batch: Batch) -> int:
        opened = self._require_open(session)
        for body in batch.bodies:
            if not isinstance(body, bytes):
                raise UsageError("a record's body is bytes")
        write = partial(opened.writer.append, session, batch)
        # A claim is not synced by itself. The first append under its epoch syncs both; otherwise a power cut could give
        # the same epoch and positions to another node.
        if opened.synced_epochs.get(session) != batch.epoch:
            end = await opened.commits.submit(write, Sync.FULL)
            opened.synced_epochs[session] = batch.epoch
            return end
        if batch.sync is Sync.NORMAL and _is_small(batch):
            end_now = opened.commits.now(write, Sync.NORMAL)
            if end_now is not None:
                return end_now
        return await opened.commits.submit(write, batch.sync)

    @property
    @override
    def key_file(self) -> Path:
        return self._file.key_file

    @property
    @override
    def immediate(self) -> Immediate:
        return self

    @property
    def is_ready(self) -> bool:
        """See `Immediate.is_ready`."""
        return self._opened is not None and self._opened.commits.is_ready

    def append_now(self, session: str, batch: Batch) -> int | None:
        """See `Immediate.append_now`: only small batches, and not the first append under an epoch."""
        opened = self._opened
        if opened is None or opened.synced_epochs.get(session) != batch.epoch:
            return None
        if not _is_small(batch):
            return None
        return opened.commits.now(partial(opened.writer.append, session, batch), Sync.NORMAL)

    @property
    @override
    def appends_waiting(self) -> int:
        return 0 if self._opened is None else self._opened.commits.waiting

    @property
    @override
    def transactional(self) -> Transactional:
        return self

    async def append_within(
        self, session: str, work: Callable[[Attempt], Batch], *, expected: int, epoch: int
    ) -> Batch:
        """See `Transactional.append_within`."""
        opened = self._require_open(session)
        write = partial(opened.writer.append_within, session, work, expected, epoch)
        batch = await opened.commits.submit(write, Sync.FULL, is_alone=True)
        opened.synced_epochs[session] = epoch
        return batch

    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        """See `Store.prune`. The bytes are overwritten; the file does not shrink, but its pages are reused."""
        opened = self._require_open(session)
        write = partial(opened.writer.prune, session, body, position, epoch, link)
        return await opened.commits.submit(write, Sync.NORMAL)

    async def delete(self, session: str) -> bool:
        """See `Store.delete`.

        The bytes are overwritten in the file, and in the log unless another process is just reading it.
        """
        opened = self._require_open(session)
        opened.synced_epochs.pop(session, None)
        is_gone = await opened.commits.submit(partial(opened.writer.delete, session), Sync.FULL)
        if is_gone:
            await opened.commits.clear_log()
        return is_gone

    async def watch(self, followed: Mapping[str, int]) -> News:
        """See `Store.watch`. A death is noticed within 20 ms, a commit of another node within 2 to 20 ms."""
        return await self._require_open("").watcher.watch(followed)

    @override
    async def is_held_elsewhere(self, session: str) -> bool:
        opened = self._require_open(session)
        node = await opened.read(partial(opened.reader.holder, session))
        return node is not None and node != opened.lock.node and opened.writer.peers.may_hold(node)

    @override
    async def forward(self, session: str, body: bytes) -> bytes:
        opened = self._require_open(session)
        number = await opened.commits.submit(partial(opened.writer.put, session, body), Sync.NORMAL)
        try:
            return await opened.watcher.answer_to(number)
        finally:
            removed = opened.commits.submit(partial(opened.writer.remove, number), Sync.NORMAL)
            # a command that stays is removed after the death of this node
            removed.add_done_callback(asyncio.Future.exception)

    @override
    async def answer(self, forwarded: int, body: bytes) -> None:
        opened = self._require_open("")
        await opened.commits.submit(partial(opened.writer.answer, forwarded, body), Sync.NORMAL)

    @override
    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        opened = self._require_open(namespace + key)
        write = partial(opened.writer.kv_put, namespace, key, body, expected, at)
        return await opened.commits.submit(write, Sync.NORMAL)

    @override
    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        opened = self._require_open(namespace + key)
        return await opened.commits.submit(
            partial(opened.writer.kv_delete, namespace, key, expected), Sync.NORMAL
        )

    async def _query(self, name: str, question: Callable[[ReadConnection], T]) -> T:
        opened = self._require_open(name)
        return await opened.read(partial(question, opened.reader))

    def _require_open(self, name: str) -> _Opened:
        if self._opened is None:
            raise UsageError("the store is not open: call `await store.open()` first")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError("a name is not valid Unicode") from error
        return self._opened


def _is_small(batch: Batch) -> bool:
    return not batch.blobs and sum(map(len, batch.bodies)) <= NOW_BYTES_MAX


class _Opened:
    """Parts of an open store: the node's lock, two connections with their threads, and the watcher."""

    def __init__(
        self,
        writer: WriteConnection,
        reader: ReadConnection,
        threads: _Threads,
        watcher: Watcher,
        commits: Commits,
    ) -> None:
        self.writer = writer
        self.reader = reader
        self.watcher = watcher
        self.commits = commits
        self.synced_epochs: dict[str, int] = {}
        """The epoch of each session under which a record was synced."""
        self.lock = writer.lock
        self._threads = threads

    @classmethod
    async def make(cls, file: DatabaseFile, node: str, durability: Durability, lease_s: float) -> _Opened:
        threads = _Threads(
            WorkThread("midstream-sqlite-writer"),
            WorkThread("midstream-sqlite-reader"),
        )
        connections: list[tuple[WriteConnection, ReadConnection]] = []
        try:
            await threads.writing.submit(lambda: connections.append(_open(file, node, lease_s)))
        except BaseException:  # after a cancellation, the thread still opens them
            threads.writing.submit(partial(_close, connections))
            threads.shut()
            raise
        [(writer, reader)] = connections
        watcher = Watcher(node, writer.peers, file.open_for_watcher, file.identify, file.world)
        watcher.start()
        return cls(writer, reader, threads, watcher, Commits(writer, threads.writing, durability, file.world))

    async def read(self, question: Callable[[], T]) -> T:
        return await self._threads.reading.submit(question)

    async def close(self) -> None:
        await self.watcher.close()
        await self.commits.finish()
        await self._threads.reading.submit(self.reader.close)
        # Last: other nodes may claim our sessions once the lock is free.
        await self._threads.writing.submit(self.writer.close)
        self._threads.shut()


class _Threads(NamedTuple):
    writing: WorkThread
    reading: WorkThread

    def shut(self) -> None:
        self.writing.shut()
        self.reading.shut()


def _open(file: DatabaseFile, node: str, lease_s: float) -> tuple[WriteConnection, ReadConnection]:
    with contextlib.ExitStack() as undo, file.convert_errors():
        db = file.connect()
        undo.callback(db.close)
        file.prepare(db)
        looking = file.connect(flags=apsw.SQLITE_OPEN_READONLY)
        undo.callback(looking.close)
        lock = nodes.NodeLock(file.nodes, node)
        undo.callback(lock.give_up)
        nodes.sweep(file.nodes)
        peers = nodes.Peers(file.nodes, lock, lease_s=lease_s)
        file.retry_while_busy(partial(inbox.clear, db, is_alive=partial(nodes.is_alive, file.nodes)))
        undo.pop_all()
    return WriteConnection(file, db, lock, peers), ReadConnection(file, looking)


def _close(connections: Iterable[tuple[WriteConnection, ReadConnection]]) -> None:
    for writer, reader in connections:
        reader.close()
        writer.close()


def engine_version() -> str:
    """Return the version of SQLite."""
    return apsw.sqlite_lib_version()
