"""What is asked of a database on the event loop, gathered into commits: on a thread, or at once where it was asked for.

Whoever asks while a commit is under way shares the next one, so a hundred sessions cost hardly more syncs than one. A
commit that waits for the disk is the thread's. One that does not costs less than the way to the thread and back: if it
is alone, and the thread has nothing to do, it is made on the loop. So is a sync of what is written ahead, as long as
the disk answers in less time than that way takes. Commits are made in the order in which they were asked for, and one
thread at a time uses the connection, without a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from msgspec import Struct

from midstream.core.records import Sync
from midstream.errors import MidstreamError
from midstream.store.thread import WorkThread
from midstream.world import Cancellable, World

T = TypeVar("T")

Durability = Literal["default", "power", "process"]
"""What `Sync` means: as the records say; every append survives a power cut; none does."""
_SYNCS = {"power": Sync.FULL, "process": Sync.NORMAL}

BATCH_MAX = 1000
"""Operations in one commit; bounds how long the first of them waits for the last."""
IDLE_CHECKPOINT_PAGES = 2000
"""Pages in the write-ahead log from which it is copied back when nobody waits (4 MB)."""
BUSY_CHECKPOINT_PAGES = 16_000
"""Pages from which it is copied back even if somebody waits (32 MB)."""
BEHIND_S = 0.1
"""Seconds for which something may be written ahead of its commit: the words of so long share one."""
AGAIN_S = 1.0
"""Seconds after which that commit is tried again, where the database takes nothing, as on a full disk."""
AT_ONCE_SHARE = 0.1
"""Most of its time that the event loop spends on commits. A disk that takes its time even for a write that is not
synced soon reaches it, and so do many sessions, which had better share commits: then they are the thread's."""
QUICK_S = 0.0005
"""Seconds within which a disk answers that may be waited for on the event loop, the way to the thread included."""
QUICK_TRIES = 8
"""Lone syncs in a row that have to come back from the thread so soon before one is made on the event loop."""


class Asked(Struct):
    """An operation that waits for its commit."""

    write: Callable[[], Any]  # each has its own kind of answer
    sync: Sync
    answer: asyncio.Future[Any]  # see `write`
    is_alone: bool
    """Whether it must not share a commit: it may end a transaction that is not only its own."""
    ahead: Callable[[], Any] | None  # see `write`
    """Does the same ahead of the commit, if there is a way, and returns the same; None where that does not go now."""


class Committer(Protocol):
    """Who commits, on one thread at a time."""

    @property
    def is_behind(self) -> bool:
        """Whether something was written ahead that is in no commit yet. Each commit begins with all of it."""

    log_pages: int
    """Pages in the write-ahead log that are not yet copied back."""

    def commit(self, batch: Sequence[Asked]) -> list[Any]:
        """Do everything, in one transaction or ahead of it, and return each one's answer or refusal, in order."""

    def commit_ahead(self, batch: Sequence[Asked]) -> list[Any] | None:
        """Do everything ahead of the commit and return each one's answer; or do nothing, and return None."""

    def checkpoint(self) -> None:
        """Copy the log back without waiting for anybody."""

    def clear_log(self) -> None:
        """Copy the log back and empty it, as far as readers allow."""


