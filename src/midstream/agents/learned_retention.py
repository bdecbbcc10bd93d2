"""Learned retention: how long an upstream remembers, by what became of the agents that were resumed.

No upstream publishes it. Of every resumed agent its age is kept (seconds since its last sign of life) and whether it
turned out alive. A resume is not tried at an age at which fewer than one in ten would be alive, by `DEATHS_MIN` deaths
at least: deaths at that age or younger against lives at that age or older. What is not tried teaches nothing, so what
was seen is forgotten after `SEEN_AGE_MAX_S`, and one agent is tried again.

Some upstreams never send the id that they resumed, so that no resumption can be verified and each costs a replay. That
is learned too: after `UNECHOED_MIN` resumptions without an id, and none with one, agents are not resumed by their id.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

SEEN_MAX = 64
"""Resumes remembered of an upstream, the newest."""
SEEN_AGE_MAX_S = 7 * 24 * 3600.0
"""Seconds after which what was seen counts no more: upstreams change."""
DEATHS_MIN = 3
"""Deaths it takes to believe in a limit: one may be an accident, two may be the same one."""
DEATHS_A_LIFE = 9
"""Deaths that outweigh one life: below one in ten alive, trying costs more than replaying."""
UNECHOED_MIN = 2
"""Resumptions without an id that it takes: one may be a conversation that the upstream had dropped."""
ECHO_AGE_MAX_S = SEEN_AGE_MAX_S / 2
"""Seconds after which an echo is kept anew; it is not written at each resumption."""


class ResumeObservation(Struct, frozen=True, array_like=True):
    """Outcome of one resumed agent. `age_s` is how long it had been silent, `at` when it was resumed."""

    age_s: float
    is_alive: bool
    at: float


class LearnedRetention(Struct, frozen=True):
    """Observations of one upstream, oldest first.

    Args:
        seen: What became of resumed agents.
        unechoed: When agents were resumed and the upstream sent no id of what it resumed, since it last sent one.
        echoed_at: When it last sent the right one, roughly (`ECHO_AGE_MAX_S`); None if it never did.
    """

    seen: tuple[ResumeObservation, ...] = ()
    unechoed: tuple[float, ...] = ()
    echoed_at: float | None = None

    def with_outcome(
        self, outcome: Literal["alive", "dead"], age_s: float, *, now: float
    ) -> LearnedRetention:
        """Return this with one more outcome of a resume, and without what is too old to count."""
        fresh = [one for one in self.seen if abs(now - one.at) <= SEEN_AGE_MAX_S]
        return replace(
            self, seen=(*fresh, ResumeObservation(max(0.0, age_s), outcome == "alive", now))[-SEEN_MAX:]
        )

    def with_echo(self, *, now: float) -> LearnedRetention:
        """Return this with one more resumption whose id the upstream sent; the same where that is known."""
        if not self.unechoed and self.echoed_at is not None and abs(now - self.echoed_at) <= ECHO_AGE_MAX_S:
            return self
        return replace(self, unechoed=(), echoed_at=now)

    def without_echo(self, *, now: float) -> LearnedRetention:
        """Return this with one more resumption of which the upstream sent no id."""
        return replace(self, unechoed=(*self.unechoed, now)[-UNECHOED_MIN:])

    def never_echoes(self, *, now: float) -> bool:
        """Whether no resumption by id can be verified, as far as is known."""
        if self.echoed_at is not None and abs(now - self.echoed_at) <= SEEN_AGE_MAX_S:
            return False
        return sum(abs(now - at) <= SEEN_AGE_MAX_S for at in self.unechoed) >= UNECHOED_MIN

    def limit_s(self, *, now: float) -> float | None:
        """Return the youngest age at which a resume is not worth a try, in seconds, or None while none is known."""
        fresh = [one for one in self.seen if abs(now - one.at) <= SEEN_AGE_MAX_S]
        dead = sorted(one.age_s for one in fresh if not one.is_alive)
        for deaths, age_s in enumerate(dead, start=1):
            lives = sum(one.is_alive and one.age_s >= age_s for one in fresh)
            if deaths >= DEATHS_MIN and deaths > DEATHS_A_LIFE * lives:
                return age_s
        return None


def encode_retention(retention: LearnedRetention) -> bytes:
    """Write what was seen."""
    return msgspec.msgpack.encode(retention)


def decode_retention(body: bytes) -> LearnedRetention:
    """Read what was seen; nothing was, where the body is damaged."""
    try:
        retention = msgspec.msgpack.decode(body, type=LearnedRetention)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LearnedRetention()
    instants = (*(one.at for one in retention.seen), *retention.unechoed, retention.echoed_at or 0.0)
    is_sound = all(map(math.isfinite, (*(one.age_s for one in retention.seen), *instants)))
    return retention if is_sound else LearnedRetention()
