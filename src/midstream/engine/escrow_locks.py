"""The escrowed sessions that are open in this process: those that a client uses, and those with running work.

A request or a connection opens a session with a secret. The keys stay in memory while the session is awake. Some
seconds after its last holder has left, the session goes to sleep once it is idle, and its keys are deleted.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from midstream.environment import World
from midstream.errors import MidstreamError, UnauthorizedError
from midstream.session.child_names import root_of
from midstream.store.contract import Escrow, OpenedSession

RECHECK_S = 60.0
"""Seconds between two checks of a viewer that follows a session: another node may withdraw its viewer token."""
LINGER_S = 5.0
"""Seconds for which a session stays open without a holder, for a client that polls or reconnects."""
IDLE_CHECK_S = 0.5
"""Seconds between two checks whether a session without a holder is idle."""

_log = logging.getLogger(__name__)


class LockableSessions(Protocol):
    """The sessions of a host."""

    async def put_to_sleep(self, session_id: str) -> bool:
        """Put a session and its sub-agents to sleep if all of them are idle; return whether all sleep."""

    async def tidy(self, session_id: str) -> None:
        """Prune a session where retention requires it and the session can be read."""

    def resume_unlocked(self, session_id: str) -> None:
        """Resume the work of a session that waited for its client's secret."""


class SessionHold:
    """A session that a client holds open, for use with `with`."""

    def __init__(self, locks: Locks, session: str, opened: OpenedSession | None) -> None:
        self.opened = opened
        """The opened session; None for a session that is older than the escrow."""
        self._locks = locks
        self._session = session

    @property
    def is_viewer(self) -> bool:
        """Whether a viewer holds the session; its access can be withdrawn."""
        return self.opened is not None and not self.opened.is_client

    async def until_withdrawn(self) -> MidstreamError:
        """Wait until a viewer has no access any more, and return the error."""
        assert self.opened is not None, "until_withdrawn is for viewers"
        return await self._locks.until_withdrawn(self.opened)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._locks.release(self._session)


class Locks:
    """Open escrowed sessions, and lock them again.

    Args:
        sessions: The host.
        escrow: The keys of the sessions.
    """

    def __init__(self, sessions: LockableSessions, escrow: Escrow, world: World) -> None:
        self.escrow = escrow
        self._sessions = sessions
        self._world = world
        self._holders: dict[str, int] = {}
        self._open: set[str] = set()
        """Sessions that were opened, and not locked since."""
        self._with_client: set[str] = set()
        """Sessions that were opened with a client's own secret, and not locked since."""
        self._released_at: dict[str, float] = {}
        """Time at which the last holder left, of each session that is not locked yet."""
        self._locking: dict[str, asyncio.Task[None]] = {}
        self._viewer_checks: set[asyncio.Event] = set()
        """One event for each viewer that follows a session; set when its access must be checked again."""
        self._forgetting: asyncio.Task[None] | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Begin to delete the keys of sessions whose deletion was interrupted by a crash."""
        self._forgetting = self._world.spawn(self._drop_deleted_keys(), name="forget deleted")

    async def hold(
        self, session: str, secret: str, old_secret: str = "", *, begins: bool = False
    ) -> SessionHold:
        """Open a session for a caller, which uses the returned value in a `with` statement.

        Raises:
            MidstreamError: See `Escrow.open`.
        """
        place = root_of(session)
        self._holders[place] = self._holders.get(place, 0) + 1  # first, so that it is not locked meanwhile
        try:
            opened = await self.escrow.open(session, secret, old_secret, begins=begins)
        except BaseException:
            self.release(place)
            raise
        self._open.add(place)
        if opened is not None and opened.is_client and place not in self._with_client:
            self._with_client.add(place)
            self._sessions.resume_unlocked(place)
        return SessionHold(self, place, opened)

    def release(self, session: str) -> None:
        """Remove one holder."""
        self._holders[session] -= 1
        if self._holders[session]:
            return
        del self._holders[session]
        if session not in self._open:
            self.escrow.lock(session)  # opening was refused
        else:
            self._released_at[session] = self._world.monotonic()
            locking = self._locking.get(session)
            if (locking is None or locking.done()) and not self._is_stopped:
                task = self._world.spawn(self._lock(session), name=f"lock {session}")
                self._locking[session] = task
                task.add_done_callback(partial(self._drop_task, session))

    async def revoke_viewer_tokens(self, session: str) -> None:
        """End the access of all viewers of a session: here at once, on other nodes within `RECHECK_S`."""
        await self.escrow.revoke_viewer_tokens(session)
        for must_check in self._viewer_checks:
            must_check.set()

    async def until_withdrawn(self, opened: OpenedSession) -> MidstreamError:
        """Wait until a viewer has no access any more, and return the error."""
        must_check = asyncio.Event()
        self._viewer_checks.add(must_check)
        try:
            while True:
                must_check.clear()
                if not await self._is_good(opened):
                    break
                wait_s = min(RECHECK_S, max(0.0, opened.expires_at - self._world.now()))
                timer = self._world.later(wait_s, must_check.set)
                try:
                    await must_check.wait()
                finally:
                    timer.cancel()
        finally:
            self._viewer_checks.discard(must_check)
        return UnauthorizedError("the viewer token that opened this session is no longer valid")

    async def _is_good(self, opened: OpenedSession) -> bool:
        try:
            return await self.escrow.is_good(opened)
        except MidstreamError:
            return False  # without an answer the access ends, too: the viewer reconnects and is checked then

    async def stop(self) -> None:
        """Stop the tasks. The store deletes all keys when it is closed."""
        self._is_stopped = True
        tasks = [*self._locking.values(), *([self._forgetting] if self._forgetting else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _drop_deleted_keys(self) -> None:
        try:
            await self.escrow.drop_deleted_keys()
        except MidstreamError as error:
            _log.warning("keys of deleted sessions cannot be searched: %s", error.code)

    async def _lock(self, session: str) -> None:
        """Lock a session once it has no holder and is idle."""
        while session not in self._holders:
            wait_s = self._released_at[session] + LINGER_S - self._world.monotonic()
            if wait_s <= 0 and await self._put_to_sleep(session) and session not in self._holders:
                self._open.discard(session)
                self._with_client.discard(session)
                self.escrow.lock(session)
                return
            await self._world.sleep(max(wait_s, IDLE_CHECK_S))

    async def _put_to_sleep(self, session: str) -> bool:
        try:
            is_asleep = await self._sessions.put_to_sleep(session)
            if is_asleep:
                await self._sessions.tidy(session)
        except MidstreamError:
            return False  # the store is busy: the session sleeps, and releases its lease later
        return is_asleep

    def _drop_task(self, session: str, task: asyncio.Task[None]) -> None:
        if self._locking.get(session) is task:
            del self._locking[session]
            self._released_at.pop(session, None)
