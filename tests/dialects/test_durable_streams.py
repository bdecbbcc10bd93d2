"""Durable Streams on the wire: parsed requests, and the form of offsets, cursors and events."""

from __future__ import annotations

import base64
import json

import pytest
from starlette.datastructures import Headers

from midstream.dialects.durable_streams import (
    CURSOR_EPOCH_S,
    CURSOR_INTERVAL_S,
    PlainStreamSettings,
    Producer,
    StreamFork,
    asks_to_close,
    body_of,
    control_event,
    cut,
    data_event,
    next_cursor,
    offset_at,
    read_fork,
    read_messages,
    read_producer,
    read_settings,
    units_at,
)
from midstream.dialects.request_fields import BadFieldError
from midstream.json_depth import DEPTH_MAX

NOW = CURSOR_EPOCH_S + 1000 * CURSOR_INTERVAL_S
JSON = PlainStreamSettings("application/json; charset=utf-8")
TEXT = PlainStreamSettings("text/plain")


def test_offsets_sort_like_their_numbers_and_are_read_back() -> None:
    numbers = [0, 9, 10, 99, 2**53 - 1]
    offsets = [offset_at(each) for each in numbers]

    assert offsets == sorted(offsets)
    assert [units_at(each) for each in offsets] == numbers
    assert units_at("-1") == 0


@pytest.mark.parametrize(
    "offset", ["", "now", "1", "0,1", "a b", offset_at(1) + "0", "-2", "\u0660" * 16 + "_" + "0" * 16]
)
def test_a_foreign_offset_is_refused(offset: str) -> None:
    with pytest.raises(BadFieldError):
        units_at(offset)


@pytest.mark.parametrize("ttl", ["", "abc", "-1", "+1", "01", "1.0", "1e3", "²", str(2**53)])
def test_a_lifetime_is_a_plain_whole_number(ttl: str) -> None:
    with pytest.raises(BadFieldError):
        read_settings(Headers({"stream-ttl": ttl}))


@pytest.mark.parametrize("at", ["", "tomorrow", "2026-01-01", "2026-01-01T00:00:00", "2026-13-01T00:00:00Z"])
def test_an_expiry_is_a_time_with_its_zone(at: str) -> None:
    with pytest.raises(BadFieldError):
        read_settings(Headers({"stream-expires-at": at}))


def test_a_stream_has_one_lifetime() -> None:
    with pytest.raises(BadFieldError, match="exclude each other"):
        read_settings(Headers({"stream-ttl": "1", "stream-expires-at": "2026-01-01T00:00:00Z"}))


def test_settings_match_whatever_their_case_parameters_and_time_zone() -> None:
    first = read_settings(
        Headers(
            {"content-type": "Text/Plain; charset=utf-8", "stream-expires-at": "2026-01-01T01:00:00+01:00"}
        )
    )
    again = read_settings(
        Headers({"content-type": "text/plain", "stream-expires-at": "2026-01-01T00:00:00.000Z"})
    )

    assert first.matches(again)
    assert not first.matches(PlainStreamSettings("text/plain"))
    assert not first.matches(PlainStreamSettings("text/html", None, first.expires_at))


def test_a_lifetime_starts_at_the_last_use_and_an_expiry_is_fixed() -> None:
    sliding = PlainStreamSettings(ttl_s=10)
    fixed = PlainStreamSettings(expires_at="1970-01-01T00:01:40Z")

    assert not sliding.has_expired(used_at=95, now=104.9)
    assert sliding.has_expired(used_at=95, now=105)
    assert not fixed.has_expired(used_at=0, now=99.9)
    assert fixed.has_expired(used_at=99, now=100)
    assert not PlainStreamSettings().has_expired(used_at=0, now=1e12)


def test_a_producer_is_given_completely_or_not_at_all() -> None:
    assert read_producer(Headers({})) is None
    assert read_producer(
        Headers({"Producer-Id": "p", "Producer-Epoch": "1", "Producer-Seq": "0"})
    ) == Producer("p", 1, 0)


