"""Liveness rules between nodes, without a clock of their own."""

from __future__ import annotations

from midstream.store.node_liveness import NodeSilences, next_node


def test_each_node_waits_for_the_next_one_and_the_last_one_for_the_first() -> None:
    assert [next_node(own, {1, 2, 5} - {own}) for own in (1, 2, 5)] == [2, 5, 1]
    assert next_node("b", {"a"}) == "a"
    assert next_node(1, set()) is None


def test_a_node_without_a_heartbeat_for_a_lease_is_frozen_until_its_next_one() -> None:
    silences: NodeSilences[int] = NodeSilences(lease_s=4.0, beat_s=2.0)
    for now in (0.0, 1.0, 2.0, 3.0):
        silences.observe({1: 7.0, 2: now}, now=now)
        assert silences.frozen == frozenset()
    silences.observe({1: 7.0, 2: 4.0}, now=4.0)
    assert silences.frozen == {1}
    silences.observe({1: 8.0, 2: 5.0}, now=5.0)
    assert silences.frozen == frozenset()


def test_a_node_is_late_before_it_is_frozen() -> None:
    silences: NodeSilences[str] = NodeSilences(lease_s=20.0, beat_s=2.0)
    for now in range(5):
        assert silences.late == frozenset()
        silences.observe({"a": 7.0, "b": float(now)}, now=float(now))
    assert silences.late == {"a"}
    assert silences.frozen == frozenset()


def test_an_observer_that_was_stopped_counts_the_gap_as_one_heartbeat() -> None:
    silences: NodeSilences[int] = NodeSilences(lease_s=4.0, beat_s=2.0)
    silences.observe({1: 7.0}, now=0.0)
    silences.observe({1: 7.0}, now=1000.0)
    assert silences.frozen == frozenset()
    silences.observe({1: 7.0}, now=2000.0)
    assert silences.frozen == {1}


def test_a_deleted_or_dropped_node_is_no_longer_tracked() -> None:
    silences: NodeSilences[int] = NodeSilences(lease_s=4.0, beat_s=2.0)
    silences.observe({1: 1.0, 2: 1.0, 3: 1.0}, now=0.0)
    silences.drop(1)
    assert {*silences.known} == {2, 3}
    silences.observe({3: 1.0}, now=1.0)
    assert {*silences.known} == {3}
