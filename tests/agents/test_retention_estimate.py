from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.agents.retention_estimate import (
    SEEN_AGE_MAX_S,
    SEEN_MAX,
    LearnedRetention,
    ResumeObservation,
    decode_retention,
    encode_retention,
)
from tests.spec import spec

HOUR = 3600.0


def observations(*dead: float, alive: tuple[float, ...] = ()) -> LearnedRetention:
    retention = LearnedRetention()
    for age_s in alive:
        retention = retention.with_outcome("alive", age_s, now=0.0)
    for age_s in dead:
        retention = retention.with_outcome("dead", age_s, now=0.0)
    return retention


@spec("REUSE-26")
def test_three_failures_make_a_limit_and_two_do_not() -> None:
    assert LearnedRetention().limit_s(now=0.0) is None
    assert observations(HOUR, 2 * HOUR).limit_s(now=0.0) is None
    assert observations(HOUR, 3 * HOUR, 2 * HOUR).limit_s(now=0.0) == 3 * HOUR


@spec("REUSE-26")
def test_one_success_at_a_greater_age_outweighs_nine_failures() -> None:
    assert observations(*[HOUR] * 9, alive=(2 * HOUR,)).limit_s(now=0.0) is None
    assert observations(*[HOUR] * 10, alive=(2 * HOUR,)).limit_s(now=0.0) == HOUR
    assert observations(*[HOUR] * 3, alive=(HOUR - 1,) * 40).limit_s(now=0.0) == HOUR


@spec("REUSE-26")
def test_observations_expire_so_that_one_agent_is_tried_again() -> None:
    retention = observations(HOUR, HOUR, HOUR)
    assert retention.limit_s(now=SEEN_AGE_MAX_S) == HOUR
    assert retention.limit_s(now=SEEN_AGE_MAX_S + 1) is None
    assert retention.with_outcome("alive", 1.0, now=SEEN_AGE_MAX_S + 1).seen == (
        ResumeObservation(1.0, is_alive=True, at=SEEN_AGE_MAX_S + 1),
    )


@spec("REUSE-26")
def test_only_the_newest_observations_are_kept() -> None:
    retention = LearnedRetention()
    for number in range(SEEN_MAX + 5):
        retention = retention.with_outcome("alive", float(number), now=float(number))
    assert [one.age_s for one in retention.seen] == [float(number) for number in range(5, SEEN_MAX + 5)]


@spec("REUSE-26")
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=80))
def test_a_failure_never_lengthens_the_limit_and_a_success_never_shortens_it(
    outcomes: list[tuple[bool, int]],
) -> None:
    retention = LearnedRetention()
    for is_alive, age_s in outcomes[: SEEN_MAX - 1]:
        before = retention.limit_s(now=0.0)
        retention = retention.with_outcome("alive" if is_alive else "dead", age_s, now=0.0)
        after = retention.limit_s(now=0.0)
        shorter, longer = (before, after) if is_alive else (after, before)
        assert (math.inf if shorter is None else shorter) <= (math.inf if longer is None else longer)


@spec("REUSE-26")
def test_encoded_observations_decode_unchanged_and_damaged_ones_are_ignored() -> None:
    retention = observations(HOUR, alive=(1.0,))
    assert decode_retention(encode_retention(retention)) == retention
    assert decode_retention(b"\xc1") == LearnedRetention()
    assert (
        decode_retention(
            encode_retention(LearnedRetention((ResumeObservation(math.nan, is_alive=True, at=0.0),)))
        )
        == LearnedRetention()
    )


@spec("REUSE-26")
@pytest.mark.parametrize(
    "body", [b"", b"{}", b"\x81\xa4\xff\xff\xff\xff\x90", msgspec.msgpack.encode({"seen": [[1, 2]]})]
)
def test_arbitrary_bytes_decode_to_no_observations(body: bytes) -> None:
    assert decode_retention(body) == LearnedRetention()


@spec("REUSE-81")
def test_two_resumptions_without_an_id_and_none_with_one_show_that_an_upstream_never_sends_it() -> None:
    once = LearnedRetention().without_echo(now=0.0)
    twice = once.without_echo(now=1.0)
    assert (once.never_echoes(now=1.0), twice.never_echoes(now=1.0)) == (False, True)
    assert decode_retention(encode_retention(twice)) == twice
    assert not twice.never_echoes(now=SEEN_AGE_MAX_S + 1)
    echoed = twice.with_echo(now=2.0)
    assert not echoed.never_echoes(now=2.0)
    assert echoed.with_echo(now=3.0) is echoed
    again = echoed.without_echo(now=4.0).without_echo(now=5.0)
    assert not again.never_echoes(now=6.0)
    assert again.never_echoes(now=SEEN_AGE_MAX_S + 3.5)
