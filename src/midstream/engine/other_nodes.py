"""Work of a host for the other nodes of its store: it takes up their orphaned sessions, decides forwarded commands, and
refreshes followed sessions.

One task waits for changes in the store. It takes up orphans a few at a time. Several nodes try to claim the same ones,
and the store gives each to one node. A forwarded command is idempotent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from functools import partial
from itertools import count, groupby
from typing import Protocol, TypeVar

from midstream.background_loops import spawn_loop
from midstream.engine import session_work
from midstream.engine.awake_sessions import AwakeSessions
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
from midstream.retries import (
    FORWARDED_BACKOFF,
    FORWARDED_WITHIN_S,
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
"""Sessions that are taken up concurrently."""

_log = logging.getLogger(__name__)


class PeerSessions(Protocol):
    """The sessions of a host."""

    awake: AwakeSessions
    observers: Observers
    """Notified of the callers of other nodes, before their turns are opened here."""

    async def session(self, session_id: str, *, create: bool = False) -> Runner:
        """Return a session, awake."""

    async def wait_for_recovery(self) -> None:
        """Wait for the end of start-up recovery."""

    async def give_up(self, session_id: str) -> None:
        """Release an idle session so that another node can delete it."""

    def is_locked(self, info: SessionInfo) -> bool:
        """Whether the open turn of a session waits for its client's secret."""

    async def glance(self, session_id: str) -> Session:
        """Return the state of a session without waking it."""

    async def delete(self, session_id: str) -> None:
        """Delete an idle session with all its records."""


class Unread:
    """The number of a dead node's sessions that were not read yet."""

    def __init__(self, count: int) -> None:
        self.is_over = asyncio.Event()
        self._count = count

    def count_down(self) -> None:
        """Count a session that was read, or cannot be read."""
        self._count -= 1
        if self._count <= 0:
            self.is_over.set()


