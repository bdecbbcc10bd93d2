"""Journals in a PostgreSQL database: grouped appends on one connection, nodes by advisory locks.

Connections of a process: one for appends, one for its lock, one to send notifications and one to receive them, one that
waits for the end of the next node, and up to four for everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from midstream.environment import World
from midstream.errors import StoreBusyError, UsageError
from midstream.extras import extra
from midstream.number_checks import require_seconds
from midstream.store.contract import Attempt, Batch, News, Store, Transactional
from midstream.store.guard.store_key import require_shared_key
from midstream.store.postgres import session_writes
from midstream.store.postgres.command_inbox import CommandInbox, PutCommand
from midstream.store.postgres.grouped_appends import GroupedAppends
from midstream.store.postgres.node_locks import BEATS_PER_LEASE, AdvisoryLock, Neighbours
from midstream.store.postgres.node_signals import Kind, Listener, Notifier
from midstream.store.postgres.node_watcher import NodeWatcher
from midstream.store.postgres.postgres_address import PostgresAddress
from midstream.store.postgres.postgres_connections import ConnectionPool, Postgres, Work
from midstream.store.postgres.postgres_errors import is_terminated
from midstream.store.postgres.postgres_migrations import require_prepared
from midstream.store.postgres.session_reads import PostgresReads, Question, require_name
from midstream.store.postgres.session_writes import HeldError
from midstream.store.postgres.tool_transactions import ToolTransactions

with extra("postgres"):
    import asyncpg

T = TypeVar("T")

JOIN_TRIES_MAX = 3
"""Attempts to become a node, if a backend is terminated each time."""

LEASE_S = 20.0
"""Seconds without a heartbeat after which a node counts as frozen although it holds its lock."""
DEATH_NOTICED_S = 1.0
"""Seconds in which the server ends the backends of a killed process; milliseconds if it is not busy."""
HELD_TRIES_MAX = 3
"""Attempts to claim a session of a dead node: another node may be faster each time."""


class PostgresStore(PostgresReads, Store):
    """A store in a PostgreSQL database that any number of processes and machines may share.

    Args:
        url: `postgresql://user@host/database?schema=midstream`; see `PostgresAddress`. Its tables are created on first
            use, if the role may do that.
        lease_s: Seconds after which sessions of a frozen node may be claimed; those of a dead node at once.
        world: Clock, jitter and ids.

    Raises:
        UsageError: `url` is not a valid address.
    """

    def __init__(self, url: str, *, lease_s: float = LEASE_S, world: World = World()) -> None:
        self.node = ""
        self._postgres = Postgres(PostgresAddress.parse(url.partition(":")[2]))
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
                self._opened = await self._join(node)
                self.node = node

    async def _join(self, node: str) -> _Opened:
        """Become a node; retry at once if a backend was terminated meanwhile. A failure undoes all steps."""
        for left in reversed(range(JOIN_TRIES_MAX)):
            try:
                return await _Opened.make(self._postgres, node, self._lease_s, self._world)
            except StoreBusyError as error:
                if not left or not is_terminated(error.__cause__):
                    raise
        raise AssertionError("unreachable")

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
        named = self._postgres.address.store_key
        return Path(named) if named else None

    @override
    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        opened = self._require_open(session)
        node = await opened.lock.number()
        return await opened.write(
            lambda db, is_repeated: session_writes.claim(
                db,
                session,
                node=node,
                frozen=opened.frozen,
                at=at,
                is_free=is_free,
                is_repeated=is_repeated,
            )
        )

    @override
    async def release(self, session: str, *, epoch: int) -> None:
        opened = self._require_open(session)
        if await opened.write(lambda db, _: session_writes.release(db, session, epoch=epoch)):
            opened.report(Kind.FREE)

    @override
    async def append(self, session: str, batch: Batch) -> int:
        opened = self._require_open(session)
        for body in batch.bodies:
            if not isinstance(body, bytes):
                raise UsageError("a record's body is bytes")
        return await opened.appends.submit(session, batch)

    @property
    @override
    def death_noticed_s(self) -> float:
        return DEATH_NOTICED_S

    @property
    @override
    def joined_at(self) -> float:
        return math.inf if self._opened is None else self._opened.lock.joined_at

    @property
    @override
    def appends_waiting(self) -> int:
        return 0 if self._opened is None else self._opened.appends.waiting

    @property
    @override
    def transactional(self) -> Transactional:
        return self

    async def append_within(
        self, session: str, work: Callable[[Attempt], Batch], *, expected: int, epoch: int
    ) -> Batch:
        """See `Transactional.append_within`. Only the session itself waits meanwhile."""
        opened = self._require_open(session)
        batch = await opened.tools.append_within(session, work, expected=expected, epoch=epoch)
        opened.notifier.report_moved({session: batch.end})
        return batch

    @override
    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        opened = self._require_open(session)
        return await opened.write(
            lambda db, _: session_writes.prune(db, session, body, link, position=position, epoch=epoch)
        )

    @override
    async def delete(self, session: str) -> bool:
        opened = self._require_open(session)
        node = await opened.lock.number()
        was_repeated = False

        async def delete(db: asyncpg.Connection, is_repeated: bool) -> list[str]:  # noqa: FBT001 - see `Work`
            nonlocal was_repeated
            was_repeated = was_repeated or is_repeated
            return await session_writes.delete(db, session, node=node, frozen=opened.frozen)

        gone = await opened.write(delete)
        opened.notifier.report_moved(dict.fromkeys(gone, 0))
        return bool(gone) or was_repeated

    @override
    async def watch(self, followed: Mapping[str, int]) -> News:
        return await self._require_open("".join(followed)).watcher.watch(followed)

    @override
    async def is_held_elsewhere(self, session: str) -> bool:
        opened = self._require_open(session)
        node, frozen = await opened.lock.number(), opened.frozen
        return await opened.pool.run(
            lambda db, _: session_writes.is_held_by_other(db, session, node=node, frozen=frozen)
        )

    @override
    async def forward(self, session: str, body: bytes) -> bytes:
        opened = self._require_open(session)
        answers_reported = opened.watcher.answers_reported
        command = await opened.inbox.put(session, body)
        opened.report_forwarded(command)
        try:
            return await opened.watcher.answer_to(command.number, answers_reported=answers_reported)
        finally:
            opened.inbox.remove_soon(command.number)

    @override
    async def answer(self, forwarded: int, body: bytes) -> None:
        opened = self._require_open("")
        sender = await opened.inbox.answer(forwarded, body)
        if sender == opened.lock.last_number:
            opened.watcher.note(Kind.ANSWERS)
        elif sender is not None:
            opened.notifier.report_answered(sender)

    @override
    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        opened = self._require_open(namespace + key)
        return await opened.write(
            lambda db, is_repeated: session_writes.kv_put(
                db, namespace, key, body, expected=expected, at=at, is_repeated=is_repeated
            )
        )

    @override
    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        opened = self._require_open(namespace + key)
        return await opened.write(
            lambda db, is_repeated: session_writes.kv_delete(
                db, namespace, key, expected=expected, is_repeated=is_repeated
            )
        )

    async def _query(self, name: str, question: Question[T]) -> T:
        opened = self._require_open(name)
        return await opened.pool.run(lambda db, _: question(db))

    def _require_open(self, name: str) -> _Opened:
        if self._opened is None:
            raise UsageError("the store is not open: call `await store.open()` first")
        require_name(name)
        return self._opened


class _Opened:
    """Parts of an open store."""

    def __init__(
        self,
        *,
        lock: AdvisoryLock,
        neighbours: Neighbours,
        pool: ConnectionPool,
        appends: GroupedAppends,
        notifier: Notifier,
        listener: Listener,
        watcher: NodeWatcher,
        tools: ToolTransactions,
        world: World,
    ) -> None:
        self.lock = lock
        self.pool = pool
        self.appends = appends
        self.notifier = notifier
        self.watcher = watcher
        self.tools = tools
        self.inbox = CommandInbox(pool, lock, lambda: self.frozen, world)
        self._neighbours = neighbours
        self._listener = listener

    @classmethod
    async def make(cls, postgres: Postgres, node: str, lease_s: float, world: World) -> _Opened:
        """Become a node. A failure undoes all steps."""
        async with contextlib.AsyncExitStack() as undo:
            connection = await postgres.connect("node")
            undo.callback(connection.terminate)
            async with postgres.errors():
                await postgres.require_lasting_backend(connection)
                await require_prepared(postgres, connection)
                await postgres.prepare_to_write(connection)
            pool = await ConnectionPool.make(postgres)
            undo.push_async_callback(pool.close)

            def report_change() -> None:
                notifier.report(Kind.NODES)
                watcher.note(Kind.NODES)

            def protect_others() -> None:
                neighbours.protect()

            def end_protection() -> None:
                neighbours.protect_for_a_while()
                report_change()

            lock = AdvisoryLock(
                postgres,
                node,
                world,
                beat_s=lease_s / BEATS_PER_LEASE,
                on_lost=protect_others,
                on_joined=end_protection,
            )
            neighbours = Neighbours(postgres, lock, pool, world, lease_s=lease_s, on_death=report_change)
            undo.push_async_callback(neighbours.close)
            notifier = Notifier(postgres, node, world)
            undo.push_async_callback(notifier.close)
            watcher = NodeWatcher(lock, neighbours, pool, world, notifier)
            listener = Listener(postgres, node, world, on_signal=watcher.receive, on_gap=watcher.note_gap)
            undo.push_async_callback(listener.close)
            await listener.start()
            appends = GroupedAppends(postgres, world, notifier.report_moved)
            undo.push_async_callback(appends.close)
            await appends.connect()
            await lock.join(connection)
            undo.pop_all()
        watcher.start()
        notifier.report(Kind.NODES)
        return cls(
            lock=lock,
            neighbours=neighbours,
            pool=pool,
            appends=appends,
            notifier=notifier,
            listener=listener,
            watcher=watcher,
            tools=ToolTransactions(postgres, world),
            world=world,
        )

    @property
    def frozen(self) -> list[int]:
        """Nodes whose sessions may be claimed although they hold their locks."""
        return [*self._neighbours.frozen]

    async def write(self, work: Work[T]) -> T:
        """Run a write, and return its result; check the liveness of a node that prevents it.

        Raises:
            LeaseHeldError: That node lives. Nothing was changed.
        """
        for _ in range(HELD_TRIES_MAX):
            try:
                return await self.pool.run(work)
            except HeldError as held:
                if not await self._neighbours.is_dead(held.node):
                    raise held.refusal() from None
        raise StoreBusyError("other nodes claim this session at the same moment", retry_after_s=1.0)

    def report(self, kind: Kind) -> None:
        """Request a query on all nodes, including this one."""
        self.notifier.report(kind)
        self.watcher.note(kind)

    def report_forwarded(self, command: PutCommand) -> None:
        """Notify the node of a command's session, or all nodes if no living node has it."""
        if command.node in self._neighbours.living:
            self.notifier.report_forwarded(command.node)
        else:
            self.report(Kind.INBOX)

    async def close(self) -> None:
        await self.watcher.close()
        await self.inbox.close()
        await self.appends.close()
        await self._neighbours.close()
        await self.lock.leave()  # last: other nodes may claim our sessions once the lock is free
        self.notifier.report(Kind.NODES)
        await self.notifier.close()
        await self._listener.close()
        await self.pool.close()
