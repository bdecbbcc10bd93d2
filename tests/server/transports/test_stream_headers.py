"""The headers that stand for fields of an `open`."""

from __future__ import annotations

from functools import partial

import pytest
from starlette.requests import HTTPConnection

from midstream.errors import MalformedFrameError, UsageError
from midstream.protocol.frames import Open, SnapshotWhen
from midstream.server.transports.stream_headers import connection_name_of, open_of
from tests.spec import spec

expected_open = partial(Open, snapshots=SnapshotWhen.GONE)


def request_with(query: str = "", **headers: str) -> HTTPConnection:
    named = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return HTTPConnection({"type": "http", "headers": named, "query_string": query.encode(), "path": "/"})


@spec("STREAM-51")
def test_every_header_has_its_field_in_the_open() -> None:
    request = request_with(
        x_idempotency_key="k",
        x_idempotent_encryption_key="s",
        x_idempotency_event_id="1-2",
        x_idempotency_next_seqno="3",
        x_idempotency_connection="4",
        x_idempotency_cancel_after="5",
    )
    assert open_of(request) == expected_open("k", "s", "1-2", 3, 4, 5.0)


@spec("STREAM-51")
def test_the_common_header_names_are_accepted_too() -> None:
    assert open_of(request_with(idempotency_key="k", last_event_id="1-2")) == expected_open("k", "", "1-2")
    assert open_of(request_with("after=1-2")) == expected_open(event_id="1-2")
    assert open_of(request_with("after=1-2", last_event_id="1-3")) == expected_open(event_id="1-3")
    with pytest.raises(MalformedFrameError):  # A value that does not count is validated all the same.
        open_of(request_with("after=seven", last_event_id="1-3"))


@spec("STREAM-37")
@pytest.mark.parametrize("text", ["", "-1", "101", "1x", "²", "1" * 5000])
def test_an_invalid_coalescing_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="coalesce_ms"):
        open_of(request_with(f"coalesce_ms={text}"))
    assert open_of(request_with("coalesce_ms=20")).coalesce_s == 0.02


@spec("STREAM-51")
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("8e03978e-40d5", "8e03978e-40d5"),
        ('"8e03978e-40d5"', "8e03978e-40d5"),
        (r'"a \"b\" \\ c"', r'a "b" \ c'),
        ('a"b"', 'a"b"'),
        ('""', ""),
    ],
)
def test_the_standard_key_is_a_quoted_string_or_a_bare_word(text: str, key: str) -> None:
    assert open_of(request_with(idempotency_key=text)) == expected_open(key)
    assert open_of(request_with(idempotency_key=text, x_idempotency_key=key)) == expected_open(key)


@pytest.mark.parametrize(
    "headers",
    [
        {"idempotency_key": '"a'},
        {"idempotency_key": '"a"b"'},
        {"idempotency_key": '"a";b=1'},
        {"idempotency_key": r'"a\b"'},
        {"idempotency_key": '"ü"'},
        {"idempotency_key": '"' + "k" * 257 + '"'},
        {"idempotency_key": "a", "x_idempotency_key": "b"},
        {"x_idempotency_key": "k" * 257},
        {"x_idempotency_key": "ü"},
        {"x_idempotency_key": "a\tb"},
        {"x_idempotent_encryption_key": "s" * 257},
        {"x_idempotent_encryption_key": "ü"},
        {"x_idempotent_encryption_key_old": "ü"},
        {"idempotency_key": '" a"'},
        {"x_idempotency_next_seqno": "x"},
        {"x_idempotency_next_seqno": "-1"},
        {"x_idempotency_connection": str(2**53 + 1)},
        {"x_idempotency_connection": "9" * 5000},
        {"x_idempotency_cancel_after": "soon"},
    ],
)
def test_a_malformed_header_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(MalformedFrameError):
        open_of(request_with(**headers))


@spec("STREAM-110")
def test_an_empty_header_counts_as_missing() -> None:
    names = ("key", "event_id", "next_seqno", "connection", "cancel_after")
    empty = {f"x_idempotency_{name}": "" for name in names}
    assert (
        open_of(request_with("after=", last_event_id="", x_idempotent_encryption_key="", **empty))
        == expected_open()
    )
    assert open_of(request_with(x_idempotency_key="", idempotency_key="k")) == expected_open("k")


@spec("STREAM-110")
def test_trailing_space_is_no_part_of_a_header() -> None:
    spaced = request_with(x_idempotency_key="k ", x_idempotent_encryption_key="s\t", last_event_id="1-2 \t ")
    assert open_of(spaced) == expected_open("k", "s", "1-2")
    assert open_of(request_with(last_event_id=" ")) == expected_open()


@spec("STREAM-110")
@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("x-idempotency-key", "a", "b"),
        ("idempotency-key", "a", '"a"'),
        ("x-idempotent-encryption-key", "a", "b"),
        ("x-idempotent-encryption-key-old", "a", "b"),
        ("x-idempotency-event-id", "1-2", "1-3"),
        ("last-event-id", "1-2", "1-3"),
        ("x-idempotency-next-seqno", "1", "2"),
        ("x-idempotency-connection", "1", "2"),
        ("x-idempotency-cancel-after", "1", "2"),
    ],
)
def test_a_repeated_header_has_equal_values_or_is_refused(name: str, one: str, other: str) -> None:
    def twice(first: str, second: str) -> HTTPConnection:
        named = [(name.encode(), first.encode()), (name.encode(), second.encode())]
        return HTTPConnection({"type": "http", "headers": named, "query_string": b"", "path": "/"})

    assert open_of(twice(one, one)) == open_of(twice(one, "")) == open_of(twice("", one))
    with pytest.raises(MalformedFrameError, match="twice"):
        open_of(twice(one, other))


@spec("STREAM-40", "STREAM-110")
def test_a_connection_has_one_name() -> None:
    named = [(b"x-midstream-connection", name) for name in (b"a", b"b")]
    with pytest.raises(MalformedFrameError, match="twice"):
        connection_name_of(
            HTTPConnection({"type": "http", "headers": named, "query_string": b"", "path": "/"})
        )
