"""Subscriptions as values: their wakes, fencing, and positions."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.dialects.durable_streams import offset_at
from midstream.dialects.stream_subscriptions import (
    LINKS_MAX,
    AckError,
    NextAct,
    StreamAck,
    StreamSubscription,
    SubscriptionConfig,
    Tail,
    WakeReport,
    Webhook,
    decode_subscription,
    encode_subscription,
    glob_matches,
)
from midstream.errors import UsageError

HOOK = SubscriptionConfig("webhook", "events/*", webhook=Webhook("https://a.example"), lease_ttl_ms=10_000)
PULL = SubscriptionConfig("pull-wake", "events/*", wake_stream="wake/pool", lease_ttl_ms=10_000)
TAILS = {"events/a": Tail(7, 5)}


def new_subscription(config: SubscriptionConfig = HOOK) -> StreamSubscription:
    made = StreamSubscription("sub", config, "http://server", "secret", 0.0)
    return made.with_link("events/a", Tail(7, 0))


def waking(config: SubscriptionConfig = HOOK) -> StreamSubscription:
    return new_subscription(config).advance(TAILS, now=100.0, wake_id="w1")[0]


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("events/*", "events/a", True),
        ("events/*", "events/a/b", False),
        ("events/*", "events", False),
        ("events/**", "events", True),
        ("events/**", "events/a/b", True),
        ("**/b", "a/x/b", True),
        ("**/b", "b/c", False),
        ("**", "a", True),
        ("e*s/x-*-y", "events/x-1-y", True),
        ("e*s/x-*-y", "events/x-y", False),
        ("a*b*b", "ab", False),
        ("/events/a/", "events/a", True),
    ],
)
def test_a_star_is_one_segment_and_two_are_any_number(pattern: str, path: str, *, expected: bool) -> None:
    assert glob_matches(pattern, path) is expected


def test_a_pattern_of_many_stars_is_matched_in_bounded_time() -> None:
    assert not glob_matches("/".join(["**", "a"] * 64), "/".join("a" * 60) + "/b")
    assert not glob_matches("*a" * 1000 + "b", "a" * 128)


def test_pending_messages_start_one_wake() -> None:
    found, act = new_subscription().advance(TAILS, now=100.0, wake_id="w1")
    assert (found.generation, found.wake_id, found.lease_until, act) == (1, "w1", 110.0, NextAct.DELIVER)
    assert found.advance(TAILS, now=109.0, wake_id="w2") == (found, NextAct.NOTHING)


def test_the_end_of_a_lease_starts_the_next_wake() -> None:
    found, act = waking().advance(TAILS, now=110.0, wake_id="w2")
    assert (found.generation, found.wake_id, act) == (2, "w2", NextAct.DELIVER)


def test_a_failed_delivery_is_repeated_as_the_same_wake_during_its_lease() -> None:
    failed = waking().fail(1, now=101.0, chance=0.0)
    assert failed.due_at() == 102.0
    assert failed.advance(TAILS, now=101.5, wake_id="w2") == (failed, NextAct.NOTHING)
    again, act = failed.advance(TAILS, now=102.0, wake_id="w2")
    assert (again.wake_id, again.generation, again.lease_until, act) == ("w1", 1, 112.0, NextAct.DELIVER)


def test_done_acks_the_tails_of_the_repeated_request() -> None:
    failed = waking().fail(1, now=101.0, chance=0.0)
    later = {"events/a": Tail(7, 6)}
    again, _ = failed.advance(later, now=102.0, wake_id="w2")
    done = again.deliver(1, is_done=True)
    assert done.links["events/a"].acked == 6
    assert done.advance(later, now=103.0, wake_id="w2")[1] is NextAct.NOTHING


def test_pauses_after_failures_exceed_leases() -> None:
    failed = waking()
    for _ in range(7):
        failed = failed.fail(1, now=101.0, chance=0.0)
    found, act = failed.advance(TAILS, now=111.0, wake_id="w2")
    assert (found.wake_id, found.next_attempt_at, act) == ("", 161.0, NextAct.NOTHING)
    found, act = found.advance(TAILS, now=161.0, wake_id="w2")
    assert (found.generation, act) == (2, NextAct.DELIVER)


def test_done_acks_the_snapshot_and_no_later_messages() -> None:
    done = waking().deliver(1, is_done=True)
    assert (done.wake_id, done.links["events/a"].acked) == ("", 5)
    assert done.advance(TAILS, now=101.0, wake_id="w2")[1] is NextAct.NOTHING
    more, act = done.advance({"events/a": Tail(7, 6)}, now=101.0, wake_id="w2")
    assert (more.generation, act) == (2, NextAct.DELIVER)


def test_an_answer_to_an_older_wake_changes_nothing() -> None:
    newer = waking().advance(TAILS, now=110.0, wake_id="w2")[0]
    assert newer.deliver(1, is_done=True) == newer
    assert newer.fail(1, now=111.0, chance=0.0) == newer


def test_a_token_belongs_to_one_generation_of_one_subscription() -> None:
    found = waking()
    token = found.token()
    assert found.generation_of(token) == 1
    assert replace(found, secret="other").generation_of(token) is None
    assert found.generation_of(token.replace("1.", "2.", 1)) is None
    assert found.generation_of("") is None
    assert found.is_current(1, WakeReport("w1", 1))
    for report in (WakeReport("w1", 2), WakeReport("w2", 1)):
        assert not found.is_current(1, report)
    assert not found.is_current(0, WakeReport("w1", 1))
    assert not found.release().is_current(1, WakeReport("", 1))


@pytest.mark.parametrize(
    ("path", "offset"),
    [
        ("events/a", "-1"),
        ("events/a", offset_at(6)),
        ("events/a", "x"),
        ("events/b", offset_at(1)),
        ("", offset_at(1)),
    ],
)
def test_an_ack_needs_a_linked_stream_and_a_position_within_it(path: str, offset: str) -> None:
    with pytest.raises(AckError):
        waking().ack(WakeReport("w1", 1, (StreamAck(offset, path),)), TAILS, now=101.0)


def test_an_ack_extends_the_lease_and_does_not_move_back() -> None:
    report = WakeReport("w1", 1, (StreamAck(offset_at(3), "events/a"),))
    found = waking().ack(report, TAILS, now=105.0)
    assert (found.links["events/a"].acked, found.lease_until) == (3, 115.0)
    back = WakeReport("w1", 1, (StreamAck(offset_at(2), "events/a"),))
    with pytest.raises(AckError):
        found.ack(back, TAILS, now=106.0)


def test_a_claim_belongs_to_one_worker_until_its_lease_ends() -> None:
    announced, act = new_subscription(PULL).advance(TAILS, now=100.0, wake_id="w1")
    assert (announced.due_at(), act) == (0.0, NextAct.ANNOUNCE)
    claimed = announced.claim("one", TAILS, now=101.0, wake_id="w2")
    assert claimed is not None
    assert (claimed.wake_id, claimed.generation, claimed.holder) == ("w1", 1, "one")
    assert claimed.is_held(now=110.9)
    assert not claimed.is_held(now=111.0)
    taken = claimed.claim("two", TAILS, now=111.0, wake_id="w2")
    assert taken is not None
    assert (taken.wake_id, taken.generation, taken.holder) == ("w2", 2, "two")
    assert new_subscription(PULL).claim("one", {"events/a": Tail(7, 0)}, now=1.0, wake_id="w") is None


def test_a_recreated_stream_is_read_from_its_start() -> None:
    done = waking().deliver(1, is_done=True)
    gone = done.settle({})
    assert gone.links == {}
    named = done.with_link("events/a", None, is_explicit=True).settle({})
    assert named.links["events/a"].birth == 0
    recreated = {"events/a": Tail(9, 2)}
    assert named.settle(recreated).pending(recreated) == ["events/a"]


def test_its_own_wake_stream_never_wakes_it() -> None:
    config = replace(PULL, pattern="**")
    assert not StreamSubscription("s", config, "", "", 0.0).matches("wake/pool")


def test_an_explicit_link_takes_precedence_over_the_pattern() -> None:
    named = new_subscription().with_link("events/a", TAILS["events/a"], is_explicit=True)
    assert [each.link_type for each in named.streams()] == ["explicit"]
    assert [each.link_type for each in named.without_link("events/a").streams()] == ["glob"]


def test_the_streams_of_one_subscription_are_limited() -> None:
    found = new_subscription()
    for number in range(LINKS_MAX - 1):
        found = found.with_link(f"events/x{number}", None)
    with pytest.raises(UsageError):
        found.with_link("events/more", None)


@pytest.mark.parametrize(
    "config",
    [
        SubscriptionConfig("webhook", webhook=Webhook("https://a.example")),
        SubscriptionConfig("webhook", "a"),
        SubscriptionConfig("pull-wake", "a"),
    ],
)
def test_an_incomplete_config_is_refused(config: SubscriptionConfig) -> None:
    with pytest.raises(UsageError):
        config.normalized()


def test_an_encoded_subscription_decodes_unchanged() -> None:
    found = waking()
    assert decode_subscription(encode_subscription(found)) == found
