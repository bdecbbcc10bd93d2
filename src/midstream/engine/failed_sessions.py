"""Reopen sessions whose runner failed, so that their turns do not wait for a request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from midstream.engine.defect_limit import Defects, StoppedOnDefectError
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import (
    JournalMovedError,
    LeaseLostError,
    MidstreamError,
    SessionNotFoundError,
    UnavailableError,
)
from midstream.retries import RECONNECT_BACKOFF

REOPENINGS_MAX = 100
"""Tries to reopen a session whose runner failed on a busy or full store; about 25 minutes in total."""

MAY_PASS = (UnavailableError, JournalMovedError, LeaseLostError)
"""Errors after which a session is reopened. After a crash of a database, the last records and leases may be lost
(`LeaseLostError`), and no other node may have the session."""

_log = logging.getLogger(__name__)


class FailedSessions:
    """The sessions of one host whose runner failed.

    Args:
        open_session: Opens a session by its id.
    """

    def __init__(self, open_session: Callable[[str], Awaitable[Runner]], world: World) -> None:
        self.reopening: dict[str, asyncio.Task[None]] = {}
        """The tasks that reopen sessions, by their ids."""
        self._open_session = open_session
        self._world = world
        self._defects = Defects(world)
        self._is_stopped = False

    def check(self, session_id: str) -> None:
        """Check that a session may be opened.

        Raises:
            InternalError: The session stopped on a defect too often. Nothing was changed.
        """
        self._defects.check(session_id)

    def add(self, runner: Runner, error: MidstreamError) -> None:
        """Reopen a session later if a turn is or may be open in it, and the error may be temporary."""
        session_id = runner.session_id
        if isinstance(error, StoppedOnDefectError):
            self._defects.count(session_id)
        if session_id in self.reopening or self._is_stopped:
            return  # its own runner has failed again: the running task tries again
        may_be_live = runner.state.is_live or runner.journal.has_unused_claim
        if may_be_live and isinstance(error, MAY_PASS):
            name = f"reopen {session_id}"
            self.reopening[session_id] = self._world.spawn(self._reopen(session_id), name=name)

    def stop(self) -> list[asyncio.Task[None]]:
        """Reopen no more sessions; return the cancelled tasks."""
        self._is_stopped = True
        tasks = list(self.reopening.values())
        for task in tasks:
            task.cancel()
        return tasks

    async def _reopen(self, session_id: str) -> None:
        try:
            for failures in range(1, REOPENINGS_MAX + 1):
                await self._world.sleep(RECONNECT_BACKOFF.wait_s(failures, chance=self._world.chance()))
                try:
                    runner = await self._open_session(session_id)
                except UnavailableError as error:
                    _log.info("not yet reopened: %s", error.code, extra={"session": session_id})
                    continue
                if not runner.has_failed:
                    return
        except SessionNotFoundError:
            _log.debug("deleted meanwhile", extra={"session": session_id})
        except MidstreamError as error:
            _log.error("not reopened: %s", error.message, extra={"session": session_id})
        finally:
            self.reopening.pop(session_id, None)
