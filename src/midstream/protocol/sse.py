"""Encoder and decoder of server-sent events, without I/O, by the browsers' standard, with a limit.

The encoder writes one event per call and never fails on data: a line end inside it starts another `data:` line. The
decoder accepts bytes in any pieces, and returns complete events. It follows the standard's parsing rules (three kinds
of line ends, one byte order mark, comments, ids that stay until replaced), except that data stay bytes, for JSON
parsers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from midstream.errors import FrameTooLargeError, MalformedFrameError
from midstream.protocol.frames import EventId, Gone, ServerFrame, SnapshotFrame, Welcome
from midstream.protocol.frames import encode as encode_frame

EVENT_BYTES_MAX = 16 * 1024 * 1024
"""Bytes of one received event. A record contains at most one response, whose limit is far lower."""
BLOCK_BYTES_MAX = 256 * 1024
"""Bytes of records after which one write is full; a larger record has a write of its own."""
RETRY_DIGITS_MAX = 8
"""Digits of a `retry` value in milliseconds; one of more than a day is ignored."""

_BOM = b"\xef\xbb\xbf"


class ServerSentEvent(Struct, frozen=True):
    """One event.

    Args:
        data: The content; each line end in it becomes one newline.
        event: Its type.
        id: Received: the newest id so far, even if this event has none. Sent: "" for none.
    """

    data: bytes
    event: str = "message"
    id: str = ""


def encode(event: ServerSentEvent) -> bytes:
    """Encode an event.

    Raises:
        MalformedFrameError: The id or the type contains a line end or a NUL, which cannot be encoded.
    """
    if any(mark in event.id + event.event for mark in "\r\n\0"):
        raise MalformedFrameError("the id and the kind of an event are one line each")
    head = f"id: {event.id}\n" if event.id else ""
    if event.event != "message":
        head += f"event: {event.event}\n"
    data = event.data
    if b"\n" in data or b"\r" in data:
        lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        data = b"\ndata: ".join(lines)
    return b"%bdata: %b\n\n" % (head.encode(), data)


def event_of_frame(frame: ServerFrame) -> bytes:
    """Encode a frame as an event of its own type.

    Welcome, gone and snapshot have the id to resume from, for a browser that reconnects before the first record.
    """
    kind = str(frame.__struct_config__.tag)
    match frame:
        case Welcome() | Gone():
            place = frame.resume_from
        case SnapshotFrame():
            place = frame.event_id
        case _:
            place = ""
    return encode(ServerSentEvent(encode_frame(frame), kind, place))


def events_of_records(records: Iterable[tuple[EventId, bytes]]) -> Iterator[bytes]:
    """Yield stored records as events, several in each write; their JSON is one line and is sent unchanged."""
    block: list[bytes] = []
    size = 0
    for event_id, body in records:
        if block and size + len(body) > BLOCK_BYTES_MAX:
            yield b"".join(block)
            block, size = [], 0
        block.append(b"id: %d-%d\nevent: record\ndata: %b\n\n" % (event_id.epoch, event_id.position, body))
        size += len(body)
    if block:
        yield b"".join(block)


class SseDecoder:
    """Parser of server-sent events, for pieces of any size."""

    def __init__(self, *, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.last_event_id = ""
        """The value of `Last-Event-ID` for the next connection."""
        self.retry_ms: int | None = None
        """The server's pause before a reconnection in milliseconds, or None."""
        self._event_bytes_max = event_bytes_max
        self._partial: list[bytes] = []
        self._partial_bytes = 0
        self._id = ""
        self._kind = ""
        self._data: list[bytes] | None = None
        self._data_bytes = 0
        self._is_first_line = True
        self._is_after_return = False

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """Process the next bytes of the body; return the complete events.

        Raises:
            FrameTooLargeError: An event is above the limit. The stream cannot be read further.
        """
        if self._is_after_return and piece:
            # The previous piece ended with a return, and a newline that follows belongs to it.
            piece = piece.removeprefix(b"\n")
            self._is_after_return = False
        if not piece:
            return []
        lines = piece.splitlines(keepends=True)
        self._is_after_return = piece.endswith(b"\r")
        rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        events: list[ServerSentEvent] = []
        for line in lines:
            event = self._take_line(self._whole(line.rstrip(b"\r\n")))
            if event is not None:
                events.append(event)
        if rest:
            self._partial.append(rest)
            self._partial_bytes += len(rest)
            self._check_size()
        return events

    def _whole(self, line: bytes) -> bytes:
        if self._partial:
            line = b"".join((*self._partial, line))
            self._partial.clear()
            self._partial_bytes = 0
        if self._is_first_line:
            self._is_first_line = False
            return line.removeprefix(_BOM)
        return line

    def _take_line(self, line: bytes) -> ServerSentEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._add_data(value)
            case b"event":
                self._kind = value.decode("utf-8", "replace")
            case b"id":
                if b"\0" not in value:
                    self._id = value.decode("utf-8", "replace")
            case b"retry":
                if value.isdigit() and len(value) <= RETRY_DIGITS_MAX:
                    self.retry_ms = int(value)
            case _:
                pass  # a comment (no name), or a field of a later standard
        return None

    def _add_data(self, value: bytes) -> None:
        if self._data is None:
            self._data = []
        self._data.append(value)
        self._data_bytes += len(value) + 1
        self._check_size()

    def _dispatch(self) -> ServerSentEvent | None:
        lines, kind = self._data, self._kind
        self._data, self._data_bytes, self._kind = None, 0, ""
        self.last_event_id = self._id
        if lines is None:
            return None
        return ServerSentEvent(b"\n".join(lines), kind or "message", self._id)

    def _check_size(self) -> None:
        if self._partial_bytes + self._data_bytes > self._event_bytes_max:
            raise FrameTooLargeError(f"a server-sent event has more than {self._event_bytes_max} bytes")
