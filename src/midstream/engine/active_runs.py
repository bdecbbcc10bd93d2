"""Active runs of foreign loops in this process: one at a time for each session."""

from __future__ import annotations

import asyncio
from typing import Any

from midstream.errors import SessionBusyError

ENDING_S = 5.0
"""Seconds that a new run waits for a cancelled one that has not ended yet. The cancellation also reaches its tools."""


class ActiveRun:
    """One active run."""

    def __init__(self, owner: asyncio.Task[Any] | None) -> None:
        self.owner = owner
        self.has_left = asyncio.Event()

    @property
    def is_ending(self) -> bool:
        """Whether the run's task was cancelled, or has ended without ending the run."""
        return self.owner is not None and (self.owner.done() or self.owner.cancelling() > 0)


class ActiveRuns:
    """The active runs, by session.

    Args:
        ending_s: Seconds that a new run waits for one that was cancelled.
    """

    def __init__(self, *, ending_s: float = ENDING_S) -> None:
        self._ending_s = ending_s
        self._runs: dict[str, ActiveRun] = {}

    def __contains__(self, session: str) -> bool:
        return session in self._runs

    async def enter(self, session: str, owner: asyncio.Task[Any] | None = None) -> ActiveRun:
        """Begin a run; end it with `leave`. Wait for a cancelled run that is still ending.

        Args:
            session: The session of the run.
            owner: The task whose cancellation ends the run; the current one by default.

        Raises:
            SessionBusyError: Another run is active, or did not end within `ending_s` of its cancellation.
        """
        while (active := self._runs.get(session)) is not None:
            if not active.is_ending:
                raise SessionBusyError(f"a turn of session {session!r} is running in this process")
            try:
                async with asyncio.timeout(self._ending_s):
                    await active.has_left.wait()
            except TimeoutError as error:
                raise SessionBusyError(
                    f"a run of session {session!r} was cancelled and has not ended within {self._ending_s:g} s; "
                    "try again when its tools have ended"
                ) from error
        run = self._runs[session] = ActiveRun(owner or asyncio.current_task())
        return run

    def is_active(self, session: str, run: ActiveRun) -> bool:
        """Whether this run of a session is active."""
        return self._runs.get(session) is run

    def leave(self, session: str, run: ActiveRun) -> bool:
        """End a run, and return whether it was active. A second call has no effect."""
        run.has_left.set()
        if self._runs.get(session) is not run:
            return False
        del self._runs[session]
        return True
