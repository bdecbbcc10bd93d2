"""State of a plain stream (Durable Streams): its records, and the decisions about appends.

One request is one record, with the sequence number of its producer. So every node recognizes a retry after a crash as a
duplicate.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct, field

from midstream.dialects.durable_streams import (
    CLOSED,
    EXPECTED_SEQ,
    NEXT_OFFSET,
    PRODUCER_EPOCH,
    PRODUCER_SEQ,
    RECEIVED_SEQ,
    PlainStreamSettings,
    Producer,
    media_type,
    offset_at,
    read_messages,
)
from midstream.dialects.request_fields import bad_field


class Created(Struct, frozen=True, omit_defaults=True, tag="created"):
    """The first record of a stream.

    Args:
        source: Journal of the source of a fork; "" for none.
        inherited: Number of units from the source.
        at: Time of creation, in seconds since 1970.
    """

    settings: PlainStreamSettings
    source: str = ""
    inherited: int = 0
    at: float = 0.0


class Appended(Struct, frozen=True, omit_defaults=True, tag="appended"):
    """One accepted request.

    Args:
        body: Its bytes, or its JSON messages joined by commas; empty if the request only closes the stream.
        units: Number of bytes or messages.
        sequence: The writer's sequence number (`Stream-Seq`), a string that is compared by bytes.
        closes: Whether it closes the stream.
        at: Time of acceptance, in seconds since 1970.
    """

    body: bytes = b""
    units: int = 0
    producer: Producer | None = None
    sequence: str | None = None
    closes: bool = False
    at: float = 0.0


class Forked(Struct, frozen=True, tag="forked"):
    """A fork of this stream will be created, or was deleted.

    Args:
        fork: Journal of the fork.
        at: Time of the request, in seconds since 1970.
        is_over: Whether the fork was deleted.
    """

    fork: str
    at: float
    is_over: bool = False


class Deleted(Struct, frozen=True, tag="deleted"):
    """The stream was deleted, but has forks, which still read inherited units from it."""


StreamRecord = Created | Appended | Forked | Deleted

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StreamRecord).decode


def encode_record(record: StreamRecord) -> bytes:
    """Encode a record for the journal."""
    return _encode(record)


def decode_record(body: bytes) -> StreamRecord:
    """Decode a record of the journal.

    Raises:
        msgspec.DecodeError: The record is damaged, or of a newer version.
    """
    record: StreamRecord = _decode(body)
    return record


class AppendRequest(Struct, frozen=True):
    """A request to append, to close, or both; fields as in `Appended`."""

    content_type: str
    body: bytes
    producer: Producer | None = None
    sequence: str | None = None
    closes: bool = False

    @property
    def only_closes(self) -> bool:
        """Whether the request closes the stream without an append."""
        return self.closes and not self.body


class StreamAnswer(Struct, frozen=True):
    """An answer without an append. `problem` is the reason; "" if an equal request already took effect."""

    status: int
    headers: Mapping[str, str] = {}
    problem: str = ""


class PlainStream(Struct):
    """State of a stream: the fold of its records."""

    settings: PlainStreamSettings
    units: int = 0
    is_closed: bool = False
    sequence: str | None = None
    """The last `Stream-Seq`, of all writers of the stream."""
    producers: dict[str, Producer] = field(default_factory=dict)
    """The last accepted request of each producer, by name. All are kept while the stream exists."""
    forks: dict[str, float] = field(default_factory=dict)
    """Time of the request for each fork, by journal."""
    is_deleted: bool = False
    written_at: float = 0.0
    """Time of the newest record with content."""

    @classmethod
    def of(cls, record: Created) -> PlainStream:
        """Return the state after the first record."""
        return cls(record.settings, record.inherited, written_at=record.at)

    def apply(self, record: Appended | Forked | Deleted) -> None:
        """Fold the next record."""
        match record:
            case Forked(is_over=True):
                self.forks.pop(record.fork, None)
            case Forked():
                self.forks[record.fork] = record.at
            case Deleted():
                self.is_deleted = True
            case Appended():
                self._append(record)

    def _append(self, record: Appended) -> None:
        self.units += record.units
        self.written_at = record.at
        self.is_closed = self.is_closed or record.closes
        if record.sequence is not None:
            self.sequence = record.sequence
        if record.producer is not None:
            self.producers[record.producer.name] = record.producer

    def decide(self, request: AppendRequest) -> Appended | StreamAnswer:
        """Return the record for a request, or an answer if nothing is appended.

        Raises:
            BadFieldError: The body is empty or malformed.
        """
        refused = self._wrong_type(request) or self._known_producer(request.producer)
        if refused is not None:
            return refused
        if self.is_closed:
            return self._closed(request)
        body, units = self._content(request)
        if request.sequence is not None and not self._is_next(request.sequence):
            return self._conflict(f"`Stream-Seq` {request.sequence[:40]!r} is not above the last one")
        return Appended(body, units, request.producer, request.sequence, request.closes)

    def success(self, appended: Appended) -> StreamAnswer:
        """Return the answer to a request, after the fold of its record.

        A producer receives 200 for new data, and 204 for a repetition or a mere close.
        """
        if appended.producer is None:
            return StreamAnswer(204, self.headers())
        return StreamAnswer(200 if appended.units else 204, self.headers() | _place(appended.producer))

    def headers(self) -> dict[str, str]:
        """Return the headers that describe the end of the stream."""
        ended = {CLOSED: "true"} if self.is_closed else {}
        return {NEXT_OFFSET: offset_at(self.units)} | ended

    def _wrong_type(self, request: AppendRequest) -> StreamAnswer | None:
        if request.only_closes:
            return None
        if not request.body:
            raise bad_field("", "the body is empty; send the content to append")
        if not request.content_type:
            raise bad_field("Content-Type", "`Content-Type` is missing; send that of the stream")
        if media_type(request.content_type) != self.settings.media_type:
            return self._conflict(f"this stream has the content type {self.settings.content_type!r}")
        return None

    def _known_producer(self, sent: Producer | None) -> StreamAnswer | None:
        """Return the answer to a repeated or refused request of a producer; None for a new one."""
        if sent is None:
            return None
        last = self.producers.get(sent.name)
        if last is not None and sent.epoch < last.epoch:
            newest = {PRODUCER_EPOCH: str(last.epoch)}
            return StreamAnswer(403, newest, f"producer {sent.name[:40]!r} has begun epoch {last.epoch}")
        if last is not None and sent.epoch > last.epoch and sent.seq:
            raise bad_field(PRODUCER_SEQ, f"a new epoch begins with `{PRODUCER_SEQ}` 0; got {sent.seq}")
        begins = last is None or sent.epoch > last.epoch
        expected = 0 if last is None or begins else last.seq + 1
        if sent.seq > expected:
            gap = {EXPECTED_SEQ: str(expected), RECEIVED_SEQ: str(sent.seq)}
            return None if self.is_closed else self._conflict(f"`{PRODUCER_SEQ}` {expected} is missing", gap)
        if last is not None and sent.seq < expected:
            return StreamAnswer(204, self.headers() | _place(last))
        return None

    def _closed(self, request: AppendRequest) -> StreamAnswer:
        if request.only_closes and request.producer is None:
            return StreamAnswer(204, self.headers())
        return self._conflict("this stream is closed")

    def _content(self, request: AppendRequest) -> tuple[bytes, int]:
        if request.body and self.settings.is_json:
            return read_messages(request.body, may_be_empty=False)
        return request.body, len(request.body)

    def _is_next(self, sequence: str) -> bool:
        return self.sequence is None or sequence.encode() > self.sequence.encode()

    def _conflict(self, problem: str, headers: Mapping[str, str] | None = None) -> StreamAnswer:
        return StreamAnswer(409, self.headers() | dict(headers or {}), problem)


def _place(producer: Producer) -> dict[str, str]:
    return {PRODUCER_EPOCH: str(producer.epoch), PRODUCER_SEQ: str(producer.seq)}