@pytest.mark.parametrize(
    "headers",
    [
        {"Producer-Id": "p"},
        {"Producer-Epoch": "0", "Producer-Seq": "0"},
        {"Producer-Id": "", "Producer-Epoch": "0", "Producer-Seq": "0"},
        {"Producer-Id": "p", "Producer-Epoch": "1.5", "Producer-Seq": "0"},
        {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "-1"},
        {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": str(2**53)},
    ],
)
def test_an_incomplete_producer_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(BadFieldError):
        read_producer(Headers(headers))


def test_a_fork_has_its_source_and_its_offset() -> None:
    everything = read_fork(Headers({"stream-forked-from": "/s"}))
    within = read_fork(
        Headers(
            {"stream-forked-from": "/s", "stream-fork-offset": offset_at(7), "stream-fork-sub-offset": "2"}
        )
    )

    assert everything == StreamFork("/s")
    assert within == StreamFork("/s", 7, 2)
    assert read_fork(Headers({})) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"stream-fork-sub-offset": "0"},
        {"stream-fork-offset": offset_at(0)},
        {"stream-forked-from": "/s", "stream-fork-sub-offset": "1"},
        {"stream-forked-from": "/s", "stream-fork-offset": offset_at(0), "stream-fork-sub-offset": "05"},
        {"stream-forked-from": "/s", "stream-fork-offset": "now"},
    ],
)
def test_an_incomplete_fork_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(BadFieldError):
        read_fork(Headers(headers))


def test_only_the_value_true_closes() -> None:
    assert asks_to_close(Headers({"stream-closed": "TRUE"}))
    assert not asks_to_close(Headers({"stream-closed": "1"}))
    assert not asks_to_close(Headers({}))


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        (b' {"a": 1} ', [{"a": 1}]),
        (b'[{"a":1}, "x,y", null]', [{"a": 1}, "x,y", None]),
        (b"[[1,2],[3]]", [[1, 2], [3]]),
        (b"[[]]", [[]]),
        (b"0", [0]),
    ],
)
def test_one_level_of_an_array_is_removed(body: bytes, messages: list[object]) -> None:
    joined, count = read_messages(body, may_be_empty=False)

    assert json.loads(b"[" + joined + b"]") == messages
    assert count == len(messages)


@pytest.mark.parametrize("body", [b"", b"{", b"[1,]", b"1 2", b"\xff", b"[" * (DEPTH_MAX + 2), b"[]"])
def test_a_body_without_messages_does_not_append(body: bytes) -> None:
    with pytest.raises(BadFieldError):
        read_messages(body, may_be_empty=False)


def test_an_empty_array_makes_an_empty_stream() -> None:
    assert read_messages(b" [ ] ", may_be_empty=True) == (b"", 0)


def test_appends_are_split_between_units() -> None:
    joined, _ = read_messages(b'["a,b", [1, 2], {"c": "]"}]', may_be_empty=False)

    assert json.loads(body_of([cut(joined, first=1, end=None, is_json=True)], is_json=True)) == [
        [1, 2],
        {"c": "]"},
    ]
    assert json.loads(body_of([cut(joined, first=0, end=2, is_json=True)], is_json=True)) == ["a,b", [1, 2]]
    assert cut(b"abcdef", first=2, end=4, is_json=False) == b"cd"


def test_a_cursor_is_always_above_the_received_one() -> None:
    first = next_cursor(None, now=NOW, chance=0.5)

    assert first == "1000"
    assert next_cursor("999", now=NOW, chance=0.5) == first
    assert next_cursor("words", now=NOW, chance=0.5) == first
    assert int(next_cursor(first, now=NOW, chance=0.0)) == int(first) + 1
    assert int(first) + 1 < int(next_cursor(first, now=NOW, chance=0.999)) <= int(first) + 180


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_no_line_of_the_data_ends_its_event(end: str) -> None:
    text = f"one{end}{end}event: control{end}data: forged"
    event = data_event([text.encode()], TEXT).decode()

    lines = event.removesuffix("\n\n").split("\n")
    assert lines == ["event: data", "data:one", "data:", "data:event: control", "data:data: forged"]
    assert "\r" not in event


def test_binary_data_is_in_base64() -> None:
    sent = bytes(range(256))
    event = data_event([sent[:10], sent[10:]], PlainStreamSettings("image/png"))

    assert base64.b64decode(event.split(b"data:")[1]) == sent
    assert json.loads(data_event([b"1", b"2,3"], JSON).split(b"data:")[1]) == [1, 2, 3]


def test_the_control_event_ends_a_closed_stream() -> None:
    goes_on = control_event(offset=offset_at(3), cursor="7", is_up_to_date=True, is_closed=False)
    ends = control_event(offset=offset_at(3), cursor="7", is_up_to_date=True, is_closed=True)

    assert json.loads(goes_on.split(b"data:")[1]) == {
        "streamNextOffset": offset_at(3),
        "streamCursor": "7",
        "upToDate": True,
    }
    assert json.loads(ends.split(b"data:")[1]) == {
        "streamNextOffset": offset_at(3),
        "streamClosed": True,
        "upToDate": True,
    }
