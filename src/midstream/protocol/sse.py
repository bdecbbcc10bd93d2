"""Server-sent events, both ways, without I/O: the browsers' standard, and a limit.

The encoder writes one event per call and never fails on data: a line end inside it starts another `data:` line.
The decoder takes bytes as they come, cut anywhere, and returns whole events. It follows the standard's parsing
rules (three kinds of line ends, one byte order mark, comments, ids that stay until replaced), except that data stays
bytes: readers parse JSON from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct

from midstream.errors import FrameTooLargeError, MalformedFrameError
from midstream.protocol.frames import EventId, Gone, ServerFrame, SnapshotFrame, Welcome
from midstream.protocol.frames import encode as encode_frame

EVENT_BYTES_MAX = 16 * 1024 * 1024
"""One event as received. A record holds a whole response at most, which models bound far below this."""
BLOCK_BYTES_MAX = 256 * 1024
"""Bytes of records after which one write is full; a record above it travels alone."""
RETRY_DIGITS_MAX = 8
"""A server that asks for more than a day between reconnects (in milliseconds) is not believed."""

_BOM = b"\xef\xbb\xbf"


class ServerSentEvent(Struct, frozen=True):
    """One event.

    Args:
        data: The content; line ends inside it arrive as one newline each.
        event: Its kind.
        id: Received: the newest id so far, also where this event brought none. Sent: "" sends none.
    """

    data: bytes
    event: str = "message"
    id: str = ""


def encode(event: ServerSentEvent) -> bytes:
    """Return an event as it goes over the wire.

    Raises:
        MalformedFrameError: The id or the kind holds a line end or a NUL, which has no form on the wire.
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
    """Return a frame as an event of its own kind.

    Welcome, gone and snapshot carry the id from which to go on, so that a browser that reconnects before the first
    record asks for the right place.
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
    """Yield stored records as events, many to a write; their JSON is one line and goes out as it is."""
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
    """Parse a stream of server-sent events from pieces of any size."""

    def __init__(self, *, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self.last_event_id = ""
        """What to send as `Last-Event-ID` when the connection is made again."""
        self.retry_ms: int | None = None
        """Milliseconds to wait before reconnecting, where the server sent that."""
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
        """Take the next bytes of the body; return the events they complete.

        Raises:
            FrameTooLargeError: An event is above the limit. The stream cannot be read further.
        """
        if self._is_after_return and piece:
            # The piece before ended with a return; a newline that follows belongs to it.
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
                pass  # a comment (no name) or a field that a later standard added
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
