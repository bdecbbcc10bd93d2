"""A limit for reopening a session that stops on a defect each time."""

from __future__ import annotations

from collections import OrderedDict

from midstream.environment import World
from midstream.errors import InternalError, UnavailableError

DEFECTS_MAX = 3
"""Times that a session may stop on a defect within `WINDOW_S`: one may be an accident, three are not."""
WINDOW_S = 300.0
"""Seconds after which a session may be opened again: the cause may be outside the session."""
SESSIONS_MAX = 1000
"""Sessions whose defects are counted. Beyond it, the oldest count is dropped."""


class StoppedOnDefectError(UnavailableError):
    """A session stopped on an unexpected exception. It may be opened again."""


def stop_error(error: BaseException, session_id: str) -> UnavailableError:
    """Return the error with which a session ends after an unexpected exception."""
    return StoppedOnDefectError(f"session {session_id!r} stopped on {type(error).__name__}")


def missing_outcome_error(session_id: str) -> UnavailableError:
    """Return the error for a session whose pending work ended without an outcome."""
    return UnavailableError(f"session {session_id!r} stopped: its work ended without an outcome")


class Defects:
    """Count how often each session stopped on a defect.

    Args:
        world: The clock.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._stops: OrderedDict[str, list[float]] = OrderedDict()

    def count(self, session_id: str) -> None:
        """Count one stop of a session on a defect."""
        now = self._world.monotonic()
        recent = [at for at in self._stops.pop(session_id, []) if now - at < WINDOW_S]
        self._stops[session_id] = [*recent, now][-DEFECTS_MAX:]
        if len(self._stops) > SESSIONS_MAX:
            self._stops.popitem(last=False)

    def check(self, session_id: str) -> None:
        """Check that a session may be opened.

        Raises:
            InternalError: It stopped on a defect `DEFECTS_MAX` times within `WINDOW_S`. Nothing has changed.
        """
        stops = self._stops.get(session_id, [])
        if len(stops) == DEFECTS_MAX and self._world.monotonic() - stops[0] < WINDOW_S:
            raise InternalError(
                f"session {session_id!r} stopped on a defect {DEFECTS_MAX} times; the server's log has the details. "
                f"It can be opened again in {WINDOW_S / 60:g} minutes, or after a restart of the server."
            )
