"""Explore the larger worlds: python -m tests.protocol [PART OF A NAME…]; exits with 1 where a promise is broken."""

from __future__ import annotations

import sys
from time import perf_counter

from tests.protocol.explorer import explore
from tests.protocol.test_small_worlds import SMALL
from tests.protocol.world import SmallWorld, WorldScenario

STATES_MAX = 5_000_000

LARGE = {
    "the client dies, and a loss": WorldScenario(losses=1, client_deaths=1, words=0),
    "another server takes over, with words": WorldScenario(losses=1, takeovers=1),
    "a stop, with words": WorldScenario(losses=1, aborts=1),
    "the power fails, with words": WorldScenario(losses=1, power_cuts=1),
    "a tool at a client, and two losses": WorldScenario(losses=2, has_tool=True, words=0),
    "three losses": WorldScenario(losses=3),
    "three losses and a stop": WorldScenario(losses=3, aborts=1, words=0),
    "the client dies twice": WorldScenario(losses=1, client_deaths=2, words=0),
    "a tool, a loss and a death": WorldScenario(losses=1, client_deaths=1, has_tool=True, words=0),
    "a tool, a death and another server": WorldScenario(
        losses=0, client_deaths=1, takeovers=1, has_tool=True, words=0
    ),
    "a tool, a stop and a loss": WorldScenario(losses=1, aborts=1, has_tool=True, words=0),
    "a stop, a loss and another server": WorldScenario(losses=1, aborts=1, takeovers=1, words=0),
    "two servers die": WorldScenario(losses=1, takeovers=2),
    "the power fails twice": WorldScenario(losses=1, power_cuts=2),
    "two processes of one checkpoint, a loss": WorldScenario(losses=1, clients=2),
    "two processes of one checkpoint, a death": WorldScenario(losses=0, clients=2, client_deaths=1, words=0),
    "two servers, a loss and a stop": WorldScenario(losses=1, servers=2, aborts=1, words=0),
    "two servers, a loss, and one dies": WorldScenario(losses=1, servers=2, takeovers=1, words=0),
    "two servers and two processes of one checkpoint": WorldScenario(losses=0, servers=2, clients=2, words=0),
    "two servers and a tool": WorldScenario(losses=1, servers=2, has_tool=True, words=0),
    "everything once": WorldScenario(losses=1, client_deaths=1, takeovers=1, aborts=1, words=0),
    "commands overtake one another, and a loss": WorldScenario(
        losses=1, aborts=1, repeats=1, overtakes=1, words=0
    ),
    "heartbeats and two losses": WorldScenario(losses=2, beats=3),
}


def main() -> int:
    wanted = " ".join(sys.argv[1:])
    worlds = {name: scenario for name, scenario in {**SMALL, **LARGE}.items() if wanted in name}
    is_broken = False
    for name, scenario in worlds.items():
        began = perf_counter()
        explored = explore(SmallWorld(scenario), states_max=STATES_MAX)
        spent = perf_counter() - began
        print(  # noqa: T201 - a command writes to a terminal
            f"{name}: {explored.states:,} states, {explored.transitions:,} transitions, {explored.ends:,} ends,"
            f" {spent:.1f} s",
            flush=True,
        )
        if explored.found is not None:
            is_broken = True
            print(explored.found)  # noqa: T201 - see above
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
