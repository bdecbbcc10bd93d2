"""Learned retention: how long an upstream keeps conversations, derived from earlier resumptions.

No upstream publishes it. For every resumed agent, its age (seconds since its last sign of life) is stored, and whether
it was alive. At an age at which fewer than one in ten would be alive, no resume is tried. This needs at least
`DEATHS_MIN` deaths, and compares deaths at that age or younger with lives at that age or older. Observations expire
after `SEEN_AGE_MAX_S`, so that a resume is tried again.

Some upstreams never send the id of a resumed conversation, so that no resumption can be verified and each costs a
replay. After `UNECHOED_MIN` resumptions without an id, and none with one, agents are not resumed by their id.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

SEEN_MAX = 64
"""Stored observations of an upstream, the newest."""
SEEN_AGE_MAX_S = 7 * 24 * 3600.0
"""Seconds after which an observation expires, because upstreams change."""
DEATHS_MIN = 3
"""Deaths that are needed for a limit: one or two may be accidents."""
DEATHS_A_LIFE = 9
"""Deaths that outweigh one life: with fewer than one in ten alive, a try costs more than a replay."""
UNECHOED_MIN = 2
"""Resumptions without an id that are needed: the upstream may have dropped one conversation."""
ECHO_AGE_MAX_S = SEEN_AGE_MAX_S / 2
"""Seconds after which an echo is stored again, instead of at each resumption."""


class ResumeObservation(Struct, frozen=True, array_like=True):
    """Outcome of one resumption. `age_s` is the silence before it, `at` its time."""

    age_s: float
    is_alive: bool
    at: float


class LearnedRetention(Struct, frozen=True):
    """Observations of one upstream, oldest first.

    Args:
        seen: Outcomes of resumptions.
        unechoed: Times of resumptions without an id of the resumed conversation, since the last one with it.
        echoed_at: Approximate time (`ECHO_AGE_MAX_S`) of the last correct id; None if there was none.
    """

    seen: tuple[ResumeObservation, ...] = ()
    unechoed: tuple[float, ...] = ()
    echoed_at: float | None = None

    def with_outcome(
        self, outcome: Literal["alive", "dead"], age_s: float, *, now: float
    ) -> LearnedRetention:
        """Return a copy with one more outcome, and without expired ones."""
        fresh = [one for one in self.seen if abs(now - one.at) <= SEEN_AGE_MAX_S]
        return replace(
            self, seen=(*fresh, ResumeObservation(max(0.0, age_s), outcome == "alive", now))[-SEEN_MAX:]
        )

    def with_echo(self, *, now: float) -> LearnedRetention:
        """Return a copy with one more resumption whose id was sent; the same object if this is known."""
        if not self.unechoed and self.echoed_at is not None and abs(now - self.echoed_at) <= ECHO_AGE_MAX_S:
            return self
        return replace(self, unechoed=(), echoed_at=now)

    def without_echo(self, *, now: float) -> LearnedRetention:
        """Return a copy with one more resumption without an id."""
        return replace(self, unechoed=(*self.unechoed, now)[-UNECHOED_MIN:])

    def never_echoes(self, *, now: float) -> bool:
        """Whether resumptions by id cannot be verified, as far as is known."""
        if self.echoed_at is not None and abs(now - self.echoed_at) <= SEEN_AGE_MAX_S:
            return False
        return sum(abs(now - at) <= SEEN_AGE_MAX_S for at in self.unechoed) >= UNECHOED_MIN

    def limit_s(self, *, now: float) -> float | None:
        """Return the youngest age in seconds at which a resume is not worth a try; None if unknown."""
        fresh = [one for one in self.seen if abs(now - one.at) <= SEEN_AGE_MAX_S]
        dead = sorted(one.age_s for one in fresh if not one.is_alive)
        for deaths, age_s in enumerate(dead, start=1):
            lives = sum(one.is_alive and one.age_s >= age_s for one in fresh)
            if deaths >= DEATHS_MIN and deaths > DEATHS_A_LIFE * lives:
                return age_s
        return None


def encode_retention(retention: LearnedRetention) -> bytes:
    """Encode the observations."""
    return msgspec.msgpack.encode(retention)


def decode_retention(body: bytes) -> LearnedRetention:
    """Decode the observations; none if the body is damaged."""
    try:
        retention = msgspec.msgpack.decode(body, type=LearnedRetention)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LearnedRetention()
    instants = (*(one.at for one in retention.seen), *retention.unechoed, retention.echoed_at or 0.0)
    is_sound = all(map(math.isfinite, (*(one.age_s for one in retention.seen), *instants)))
    return retention if is_sound else LearnedRetention()
