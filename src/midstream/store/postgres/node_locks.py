"""Liveness of nodes: a node is a process that holds an advisory lock of PostgreSQL on a number of its own.

The server frees the lock when the process dies, however it dies. Each node waits for the lock of the next one in the
order of their numbers, on a connection of its own, and so notices its end within milliseconds. It then deletes the row
of that node: a node without a row is dead, and its sessions are free. If the watching node is stopped itself, the
others check the lock after two beats.

A connection may also be lost while its process lives. Then the process joins again under another number, and keeps its
sessions and their epochs. It has `GRACE_S` for that, or `REJOIN_S` after a restart of the server, when all nodes lose
their connections.

A stopped process still holds its lock. So each node also beats. A node without a beat for a whole lease counts as
frozen. While the event loop is late, a thread beats instead (`heartbeat_thread.py`). No two clocks are compared: each
observer measures silences with its own clock. A node that is wrongly taken for dead or frozen is fenced by the epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import socket
from collections.abc import Callable

from midstream.background_loops import spawn_loop
from midstream.environment import World
from midstream.errors import MidstreamError, StoreBusyError
from midstream.extras import extra
from midstream.retries import Backoff
from midstream.store.node_liveness import NodeSilences, next_node
from midstream.store.postgres.heartbeat_thread import HeartbeatThread
from midstream.store.postgres.postgres_connections import ConnectionPool, Postgres, ServerLink
from midstream.store.postgres.postgres_errors import FAILURES, refusal_of

with extra("postgres"):
    import asyncpg

BEATS_PER_LEASE = 10
"""Beats in the time after which a node counts as frozen."""
BEAT_WITHIN_S = 10.0
"""Seconds for the server to answer a beat; after that, the connection counts as lost."""
GRACE_S = 0.02
"""Seconds for a node to join again after its connection was lost."""
REJOIN_S = 3.0
"""Seconds for all others to join again after the observer's own connection was lost."""
JOIN_WITHIN_S = 5.0
"""Seconds that a claim waits for this node to join again."""
REJOIN_BACKOFF = Backoff(first_s=0.02, most_s=1.0, jitter=0.5)
LOCK_CLASS_BITS = 32
SNAPSHOT_MS = 200
"""Milliseconds of one snapshot of a waiting node: a snapshot prevents the removal of old rows."""
FOREVER_S = 1e9
"""No limit for the wait for another node's end."""

# The class of the locks: the schema's oid.
FIND_CLASS = "select $1::regnamespace::oid::bigint"
# Become a node.
JOIN = "insert into node (name, address) values ($1, $2) returning number"
# Acquire the lock of this node, until its connection ends.
LOCK = "select pg_advisory_lock($1, $2)"
# Move the sessions of the node's last number to the new one.
ADOPT_SESSIONS = "update session set node = $1 where node = $2"
# Move the commands that it has forwarded.
ADOPT_INBOX = "update inbox set sender = $1 where sender = $2"
# Stop to be a node.
LEAVE = "delete from node where number = $1"
# Beat; no row: other nodes have declared this node dead.
BEAT = "update node set seen_at = clock_timestamp() where number = $1 returning number"
# Wait for the end of another node; the statement releases the lock again. A waiting statement holds a snapshot, and a
# snapshot prevents the removal of old row versions. So the wait is repeated with new snapshots. (A `lock_timeout` that
# is caught leaves no line in the server's log.)
WAIT_FOR_END = """
do $$
begin
    loop
        begin
            perform set_config('lock_timeout', '{snapshot_ms}ms', true);
            perform pg_advisory_xact_lock_shared({lock_class}, {number});
            return;
        exception when lock_not_available then null;
        end;
        commit;
    end loop;
end $$
"""
# Notice the death of the waiting process within seconds.
CHECK_CLIENT = "set client_connection_check_interval to '2s'"
# Whether a node has left, and whether its lock is free.
LOOK_AT = """
select not exists (select from node where number = $2), pg_try_advisory_xact_lock_shared($1, $2)
"""
# Declare a node dead if its lock is free, and delete the commands that it has forwarded: its clients send them again to
# another node. Return whether it has left.
BURY = """
with gone as (
    delete from node where number = $2 and pg_try_advisory_xact_lock_shared($1, $2) returning number
), removed as (
    delete from inbox using gone where sender = gone.number
)
select exists (select from gone) or not exists (select from node where number = $2)
"""
# All nodes with their last beats.
FIND_NODES = "select number, extract(epoch from seen_at)::double precision from node"

_log = logging.getLogger(__name__)


