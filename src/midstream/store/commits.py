"""What is asked of a database on the event loop, gathered into commits: on a thread, or at once where it was asked for.

Whoever asks while a commit is under way shares the next one, so a hundred sessions cost hardly more syncs than one. A
commit that waits for the disk is the thread's. One that does not costs less than the way to the thread and back: if it
is small and alone, and the thread has nothing to do, it is made on the loop. So commits are made in the order in which
they were asked for, and one thread at a time uses the connection, without a lock.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import apsw
from msgspec import Struct

from midstream.core.records import Sync
from midstream.store.thread import WorkThread
from midstream.world import World

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
HERE_SHARE = 0.1
"""Most of its time that the event loop spends on commits. A disk that takes its time even for a write that is not
synced soon reaches it, and so do many sessions, which had better share commits: then they are the thread's."""


class Way(enum.Enum):
    """How an operation may be committed."""

    SHARED = "shared"
    """With others, on the thread."""
    HERE = "here"
    """It is small: also on the event loop, while it is alone and nothing has to be synced."""
    ALONE = "alone"
    """With no others, on the thread: it may end a transaction that is not only its own."""


class Asked(Struct):
    """An operation that waits for its commit."""

    write: Callable[[], Any]  # each has its own kind of answer
    sync: Sync
    answer: asyncio.Future[Any]  # see `write`
    way: Way


class Writer(Protocol):
    """Who commits, on one thread at a time."""

    log_pages: int
    """Pages in the write-ahead log that are not yet copied back."""

    def commit(self, batch: Sequence[Asked]) -> list[Any]:
        """Do everything in one transaction and return each one's answer or refusal, in order."""

    def commit_if_free(self, batch: Sequence[Asked]) -> list[Any]:
        """Do the same without waiting for another process.

        Raises:
            apsw.BusyError: One is writing. Nothing was done.
        """

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

    def __init__(self, writer: Writer, thread: WorkThread, durability: Durability, world: World) -> None:
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
        self._here_from = 0.0
        """When the event loop has time for a commit again."""
        self._idle = asyncio.Event()
        self._idle.set()

    def ask(self, write: Callable[[], T], sync: Sync, way: Way = Way.SHARED) -> asyncio.Future[T]:
        """Let `write` be done in a commit; the future has its answer once that is as durable as `sync` says.

        A cancelled future stops nothing. An operation refuses by a `MidstreamError`, before it has written anything.
        """
        answer: asyncio.Future[T] = self._loop.create_future()
        asked = Asked(write, self._sync or sync, answer, way)
        if self._is_busy or not self._has_committed_here(asked):
            self._waiting.append(asked)
            if not self._is_busy:
                self._become_busy()
                if self._is_shared:  # who asks in the same moment shares the commit
                    self._loop.call_soon(self._commit_next)
                else:
                    self._commit_next()
        return answer

    async def clear_log(self) -> None:
        """Copy the log into the database and empty it, as far as readers allow."""
        self._has_new_log = True
        await self._thread.ask(self._writer.clear_log)

    async def finish(self) -> None:
        """Wait until everything asked for is committed."""
        await self._idle.wait()

    def _has_committed_here(self, asked: Asked) -> bool:
        """Commit at once what nobody has to wait for; return False where it is better left to the thread."""
        if asked.way is not Way.HERE or asked.sync is Sync.FULL:
            return False
        if self._is_shared or self._has_new_log or self._thread.is_at_work:
            return False
        began_at = self._world.monotonic()
        if began_at < self._here_from:
            return False
        try:
            answers = self._writer.commit_if_free([asked])
        except apsw.BusyError:
            return False
        except BaseException as bug:  # noqa: BLE001 - whatever it is belongs to who asked
            answers = [bug]
        ended_at = self._world.monotonic()
        self._here_from = ended_at + (ended_at - began_at) * (1 / HERE_SHARE - 1)
        _settle(asked.answer, answers[0])
        self._go_on()
        return True

    def _become_busy(self) -> None:
        self._is_busy = True
        self._idle.clear()

    def _commit_next(self) -> None:
        if len(self._waiting) == 1:
            batch, self._waiting = self._waiting, []
        else:
            several = enumerate(self._waiting[:BATCH_MAX])
            alone = (number for number, asked in several if asked.way is Way.ALONE)
            count = next(alone, BATCH_MAX) or 1
            batch = self._waiting[:count]
            del self._waiting[:count]
        self._is_shared = len(batch) > 1
        self._has_new_log = False
        self._thread.tell(partial(self._writer.commit, batch), partial(self._committed, batch))

    def _committed(self, batch: Sequence[Asked], done: list[Any] | None, bug: BaseException | None) -> None:
        for asked, answer in zip(batch, [bug] * len(batch) if done is None else done, strict=True):
            _settle(asked.answer, answer)
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


def _settle(future: asyncio.Future[Any], answer: object) -> None:
    if future.done():
        return  # nobody waits any more
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
