"""Both halves of the stream protocol in every small world: nothing lost, nothing twice, and an end from
everywhere.

`make explore` tries larger worlds; `docs/design/model.md` describes them with their numbers of states.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.protocol import plants
from tests.protocol.explorer import explore
from tests.protocol.world import SmallWorld, WorldScenario
from tests.search import with_slow
from tests.spec import spec

STATES_MAX = 30_000

SMALL = {
    "two losses": WorldScenario(losses=2),
    "the client dies": WorldScenario(losses=0, client_deaths=1),
    "another server takes over": WorldScenario(losses=1, takeovers=1, words=0),
    "a stop": WorldScenario(losses=1, aborts=1, words=0),
    "a stop and another server": WorldScenario(losses=0, aborts=1, takeovers=1, words=0),
    "the power fails": WorldScenario(losses=1, power_cuts=1, words=0),
    "a tool at a client": WorldScenario(losses=1, has_tool=True, words=0),
    "a tool at a client that dies": WorldScenario(losses=0, client_deaths=1, has_tool=True, words=0),
    "two processes of one checkpoint": WorldScenario(losses=0, clients=2, words=0),
    "commands arrive twice": WorldScenario(losses=1, repeats=1, words=0),
    "commands overtake one another": WorldScenario(losses=0, aborts=1, repeats=1, overtakes=1, words=0),
    "heartbeats": WorldScenario(losses=1, beats=2, words=0),
    "two servers": WorldScenario(losses=1, servers=2, words=0),
    "two servers and a stop": WorldScenario(losses=0, servers=2, aborts=1, words=0),
    "two servers, of which one dies": WorldScenario(losses=0, servers=2, takeovers=1, words=0),
}

# Those of a second and more. `make check` leaves the first ones to `make test`, which leaves the others to `make long`.
LARGER = {"the client dies", "another server takes over", "the power fails"}
LARGEST = {"two losses", "a stop", "a tool at a client", "two servers"}


@pytest.mark.slow
@spec(
    "STREAM-8",
    "STREAM-12",
    "STREAM-13",
    "STREAM-14",
    "STREAM-18",
    "STREAM-21",
    "STREAM-24",
    "STREAM-50",
    "STREAM-101",
)
@pytest.mark.parametrize("name", with_slow(SMALL, LARGER, LARGEST))
def test_every_state_of_a_small_world_keeps_the_promises(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    explored = explore(SmallWorld(SMALL[name]), states_max=STATES_MAX)
    record_property("states", explored.states)
    assert explored.found is None, str(explored.found)
    assert explored.ends > 0


def test_events_may_overtake_acks() -> None:
    assert explore(plants.EventsFirst(WorldScenario(losses=1)), states_max=STATES_MAX).found is None


PLANTED: dict[type[SmallWorld], tuple[WorldScenario, str]] = {
    plants.AckBeforeAppend: (WorldScenario(losses=0, takeovers=1, words=0), "acknowledged"),
    plants.AckBeforeSync: (WorldScenario(losses=0, power_cuts=1, words=0), "acknowledged"),
    plants.NoDedupe: (WorldScenario(losses=1, words=0), "not the end"),
    plants.FencedByArrival: (WorldScenario(losses=1, words=0), "not the end"),
    plants.FencedInOneProcess: (
        WorldScenario(losses=1, servers=2, words=0),
        "connection received",
    ),
    plants.TakenFromOlder: (WorldScenario(losses=1, servers=2, aborts=1, words=0), "was accepted after"),
    plants.ReplayTooLate: (WorldScenario(losses=1, words=1), "no end came"),
    plants.EpochReused: (WorldScenario(losses=0, power_cuts=1, words=1), "not the end"),
    plants.TakesAnyOrder: (
        WorldScenario(losses=0, aborts=1, overtakes=1, words=0),
        "commands were accepted as",
    ),
    plants.at_client(plants.GapIsTheEnd): (
        WorldScenario(losses=0, aborts=1, overtakes=1, words=0),
        "not the end",
    ),
    plants.at_client(plants.NoPlayback): (WorldScenario(losses=1, words=0), "not the end"),
    plants.at_client(plants.DeliversTwice): (
        WorldScenario(losses=1, words=0),
        "application received",
    ),
    plants.at_client(plants.DeletesTooEarly): (
        WorldScenario(losses=0, client_deaths=1, words=0),
        "not the end",
    ),
    plants.at_client(plants.MovesTooEarly): (WorldScenario(losses=0, client_deaths=1, words=0), "was lost"),
    plants.at_client(plants.SendBeforeWrite): (
        WorldScenario(losses=0, client_deaths=1, aborts=1, words=0),
        "not the end",
    ),
    plants.at_client(plants.OutcomeApart): (
        WorldScenario(losses=0, client_deaths=1, has_tool=True, words=0),
        "not the end",
    ),
    plants.at_client(plants.RunBeforeIntent): (
        WorldScenario(losses=0, has_tool=True, words=0),
        "without an intent",
    ),
    plants.at_client(plants.AppliesLate): (WorldScenario(losses=0, client_deaths=1, words=0), "was lost"),
}


# Found by two servers, a loss and a stop in one world: the search reaches it after two seconds.
LATE = {plants.TakenFromOlder}


@pytest.mark.parametrize(
    "world",
    with_slow(PLANTED, (), LATE),
    ids=lambda world: world.__name__,
)
def test_a_planted_bug_is_found(world: type[SmallWorld]) -> None:
    scenario, words = PLANTED[world]
    explored = explore(world(scenario), states_max=STATES_MAX)
    assert explored.found is not None
    assert words in explored.found.what
