"""A plain stream: each request of a producer takes effect once, whatever is repeated or lost."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.dialects.durable_stream_state import (
    Appended,
    AppendRequest,
    Created,
    PlainStream,
    StreamAnswer,
    decode_record,
    encode_record,
)
from midstream.dialects.durable_streams import PlainStreamSettings, Producer, offset_at
from midstream.dialects.request_fields import BadFieldError

TEXT = PlainStreamSettings("text/plain")
JSON = PlainStreamSettings("application/json")


class _Server:
    """A stream and its journal, from which it is folded again after a crash."""

    def __init__(self, settings: PlainStreamSettings = TEXT) -> None:
        self.journal = [encode_record(Created(settings))]
        self.stream = self.restore()

    def restore(self) -> PlainStream:
        first, *others = [decode_record(each) for each in self.journal]
        assert isinstance(first, Created)
        stream = PlainStream.of(first)
        for each in others:
            assert isinstance(each, Appended)
            stream.apply(each)
        return stream

    def post(
        self,
        body: bytes = b"x",
        producer: tuple[str, int, int] | None = None,
        *,
        sequence: str | None = None,
        closes: bool = False,
        content_type: str | None = None,
    ) -> StreamAnswer:
        found = self.stream.decide(
            AppendRequest(
                self.stream.settings.content_type if content_type is None else content_type,
                body,
                None if producer is None else Producer(*producer),
                sequence,
                closes,
            )
        )
        if isinstance(found, StreamAnswer):
            return found
        self.journal.append(encode_record(found))
        self.stream.apply(found)
        return self.stream.success(found)

    @property
    def content(self) -> bytes:
        records = [decode_record(each) for each in self.journal[1:]]
        return b"".join(each.body for each in records if isinstance(each, Appended))


def test_an_append_returns_the_end_of_the_stream() -> None:
    server = _Server()

    answer = server.post(b"abc")

    assert (answer.status, dict(answer.headers)) == (204, {"Stream-Next-Offset": offset_at(3)})


def test_json_messages_are_the_units() -> None:
    server = _Server(JSON)

    answer = server.post(b"[1,[2,3]]")

    assert answer.headers["Stream-Next-Offset"] == offset_at(2)


def test_a_repeated_request_takes_effect_once() -> None:
    server = _Server()
    first = server.post(b"a", ("p", 0, 0))
    server.post(b"b", ("p", 0, 1))

    again = server.post(b"a", ("p", 0, 0))

    assert (first.status, again.status) == (200, 204)
    assert again.headers["Producer-Seq"] == "1"
    assert server.content == b"ab"


def test_a_repeated_request_takes_effect_once_after_a_crash_too() -> None:
    server = _Server()
    server.post(b"a", ("p", 3, 0))
    server.stream = server.restore()

    assert server.post(b"a", ("p", 3, 0)).status == 204
    assert server.content == b"a"


def test_a_gap_is_refused_with_the_missing_number() -> None:
    server = _Server()
    server.post(b"a", ("p", 0, 0))

    answer = server.post(b"c", ("p", 0, 2))

    assert answer.status == 409
    assert (answer.headers["Producer-Expected-Seq"], answer.headers["Producer-Received-Seq"]) == ("1", "2")
    assert server.post(b"c", ("new", 0, 2)).headers["Producer-Expected-Seq"] == "0"


def test_a_newer_epoch_fences_the_older_one() -> None:
    server = _Server()
    server.post(b"a", ("p", 0, 0))
    with pytest.raises(BadFieldError):
        server.post(b"b", ("p", 1, 1))
    assert server.post(b"b", ("p", 1, 0)).status == 200

    stale = server.post(b"c", ("p", 0, 1))

    assert (stale.status, stale.headers["Producer-Epoch"]) == (403, "1")
    assert server.content == b"ab"


def test_the_sequences_of_writers_increase_bytewise() -> None:
    server = _Server()
    assert server.post(sequence="09").status == 204

    assert server.post(sequence="09").status == 409
    assert server.post(sequence="10").status == 204
    assert server.post(sequence="2").status == 204
    assert server.post(sequence="10").status == 409


def test_an_empty_sequence_is_a_sequence() -> None:
    server = _Server()

    assert server.post(sequence="").status == 204
    assert server.post(sequence="").status == 409


def test_a_duplicate_is_detected_before_its_sequence_is_compared() -> None:
    server = _Server()
    server.post(b"a", ("p", 0, 0), sequence="1")

    assert server.post(b"a", ("p", 0, 0), sequence="1").status == 204


def test_nothing_is_appended_to_a_closed_stream() -> None:
    server = _Server()
    closing = server.post(b"last", closes=True)

    refused = server.post(b"more")

    assert closing.headers["Stream-Closed"] == refused.headers["Stream-Closed"] == "true"
    assert refused.status == 409
    assert server.post(b"more", closes=True).status == 409
    assert server.post(b"more", ("p", 0, 4)).headers["Stream-Closed"] == "true"
    assert server.content == b"last"


def test_closing_is_repeatable() -> None:
    server = _Server()

    assert server.post(b"", closes=True, content_type="").status == 204
    assert server.post(b"", closes=True, content_type="image/png").status == 204
    assert len(server.journal) == 2


def test_a_close_by_a_producer_is_repeatable_only_by_it() -> None:
    server = _Server()
    server.post(b"a", ("p", 0, 0))
    server.post(b"b", ("p", 0, 1), closes=True)
    server.stream = server.restore()

    assert server.post(b"other", ("p", 0, 1), closes=True).status == 204
    assert server.post(b"a", ("p", 0, 0)).status == 204  # its answer may have been lost
    assert server.post(b"", ("p", 0, 2), closes=True).status == 409
    assert server.post(b"", ("q", 0, 0), closes=True).status == 409
    assert server.content == b"ab"


def test_a_producer_that_only_closes_appends_no_data() -> None:
    server = _Server()

    closing = server.post(b"", ("p", 0, 0), closes=True)

    assert (closing.status, closing.headers["Producer-Seq"]) == (204, "0")
    assert server.restore().is_closed


@pytest.mark.parametrize("content_type", ["image/png", "text/html"])
def test_another_content_type_is_refused(content_type: str) -> None:
    assert _Server().post(content_type=content_type).status == 409


@pytest.mark.parametrize(("body", "content_type"), [(b"", "text/plain"), (b"x", "")])
def test_a_request_without_content_or_its_type_is_malformed(body: bytes, content_type: str) -> None:
    with pytest.raises(BadFieldError):
        _Server().post(body, content_type=content_type)


def test_a_malformed_body_leaves_its_producer_unchanged() -> None:
    server = _Server(JSON)
    with pytest.raises(BadFieldError):
        server.post(b"{", ("p", 0, 0))

    assert server.post(b"{}", ("p", 0, 0)).status == 200


def test_a_fork_continues_at_the_place_of_its_source() -> None:
    fork = PlainStream.of(Created(TEXT, "source", 7))

    assert fork.headers() == {"Stream-Next-Offset": offset_at(7)}


def test_an_invalid_record_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_record(b"\xc1")


@given(
    tries=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), max_size=40),
)
def test_every_message_is_stored_once_whatever_is_lost_and_repeated(
    tries: list[tuple[int, bool, bool]],
) -> None:
    """A producer resumes at its last acknowledged message; answers are lost, the server crashes between requests."""
    server = _Server()
    acknowledged = 0
    for ahead, answer_is_lost, crashes in tries:
        number = acknowledged + ahead
        answer = server.post(b"%04d" % number, ("p", 0, number))
        if crashes:
            server.stream = server.restore()
        if answer.status in (200, 204) and not answer_is_lost:
            acknowledged = int(answer.headers["Producer-Seq"]) + 1

    count = len(server.content) // 4
    assert server.content == b"".join(b"%04d" % each for each in range(count))
    assert count >= acknowledged
