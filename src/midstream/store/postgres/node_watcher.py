"""Changes that concern a node: ends of followed journals, forwarded commands, orphans.

A notification starts the query for its kind of change. Each second everything is queried, even without a notification.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from midstream.background_loops import spawn_loop
from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.store.contract import ForwardedCommand, News
from midstream.store.postgres.followed_sessions import FollowedHere
from midstream.store.postgres.node_locks import AdvisoryLock, Neighbours
from midstream.store.postgres.node_signals import Kind, Notifier, Signal
from midstream.store.postgres.postgres_connections import ConnectionPool

BACKSTOP_S = 1.0
"""Seconds after which everything is queried, without any notification."""
FORWARDED_MAX = 100
"""Commands of one result; further ones wait for the next query."""

# Commands without an answer, oldest first, for sessions of this node or of no living node, whose senders wait: they
# hold their locks. (A node is in its table before it has a session.)
FIND_UNDECIDED = """
select inbox.number, inbox.session, inbox.body, coalesce(node.name, ''), coalesce(session.epoch, 0)
from inbox left join session on session.name = inbox.session left join node on node.number = sender
where answer is null
    and (session.node is null or session.node = $1 or session.node = any($2::integer[])
        or not exists (select from node where number = session.node))
    and sender <> all($2::integer[])
    and (sender = $1 or not pg_try_advisory_xact_lock_shared($3, sender))
