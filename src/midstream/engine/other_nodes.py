"""Work of a host for the other nodes of its store: takes up what they left, decides what they hand over, and keeps
readers of their sessions up to date.

One task waits for the store's news. It takes up orphans a few at a time; several survivors ask for the same ones, and
the store gives each to one of them. A command is decided as if it had come in here, so that twice is as good as once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from functools import partial
from itertools import count, groupby
from typing import Protocol, TypeVar

from midstream.engine import session_work
from midstream.engine.followed_journals import FollowedJournals
from midstream.engine.forwarding import (
    GIVE_UP,
    Accepted,
    Forwarder,
    decode_command,
    encode_answer,
    encode_command,
    name_approver,
)
from midstream.engine.pruning import Pruner
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import (
    DrainingError,
    InternalError,
    KeysUnavailableError,
    LeaseHeldError,
    MidstreamError,
    SessionLockedError,
    UnavailableError,
)
from midstream.observability.observers import Observers
from midstream.protocol.frames import EventId
from midstream.retries import (
    HAND_OVER_BACKOFF,
    HAND_OVER_S,
    RECONNECT_BACKOFF,
    RETURNED_ATTEMPTS_MAX,
    RETURNED_BACKOFF,
    STORE_ATTEMPTS_MAX,
)
from midstream.session.child_names import root_of
from midstream.session.retention import Retention
from midstream.session.session import Received, Session
from midstream.store.contract import ForwardedCommand, News, SessionInfo, Store

T = TypeVar("T")

TAKEN_UP_AT_ONCE = 16
"""Sessions taken up side by side."""

_log = logging.getLogger(__name__)


class PeerSessions(Protocol):
    """The sessions of a host."""

    observers: Observers
    """Notified of turns that callers of other nodes are about to open here."""

    async def session(self, session_id: str, *, create: bool = False) -> Runner:
        """Return a session, awake."""

    async def wait_for_recovery(self) -> None:
        """Wait for the end of start-up recovery."""

    def followed_ends(self) -> Mapping[str, int]:
        """Return the sessions that have readers here and are not owned here, with the ends known here."""

    async def give_up(self, session_id: str) -> None:
        """Let go of an idle session that is to be deleted."""

    def is_locked(self, info: SessionInfo) -> bool:
        """Whether the open turn of a session waits for its client."""

    def awake(self, session_id: str) -> Runner | None:
        """Return a session if it is awake."""

    async def glance(self, session_id: str) -> Session:
        """Return what is known of a session without waking it."""

    async def delete(self, session_id: str) -> None:
        """Remove an idle session and all its records for good."""

    def note_pruned(self, session_id: str, last: EventId) -> None:
        """Store that the events of a session up to this one were pruned."""


class Unread:
    """How many sessions of a dead node were not read yet."""

    def __init__(self, count: int) -> None:
        self.is_over = asyncio.Event()
        self._count = count

    def count_down(self) -> None:
        """Count one that was read, or cannot be."""
        self._count -= 1
        if self._count <= 0:
            self.is_over.set()


class Caretaker:
    """Looks after the sessions of others, and prunes all of them, from `start` to `stop`."""

    def __init__(self, sessions: PeerSessions, store: Store, world: World, retention: Retention) -> None:
        self.peers = 0
        """How many other living nodes there are."""
        self._sessions = sessions
        self._store = store
        self._world = world
        self.retention = retention
        self._pruner = Pruner(sessions, store, world, retention)
        self._forwarder = Forwarder(store.forward, world)
        self._turnstile = asyncio.Semaphore(TAKEN_UP_AT_ONCE)
        self._is_following_more = asyncio.Event()
        self.journals = FollowedJournals(self.refresh_followed)
        """Readers of journals that are no sessions."""
        self._watching: asyncio.Task[None] | None = None
        self._working: set[asyncio.Task[None]] = set()
        self._taking_up: set[str] = set()
        self._reported_again: set[str] = set()
        """Orphans that were reported while they were being taken up: another node had them, and died, too."""
        self._once_more: set[str] = set()
        """Sessions that are taken up again when the attempt that is under way has ended."""
        self._locked: dict[str, int] = {}
        """Epochs of the sessions whose open turns wait for their clients' secrets."""

    def start(self) -> None:
        """Begin to watch the store."""
        self._watching = self._world.spawn(self._watch(), name="caretaker")
        self._work(self._pruner.run(), name="pruning")

    async def stop(self) -> None:
        """Stop watching; what is being taken up, decided or forwarded is let go."""
        self._forwarder.refuse(
            DrainingError("this server is shutting down; reconnect to continue", retry_after_s=1.0)
        )
        self._once_more.clear()
        tasks = [*self._working, *([self._watching] if self._watching else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def take_up(self, session_ids: Iterable[str], *, once_more: bool = False) -> None:
        """Begin to resume turns without a node.

        Args:
            session_ids: The sessions; those that are being taken up are left out, unless another node proves faster.
            once_more: Take those up again afterwards: what the attempt under way lacked has come.
        """
        wanted = dict.fromkeys(session_ids)
        again = self._once_more if once_more else self._reported_again
        again.update(wanted.keys() & self._taking_up)
        new = [session_id for session_id in wanted if session_id not in self._taking_up]
        unread = Unread(len(new))
        for session_id in new:
            self._taking_up.add(session_id)
            self._work(self._take_up(session_id, unread), name=f"take up {session_id}")

    async def prune(self, session_id: str) -> None:
        """Prune what is due of one session.

        Raises:
            UnavailableError: The store is busy or full.
        """
        await self._pruner.tend(session_id)

    def is_locked(self, info: SessionInfo) -> bool:
        """Whether the open turn of a session waits for its client's secret, since nothing has claimed it yet."""
        return info.mark.is_live and self._locked.get(info.session) == info.epoch

    def note_unlocked(self, session_id: str) -> set[str]:
        """Let a session and its sub-agents wait for its client no more; return those that did."""
        names = {name for name in self._locked if root_of(name) == session_id}
        for name in names:
            del self._locked[name]
        return names

    def refresh_followed(self) -> None:
        """Compute again which sessions are followed: another one has a reader now."""
        self._is_following_more.set()

    async def _watch(self) -> None:
        failures = 0
        while True:
            try:
                await self._attend_to(await self._wait_for_changes())
                failures = 0
            except UnavailableError as error:
                failures += 1
                _log.warning("the other nodes cannot be listed: %s", error.code)
                await self._world.sleep(RECONNECT_BACKOFF.wait_s(failures, chance=self._world.chance()))
            except MidstreamError as error:
                _log.error("the other nodes are no longer monitored: %s", error.message)
                return

    async def _wait_for_changes(self) -> News:
        """Wait for news, asking anew whenever there is more to follow.

        With peers also from time to time: a session that is silent here may be another node's by now, since this
        process was frozen, or lost its lock.
        """
        while True:
            self._is_following_more.clear()
            asking = self._world.spawn(self._store.watch(self._followed_ends()), name="watch")
            waiting = [asking, self._world.spawn(self._is_following_more.wait(), name="follow more")]
            if self.peers:
                waiting.append(
                    self._world.spawn(self._world.sleep(session_work.HELD_FOR_S), name="follow the silent")
                )
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()
                await asyncio.wait(waiting)
            if not asking.cancelled():
                return asking.result()

    async def _attend_to(self, news: News) -> None:
        self.peers = news.peers
        self.take_up(news.orphans)
        for session_id, forwarded_commands in groupby(
            news.forwarded_commands, key=lambda forwarded: forwarded.session
        ):
            self._work(self._decide([*forwarded_commands]), name=f"inbox of {session_id}")
        await self._refresh(news.moved)

    def _work(self, work: Coroutine[object, object, None], *, name: str) -> None:
        task = self._world.spawn(work, name=name)
        self._working.add(task)
        task.add_done_callback(self._finish_work)

    def _finish_work(self, task: asyncio.Task[None]) -> None:
        self._working.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            _log.error("monitoring of the other nodes failed", exc_info=bug)

    # --- orphans

    async def _take_up(self, session_id: str, unread: Unread) -> None:
        """Resume a turn without a node, unless another survivor was faster."""
        try:
            await self._sessions.wait_for_recovery()
            try:
                async with self._turnstile:
                    await self._sessions.session(session_id)
            except (UnavailableError, LeaseHeldError):
                pass  # tried again below
            finally:
                unread.count_down()
            await unread.is_over.wait()  # what died together is judged together
            returns = 0
            for failures in range(1, STORE_ATTEMPTS_MAX + 1):
                try:
                    async with self._turnstile:
                        await (await self._sessions.session(session_id)).take_up()
                except UnavailableError:
                    await self._world.sleep(RECONNECT_BACKOFF.wait_s(failures, chance=self._world.chance()))
                except LeaseHeldError:
                    if session_id in self._reported_again:
                        self._reported_again.discard(session_id)
                        continue
                    returns += 1
                    if returns > RETURNED_ATTEMPTS_MAX or not await self._has_returned(session_id):
                        _log.debug("another node was faster", extra={"session": session_id})
                        return
                    await self._world.sleep(RETURNED_BACKOFF.wait_s(returns, chance=self._world.chance()))
                else:
                    return
        except SessionLockedError:
            _log.debug("a turn waits for its client", extra={"session": session_id})
            await self._note_locked(session_id)
        except MidstreamError as error:
            _log.error("not taken over: %s", error.message, extra={"session": session_id})
        finally:
            self._taking_up.discard(session_id)
            self._reported_again.discard(session_id)
        if session_id in self._once_more:  # not after a cancellation
            self._once_more.discard(session_id)
            self.take_up({session_id})

    async def _has_returned(self, session_id: str) -> bool:
        """Whether an orphan is held under the epoch that it had without a node: its node has come back.

        Should that node die before the store looks again, the orphan is not reported once more.
        """
        try:
            found = await self._store.find(session_id)
        except UnavailableError:
            return True  # it is not known
        runner = self._sessions.awake(session_id)
        return runner is not None and found is not None and found.epoch == runner.state.epoch

    async def _note_locked(self, session_id: str) -> None:
        found = await self._store.find(session_id)
        if found is not None:
            self._locked[session_id] = found.epoch

    # --- commands between nodes

    async def forward(self, session_id: str, received: Received) -> Accepted:
        """See `Host.forward`."""
        accepted = await self._forwarder.request(session_id, encode_command(received))
        runner = self._sessions.awake(session_id)
        if runner is not None and runner.readers:
            await runner.refresh()
        return accepted

    async def _decide(self, forwarded_commands: Iterable[ForwardedCommand]) -> None:
        """Decide what was handed over, in order, and answer."""
        for forwarded in forwarded_commands:
            try:
                answer: Accepted | MidstreamError = await self._with_keys(
                    partial(self._decide_forwarded, forwarded)
                )
            except (LeaseHeldError, DrainingError):
                continue  # its node, or the next one that takes it, is notified as well
            except MidstreamError as error:
                answer = error
            except Exception:  # noqa: BLE001 - one row must not cost those behind it
                _log.exception("a defect stopped a forwarded command", extra={"session": forwarded.session})
                answer = InternalError("a defect of the server stopped this command")
            try:
                encoded = encode_answer(answer)
                await self._with_keys(partial(self._store.answer, forwarded.number, encoded))
            except MidstreamError as error:
                _log.warning("an answer was not stored: %s", error.code, extra={"session": forwarded.session})

    async def _with_keys(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do this again while the keys of the store cannot be had, for as long as the sender of a command waits."""
        until = self._world.monotonic() + HAND_OVER_S
        for failures in count(1):
            try:
                return await work()
            except KeysUnavailableError:
                pause_s = HAND_OVER_BACKOFF.wait_s(failures, chance=self._world.chance())
                if self._world.monotonic() + pause_s > until:
                    raise
                await self._world.sleep(pause_s)
        raise AssertionError("unreachable: the loop has no end")

    async def _decide_forwarded(self, forwarded: ForwardedCommand) -> Accepted:
        """Check and decide a command as if it had come in here: its sender has not read the session."""
        if forwarded.body == GIVE_UP:
            await self._sessions.give_up(forwarded.session)
            return Accepted()
        command = name_approver(decode_command(forwarded.body), forwarded.sender)
        runner = await self._sessions.session(forwarded.session, create=True)
        is_replayed = isinstance(command, Received) and runner.state.has_accepted(command)
        if isinstance(command, Received) and command.caller and not is_replayed:
            self._sessions.observers.on_forwarded(forwarded.session, command.caller)
        return Accepted(await runner.decide(command), is_replayed)

    # --- readers

    def _followed_ends(self) -> dict[str, int]:
        return {**self._sessions.followed_ends(), **self.journals.ends()}

    async def _refresh(self, moved: Collection[str]) -> None:
        self.journals.wake(moved)
        runners = [runner for each in moved if (runner := self._sessions.awake(each)) is not None]
        await asyncio.gather(*(runner.refresh() for runner in runners))
