"""Commands from one node to another as rows of a table: forwarded, answered and deleted in groups.

A burst of commands costs only a few commits. A forwarded command is synced, so that its number stays unique. An answer
is not synced: after a crash of the server the command is decided again, which is harmless.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from midstream.environment import World
from midstream.errors import LeaseLostError, MidstreamError
from midstream.store.postgres.node_locks import AdvisoryLock
from midstream.store.postgres.postgres_connections import ConnectionPool

T = TypeVar("T")
R = TypeVar("R")

GROUP_MAX = 200
"""Rows written in one statement."""

# Store commands for the nodes that have the leases of their sessions; their numbers are in the order of the commands.
PUT = """
with kept as (
    insert into inbox (session, sender, body)
    select session, $1, body from unnest($2::text[], $3::bytea[]) with ordinality as command (session, body, place)
    order by place returning number, session
)
select kept.number, node from kept left join session on session.name = kept.session order by kept.number
"""
# Answer commands whose senders wait, unless another living node has their sessions; return the senders.
ANSWER = """
update inbox set answer = given.answer from unnest($1::bigint[], $2::bytea[]) as given (number, answer)
where inbox.number = given.number and inbox.answer is null
and not exists (
    select from session join node on node.number = session.node
    where session.name = inbox.session and session.node <> $3 and session.node <> all($4::integer[])
)
returning inbox.number, sender, set_config('synchronous_commit', 'off', true)
"""
# Delete forwarded commands.
REMOVE = """
delete from inbox where number = any($1::bigint[]) returning set_config('synchronous_commit', 'off', true)
"""


class PutCommand(Struct, frozen=True):
    """A command in the inbox.

    Args:
        number: Its number.
        node: Number of the node that has its session; None if there is none.
    """

    number: int
    node: int | None


class _Waiting(Struct, Generic[T, R], eq=False):
    """A row that waits for the next group."""

    row: T
    outcome: asyncio.Future[R]


class GroupedRows(Generic[T, R]):
    """Writes rows, one group at a time, in order.

    Args:
        write: Writes a group, and returns an outcome for each row.
        on_unwanted: Called with the outcome of a row whose caller was cancelled.
    """

    def __init__(
        self,
        write: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
        world: World,
        on_unwanted: Callable[[R], None] = lambda _: None,
    ) -> None:
        self._write = write
        self._world = world
        self._on_unwanted = on_unwanted
        self._waiting: list[_Waiting[T, R]] = []
        self._working: asyncio.Task[None] | None = None

    def submit(self, row: T) -> asyncio.Future[R]:
        """Write a row with the next group. Cancelling the future does not cancel the write."""
        outcome: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(row, outcome))
        if self._working is None:
            self._working = self._world.spawn(self._work(), name="inbox")
        return outcome

    async def close(self) -> None:
        """Write all waiting rows."""
        if self._working is not None:
            await asyncio.wait({self._working})

    async def _work(self) -> None:
        group: list[_Waiting[T, R]] = []
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
                group = [each for each in group if not each.outcome.done()]
                if group:
                    await self._write_group(group)
        except BaseException as error:
            closed = LeaseLostError(
                "the store was closed before the outcome of a forwarded command was known"
            )
            for each in (*group, *self._waiting):
                _refuse(each, closed if isinstance(error, asyncio.CancelledError) else error)
            self._waiting.clear()
            raise
        finally:
            self._working = None

    async def _write_group(self, group: Sequence[_Waiting[T, R]]) -> None:
        try:
            outcomes = await self._write([each.row for each in group])
        except MidstreamError as refusal:
            for each in group:
                _refuse(each, refusal)
            return
        for each, outcome in zip(group, outcomes, strict=True):
            if each.outcome.done():
                self._on_unwanted(outcome)
            else:
                each.outcome.set_result(outcome)


class CommandInbox:
    """The commands that this node forwards, and those that it answers.

    Args:
        frozen: The nodes whose sessions may be claimed although they hold their locks.
    """

    def __init__(
        self, pool: ConnectionPool, lock: AdvisoryLock, frozen: Callable[[], Collection[int]], world: World
    ) -> None:
        self._pool = pool
        self._lock = lock
        self._frozen = frozen
        self._puts = GroupedRows(self._put, world, lambda unwanted: self.remove_soon(unwanted.number))
        self._answers = GroupedRows(self._answer, world)
        self._removals = GroupedRows(self._remove, world)

    async def put(self, session: str, body: bytes) -> PutCommand:
        """Store a command for the node that has a session.

        Raises:
            MidstreamError: It was not stored, or was stored after its sender had stopped waiting.
        """
        return await self._puts.submit((session, body))

    async def answer(self, number: int, body: bytes) -> int | None:
        """Store an answer, see `Store.answer`; return the number of the node that waits for it, or None."""
        return await self._answers.submit((number, body))

    def remove_soon(self, number: int) -> None:
        """Delete a forwarded command. If that fails, it is removed after the death of this node."""
        self._removals.submit(number).add_done_callback(asyncio.Future.exception)

    async def close(self) -> None:
        """Write all waiting rows."""
        for rows in (self._puts, self._answers, self._removals):
            with contextlib.suppress(MidstreamError):
                await rows.close()

    async def _put(self, commands: Sequence[tuple[str, bytes]]) -> Sequence[PutCommand]:
        sender = await self._lock.number()
        sessions, bodies = [session for session, _ in commands], [body for _, body in commands]
        rows = await self._pool.run(lambda db, _: db.fetch(PUT, sender, sessions, bodies))
        return [PutCommand(number, node) for number, node in rows]

    async def _answer(self, answers: Sequence[tuple[int, bytes]]) -> Sequence[int | None]:
        node = await self._lock.number()
        # In the order of numbers, as in `_remove`, so that two groups cannot deadlock.
        in_order = sorted(answers)
        numbers, bodies = [number for number, _ in in_order], [body for _, body in in_order]
        rows = await self._pool.run(lambda db, _: db.fetch(ANSWER, numbers, bodies, node, [*self._frozen()]))
        senders = {number: sender for number, sender, _ in rows}
        return [senders.get(number) for number, _ in answers]

    async def _remove(self, numbers: Sequence[int]) -> Sequence[None]:
        await self._pool.run(lambda db, _: db.execute(REMOVE, sorted(numbers)))
        return [None] * len(numbers)


def _refuse(waiting: _Waiting[T, R], error: BaseException) -> None:
    if not waiting.outcome.done():
        waiting.outcome.set_exception(error.again() if isinstance(error, MidstreamError) else error)