order by inbox.number
"""
# The answers to commands of this node.
FIND_ANSWERS = "select number, answer from inbox where sender = $1 and answer is not null"
# Sessions with an open turn that no living node has, with their epochs. The index is searched for each node with open
# turns in turn, so that the many turns of living nodes are not read.
FIND_ORPHANS = """
with recursive holder as (
    (select node from session where is_live and node is not null order by node limit 1)
    union all
    select (
        select session.node from session
        where is_live and session.node > holder.node order by session.node limit 1
    ) from holder where holder.node is not null
), free as (
    select name, epoch, changed_at from session where is_live and node is null
    union all
    select name, epoch, changed_at from holder join session on session.node = holder.node and is_live
    where holder.node = any($1::integer[]) or not exists (select from node where number = holder.node)
)
select name, epoch from free order by changed_at
"""
# The ends of these journals.
FIND_ENDS = "select name, last from session where name = any($1::text[])"

_log = logging.getLogger(__name__)


class _Found(Struct):
    """Changes, and the marks of returned ones after the caller has received them."""

    news: News
    forwarded_commands: frozenset[tuple[int, int]]
    orphans: frozenset[tuple[str, int]]


class _Waiting:
    """A waiting `watch` call."""

    def __init__(self, followed: Mapping[str, int]) -> None:
        self.followed = dict(followed)
        self.found: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()


class NodeWatcher:
    """Queries for changes, from `start` to `close`.

    Args:
        notifier: Announces the sessions that are followed here, and receives the announcements of others.
    """

    def __init__(
        self,
        lock: AdvisoryLock,
        neighbours: Neighbours,
        pool: ConnectionPool,
        world: World,
        notifier: Notifier,
    ) -> None:
        self._lock = lock
        self._neighbours = neighbours
        self._pool = pool
        self._world = world
        self._notifier = notifier
        self._followed = FollowedHere(world)
        self._nudged = asyncio.Event()
        self._signs: set[Kind] = set(Kind)
        """The kinds of changes to query."""
        self._moved: dict[str, int] = {}
        """Ends in notifications of other nodes."""
        self._waiting: _Waiting | None = None
        self._awaited: dict[int, asyncio.Future[bytes]] = {}
        self.answers_reported = 0
        """Number of times that answers may have arrived."""
        self._reported = _Found(News(peers=-1), frozenset(), frozenset())
        self._all_looked_at = 0.0
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to query."""
        self._looking = spawn_loop(self._world, self._look, name="store watcher")

    async def close(self) -> None:
        """Stop the queries, and cancel the waiting callers."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})
        if self._waiting is not None:
            self._waiting.found.cancel()
        for answer in self._awaited.values():
            answer.cancel()
        await self._world.sleep(0)  # the cancelled callers clean up

    async def watch(self, followed: Mapping[str, int]) -> News:
        """See `Store.watch`."""
        waiting = self._waiting = _Waiting(followed)
        self._nudged.set()
        try:
            self._reported = await waiting.found  # only now, so that a cancelled call consumes nothing
        finally:
            if self._waiting is waiting:
                self._waiting = None
        return self._reported.news

    async def answer_to(self, number: int, *, answers_reported: int) -> bytes:
        """Wait for the answer to a forwarded command.

        Args:
            answers_reported: That attribute before the command was stored. If it changed, the answer may exist already.
        """
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._awaited[number] = answer
        if answers_reported != self.answers_reported:
            self.note(Kind.ANSWERS)
        try:
            return await answer
        finally:
            del self._awaited[number]

    def receive(self, signal: Signal) -> None:
        """Process a notification of another node."""
        self._notifier.note_followed(signal.follows)
        waiting = self._waiting
        if waiting is not None:
            followed = waiting.followed
            moved = {name: end for name, end in signal.moved.items() if followed.get(name, end) != end}
            self._moved.update(moved)
            if moved:
                self._nudged.set()
        if kinds := signal.kinds_for(self._lock.last_number):
            self.note(*kinds)
        if Kind.NODES in signal.kinds:
            self._followed.forget()

    def note(self, *kinds: Kind) -> None:
        """Request queries of these kinds."""
        self._signs.update(kinds)
        self.answers_reported += Kind.ANSWERS in kinds
        self._nudged.set()

    def note_all(self) -> None:
        """Request all queries."""
        self._all_looked_at = -BACKSTOP_S
        self.note(*Kind)

    def note_gap(self) -> None:
        """Request all queries and new announcements of the others, because notifications may be missing."""
        self.note_all()
        self._notifier.report(Kind.NODES)

    # --- the task that queries

    async def _look(self) -> None:
        while True:
            self._nudged.clear()
            try:
                await self._check()
            except MidstreamError as error:
                self.note_all()
                _log.debug("the store cannot be read: %s", error.message)
                await self._world.sleep(BACKSTOP_S / 4)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BACKSTOP_S):
                    await self._nudged.wait()

    async def _check(self) -> None:
        now = self._world.monotonic()
        if now - self._all_looked_at >= BACKSTOP_S:
            self._all_looked_at = now
            self._signs.update(Kind)
        signs, self._signs = self._signs, set()  # a notification during a query belongs to the next one
        try:
            if Kind.NODES in signs and await self._neighbours.look():
                signs.update(Kind)
            if self._awaited and Kind.ANSWERS in signs:
                await self._settle_answers()
            waiting = self._waiting
            if waiting is None or waiting.found.done():
                self._signs |= signs - {Kind.NODES}
                return
            moved, self._moved = self._moved, {}
            if due := self._followed.due(waiting.followed):
                self._notifier.announce(due)
            found = await self._find_changes(waiting.followed, signs)
        except BaseException:
            self._signs |= signs
            raise
        if found.news == News(peers=self._reported.news.peers):
            self._reported = found
        elif not waiting.found.done():
            waiting.found.set_result(found)
            return
        if waiting.found.cancelled():
            self._signs.update(Kind)
            self._moved = {**moved, **self._moved}

    async def _find_changes(self, followed: Mapping[str, int], signs: set[Kind]) -> _Found:
        """Return new changes, and the marks for them."""
        node, lock_class = self._lock.last_number, self._lock.lock_class
        frozen = [*self._neighbours.frozen]
        commands, orphans = self._reported.forwarded_commands, self._reported.orphans
        fresh: list[Any] = []
        if Kind.INBOX in signs or Kind.NODES in signs:
            rows = await self._pool.run(lambda db, _: db.fetch(FIND_UNDECIDED, node, frozen, lock_class))
            fresh = [row for row in rows if (row[0], row[4]) not in commands][:FORWARDED_MAX]
            # Marks of deleted rows are dropped.
            commands = commands.intersection((row[0], row[4]) for row in rows)
            commands = commands.union((row[0], row[4]) for row in fresh)
        lost: list[tuple[str, int]] = []
        if Kind.FREE in signs or Kind.NODES in signs:
            free = [tuple(row) for row in await self._pool.run(lambda db, _: db.fetch(FIND_ORPHANS, frozen))]
            lost = [each for each in free if each not in orphans]
            orphans = frozenset(free)
        moved: frozenset[str] = frozenset()
        if followed:
            rows = await self._pool.run(lambda db, _: db.fetch(FIND_ENDS, [*followed]))
            ends = dict(map(tuple, rows))
            moved = frozenset(name for name, end in followed.items() if ends.get(name, 0) != end)
        news = News(
            moved,
            tuple(ForwardedCommand(*row[:4]) for row in (tuple(row) for row in fresh)),
            tuple(session for session, _ in lost),
            len(self._neighbours.living),
        )
        return _Found(news, commands, orphans)

    async def _settle_answers(self) -> None:
        node = self._lock.last_number
        rows = await self._pool.run(lambda db, _: db.fetch(FIND_ANSWERS, node))
        for number, body in rows:
            answer = self._awaited.get(number)
            if answer is not None and not answer.done():
                answer.set_result(body)
