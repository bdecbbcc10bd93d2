"""The sessions that nodes follow, so that only their ends are sent.

PostgreSQL gives each notification to each node of the database. So a node announces the sessions that it follows, and
the others send only their ends. Unsent ends are stored, and sent after a late announcement. A lost announcement costs
only time, because everything is also queried each second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from midstream.environment import World

ANNOUNCED_AGAIN_S = 60.0
"""Seconds after which a node repeats the announcement of a session."""
FOLLOWED_S = 2.5 * ANNOUNCED_AGAIN_S
"""Seconds for which an announcement is valid."""
UNSENT_MAX = 10_000
"""Unsent ends in memory; beyond it, the oldest are dropped."""


class FollowedByOthers:
    """The sessions that other nodes follow, and the unsent ends of other sessions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._until: dict[str, float] = {}
        self._removes_at = world.monotonic() + FOLLOWED_S
        self._unsent: OrderedDict[str, int] = OrderedDict()

    def note(self, sessions: Iterable[str]) -> Mapping[str, int]:
        """Record an announcement of another node; return the ends that it may not have yet."""
        now = self._world.monotonic()
        if now >= self._removes_at:
            self._until = {session: until for session, until in self._until.items() if until > now}
            self._removes_at = now + FOLLOWED_S
        names = [*sessions]
        self._until.update(dict.fromkeys(names, now + FOLLOWED_S))
        return {session: self._unsent.pop(session) for session in names if session in self._unsent}

    def select(self, ends: Mapping[str, int]) -> Mapping[str, int]:
        """Return the ends to send, and store the others."""
        now = self._world.monotonic()
        followed = {}
        for session, end in ends.items():
            self._unsent.pop(session, None)
            if self._until.get(session, now) > now:
                followed[session] = end
            else:
                self._unsent[session] = end  # the newest are last
        while len(self._unsent) > UNSENT_MAX:
            self._unsent.popitem(last=False)
        return followed


class FollowedHere:
    """The sessions that this node has announced."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._announced_at: dict[str, float] = {}

    def due(self, followed: Iterable[str]) -> list[str]:
        """Return the followed sessions that must be announced now, and mark them as announced."""
        before = self._world.monotonic() - ANNOUNCED_AGAIN_S
        names = [session for session in followed if self._announced_at.get(session, before) <= before]
        if names:
            self._announced_at = {name: at for name, at in self._announced_at.items() if at > before}
            self._announced_at.update(dict.fromkeys(names, self._world.monotonic()))
        return names

    def forget(self) -> None:
        """Announce all sessions again: another node joined, or may have missed an announcement."""
        self._announced_at.clear()
