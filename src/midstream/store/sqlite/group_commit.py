"""Group commit for one database, on a thread or on the event loop.

Operations that arrive while a commit is under way share the next one, so that a hundred sessions cost hardly more syncs
than one. A synced commit runs on the thread. One that is not synced costs less than the way to the thread and back: if
it is alone, and the thread is idle, it runs on the event loop. Commits keep the order of the requests, and one thread
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
"""What `Sync` means: by the kind of the records; every append survives a power cut; none does."""
_SYNCS = {"power": Sync.FULL, "process": Sync.NORMAL}

BATCH_MAX = 1000
"""Operations in one commit; bounds how long the first of them waits for the last."""
IDLE_CHECKPOINT_PAGES = 2000
"""Pages in the write-ahead log from which it is copied back when no append waits (4 MB)."""
BUSY_CHECKPOINT_PAGES = 16_000
"""Pages from which it is copied back even if an append waits (32 MB)."""
AT_ONCE_SHARE = 0.1
"""Most of its time that the event loop spends on commits. A disk that takes its time even for a write that is not
synced soon reaches it, and so do many sessions, which had better share commits: then they are the thread's."""


class QueuedOperation(Struct):
    """An operation that waits for its commit."""

    write: Callable[[], Any]  # each has its own kind of answer
    sync: Sync
    answer: asyncio.Future[Any]  # see `write`
    is_alone: bool
    """Whether it must not share a commit: it may end a transaction that is not only its own."""


class Committer(Protocol):
    """Makes commits, on one thread at a time."""

    log_pages: int
    """Pages in the write-ahead log that are not yet copied back."""

    def commit(self, batch: Sequence[QueuedOperation], *, is_patient: bool = True) -> list[Any]:
        """Do everything, in one transaction, and return each one's answer or refusal, in order.

        Args:
            is_patient: Whether to wait for another process that writes; otherwise everything is refused.
        """

    def checkpoint(self) -> None:
        """Copy the log back without waiting for readers."""

    def clear_log(self) -> None:
        """Copy the log back and empty it, as far as readers allow."""


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
        """Whether the next commit is likely to be of several, as the last one was."""
        self._has_new_log = False
        """Whether the next commit may begin the log anew, and sync that."""
        self._at_once_from = 0.0
        """When the event loop has time for a commit again."""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """How many operations wait for a commit."""
        return len(self._waiting)

    def submit(
        self,
        write: Callable[[], T],
        sync: Sync,
        *,
        is_alone: bool = False,
    ) -> asyncio.Future[T]:
        """Run `write` in a commit; the future has its result once the commit is as durable as `sync` requires.

        A cancelled future stops nothing.

        Args:
            write: Does it, or refuses by a `MidstreamError` before it has written anything.
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
        """Whether `now` may commit what need not be synced: nothing else is being committed, or about to be."""
        if self._sync is Sync.FULL or self._is_busy or self._is_shared or self._has_new_log:
            return False
        return not self._thread.is_at_work and self._world.monotonic() >= self._at_once_from

    def now(self, write: Callable[[], T], sync: Sync) -> T | None:
        """Commit `write` alone, here and now, and return its answer; None where it is to be asked for.

        After None nothing was written: the commit would be synced, or have to wait, or was refused.
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
        """Copy the log into the database and empty it, as far as readers allow."""
        self._has_new_log = True
        await self._thread.submit(self._writer.clear_log)

    async def finish(self) -> None:
        """Wait until everything asked for is committed."""
        await self._idle.wait()

    def _become_busy(self) -> None:
        self._is_busy = True
        self._idle.clear()

    def _commit_next(self) -> None:
        if len(self._waiting) == 1:
            batch, self._waiting = self._waiting, []
        else:
            alone = (number for number, asked in enumerate(self._waiting[:BATCH_MAX]) if asked.is_alone)
            count = next(alone, BATCH_MAX) or 1
            batch = self._waiting[:count]
            del self._waiting[:count]
        self._is_shared = len(batch) > 1
        self._has_new_log = False
        self._thread.submit_then(partial(self._writer.commit, batch), partial(self._finish_batch, batch))

    def _pause_after(self, began_at: float) -> None:
        """Leave the event loop to others for a while, after what it was kept from them."""
        ended_at = self._world.monotonic()
        self._at_once_from = ended_at + (ended_at - began_at) * (1 / AT_ONCE_SHARE - 1)

    def _finish_batch(
        self, batch: Sequence[QueuedOperation], done: list[Any] | None, bug: BaseException | None
    ) -> None:
        answers = [bug] * len(batch) if done is None else done
        for asked, answer in zip(batch, answers, strict=True):
            if asked.answer.done():
                continue  # the caller was cancelled
            if isinstance(answer, BaseException):
                asked.answer.set_exception(answer)
            else:
                asked.answer.set_result(answer)
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
