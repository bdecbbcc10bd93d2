"""Counters: limits for one caller, and their independence of other callers."""

from __future__ import annotations

import contextlib

import pytest
from starlette.types import Scope

from midstream.errors import LimitReachedError
from midstream.server.limits import CALLERS_MAX, HOUR_S, CallerSlots, Rate, RunningTurns, address_of
from midstream.testing.fake_worlds import FakeWorld


async def test_a_rate_is_used_up_and_recovers_evenly() -> None:
    world = FakeWorld()
    rate = Rate(60, "requests", world)
    for _ in range(60):
        rate.count("ada")
    with pytest.raises(LimitReachedError, match="more than 60 requests in one minute") as refused:
        rate.count("ada")
    assert refused.value.retry_after_s == pytest.approx(1.0)
    rate.count("bob")
    rate.count("")
    await world.advance(2.0)
    rate.count("ada")
    rate.count("ada")
    with pytest.raises(LimitReachedError):
        rate.count("ada")


async def test_a_rate_holds_across_all_servers_of_a_store() -> None:
    world = FakeWorld()
    servers = [Rate(60, "requests", world) for _ in range(10)]
    passed = 0
    for second in range(600):  # Ten requests a second, one at each server: one a second is allowed.
        for server in servers:
            with contextlib.suppress(LimitReachedError):
                server.count("ada")
                passed += 1
        if second % 2:
            reports = [server.own_counts() for server in servers]
            for server, own in zip(servers, reports, strict=True):
                others = [each for each in reports if each is not own]
                sums = {
                    caller: sum(each.get(caller, 0.0) for each in others)
                    for each in others
                    for caller in each
                }
                server.set_other_counts(sums)
        await world.advance(1.0)
    most = 60 + 600 + 9 * 3  # Requests that nine servers accept before they have exchanged their counts.
    assert 600 <= passed <= most


async def test_a_caller_that_pauses_may_continue_at_all_servers_at_the_same_time() -> None:
    world = FakeWorld()
    here, there = Rate(60, "requests", world), Rate(60, "requests", world)
    here.add("ada", 20)
    there.add("ada", 40)
    for _ in range(30):
        here_counts, there_counts = here.own_counts(), there.own_counts()
        here.set_other_counts(there_counts)
        there.set_other_counts(here_counts)
        await world.advance(1.0)
    here.check("ada", 29)
    with pytest.raises(LimitReachedError):
        here.check("ada", 32)


async def test_usage_added_without_a_check_counts_later() -> None:
    world = FakeWorld()
    tokens = Rate(1000, "tokens", world, within_s=HOUR_S)
    tokens.add("ada", 3000)
    with pytest.raises(LimitReachedError, match="hour"):
        tokens.check("ada")
    await world.advance(2 * HOUR_S + 10)
    tokens.check("ada")


def test_rates_of_any_number_of_callers_take_bounded_memory() -> None:
    rate = Rate(1, "requests", FakeWorld())
    for number in range(CALLERS_MAX + 10):
        rate.count(str(number))
    assert len(rate._levels) == CALLERS_MAX
    rate.count("0")  # Dropped without harm.
    with pytest.raises(LimitReachedError):
        rate.count(str(CALLERS_MAX))


def test_a_released_slot_can_be_taken_again() -> None:
    places = CallerSlots(1, "streams")
    places.take("ada")
    places.take("bob")
    places.take("")
    with pytest.raises(LimitReachedError):
        places.take("ada")
    places.free("ada")
    places.free("")
    places.take("ada")


async def test_turns_are_counted_while_they_run() -> None:
    world, live = FakeWorld(), {"s1", "s2"}
    turns = RunningTurns(2, world)
    for session in ("s1", "s2", "s1"):
        turns.begin("ada", session, live.__contains__)
    await world.advance(10)
    with pytest.raises(LimitReachedError):
        turns.begin("ada", "s3", live.__contains__)
    turns.begin("bob", "s3", live.__contains__)
    live.remove("s1")
    turns.begin("ada", "s3", live.__contains__)
    # A turn that was just requested counts before it runs.
    with pytest.raises(LimitReachedError):
        turns.begin("ada", "s4", live.__contains__)


@pytest.mark.parametrize(
    ("client", "address"),
    [
        (("198.51.100.7", 1), "198.51.100.7"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::"),
        (("::ffff:198.51.100.7", 1), "::ffff:c633:6407"),
        (("127.0.0.1", 1), ""),
        (("::1", 1), ""),
        (("testclient", 1), ""),
        (None, ""),
    ],
)
def test_an_address_is_one_caller_and_the_local_machine_is_none(
    client: tuple[str, int] | None, address: str
) -> None:
    scope: Scope = {"type": "http", "client": client}
    found = address_of(scope)
    assert (found == "") == (address == "")
    assert address_of({**scope, "client": client and (client[0], 2)}) == found


def test_addresses_of_one_network_are_one_caller() -> None:
    first, second = ({"client": (f"2001:db8::{number}", 1)} for number in (1, 2))
    assert address_of(first) == address_of(second) != ""
