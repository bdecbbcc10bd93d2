"""The thread that watches a store for other nodes and their changes.

It polls, which works on every system and for every kind of death. A check costs a few system calls while there are
other nodes, and almost nothing without them. The database is queried only after a commit of another connection. The
thread never waits for a lock, so closing the store ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from msgspec import Struct

from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.store.contract import ForwardedCommand, News
from midstream.store.sqlite.inbox import FORWARDED_MAX, WatcherView
from midstream.store.sqlite.liveness import Peers

T = TypeVar("T")

ALONE_S = 0.25
"""Seconds between two checks without other nodes: the greatest time until the first one is noticed."""
QUIET_S = 0.02
"""Seconds between two checks with other nodes: the greatest time until a death is noticed."""
BUSY_S = 0.002
"""Seconds between two checks after a change, or while an answer is awaited. The pause then grows by half a check each
time, so that output is followed closely and silence costs little."""
BACKSTOP_S = 1.0
"""Seconds after which everything is checked."""

_log = logging.getLogger(__name__)


class _Reported(Struct):
    """Changes, and the marks of returned ones after the caller has received them."""

    news: News
    forwarded_commands: frozenset[tuple[int, int]]
    orphans: frozenset[tuple[str, int]]
    changes: int
    """Number of changes of the peers at the time of the check."""


class _Waiting:
    """A waiting `watch` call."""

    def __init__(self, followed: Mapping[str, int]) -> None:
        self.followed = dict(followed)
        self.result: asyncio.Future[_Reported] = asyncio.get_running_loop().create_future()
        self.is_over = False
        """Whether there were changes for it."""


class Watcher:
    """Checks for changes in a thread of its own, from `start` to `close`, and beats for its node.

    Args:
        view: Opens the view of the database, in this thread.
        identify: Returns the identity of the file at the database's path. A change is logged: the store goes on with
            the file that it has opened, whose records are lost if it was deleted.
    """

    def __init__(
        self,
        node: str,
        peers: Peers,
        view: Callable[[], contextlib.AbstractContextManager[WatcherView]],
        identify: Callable[[], object],
        world: World,
    ) -> None:
        self._node = node
        self._peers = peers
        self._view = view
        self._identify = identify
        self._opened = identify()
        self._is_in_place = True
        self._world = world
        self._loop = asyncio.get_running_loop()
        self._nudged = threading.Event()
        self._is_over = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._waiting: _Waiting | None = None
        self._awaited: dict[int, asyncio.Future[bytes]] = {}
        self._waits_begun = 0
        """Number of times that a task began to wait."""
        self._reported = _Reported(News(peers=-1), frozenset(), frozenset(), changes=-1)
        self._last_check = (-1, -1)
        """Values of `_waits_begun` and of the database version at the last check."""
        self._changes = 0
        self._all_looked_at = 0.0
        self._pause_s = BUSY_S

    # --- on the event loop

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._work, name="midstream-store-watcher", daemon=True).start()

    async def close(self) -> None:
        """End the thread, and cancel the callers that wait."""
        self._is_over = True
        self._nudged.set()
        await asyncio.shield(self._ended)
        if self._waiting is not None:
            self._waiting.result.cancel()
        for answer in self._awaited.values():
            answer.cancel()
        await self._world.sleep(0)  # the cancelled callers clean up

    async def watch(self, followed: Mapping[str, int]) -> News:
        """See `Store.watch`."""
        waiting = self._waiting = _Waiting(followed)
        self._check_soon()
        try:
            self._reported = await waiting.result  # only now, so that a cancelled call consumes nothing
        finally:
            if self._waiting is waiting:
                self._waiting = None
        return self._reported.news

    async def answer_to(self, forwarded: int) -> bytes:
        """Wait for the answer to a forwarded command of this node."""
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._awaited[forwarded] = answer
        self._check_soon()
        try:
            return await answer
        finally:
            del self._awaited[forwarded]

    def _check_soon(self) -> None:
        self._waits_begun += 1
        self._nudged.set()

    # --- in the thread

    def _work(self) -> None:
        try:
            with contextlib.ExitStack() as closing:
                view: WatcherView | None = None
                while not self._is_over:
                    try:
                        self._check_place()
                        self._changes += self._peers.check_all(now=self._world.monotonic())
                        if self._has_waiting():
                            view = view or closing.enter_context(self._view())
                            self._check(view)
                    except (MidstreamError, OSError) as error:
                        self._last_check = (-1, -1)
                        _log.debug("the store cannot be read: %s", error)
                    except Exception:  # noqa: BLE001 - callers would wait for ever for the changes and answers
                        self._last_check = (-1, -1)
                        _log.exception("a defect stopped a check of the store; the next one follows")
                        self._nudged.wait(BACKSTOP_S)
                    self._nudged.wait(self._next_pause_s())
                    self._nudged.clear()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its waiters with it
                self._loop.call_soon_threadsafe(self._ended.set_result, None)

    def _check_place(self) -> None:
        was_in_place, self._is_in_place = self._is_in_place, self._identify() == self._opened
        if was_in_place and not self._is_in_place:
            _log.error(
                "the database was deleted, moved or replaced while this process has it open: other processes do not "
                "see what this one stores, and it may be lost. Restore the file at its path, or stop this process"
            )
        elif self._is_in_place and not was_in_place:
            _log.warning("the database is at its path again")

    def _has_waiting(self) -> bool:
        waiting = self._waiting  # it stays until the event loop has received the changes, and waits no more
        return (waiting is not None and not waiting.is_over) or bool(self._awaited)

    def _next_pause_s(self) -> float:
        if self._awaited:
            return BUSY_S
        if not (self._peers.living or self._peers.frozen):
            return ALONE_S
        self._pause_s = min(1.5 * self._pause_s, QUIET_S)
        return self._pause_s

    def _check(self, view: WatcherView) -> None:
        now, changes = self._world.monotonic(), self._changes
        is_all = changes != self._reported.changes or now - self._all_looked_at >= BACKSTOP_S
        before, self._last_check = self._last_check, (self._waits_begun, view.version())
        if self._last_check == before and not is_all:
            return
        if self._awaited:
            self._settle_answers(dict(view.answers(self._node)))
        waiting = self._waiting
        if waiting is None or waiting.is_over:
            return
        if is_all:
            self._all_looked_at = now
        result = self._find_changes(waiting.followed, view, changes, is_all=is_all)
        if result.news == News(peers=self._reported.news.peers):
            self._reported = result
        else:
            waiting.is_over = True
            self._pause_s = BUSY_S
            _deliver(waiting.result, result)

    def _find_changes(
        self, followed: Mapping[str, int], view: WatcherView, changes: int, *, is_all: bool
    ) -> _Reported:
        """Return new changes, and the marks for them."""
        forwarded_commands = [each for each in view.list_undecided() if self._is_ours(each.node)]
        senders = {
            sender for sender in {each.sender for each in forwarded_commands} if self._may_wait(sender)
        }
        forwarded_commands = [each for each in forwarded_commands if each.sender in senders]
        fresh = [
            each
            for each in forwarded_commands
            if (each.number, each.epoch) not in self._reported.forwarded_commands
        ][:FORWARDED_MAX]
        orphans = self._orphans(view) if is_all else view.list_given_up()
        lost = [each for each in orphans if each not in self._reported.orphans]
        news = News(
            view.find_moved(followed) if followed else frozenset(),
            tuple(ForwardedCommand(each.number, each.session, each.body, each.sender) for each in fresh),
            tuple(session for session, _ in lost),
            len(self._peers.living),
        )
        # Marks of deleted rows are dropped.
        still = self._reported.forwarded_commands.intersection(
            (each.number, each.epoch) for each in forwarded_commands
        )
        known = self._reported.orphans.intersection(orphans) if is_all else self._reported.orphans
        reported_commands = still.union((each.number, each.epoch) for each in fresh)
        return _Reported(
            news, reported_commands, known.union(lost), changes if is_all else self._reported.changes
        )

    def _orphans(self, view: WatcherView) -> list[tuple[str, int]]:
        living = {self._node, *self._peers.living}
        # Queried again: a node that has just joined is alive, and its sessions are no orphans.
        return [(name, epoch) for name, epoch, node in view.orphans(living) if self._is_ours(node)]

    def _is_ours(self, node: str | None) -> bool:
        """Whether a session belongs to this node, or to no living node."""
        return node is None or node == self._node or not self._peers.may_hold(node)

    def _may_wait(self, sender: str) -> bool:
        """Whether the sender of a forwarded command may still wait for its answer."""
        return sender == self._node or self._peers.may_hold(sender)

    def _settle_answers(self, answers: Mapping[int, bytes]) -> None:
        for number, future in [*self._awaited.items()]:
            if number in answers:
                _deliver(future, answers[number])


def _deliver(future: asyncio.Future[T], result: T) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and its waiters with it
        future.get_loop().call_soon_threadsafe(_settle, future, result)


def _settle(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)
