"""Journals in the streams of a NATS JetStream cluster, with one connection for each process."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from typing_extensions import override

from midstream.environment import World
from midstream.errors import LeaseLostError, MidstreamError, UsageError
from midstream.number_checks import require_seconds
from midstream.store.contract import News, Store
from midstream.store.guard.store_key import require_shared_key
from midstream.store.jetstream.change_watcher import ChangeWatcher, Sign
from midstream.store.jetstream.command_routes import CommandRoutes
from midstream.store.jetstream.entry_writes import EntryWrites
from midstream.store.jetstream.jetstream_address import JetStreamAddress
from midstream.store.jetstream.jetstream_link import JetStreamLink
from midstream.store.jetstream.journal_writes import JournalWrites
from midstream.store.jetstream.node_presence import NodePresence
from midstream.store.jetstream.session_reader import SessionReader
from midstream.store.jetstream.session_removal import SessionRemoval
from midstream.store.jetstream.stream_setup import Durability, prepare_streams
from midstream.store.jetstream.stream_subjects import StreamSubjects

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W")

LEASE_S = 20.0
"""Seconds without an answer after which a connected node counts as frozen."""
DEATH_NOTICED_S = 3.0
"""Seconds in which the end of a connection is noticed and checked."""
CLOSE_S = 10.0
"""Seconds that closing a store waits for unreachable servers."""


class _Opened:
    """Parts of an open store."""

    def __init__(
        self,
        link: JetStreamLink,
        subjects: StreamSubjects,
        durability: Durability,
        node: str,
        lease_s: float,
        world: World,
    ) -> None:
        self.link = link
        self.durability = durability
        self.reader = SessionReader(link, subjects, world)
        self.presence = NodePresence(
            link, subjects, world, node, lease_s=lease_s, on_change=lambda: self.watcher.report(Sign.NODES)
        )
        self.watcher = ChangeWatcher(link, subjects, self.reader, self.presence, world)
        self.routes = CommandRoutes(
            link, subjects, self.reader, self.presence, world, on_received=self.watcher.note
        )
        self.writes = JournalWrites(
            link,
            subjects,
            self.reader,
            self.presence,
            world,
            on_moved=self.watcher.report_moved,
            on_freed=lambda: self.watcher.report(Sign.FREE),
        )
        self.removal = SessionRemoval(
            link,
            subjects,
            self.reader,
            self.presence,
            world,
            new_op=self.writes.new_op,
            on_moved=self.watcher.report_moved,
        )
        self.entries = EntryWrites(link, subjects, self.reader, world, self.writes.new_op)
        self._world = world
        self._pending = 0
        self._idle = asyncio.Event()
        self._watching: set[asyncio.Task[Any]] = set()

    @classmethod
    async def make(cls, address: JetStreamAddress, node: str, lease_s: float, world: World) -> _Opened:
        """Become a node. A failure undoes all steps."""
        opened: _Opened | None = None

        def note_all() -> None:
            if opened is not None:
                opened.watcher.note_all()
                opened.routes.note()

        async with contextlib.AsyncExitStack() as undo:
            link = JetStreamLink(address, world, on_connected=note_all)
            undo.push_async_callback(link.close)
            await link.connect()
            subjects, durability = await prepare_streams(link, address)
            opened = cls(link, subjects, durability, node, lease_s, world)
            await opened.watcher.start(opened.routes)
            await opened.routes.start()
            await opened.presence.join()
            undo.pop_all()
        await opened.watcher.report(Sign.NODES)
        return opened

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a write, and return its result; closing the store waits for it.

        After a cancellation the outcome is unknown, and the next write reads the journal. A task for each append would
        cost 30 us more.
        """
        self._pending += 1
        try:
            return await work
        except MidstreamError:
            if not self.link.is_open:  # closing the store did not wait any longer
                raise LeaseLostError("the store was closed before the outcome of a write was known") from None
            raise
        finally:
            self._pending -= 1
            if not self._pending:
                self._idle.set()

    async def until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a wait, and return its result; cancel it with its caller, and when the store is closed."""
        task = self._world.spawn(work, name="store watch")
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        try:
            return await task
        finally:
            task.cancel()

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await self.routes.close()
        if self._pending:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._idle.wait()
        await self.presence.leave()  # last: other nodes may claim our sessions once the entry is removed
        await self.watcher.report(Sign.NODES)
        with contextlib.suppress(Exception):
            await self.link.flush()
        await self.link.close()


def _of(
    part: Callable[[_Opened], W], method: Callable[Concatenate[W, P], T]
) -> Callable[Concatenate[JetStreamStore, P], T]:
    """Return the method of a part as a method of the store."""

    @wraps(method)
    def call(store: JetStreamStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(part(store._require_open()), *args, **kwargs)  # noqa: SLF001 - the store is ours

    return call


def _write(
    part: Callable[[_Opened], W], method: Callable[Concatenate[W, P], Coroutine[Any, Any, T]]
) -> Callable[Concatenate[JetStreamStore, P], Coroutine[Any, Any, T]]:
    """Return a write of a part as a method of the store; closing the store waits for it."""

    @wraps(method)
    async def call(store: JetStreamStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        opened = store._require_open()  # noqa: SLF001 - the store is ours
        return await opened.finish(method(part(opened), *args, **kwargs))

    return call


class JetStreamStore(Store):
    """A store in a NATS JetStream cluster that any number of processes and machines may share.

    It is not `transactional`: tools cannot write in the transaction of their outcome.

    Args:
        url: `nats://host:4222,host:4222,host:4222/?name=midstream`; see `JetStreamAddress`. Streams are created.
        lease_s: Seconds after which sessions of a frozen node may be claimed; one second for a dead node.
        world: Clock, jitter and ids.

    Raises:
        UsageError: `url` is not a valid address.
    """

    def __init__(self, url: str, *, lease_s: float = LEASE_S, world: World = World()) -> None:
        self.node = ""
        self._address = JetStreamAddress.parse(url.partition(":")[2])
        require_seconds("lease_s", lease_s, is_positive=True)
        self._lease_s = lease_s
        self._world = world
        self._opening = asyncio.Lock()
        self._opened: _Opened | None = None

    @override
    async def open(self) -> None:
        require_shared_key(self.key_file)
        async with self._opening:
            if self._opened is None:
                node = self._world.new_id("node")
                self._opened = await _Opened.make(self._address, node, self._lease_s, self._world)
                self.node = node

    @override
    async def close(self) -> None:
        async with self._opening:
            if self._opened is not None:
                opened, self._opened = self._opened, None
                self.node = ""
                await self._world.finish(opened.close(), name="close of the store")

    @property
    @override
    def key_file(self) -> Path | None:
        return Path(self._address.store_key) if self._address.store_key else None

    @property
    @override
    def death_noticed_s(self) -> float:
        return DEATH_NOTICED_S

    @property
    @override
    def joined_at(self) -> float:
        opened = self._opened
        return math.inf if opened is None or not opened.link.is_connected else opened.link.connected_at

    read = _of(lambda opened: opened.reader, SessionReader.read)
    blob = _of(lambda opened: opened.reader, SessionReader.blob)
    blob_digests = _of(lambda opened: opened.reader, SessionReader.blob_digests)
    find = _of(lambda opened: opened.reader, SessionReader.find)
    list = _of(lambda opened: opened.reader, SessionReader.list)
    kv_get = _of(lambda opened: opened.reader, SessionReader.kv_get)
    kv_list = _of(lambda opened: opened.reader, SessionReader.kv_list)
    kv_namespaces = _of(lambda opened: opened.reader, SessionReader.kv_namespaces)
    is_held_elsewhere = _of(lambda opened: opened.writes, JournalWrites.is_held_elsewhere)
    forward = _of(lambda opened: opened.routes, CommandRoutes.forward)
    answer = _of(lambda opened: opened.routes, CommandRoutes.answer)
    claim = _write(lambda opened: opened.writes, JournalWrites.claim)
    release = _write(lambda opened: opened.writes, JournalWrites.release)
    append = _write(lambda opened: opened.writes, JournalWrites.append)
    prune = _write(lambda opened: opened.writes, JournalWrites.prune)
    delete = _write(lambda opened: opened.removal, SessionRemoval.delete)
    kv_put = _write(lambda opened: opened.entries, EntryWrites.put)
    kv_delete = _write(lambda opened: opened.entries, EntryWrites.delete)

    @override
    async def watch(self, followed: Mapping[str, int]) -> News:
        opened = self._require_open()
        return await opened.until_closed(opened.watcher.watch(followed))

    def _require_open(self) -> _Opened:
        if self._opened is None:
            raise UsageError("the store is not open: call `await store.open()` first")
        return self._opened
