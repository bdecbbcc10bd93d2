"""Permitted values of an `open`, and their combination with the headers of its request."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.errors import MalformedFrameError
from midstream.protocol import frames
from midstream.protocol.frames import KEY_CHARS_MAX, NUMBER_MAX, Error, Open, SnapshotWhen
from midstream.protocol.open_frame import check_open, merge_open_fields
from midstream.protocol.server_stream import Admit, ServerStream
from tests.spec import spec

SECRET = "s" * 43


@spec("STREAM-2")
@pytest.mark.parametrize(
    "frame",
    [
        Open(),
        Open("a", SECRET, next_seqno=NUMBER_MAX, connection=NUMBER_MAX, cancel_after_s=3600.0),
        Open("~" * KEY_CHARS_MAX, "a b", old_secret="!"),
    ],
)
def test_an_open_within_its_bounds_is_accepted(frame: Open) -> None:
    check_open(frame)
    assert merge_open_fields(frame, Open()) == merge_open_fields(Open(), frame) == frame


@spec("STREAM-2")
@pytest.mark.parametrize("word", [" a", "a ", "a\n", "\x7f", "ä", "a" * (KEY_CHARS_MAX + 1)])
@pytest.mark.parametrize("member", ["stream", "secret", "old_secret"])
def test_a_value_that_no_header_can_carry_is_refused(member: str, word: str) -> None:
    with pytest.raises(MalformedFrameError):
        check_open(replace(Open("a", SECRET), **{member: word}))


@spec("STREAM-110")
@pytest.mark.parametrize(
    "headers",
    [
        Open(secret=SECRET),
        Open(secret=SECRET, event_id="1-2", next_seqno=3, connection=4, cancel_after_s=5.0, old_secret="t"),
        Open("a", SECRET, "1-2"),
    ],
)
def test_values_in_headers_may_be_missing_in_the_open_and_must_not_contradict_it(headers: Open) -> None:
    frame = Open("a", coalesce_s=0.05, snapshots=SnapshotWhen.BEGIN)
    stream = ServerStream(headers=headers, now=0.0)
    stream.receive(frames.encode(frame), now=0.0)
    (admit,) = stream.requests()
    assert isinstance(admit, Admit)
    together = Open(
        "a",
        SECRET,
        headers.event_id,
        headers.next_seqno,
        headers.connection,
        headers.cancel_after_s,
        old_secret=headers.old_secret,
        coalesce_s=0.05,
        snapshots=SnapshotWhen.BEGIN,
    )
    assert (
        admit.open == together == merge_open_fields(Open(), together) == merge_open_fields(headers, together)
    )


@spec("STREAM-110")
@pytest.mark.parametrize(
    ("member", "content", "given"),
    [
        ("stream", "b", "a"),
        ("secret", "t", SECRET),
        ("old_secret", "t", "u"),
        ("event_id", "1-2", "1-3"),
        ("next_seqno", 1, 2),
        ("connection", 1, 2),
        ("cancel_after_s", 1.0, 2.0),
    ],
)
def test_headers_that_contradict_the_open_end_the_connection(
    member: str, content: object, given: object
) -> None:
    stream = ServerStream(headers=replace(Open(), **{member: content}), now=0.0)
    stream.receive(frames.encode(replace(Open("a", SECRET), **{member: given})), now=0.0)
    (error,) = map(frames.decode_server, stream.frames_to_send())
    assert isinstance(error, Error)
    assert (error.code, stream.requests(), stream.is_closed) == ("malformed_frame", [], True)
    assert f"`{member}`" in error.message
