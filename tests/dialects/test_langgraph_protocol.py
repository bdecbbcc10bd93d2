"""The thread protocol: numbered without a gap, and each suffix contains exactly the missing events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midstream.dialects.langgraph_protocol import CHANNELS, ProtocolEvents, Subscription, checkpoint_id
from midstream.dialects.run_fold import RunFold
from midstream.session.records import EpochStarted, Record
from tests.dialects.langgraph_journal import approved, cut, delta, opening, whole

Json = dict[str, Any]


def events_of(records: list[Record], wanted: Subscription) -> list[Json]:
    stream = ProtocolEvents(RunFold("t"), 0, wanted, "agent")
    epoch, events = 0, list[Json]()
    for record in records:
        epoch = record.epoch if isinstance(record, EpochStarted) else epoch
        for event in stream.take(record, epoch=epoch):
            number, _, data = event.decode().rstrip().split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert number == f"id: {events[-1]['seq']}"
    return events


@pytest.mark.parametrize("story", [approved, cut])
def test_events_are_numbered_without_a_gap_and_a_reader_continues_after_any(story: Any) -> None:  # noqa: ANN401
    every = events_of(story(), Subscription(CHANNELS))
    assert [each["seq"] for each in every] == [*range(1, len(every) + 1)]
    assert len({each["event_id"] for each in every}) == len(every)
    for since in range(len(every)):
        assert events_of(story(), Subscription(CHANNELS, since=since)) == every[since:]
    for channel in CHANNELS:
        some = events_of(story(), Subscription(frozenset((channel,))))
        assert some == [each for each in every if each["method"].partition(".")[0] == channel]


def test_a_message_consists_of_blocks_as_in_langchain() -> None:
    records = [*opening(), delta("hm", kind="thinking"), delta("Hello ", part=1), delta("you", part=1)]
    data = [
        each["params"]["data"]
        for each in events_of([*records, *whole("Hello you")], Subscription(frozenset(("messages",))))
    ]

    finished = [each["content"] for each in data if each["event"] == "content-block-finish"]
    assert finished[-1] == {"type": "text", "text": "Hello you"}
    assert data[-1]["event"] == "message-finish"


def test_an_interrupted_message_is_void_and_not_in_the_following_state() -> None:
    events = events_of(cut(), Subscription(CHANNELS))
    place = next(
        number for number, each in enumerate(events) if each["params"]["data"].get("event") == "error"
    )
    following = events[place + 1 :]
    states = [each["params"]["data"]["messages"] for each in following if each["method"] == "values"]
    assert [[one["id"] for one in state] for state in states[:2]] == [["m1", "ai-1"], ["m1"]]
    assert following[1]["params"]["data"] == {"event": "running", "graph_name": "agent"}


def test_readers_of_other_namespaces_receive_nothing_and_states_are_in_order() -> None:
    assert events_of(approved(), Subscription(CHANNELS, is_root=False)) == []
    names = [checkpoint_id(number) for number in (0, 1, 9, 65_535, 65_536, 2**30)]
    assert names == sorted(names)
