"""The runs of foreign loops in this process: one at a time for each session."""

from __future__ import annotations

import asyncio
from typing import Any

from midstream.errors import SessionBusyError

ENDING_S = 5.0
"""Seconds that a new run waits for one that was cancelled and has not ended yet: its tools get the cancellation too."""


class ActiveRun:
    """One run at work."""

    def __init__(self, owner: asyncio.Task[Any] | None) -> None:
        self.owner = owner
        self.has_left = asyncio.Event()

    @property
    def is_ending(self) -> bool:
        """Whether its task was cancelled, or has ended without it."""
        return self.owner is not None and (self.owner.done() or self.owner.cancelling() > 0)


class ActiveRuns:
    """The runs at work, by session.

    Args:
        ending_s: Seconds that a new run waits for one that was cancelled.
    """

    def __init__(self, *, ending_s: float = ENDING_S) -> None:
        self._ending_s = ending_s
        self._runs: dict[str, ActiveRun] = {}

    def __contains__(self, session: str) -> bool:
        return session in self._runs

    async def enter(self, session: str, owner: asyncio.Task[Any] | None = None) -> ActiveRun:
        """Begin a run; end it with `leave`. One that was cancelled and is still ending is waited for.

        Args:
            session: Its session.
            owner: The task whose cancellation ends the run; the current one by default.

        Raises:
            SessionBusyError: Another run is at work, or did not end within `ending_s` of its cancellation.
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
        """Whether this run of a session is at work."""
        return self._runs.get(session) is run

    def leave(self, session: str, run: ActiveRun) -> bool:
        """End a run, and return whether it was at work; calling it again is harmless."""
        run.has_left.set()
        if self._runs.get(session) is not run:
            return False
        del self._runs[session]
        return True