class Commits:
    """Makes the commits of one database, one at a time.

    Args:
        writer: Who makes them.
        thread: Where.
        durability: See `Durability`.
        world: The clock.
    """

    def __init__(self, writer: Committer, thread: WorkThread, durability: Durability, world: World) -> None:
        self._writer = writer
        self._thread = thread
        self._sync = _SYNCS.get(durability)
        self._world = world
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Asked] = []
        self._is_busy = False
        self._is_shared = True
        """Whether the next commit is likely to be of several, as the last one was."""
        self._has_new_log = False
        """Whether the next commit may begin the log anew, and sync that."""
        self._catching_up: Cancellable | None = None
        """The commit that will be made for what was written ahead."""
        self._at_once_from = 0.0
        """When the event loop has time for a commit again."""
        self._began_at = 0.0
        self._quick = 0
        """Lone syncs in a row that came back soon."""
        self._idle = asyncio.Event()
        self._idle.set()

    def ask(
        self,
        write: Callable[[], T],
        sync: Sync,
        *,
        is_alone: bool = False,
        ahead: Callable[[], T | None] | None = None,
    ) -> asyncio.Future[T]:
        """Let `write` be done in a commit; the future has its answer once that is as durable as `sync` says.

        A cancelled future stops nothing.

        Args:
            write: Does it, or refuses by a `MidstreamError` before it has written anything.
            is_alone: See `Asked`.
            ahead: See `Asked`.
        """
        answer: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append(Asked(write, self._sync or sync, answer, is_alone, ahead))
        if not self._is_busy:
            self._become_busy()
            if self._is_shared:  # who asks in the same moment shares the commit
                self._loop.call_soon(self._commit_next)
            else:
                self._commit_next()
        return answer

    def at_once(self, commit: Callable[[], T | None], sync: Sync) -> T | None:
        """Let `commit` be done here and now, and return its answer; None where it is to be asked for.

        Args:
            commit: A transaction of its own that waits for nobody. Where that is not possible it does nothing, and
                returns None.
        """
        if (self._sync or sync) is Sync.FULL or self._is_busy or self._is_shared or self._has_new_log:
            return None
        began_at = self._world.monotonic()
        if self._thread.is_at_work or began_at < self._at_once_from:
            return None
        done = commit()
        self._rest_after(began_at)
        if self._writer.log_pages > IDLE_CHECKPOINT_PAGES:
            self._go_on()
        return done

    def ahead(self, put: Callable[[], T | None]) -> T | None:
        """Let `put` write something ahead of its commit, and return its answer; None where it is to be asked for.

        Nothing is under way meanwhile: what is put stands behind all that was asked for.

        Args:
            put: Where that is not possible it does nothing, and returns None.
        """
        if self._sync is Sync.FULL or self._is_busy:
            return None
        done = put()
        if done is not None and self._catching_up is None:
            self._catch_up_in(BEHIND_S)
        return done

    async def caught_up(self) -> None:
        """Wait until what was written ahead is in the database.

        Raises:
            UnavailableError: The database takes nothing now.
        """
        if self._writer.is_behind:
            await self.ask(_nothing, Sync.NORMAL)

    def _catch_up_in(self, seconds: float) -> None:
        self._catching_up = self._world.later(seconds, self._catch_up)

    def _catch_up(self) -> None:
        self._catching_up = None
        if self._writer.is_behind:
            self.ask(_nothing, Sync.NORMAL).add_done_callback(self._caught_up)

    def _caught_up(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is not None and self._catching_up is None:
            self._catch_up_in(AGAIN_S)

    async def clear_log(self) -> None:
        """Copy the log into the database and empty it, as far as readers allow."""
        self._has_new_log = True
        await self._thread.ask(self._writer.clear_log)

    async def finish(self) -> None:
        """Wait until everything asked for is committed, and what was written ahead, where the database takes it."""
        await self._idle.wait()
        if self._catching_up is not None:
            self._catching_up.cancel()
        with contextlib.suppress(MidstreamError):
            await self.caught_up()
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
        self._began_at = self._world.monotonic()
        try:
            done = self._commit_here(batch)
        except Exception as bug:  # noqa: BLE001 - whatever it is belongs to who asked, as on the thread
            done = [bug]
        if done is None:
            self._thread.tell(partial(self._writer.commit, batch), partial(self._committed, batch))
        else:  # whoever asks again and again lets others have the loop in between
            self._loop.call_soon(self._answer, batch, done)

    def _commit_here(self, batch: Sequence[Asked]) -> list[Any] | None:
        """Write a lone append ahead, on the event loop; None where the disk may keep it waiting, or it has to."""
        if len(batch) > 1 or batch[0].ahead is None or self._thread.is_at_work:
            return None
        is_synced = batch[0].sync is Sync.FULL
        if is_synced and (self._quick < QUICK_TRIES or self._began_at < self._at_once_from):
            return None
        done = self._writer.commit_ahead(batch)
        if is_synced and self._world.monotonic() - self._began_at > QUICK_S:
            self._quick = 0
            self._rest_after(self._began_at)
        return done

    def _rest_after(self, began_at: float) -> None:
        """Leave the event loop to others for a while, after what it was kept from them."""
        ended_at = self._world.monotonic()
        self._at_once_from = ended_at + (ended_at - began_at) * (1 / AT_ONCE_SHARE - 1)

    def _committed(self, batch: Sequence[Asked], done: list[Any] | None, bug: BaseException | None) -> None:
        if len(batch) > 1:
            self._quick = 0
        elif batch[0].ahead is not None and batch[0].sync is Sync.FULL:
            is_quick = self._world.monotonic() - self._began_at <= QUICK_S
            self._quick = self._quick + 1 if is_quick else 0
        self._answer(batch, [bug] * len(batch) if done is None else done)

    def _answer(self, batch: Sequence[Asked], answers: Sequence[Any]) -> None:
        for asked, answer in zip(batch, answers, strict=True):
            if asked.answer.done():
                continue  # nobody waits any more
            if isinstance(answer, BaseException):
                asked.answer.set_exception(answer)
            else:
                asked.answer.set_result(answer)
        if self._catching_up is None and self._writer.is_behind:
            self._catch_up_in(BEHIND_S)
        self._go_on()

    def _go_on(self) -> None:
        limit = BUSY_CHECKPOINT_PAGES if self._waiting else IDLE_CHECKPOINT_PAGES
        if self._writer.log_pages > limit:
            self._become_busy()
            self._has_new_log = True
            self._thread.tell(self._writer.checkpoint, lambda _done, _bug: self._go_on())
        elif self._waiting:
            self._commit_next()
        else:
            self._is_busy = False
            self._idle.set()


def _nothing() -> None:
    """What is asked for where the commit itself is wanted."""