class AdvisoryLock:
    """This process as a node: its number, its lock and its beats.

    Args:
        name: The node's name, for display.
        on_lost: Called when the lock was lost, before the node joins again.
        on_joined: Called after it has joined again.
    """

    def __init__(
        self,
        postgres: Postgres,
        name: str,
        world: World,
        *,
        beat_s: float,
        on_lost: Callable[[], None],
        on_joined: Callable[[], None],
    ) -> None:
        self.lock_class = 0
        self.joined_at = math.inf
        """See `Store.joined_at`."""
        self._postgres = postgres
        self._name = name
        self._world = world
        self._beat_s = beat_s
        self._on_lost = on_lost
        self._on_joined = on_joined
        self._number = 0
        self._connection: asyncpg.Connection | None = None
        self._joined = asyncio.Event()
        self._lost = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._beaten_at = world.monotonic()
        self._heartbeat_thread = HeartbeatThread(
            postgres,
            world,
            beat_s=beat_s,
            beaten_at=lambda: self._beaten_at,
            beat=lambda connection: connection.fetchval(BEAT, self._number, timeout=BEAT_WITHIN_S),
        )

    async def join(self, connection: asyncpg.Connection) -> None:
        """Become a node, on a connection that belongs to the node from now on.

        Raises:
            MidstreamError: The server refused.
        """
        async with self._postgres.errors():
            await self._take(connection, old=0)
        self._tasks = [
            spawn_loop(self._world, self._beat, name="beat"),
            spawn_loop(self._world, self._keep, name="node lock"),
        ]
        self._heartbeat_thread.start()

    async def number(self) -> int:
        """Return the number of this node; wait some seconds if its connection was lost.

        Raises:
            StoreBusyError: The server cannot be reached.
        """
        if not self._joined.is_set():
            try:
                async with asyncio.timeout(JOIN_WITHIN_S):
                    await self._joined.wait()
            except TimeoutError:
                raise StoreBusyError(f"{self._postgres.where} cannot be reached", retry_after_s=1.0) from None
        return self._number

    @property
    def last_number(self) -> int:
        """The present or last number of this node."""
        return self._number

    async def leave(self) -> None:
        """Release the lock: this node counts as dead."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            await self._heartbeat_thread.close()
        if self._connection is not None:
            with contextlib.suppress(*FAILURES):
                await self._connection.execute(LEAVE, self._number, timeout=1.0)
            with contextlib.suppress(*FAILURES):
                await self._connection.close(timeout=1.0)

    async def _take(self, connection: asyncpg.Connection, *, old: int) -> None:
        oid = await connection.fetchval(FIND_CLASS, self._postgres.address.schema)
        self.lock_class = oid - (1 << LOCK_CLASS_BITS) if oid >= 1 << (LOCK_CLASS_BITS - 1) else oid
        address = f"{socket.gethostname()} {os.getpid()}"
        async with connection.transaction():  # its row becomes visible after it has its lock
            number = await connection.fetchval(JOIN, self._name, address)
            await connection.execute(LOCK, self.lock_class, number)
            if old:
                await connection.execute(ADOPT_SESSIONS, number, old)
                await connection.execute(ADOPT_INBOX, number, old)
                await connection.execute(LEAVE, old)
        self._number, self._connection = number, connection
        self._lost.clear()
        connection.add_termination_listener(lambda _: self._lose())
        if connection.is_closed():
            self._lose()
        else:
            self.joined_at = self._world.monotonic()
            self._joined.set()

    def _lose(self) -> None:
        self.joined_at = math.inf
        self._joined.clear()
        self._lost.set()

    async def _keep(self) -> None:
        """Join again whenever the connection was lost."""
        while True:
            await self._lost.wait()
            _log.warning("node %d has lost its lock in %s; joining again", self._number, self._postgres.where)
            self._on_lost()
            for failures in itertools.count(1):
                if await self._join_again():
                    break
                await self._world.sleep(REJOIN_BACKOFF.wait_s(failures, chance=self._world.chance()))
            self._on_joined()

    async def _join_again(self) -> bool:
        try:
            connection = await self._postgres.connect_to_write("node")
            try:
                await self._take(connection, old=self._number)
            except BaseException:  # also a cancellation
                connection.terminate()
                raise
        except (MidstreamError, *FAILURES) as error:
            _log.debug("not joined: %s", refusal_of(error, self._postgres.where).message)
            return False
        return True

    async def _beat(self) -> None:
        while True:
            await self._world.sleep(self._beat_s)
            connection = self._connection
            if connection is None or not self._joined.is_set():
                continue
            try:
                number = await connection.fetchval(BEAT, self._number, timeout=BEAT_WITHIN_S)
            except FAILURES as error:
                _log.warning("a heartbeat failed: %s", refusal_of(error, self._postgres.where).message)
                connection.terminate()
            else:
                self._beaten_at = self._world.monotonic()
                if number is None:
                    _log.warning("node %d was declared dead by another node", self._number)
                    connection.terminate()


class Neighbours:
    """This node's view of the other nodes.

    Args:
        lease_s: Seconds without a beat after which a node counts as frozen.
        on_death: Called when the end of a node was noticed.
    """

    def __init__(
        self,
        postgres: Postgres,
        lock: AdvisoryLock,
        pool: ConnectionPool,
        world: World,
        *,
        lease_s: float,
        on_death: Callable[[], None],
    ) -> None:
        self.living: frozenset[int] = frozenset()
        self.frozen: frozenset[int] = frozenset()
        self._lock = lock
        self._pool = pool
        self._world = world
        self._lease_s = lease_s
        self._on_death = on_death
        self._link = ServerLink(postgres, "sentry")
        self._silences: NodeSilences[int] = NodeSilences(lease_s=lease_s, beat_s=lease_s / BEATS_PER_LEASE)
        self._protected: frozenset[int] = frozenset()
        self._protected_until = 0.0
        self._changed = asyncio.Event()
        self._watching = spawn_loop(world, self._watch, name="sentry")

    def protect(self) -> None:
        """Declare no known node dead: this node lost its connection, and the others may have, too."""
        self._protected |= {*self._silences.known}
        self._protected_until = math.inf

    def protect_for_a_while(self) -> None:
        """Give the others time to join again, after this node has."""
        self._protected_until = self._world.monotonic() + REJOIN_S

    async def look(self) -> bool:
        """Check all nodes; return whether one joined, left, froze or continued.

        Raises:
            MidstreamError: The server cannot be reached.
        """
        rows = await self._pool.run(lambda connection, _: connection.fetch(FIND_NODES))
        before = {*self._silences.known}
        own = self._lock.last_number
        beats = {number: beat for number, beat in rows if number != own}
        self._silences.observe(beats, now=self._world.monotonic())
        if before != {*self._silences.known}:
            self._changed.set()
        for number in self._silences.late - self._silences.frozen:
            # The node that watches it has not noticed its end, so that node is stopped.
            if await self.is_dead(number):
                self._silences.drop(number)
                self._changed.set()
                self._on_death()
        return self._judge()

    def _judge(self) -> bool:
        frozen = self._silences.frozen
        living = frozenset(self._silences.known) - frozen
        for number in frozen - self.frozen:
            _log.warning(
                "node %d was silent for %g s; other nodes may take its sessions", number, self._lease_s
            )
        is_changed = (living, frozen) != (self.living, self.frozen)
        self.living, self.frozen = living, frozen
        return is_changed

    async def is_dead(self, number: int) -> bool:
        """Whether a node is dead or frozen; one with a free lock is declared dead.

        Raises:
            MidstreamError: The server cannot be reached.
        """
        if number in self.frozen:
            return True
        if self._is_protected(number):
            return False
        ask = (self._lock.lock_class, number)
        has_left, is_free = await self._pool.run(lambda db, _: db.fetchrow(LOOK_AT, *ask))
        if has_left or not is_free:
            return bool(has_left)
        await self._world.sleep(GRACE_S)
        is_gone: bool = await self._pool.run(lambda db, _: db.fetchval(BURY, *ask))
        return is_gone

    def _is_protected(self, number: int) -> bool:
        if self._protected and self._world.monotonic() >= self._protected_until:
            self._protected = frozenset()
        return number in self._protected

    async def close(self) -> None:
        """Stop watching."""
        self._watching.cancel()
        await asyncio.wait({self._watching})
        self._link.drop()

    async def _watch(self) -> None:
        """Wait for the end of the current next node, again and again."""
        while True:
            self._changed.clear()
            number = next_node(self._lock.last_number, self._silences.known)
            if number is None:
                await self._changed.wait()
                continue
            try:
                if not await self._wait_for_end(number):
                    continue
                if await self.is_dead(number):
                    self._silences.drop(number)
                    self._judge()
                else:  # it joins again, and its row is deleted
                    await self._world.sleep(GRACE_S)
                self._on_death()
            except (MidstreamError, *FAILURES) as error:
                _log.debug("the next node is not watched: %s", error)
                self._link.drop()
                await self._world.sleep(REJOIN_BACKOFF.wait_s(4, chance=self._world.chance()))

    async def _wait_for_end(self, number: int) -> bool:
        """Wait until the lock of a node is free; False if another node has become the next one."""
        connection = await self._link.connection()
        with contextlib.suppress(asyncpg.PostgresError):
            await connection.execute(CHECK_CLIENT)
        statement = WAIT_FOR_END.format(
            snapshot_ms=SNAPSHOT_MS, lock_class=self._lock.lock_class, number=number
        )
        waiting = self._world.spawn(connection.execute(statement, timeout=FOREVER_S), name="wait for a node")
        changed = self._world.spawn(self._changed.wait(), name="nodes changed")
        try:
            await asyncio.wait({waiting, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (waiting, changed):
                task.cancel()
            await asyncio.wait({waiting, changed})
        if waiting.cancelled():
            return False
        waiting.result()
        return True