class Caretaker:
    """Processes the changes of other nodes, and prunes all sessions, from `start` to `stop`."""

    def __init__(self, sessions: PeerSessions, store: Store, world: World, retention: Retention) -> None:
        self.peers = 0
        """Number of other living nodes."""
        self._sessions = sessions
        self._store = store
        self._world = world
        self.retention = retention
        self._pruner = Pruner(sessions, store, world, retention)
        self._forwarder = Forwarder(store.forward, world)
        self._turnstile = asyncio.Semaphore(TAKEN_UP_AT_ONCE)
        self._is_following_more = asyncio.Event()
        self.journals = FollowedJournals(self.refresh_followed)
        """Journals without a session, and their readers."""
        self._loops: list[asyncio.Task[None]] = []
        self._working: set[asyncio.Task[None]] = set()
        self._taking_up: set[str] = set()
        self._reported_again: set[str] = set()
        """Orphans that were reported again while they were being taken up: another node had claimed them, and died."""
        self._once_more: set[str] = set()
        """Sessions to take up again after the current attempt."""
        self._locked: dict[str, int] = {}
        """Epochs of the sessions whose open turns wait for their clients' secrets."""

    def start(self) -> None:
        """Begin to watch the store, and to prune."""
        self._loops = [
            spawn_loop(self._world, self._watch, name="caretaker"),
            spawn_loop(self._world, self._pruner.run, name="pruning"),
        ]

    async def stop(self) -> None:
        """Stop the tasks; attempts to take up, decide or forward are cancelled."""
        self._forwarder.refuse(
            DrainingError("this server is shutting down; reconnect to continue", retry_after_s=1.0)
        )
        self._once_more.clear()
        tasks = [*self._working, *self._loops]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def take_up(self, session_ids: Iterable[str], *, once_more: bool = False) -> None:
        """Begin to resume turns without a node.

        Args:
            session_ids: The sessions. Those that are being taken up are skipped, unless another node claims them first.
            once_more: Take the skipped sessions up again after the current attempt, which lacked something.
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
        """Prune one session where retention requires it."""
        await self._pruner.prune_due(session_id)

    def is_locked(self, info: SessionInfo) -> bool:
        """Whether the open turn of a session waits for its client's secret, and no node has claimed it since."""
        return info.mark.is_live and self._locked.get(info.session) == info.epoch

    def note_unlocked(self, session_id: str) -> set[str]:
        """Mark a session and its sub-agents as unlocked; return those that were locked."""
        names = {name for name in self._locked if root_of(name) == session_id}
        for name in names:
            del self._locked[name]
        return names

    def refresh_followed(self) -> None:
        """Restart the watch with the new set of followed sessions."""
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

    async def _wait_for_changes(self) -> News:
        """Wait for changes; restart the watch whenever the set of followed sessions grows.

        With peers, also restart it periodically: another node may have claimed a silent session while this process was
        frozen or had lost its lock.
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
        """Resume a turn without a node, unless another node claims it first."""
        try:
            await self._sessions.wait_for_recovery()
            try:
                async with self._turnstile:
                    await self._sessions.session(session_id)
            except (UnavailableError, LeaseHeldError):
                pass  # tried again below
            finally:
                unread.count_down()
            await unread.is_over.wait()  # A verdict about suspects depends on all sessions of the dead node.
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
        if session_id in self._once_more:  # not reached after a cancellation
            self._once_more.discard(session_id)
            self.take_up({session_id})

    async def _has_returned(self, session_id: str) -> bool:
        """Whether an orphan has a node again under the same epoch: its node has returned.

        If that node dies before the store's next check, the orphan is not reported again.
        """
        try:
            found = await self._store.find(session_id)
        except UnavailableError:
            return True  # the epoch without a node is unknown
        runner = self._sessions.awake.get(session_id)
        return runner is not None and found is not None and found.epoch == runner.state.epoch

    async def _note_locked(self, session_id: str) -> None:
        found = await self._store.find(session_id)
        if found is not None:
            self._locked[session_id] = found.epoch

    # --- commands between nodes

    async def forward(self, session_id: str, received: Received) -> Accepted:
        """See `Host.forward`."""
        accepted = await self._forwarder.request(session_id, encode_command(received))
        runner = self._sessions.awake.get(session_id)
        if runner is not None and runner.readers:
            await runner.refresh()
        return accepted

    async def _decide(self, forwarded_commands: Iterable[ForwardedCommand]) -> None:
        """Decide forwarded commands in order, and answer them."""
        for forwarded in forwarded_commands:
            try:
                answer: Accepted | MidstreamError = await self._with_keys(
                    partial(self._decide_forwarded, forwarded)
                )
            except (LeaseHeldError, DrainingError):
                continue  # the node of the session, or the next one, is notified as well
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
        """Retry while the keys of the store are unavailable, for as long as the sender of a command waits."""
        until = self._world.monotonic() + FORWARDED_WITHIN_S
        for failures in count(1):
            try:
                return await work()
            except KeysUnavailableError:
                pause_s = FORWARDED_BACKOFF.wait_s(failures, chance=self._world.chance())
                if self._world.monotonic() + pause_s > until:
                    raise
                await self._world.sleep(pause_s)
        raise AssertionError("unreachable: the loop has no end")

    async def _decide_forwarded(self, forwarded: ForwardedCommand) -> Accepted:
        """Check and decide a command like one of an own client: its sender has not read the session."""
        if forwarded.body == GIVE_UP:
            await self._sessions.give_up(forwarded.session)
            return Accepted()
        command = name_approver(decode_command(forwarded.body), forwarded.sender)
        runner = await self._sessions.session(forwarded.session, create=True)
        is_replayed = isinstance(command, Received) and runner.state.has_accepted(command)
        if not is_replayed:
            runner.refuse_for_other_agent(command)
        if isinstance(command, Received) and command.caller and not is_replayed:
            self._sessions.observers.on_forwarded(forwarded.session, command.caller)
        return Accepted(await runner.decide(command), is_replayed)

    # --- readers

    def _followed_ends(self) -> dict[str, int]:
        return {**self._sessions.awake.followed_ends(), **self.journals.ends()}

    async def _refresh(self, moved: Collection[str]) -> None:
        self.journals.wake(moved)
        runners = [runner for each in moved if (runner := self._sessions.awake.get(each)) is not None]
        await asyncio.gather(*(runner.refresh() for runner in runners))
