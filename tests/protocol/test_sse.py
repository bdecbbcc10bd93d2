"""Server-sent events survive any cut, and follow the standard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import FrameTooLargeError, MalformedFrameError
from midstream.protocol.frames import EventId, HeartbeatFrame, Welcome
from midstream.protocol.frames import encode as encode_frame
from midstream.protocol.sse import (
    BLOCK_BYTES_MAX,
    ServerSentEvent,
    SseDecoder,
    encode,
    event_of_frame,
    events_of_records,
)

one_line = st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), max_size=20)
# A carriage return has no form of its own in this format: it arrives as a newline.
payloads = st.binary(max_size=60).map(lambda data: data.replace(b"\r", b""))
sent_events = st.builds(ServerSentEvent, data=payloads, event=one_line.filter(bool), id=one_line.filter(bool))
cuts = st.lists(st.integers(min_value=1, max_value=9), max_size=60)


def pieces(body: bytes, sizes: list[int]) -> list[bytes]:
    out = []
    for size in sizes:
        out.append(body[:size])
        body = body[size:]
    return [*out, body]


def decoded(*parts: bytes) -> list[ServerSentEvent]:
    decoder = SseDecoder()
    return [event for part in parts for event in decoder.feed(part)]


@given(st.lists(sent_events, max_size=5), cuts)
def test_encoded_events_are_decoded_however_they_are_cut(
    events: list[ServerSentEvent], sizes: list[int]
) -> None:
    body = b"".join(encode(event) for event in events)
    assert decoded(*pieces(body, sizes)) == events


@given(st.text("\r\n:abdet iv\0\ufeff0", max_size=80), cuts)
def test_any_bytes_decode_the_same_whole_and_cut(text: str, sizes: list[int]) -> None:
    body = text.encode()
    assert decoded(*pieces(body, sizes)) == decoded(body)


@given(st.lists(st.binary(max_size=50), max_size=10))
def test_no_bytes_break_the_decoder(parts: list[bytes]) -> None:
    decoded(*parts)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"data: a\n\n", [ServerSentEvent(b"a")]),
        (b"data:a\r\rdata: b\r\n\r\n", [ServerSentEvent(b"a"), ServerSentEvent(b"b")]),
        (b"data\n\n", [ServerSentEvent(b"")]),
        (b"data: a\ndata: b\n\n", [ServerSentEvent(b"a\nb")]),
        (b"data:  a\n\n", [ServerSentEvent(b" a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [ServerSentEvent(b"a")]),
        (b": a comment\nunknown: x\ndata: a\n\n", [ServerSentEvent(b"a")]),
        (b"event: only a kind\n\ndata: a\n\n", [ServerSentEvent(b"a")]),
        (b"id: 7\n\ndata: a\n\n", [ServerSentEvent(b"a", id="7")]),
        (b"id: 7\ndata: a\n\ndata: b\n\n", [ServerSentEvent(b"a", id="7"), ServerSentEvent(b"b", id="7")]),
        (b"id: 7\ndata: a\n\nid\ndata: b\n\n", [ServerSentEvent(b"a", id="7"), ServerSentEvent(b"b")]),
        (b"id: a\0b\ndata: a\n\n", [ServerSentEvent(b"a")]),
        (b"data: never ended", []),
        (b"data: never ended\n", []),
    ],
)
def test_the_cases_of_the_standard_are_decoded(body: bytes, expected: list[ServerSentEvent]) -> None:
    assert decoded(body) == expected


def test_an_id_counts_only_once_its_event_has_ended() -> None:
    decoder = SseDecoder()
    decoder.feed(b"id: 3-9\ndata: cut off")
    assert decoder.last_event_id == ""
    decoder.feed(b"\n\n")
    assert decoder.last_event_id == "3-9"


def test_the_server_may_set_the_reconnection_time() -> None:
    decoder = SseDecoder()
    decoder.feed(b"retry: 1500\nretry: soon\n")
    assert decoder.retry_ms == 1500


@pytest.mark.parametrize("body", [b"data: " + b"a" * 100, b"data: abc\n" * 30])
def test_an_event_without_end_is_refused_before_it_fills_the_memory(body: bytes) -> None:
    decoder = SseDecoder(event_bytes_max=64)
    with pytest.raises(FrameTooLargeError):
        decoder.feed(body)


@pytest.mark.parametrize("bad", [ServerSentEvent(b"", id="a\nb"), ServerSentEvent(b"", event="a\rb")])
def test_an_id_or_a_kind_cannot_inject_another_field(bad: ServerSentEvent) -> None:
    with pytest.raises(MalformedFrameError):
        encode(bad)


def test_data_with_line_ends_cannot_inject_another_field() -> None:
    body = encode(ServerSentEvent(b"a\nid: 666\r\n\r\nevent: fake"))
    assert decoded(body) == [ServerSentEvent(b"a\nid: 666\n\nevent: fake")]


def test_records_are_sent_as_stored_with_many_in_one_write() -> None:
    records = [(EventId(2, position), b'{"n":%d}' % position) for position in (7, 8)]
    (block,) = events_of_records(records)
    assert decoded(block) == [
        ServerSentEvent(b'{"n":7}', "record", "2-7"),
        ServerSentEvent(b'{"n":8}', "record", "2-8"),
    ]


def test_a_write_is_bounded_and_a_large_record_is_sent_alone() -> None:
    large = b'"%b"' % (b"x" * BLOCK_BYTES_MAX)
    blocks = events_of_records((EventId(1, place), body) for place, body in enumerate([b"1", large, b"2"]))
    assert [len(decoded(block)) for block in blocks] == [1, 1, 1]


def test_a_frame_is_an_event_of_its_own_kind_and_the_welcome_has_the_event_id_to_resume_from() -> None:
    welcome = Welcome(stream="", event_id="3-9", resume_from="3-4")
    beat = HeartbeatFrame("3-9")
    assert decoded(event_of_frame(welcome), event_of_frame(beat)) == [
        ServerSentEvent(encode_frame(welcome), "welcome", "3-4"),
        ServerSentEvent(encode_frame(beat), "heartbeat", "3-4"),
    ]
