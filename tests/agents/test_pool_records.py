from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from midstream.agents.pool_records import (
    MARKS_MAX,
    RECORD_AGE_MAX_S,
    RECORDS_MAX,
    ForkPoint,
    confirm,
    create_fork,
    create_fresh,
    create_resumed,
    decode,
    encode,
    find_expired,
    with_answer,
    with_side_call,
)
from midstream.models.fingerprint import LINK_BYTES
from tests.agents.reuse_examples import confirmed, conversation, outline_of, pending, step_of, user_message
from tests.spec import spec

RECORD = with_side_call(
    confirmed(outline_of(*conversation("a", "b")), calls=["c1", "c2"]),
    outline_of(user_message("title"), system="Titles."),
)


@spec("REUSE-22")
def test_a_record_is_pending_until_the_upstream_confirms_it() -> None:
    record = create_fresh(outline_of(user_message("a")), upstream="scripted", now=10.0)
    assert (record.phase, record.agent, record.is_resumable) == ("pending", "", False)
    record = confirm(record, "agent-1", now=11.0)
    assert (record.phase, record.agent, record.is_resumable) == ("confirmed", "agent-1", True)
    record = with_answer(record, agent="agent-2", mark="m1", open_calls=(), now=12.0)
    assert (record.agent, record.marks, record.used_at) == ("agent-2", (ForkPoint(1, "agent-2", "m1"),), 12.0)

    record = create_resumed(record, outline_of(*conversation("a", "b")), now=13.0)
    assert (record.phase, record.agent, record.is_resumable) == ("pending", "agent-2", False)
    assert (record.fingerprint.count, record.marks, record.created_at) == (
        2,
        (ForkPoint(1, "agent-2", "m1"),),
        10.0,
    )


@spec("REUSE-22")
def test_a_confirmed_record_without_an_agent_id_cannot_be_resumed() -> None:
    assert not confirm(pending(outline_of(user_message("a"))), "", now=1.0).is_resumable


@spec("REUSE-23")
def test_there_is_no_fork_point_while_calls_are_open() -> None:
    record = confirmed(outline_of(user_message("a")), calls=["c1"])
    assert (record.marks, record.open_calls, record.answered) == ((), ("c1",), ())
    record = create_resumed(record, outline_of(user_message("a"), step_of(calls=["c1"])), now=4.0)
    assert (record.open_calls, record.answered) == ((), ("c1",))
    record = with_answer(record, agent="agent-1", mark="m", open_calls=(), now=5.0)
    assert record.marks == (ForkPoint(1, "agent-1", "m"),)


@spec("REUSE-23")
def test_another_answer_to_the_same_message_replaces_its_mark() -> None:
    record = confirmed(outline_of(*conversation("a", "b")))
    assert record.marks == (ForkPoint(2, "agent-1", "mark-2"),)
    record = create_fork(record, outline_of(*conversation("a", "b")), 1, now=4.0)
    assert (record.agent, record.marks, record.created_at) == ("", (), 4.0)
    record = with_answer(record, agent="fork", mark="new", open_calls=(), now=5.0)
    assert record.marks == (ForkPoint(2, "fork", "new"),)


@spec("REUSE-23")
def test_only_the_newest_marks_are_kept() -> None:
    record = confirmed(outline_of(user_message("0")))
    for turn in range(1, MARKS_MAX + 10):
        record = create_resumed(record, outline_of(*conversation(*map(str, range(turn + 1)))), now=1.0)
        record = with_answer(record, agent="agent-1", mark=f"m{turn}", open_calls=(), now=1.0)
    assert [mark.users for mark in record.marks] == list(range(11, MARKS_MAX + 11))


@spec("REUSE-13")
def test_a_noted_side_call_changes_nothing_else_and_ends_with_the_next_turn() -> None:
    before = confirmed(outline_of(user_message("a")))
    after = with_side_call(before, outline_of(user_message("title"), system="Titles."))
    assert replace(after, asides=()) == before
    assert create_resumed(after, outline_of(*conversation("a", "b")), now=1.0).asides == ()


def test_the_newest_side_call_of_each_system_prompt_is_kept_and_at_most_four() -> None:
    record = confirmed(outline_of(user_message("a")))
    for number in range(6):
        for name in ("first", "second"):
            record = with_side_call(
                record, outline_of(user_message(f"{name} {number}"), system=f"Titles {number}.")
            )
    newest = [
        outline_of(user_message(f"second {number}"), system=f"Titles {number}.").fingerprint
        for number in range(2, 6)
    ]
    assert [aside.link for aside in record.asides] == [each.users[-LINK_BYTES:] for each in newest]


@spec("REUSE-24")
def test_an_encoded_record_decodes_unchanged() -> None:
    assert decode(encode(RECORD)) == RECORD
    assert decode(encode(pending(outline_of()))) == pending(outline_of())


@spec("REUSE-24")
@given(st.data())
def test_a_damaged_record_decodes_to_none(data: st.DataObject) -> None:
    body = bytearray(encode(RECORD))
    at = data.draw(st.integers(0, len(body) - 1))
    if data.draw(st.booleans()):
        body[at] ^= data.draw(st.integers(1, 255))
    else:
        del body[at:]
    assert decode(bytes(body)) is None


@spec("REUSE-24")
@given(st.binary(max_size=80))
def test_arbitrary_bytes_decode_without_an_error(body: bytes) -> None:
    assert decode(body) is None


@spec("REUSE-24")
@pytest.mark.parametrize(
    "unsound",
    [
        replace(RECORD, used_at=math.nan),
        replace(RECORD, created_at=math.inf),
        replace(RECORD, fingerprint=replace(RECORD.fingerprint, users=b"1234")),
        replace(RECORD, marks=(ForkPoint(3, "a", "m"),)),
        replace(RECORD, marks=(ForkPoint(0, "a", "m"),)),
        replace(RECORD, marks=(ForkPoint(2, "a", "m"), ForkPoint(1, "a", "m"))),
        replace(RECORD, phase="done"),
        replace(RECORD, agent=7),
    ],
)
def test_an_inconsistent_record_decodes_to_none(unsound: msgspec.Struct) -> None:
    assert decode(encode(unsound)) is None  # type: ignore[arg-type]


@spec("REUSE-25")
def test_records_are_removed_after_seven_days_without_use() -> None:
    now = 1_000_000.0
    used = {
        "old": now - RECORD_AGE_MAX_S - 1,
        "week": now - RECORD_AGE_MAX_S,
        "new": now,
        "future": now + 1e9,
    }
    assert find_expired(used.items(), now=now) == ("old",)


@spec("REUSE-25")
def test_the_least_recently_used_records_beyond_the_cap_are_removed() -> None:
    used = [(f"k{at}", float(at)) for at in range(RECORDS_MAX + 3)]
    assert sorted(find_expired(used, now=1000.0)) == ["k0", "k1", "k2"]
    assert find_expired(used[3:], now=1000.0) == ()


@spec("REUSE-25")
@given(st.lists(st.floats(0, 2e6), max_size=300))
def test_the_remaining_records_are_young_and_few_enough(times: list[float]) -> None:
    used = {str(place): at for place, at in enumerate(times)}
    gone = set(find_expired(used.items(), now=1e6))
    stay = used.keys() - gone
    assert len(stay) <= RECORDS_MAX
    assert all(1e6 - used[key] <= RECORD_AGE_MAX_S for key in stay)
    assert len(stay) == min(RECORDS_MAX, sum(1e6 - at <= RECORD_AGE_MAX_S for at in times))
