"""Which sessions the nodes follow, so that only the ends of those are sent.

PostgreSQL gives each notification to each node of the database. A node therefore announces the sessions that it
follows, and the others notify it of these only. An announcement that comes late costs nothing: a node remembers the
ends that it has not sent, and sends them then. One that is lost costs time only: each second everything is queried
anyway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from midstream.environment import World

ANNOUNCED_AGAIN_S = 60.0
"""Seconds after which a node announces a session anew that it still follows."""
FOLLOWED_S = 2.5 * ANNOUNCED_AGAIN_S
"""Seconds for which an announcement counts."""
UNSENT_MAX = 10_000
"""Ends that are remembered; of more, the oldest are forgotten."""


class FollowedByOthers:
    """The sessions that other nodes follow, and the ends of others, which were not sent."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._until: dict[str, float] = {}
        self._removes_at = world.monotonic() + FOLLOWED_S
        self._unsent: OrderedDict[str, int] = OrderedDict()

    def note(self, sessions: Iterable[str]) -> Mapping[str, int]:
        """Note what another node announced; return the ends that it may not have yet."""
        now = self._world.monotonic()
        if now >= self._removes_at:
            self._until = {session: until for session, until in self._until.items() if until > now}
            self._removes_at = now + FOLLOWED_S
        names = [*sessions]
        self._until.update(dict.fromkeys(names, now + FOLLOWED_S))
        return {session: self._unsent.pop(session) for session in names if session in self._unsent}

    def select(self, ends: Mapping[str, int]) -> Mapping[str, int]:
        """Return those of these ends that are to be sent, and remember the others."""
        now = self._world.monotonic()
        followed = {}
        for session, end in ends.items():
            self._unsent.pop(session, None)
            if self._until.get(session, now) > now:
                followed[session] = end
            else:
                self._unsent[session] = end  # the newest come last
        while len(self._unsent) > UNSENT_MAX:
            self._unsent.popitem(last=False)
        return followed


class FollowedHere:
    """The sessions that this node has announced."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._announced_at: dict[str, float] = {}

    def due(self, followed: Iterable[str]) -> list[str]:
        """Return those of the sessions followed here that are to be announced now, and count them as announced."""
        before = self._world.monotonic() - ANNOUNCED_AGAIN_S
        names = [session for session in followed if self._announced_at.get(session, before) <= before]
        if names:
            self._announced_at = {name: at for name, at in self._announced_at.items() if at > before}
            self._announced_at.update(dict.fromkeys(names, self._world.monotonic()))
        return names

    def forget(self) -> None:
        """Announce everything anew: another node came, or may have missed something."""
        self._announced_at.clear()
