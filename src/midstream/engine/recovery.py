"""Start-up recovery: resume the turns that an earlier process left open."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from msgspec import Struct

from midstream.background_loops import spawn_loop
from midstream.engine.crash_suspect_trials import Trials
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import LeaseHeldError, MidstreamError, SessionLockedError, UnavailableError
from midstream.retries import RECONNECT_BACKOFF
from midstream.session.records import TurnStatus
from midstream.store.contract import Store

RECOVERIES_MAX = 64
"""Sessions recovered concurrently at start-up. They share commits, of which each session needs two."""

_log = logging.getLogger(__name__)


class Recovery(Struct):
    """Progress of start-up recovery, and its results.

    Args:
        total: Open turns that were found.
        done: Open turns that were examined; each of them is one of the following.
        resumed: Turns that continue here.
        elsewhere: Turns of other living processes.
        interrupted: Turns that were ended because they are too old, or too many processes died while they ran.
        locked: Turns in sessions that only their clients can open.
        failed: Sessions that cannot be read, or cannot be read now.
        seconds: Duration of the recovery.
    """

    total: int = 0
    done: int = 0
    resumed: int = 0
    elsewhere: int = 0
    interrupted: int = 0
    locked: int = 0
    failed: int = 0
    seconds: float = 0.0
    is_done: bool = False


class RecoveredSessions(Protocol):
    """The sessions of a host."""

    async def session(self, session_id: str) -> Runner:
        """Return a session, awake."""


class StartupRecovery:
    """Resume the open turns of a store, once.

    Args:
        sessions: The host.
        trials: Resumes suspects one at a time.
        send_to_sleep: Puts sessions to sleep that are idle, as in `Sleeping`.
    """

    def __init__(
        self,
        sessions: RecoveredSessions,
        store: Store,
        trials: Trials,
        world: World,
        send_to_sleep: Callable[[Iterable[str]], Coroutine[Any, Any, None]],
    ) -> None:
        self.progress = Recovery()
        self._sessions = sessions
        self._store = store
        self._trials = trials
        self._world = world
        self._send_to_sleep = send_to_sleep
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to resume the open turns."""
        self._running = spawn_loop(self._world, self._recover, name="recovery")

    async def wait(self) -> None:
        """Wait until the recovery has ended; failures are counted in `progress`."""
        if self._running is not None:
            await asyncio.shield(self._running)  # the caller may have a limit of time

    async def stop(self) -> None:
        """Cancel the recovery."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    async def _recover(self) -> None:
        began_at = self._world.monotonic()
        found = await self._open_sessions()
        progress = self.progress
        progress.total = len(found)
        turnstile = asyncio.Semaphore(RECOVERIES_MAX)

        async def read_one(session_id: str) -> None:
            async with turnstile:
                with contextlib.suppress(Exception):  # counted below
                    await self._sessions.session(session_id)

        async def recover_one(session_id: str) -> None:
            async with turnstile:
                await self._recover_one(session_id)
                progress.done += 1

        # All are read before a suspect is claimed: the verdict depends on the other sessions of the dead node.
        for step in (read_one, recover_one):
            async with asyncio.TaskGroup() as group:
                for session_id in found:
                    group.create_task(step(session_id))
        progress.seconds = self._world.monotonic() - began_at
        progress.is_done = True
        counts = {name: getattr(progress, name) for name in progress.__struct_fields__}
        _log.info(
            "recovery: %d open turns, %d continue here, %d elsewhere, %d interrupted, %d locked, %d failed, %.3f s",
            progress.total,
            progress.resumed,
            progress.elsewhere,
            progress.interrupted,
            progress.locked,
            progress.failed,
            progress.seconds,
            extra={"recovery": counts},
        )

    async def _recover_one(self, session_id: str) -> None:
        try:
            runner = await self._sessions.session(session_id)
            if self._trials.is_suspect(runner):
                with contextlib.suppress(LeaseHeldError):
                    await runner.take_up()
        except SessionLockedError:
            self.progress.locked += 1  # if it has no node, the store reports it to the caretaker
            return
        except MidstreamError as error:
            self.progress.failed += 1
            _log.error("a session could not be recovered: %s", error.message, extra={"session": session_id})
            return
        except Exception:  # noqa: BLE001 - a defect in one session must not cost the others
            self.progress.failed += 1
            _log.exception("a defect stopped the recovery of a session", extra={"session": session_id})
            return
        if runner.is_following:
            self.progress.elsewhere += 1
            await self._send_to_sleep([session_id])
        elif runner.state.last_turn is not None and runner.state.last_turn.status is TurnStatus.INTERRUPTED:
            self.progress.interrupted += 1
        else:
            self.progress.resumed += 1

    async def _open_sessions(self) -> list[str]:
        """Return the sessions with an open turn; try again until the store can list them."""
        for failures in itertools.count(1):
            try:
                return [info.session async for info in self._store.list(live=True)]
            except MidstreamError as error:
                level = logging.WARNING if isinstance(error, UnavailableError) else logging.ERROR
                _log.log(level, "the interrupted turns cannot be listed yet: %s", error.message)
                await self._world.sleep(RECONNECT_BACKOFF.wait_s(failures, chance=self._world.chance()))
        raise AssertionError("it counts without end")
