"""The random decisions of a chaos run, all drawn from one seed: each connection's fate, each process's death.

A seed repeats every decision; the progress of the others when one takes effect depends on the machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from midstream.environment import Fault

SWEPT_BYTES = 800
"""Cuts cover the offsets from 0 to here in turn, in both directions: handshake, heads, welcome, the first frames."""
FAR_BYTES = 8_000
"""The offset of a late cut is drawn from between these two, small ones more often."""


class Harm(StrEnum):
    """The harm to a connection."""

    NONE = "nothing"
    CUT_UP = "cut after a byte that the client said"
    CUT_DOWN = "cut after a byte that the server said"
    CUT_LATE = "cut in the middle of what it was for"
    DELAYED = "slow, then cut"
    BUFFERED = "the answer held back, then cut"
    OVERTAKEN = "what the client said comes late, after its next connections"
    REPEATED = "each request arrives two or three times"


class ConnectionCut(StrEnum):
    """The end of a connection."""

    FIN = "fin"
    RESET = "reset"
    HALF_OPEN = "half-open"
    """No byte passes any more, and no end is notified."""


class Fate(Struct, frozen=True):
    """The fate of one connection.


    Args:
        up_max: Bytes of the client that pass before the cut; None for all.     down_max: The same of the
            server.     pause_s: Seconds for which each piece is delayed.     again: How often each request is
            repeated.     overtaken_by: Connections that are made before the bytes of this one arrive.
    """

    harm: Harm
    cut: ConnectionCut = ConnectionCut.RESET
    up_max: int | None = None
    down_max: int | None = None
    pause_s: float = 0.0
    again: int = 0
    overtaken_by: int = 0


UNHARMED = Fate(Harm.NONE)
_WEIGHTS = {
    Harm.NONE: 6,
    Harm.CUT_UP: 16,
    Harm.CUT_DOWN: 22,
    Harm.CUT_LATE: 30,
    Harm.DELAYED: 6,
    Harm.BUFFERED: 5,
    Harm.OVERTAKEN: 6,
    Harm.REPEATED: 9,
}
_CUTS = {ConnectionCut.FIN: 5, ConnectionCut.RESET: 5, ConnectionCut.HALF_OPEN: 2}
"""How often; a client that waits for a half-open connection makes no other in the meantime."""


class PlannedDeath(Struct, frozen=True):
    """A process kills itself when it reaches a point for the `count`-th time."""

    point: Fault
    count: int


_SERVER_DEATHS: dict[Fault, int] = {
    Fault.BEFORE_APPEND: 400,
    Fault.AFTER_APPEND: 400,
    Fault.AFTER_PUBLISH: 400,
    Fault.BEFORE_TOOL: 20,
    Fault.AFTER_TOOL: 20,
    Fault.BEFORE_ACK: 40,
    Fault.BEFORE_CLAIM: 8,
    Fault.AFTER_CLAIM: 8,
}
_CLIENT_DEATHS: dict[Fault, int] = {
    Fault.BEFORE_CHECKPOINT: 300,
    Fault.AFTER_CHECKPOINT: 300,
    Fault.BEFORE_TOOL: 8,
    Fault.AFTER_TOOL: 8,
}
"""The points at which each side dies, and the last time at which it does."""


class ChaosPlan:
    """All decisions of a seed.


    Args:
        connections_per_kill: The approximate number of connections between two kills from outside.
    """

    def __init__(self, seed: int, *, connections_per_kill: int) -> None:
        self.seed = seed
        self._connections_per_kill = connections_per_kill

    def fate(self, number: int) -> Fate:
        """Return the fate of the connection that is accepted as the `number`-th."""
        chance = self._chance("connection", number)
        (harm,) = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()])
        (cut,) = chance.choices([*_CUTS], [*_CUTS.values()])
        late = round(math.exp(chance.uniform(math.log(SWEPT_BYTES / 2), math.log(FAR_BYTES))))
        swept = number % SWEPT_BYTES
        match harm:
            case Harm.NONE:
                return UNHARMED
            case Harm.CUT_UP:
                return Fate(harm, cut, up_max=swept)
            case Harm.CUT_DOWN:
                return Fate(harm, cut, down_max=swept)
            case Harm.DELAYED:
                return Fate(harm, cut, down_max=late, pause_s=chance.uniform(0.005, 0.05))
            case Harm.BUFFERED:
                return Fate(harm, cut, down_max=late, pause_s=chance.uniform(0.1, 0.4))
            case Harm.OVERTAKEN:
                return Fate(harm, overtaken_by=chance.randint(1, 6))
            case Harm.REPEATED:
                return Fate(harm, cut, down_max=late, again=chance.randint(1, 2))
            case Harm.CUT_LATE:
                return Fate(harm, cut, down_max=late)

    def death(self, side: str, life: int) -> PlannedDeath | None:
        """Return where a process of this side kills itself in its `life`-th life, if it does."""
        chance = self._chance(side, life)
        if chance.random() < 0.4:
            return None
        deaths = _SERVER_DEATHS if side == "server" else _CLIENT_DEATHS
        point = chance.choice([*deaths])
        return PlannedDeath(point, chance.randint(1, deaths[point]))

    def kill(self, number: int, sides: Sequence[str]) -> tuple[int, str]:
        """Return after how many connections since the last kill the `number`-th one comes, and its victim."""
        chance = self._chance("kill", number)
        after = round(self._connections_per_kill * chance.uniform(0.5, 1.5))
        return after, chance.choice([*sides, "server"])

    def _chance(self, what: str, number: int) -> random.Random:
        return random.Random(f"{self.seed} {what} {number}")
