"""Group commit for one database, on a thread or on the event loop.

Operations that arrive while a commit is under way share the next one, so that a hundred sessions cost hardly more syncs
than one. A synced commit runs on the thread. A commit without a sync costs less than the way to the thread and back: if
it is alone, and the thread is idle, it runs on the event loop. Commits keep the order of the requests. Only one thread
at a time uses the connection, without a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from msgspec import Struct

from midstream.environment import World
from midstream.session.records import Sync
from midstream.store.sqlite.worker_thread import WorkThread

T = TypeVar("T")

Durability = Literal["default", "power", "process"]
"""Durability of appends: as the kind of their records requires; always synced; never synced."""
_SYNCS = {"power": Sync.FULL, "process": Sync.NORMAL}

BATCH_MAX = 1000
"""Operations in one commit: a limit on the wait of the first one for the last one."""
IDLE_CHECKPOINT_PAGES = 2000
"""Pages in the write-ahead log after which it is checkpointed if no append waits (4 MB)."""
BUSY_CHECKPOINT_PAGES = 16_000
"""Pages after which it is checkpointed even if appends wait (32 MB)."""
AT_ONCE_SHARE = 0.1
"""Greatest share of the event loop's time for commits. On a slow disk, or with many sessions, the share is reached
soon. Then the thread makes the commits."""


class QueuedOperation(Struct):
    """An operation that waits for its commit."""

    write: Callable[[], Any]  # results have different types
    sync: Sync
    answer: asyncio.Future[Any]  # see `write`
    is_alone: bool
    """Whether it must not share a commit, because it may end its transaction."""


class Committer(Protocol):
    """Makes commits; only one thread at a time uses it."""

    log_pages: int
    """Pages in the write-ahead log that are not checkpointed yet."""

    def commit(self, batch: Sequence[QueuedOperation], *, is_patient: bool = True) -> list[Any]:
        """Run the operations in one transaction, and return their results or errors, in order.

        Args:
            is_patient: Whether to wait for another writing process; otherwise all operations are refused.
        """

    def checkpoint(self) -> None:
        """Checkpoint the log without waiting for readers."""

    def clear_log(self) -> None:
        """Checkpoint the log and truncate it, as far as readers permit."""


class Commits:
    """Makes the commits of one database, one at a time."""

    def __init__(self, writer: Committer, thread: WorkThread, durability: Durability, world: World) -> None:
        self._writer = writer
        self._thread = thread
        self._sync = _SYNCS.get(durability)
        self._world = world
        self._loop = asyncio.get_running_loop()
        self._waiting: list[QueuedOperation] = []
        self._is_busy = False
        self._is_shared = True
        """Whether the next commit probably has several operations, as the last one had."""
        self._has_new_log = False
        """Whether the next commit may restart the log, which needs a sync."""
        self._at_once_from = 0.0
        """Time from which the event loop may commit again."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """Number of operations that wait for a commit."""
        return len(self._waiting)

    def submit(
        self,
        write: Callable[[], T],
        sync: Sync,
        *,
        is_alone: bool = False,
    ) -> asyncio.Future[T]:
        """Run `write` in a commit; the future has its result once the commit is as durable as `sync` requires.

        Cancelling the future does not cancel the operation.

        Args:
            write: The operation; it may raise a `MidstreamError` before it writes.
        """
        answer: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append(QueuedOperation(write, self._sync or sync, answer, is_alone))
        if not self._is_busy:
            self._become_busy()
            if self._is_shared:  # submissions of the same moment share the commit
                self._loop.call_soon(self._commit_next)
            else:
                self._commit_next()
        return answer

    @property
    def is_ready(self) -> bool:
        """Whether `now` may commit without a sync: no other commit is running or about to run."""
        if self._sync is Sync.FULL or self._is_busy or self._is_shared or self._has_new_log:
            return False
        return not self._thread.is_at_work and self._world.monotonic() >= self._at_once_from

    def now(self, write: Callable[[], T], sync: Sync) -> T | None:
        """Commit `write` alone, in this call, and return its result; None: call `submit` instead.

        After None nothing was written: the commit would need a sync or a wait, or was refused.
        """
        if (self._sync or sync) is Sync.FULL or not self.is_ready:
            return None
        began_at = self._world.monotonic()
        answer: asyncio.Future[T] = self._loop.create_future()
        [done] = self._writer.commit(
            [QueuedOperation(write, Sync.NORMAL, answer, is_alone=True)], is_patient=False
        )
        self._pause_after(began_at)
        if self._writer.log_pages > IDLE_CHECKPOINT_PAGES:
            self._go_on()
        return None if isinstance(done, BaseException) else done

    async def clear_log(self) -> None:
        """Checkpoint the log and truncate it, as far as readers permit."""
        self._has_new_log = True
        await self._thread.submit(self._writer.clear_log)

    async def finish(self) -> None:
        """Wait until all submitted operations are committed."""
        await self._idle.wait()

    def _become_busy(self) -> None:
        self._is_busy = True
        self._idle.clear()

    def _commit_next(self) -> None:
        if len(self._waiting) == 1:
            batch, self._waiting = self._waiting, []
        else:
            alone = (
                number for number, operation in enumerate(self._waiting[:BATCH_MAX]) if operation.is_alone
            )
            count = next(alone, BATCH_MAX) or 1
            batch = self._waiting[:count]
            del self._waiting[:count]
        self._is_shared = len(batch) > 1
        self._has_new_log = False
        self._thread.submit_then(partial(self._writer.commit, batch), partial(self._finish_batch, batch))

    def _pause_after(self, began_at: float) -> None:
        """Leave the event loop to other work for a time in proportion to the last commit."""
        ended_at = self._world.monotonic()
        self._at_once_from = ended_at + (ended_at - began_at) * (1 / AT_ONCE_SHARE - 1)

    def _finish_batch(
        self, batch: Sequence[QueuedOperation], done: list[Any] | None, bug: BaseException | None
    ) -> None:
        answers = [bug] * len(batch) if done is None else done
        for operation, answer in zip(batch, answers, strict=True):
            if operation.answer.done():
                continue  # the caller was cancelled
            if isinstance(answer, BaseException):
                operation.answer.set_exception(answer)
            else:
                operation.answer.set_result(answer)
        self._go_on()

    def _go_on(self) -> None:
        limit = BUSY_CHECKPOINT_PAGES if self._waiting else IDLE_CHECKPOINT_PAGES
        if self._writer.log_pages > limit:
            self._become_busy()
            self._has_new_log = True
            self._thread.submit_then(self._writer.checkpoint, lambda _done, _bug: self._go_on())
        elif self._waiting:
            self._commit_next()
        else:
            self._is_busy = False
            self._idle.set()
