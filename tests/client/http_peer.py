"""A peer like `peer.Peer`, over plain HTTP: by server-sent events, and by long poll."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

import msgspec
from msgspec import Struct

from midstream.protocol import frames
from midstream.protocol.frames import Ack, CommandFrame, Open, decode_client, secret_digest_of
from midstream.protocol.server_stream import NATIVE, FrameEncoding, ServerStream, read_command
from midstream.protocol.sse import ServerSentEvent, encode, event_of_frame, events_of_records
from midstream.server.api.problems import problem_of
from midstream.session.turn.commands import Refused
from tests.client.peer import HALF, PeerScript
from tests.protocol.stream_link import MemoryHost

SSE = FrameEncoding(event_of_frame, events_of_records)


class PeerRequest(Struct, frozen=True):
    """A request; the names of its headers are in lower case."""

    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    @property
    def opening(self) -> Open:
        """The `open` in its body."""
        frame = decode_client(self.body)
        assert isinstance(frame, Open)
        return frame

    @property
    def is_opening(self) -> bool:
        """Whether a connection starts with it."""
        return self.path.endswith("/events") or self.query.get("n") == ["0"]


class HttpPeer:
    """Serve one session; the n-th opening request meets the n-th script, later ones are served correctly."""

    def __init__(self, *scripts: PeerScript | int, degraded_reason: str = "") -> None:
        self.host = MemoryHost()
        self.url = ""
        self.requests: list[PeerRequest] = []
        """The requests that opened a connection."""
        self._scripts = [*scripts]
        self._degraded_reason = degraded_reason
        self._writers: set[asyncio.StreamWriter] = set()
        self._following: dict[asyncio.StreamWriter, ServerStream] = {}
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[HttpPeer]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        async with server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield self
            self.cut()

    async def feed(self) -> None:
        """Send the new records of the journal."""
        for writer, stream in [*self._following.items()]:
            self.host.serve(stream, now=time.monotonic())
            _write_command(writer, b"".join(stream.frames_to_send()))
        async with self._changed:
            self._changed.notify_all()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    await self._answer(await _read(reader), writer)
                    await writer.drain()
        finally:
            self._writers.discard(writer)
            self._following.pop(writer, None)
            writer.close()

    async def _answer(self, asked: PeerRequest, writer: asyncio.StreamWriter) -> None:
        if asked.path.endswith("/commands"):
            _write_whole(writer, *self._take(asked))
            await self.feed()
            return
        script: PeerScript | int | None = None
        if asked.is_opening:
            self.requests.append(asked)
            script = self._scripts.pop(0) if self._scripts else None
        if isinstance(script, int):
            _write_whole(writer, script, b"no")
        elif script is not None:
            await _follow_script(asked, script, writer)
        elif asked.path.endswith("/events"):
            stream = self._admitted(asked, SSE)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
            writer.write(b"transfer-encoding: chunked\r\n\r\n")
            self._following[writer] = stream
            await self.feed()
        else:
            await self._poll(asked, writer)

    def _admitted(self, asked: PeerRequest, wire: FrameEncoding) -> ServerStream:
        stream = ServerStream(wire=wire, degraded_reason=self._degraded_reason, now=time.monotonic())
        stream.receive(asked.body, now=time.monotonic())
        return stream

    async def _poll(self, asked: PeerRequest, writer: asyncio.StreamWriter) -> None:
        stream = self._admitted(asked, NATIVE)
        self.host.serve(stream, now=time.monotonic())
        sent = stream.frames_to_send()[0 if asked.is_opening else 1 :]
        while not sent:
            async with self._changed:
                await self._changed.wait()
            self.host.serve(stream, now=time.monotonic())
            sent = stream.frames_to_send()
        _write_polled(writer, sent)

    def _take(self, asked: PeerRequest) -> tuple[int, bytes]:
        frame = decode_client(asked.body)
        if not isinstance(frame, CommandFrame):
            return 204, b""
        stream = asked.headers["x-idempotency-key"]
        digest = secret_digest_of(asked.headers["x-idempotent-encryption-key"])
        try:
            self.host.do(read_command(frame, stream=stream, secret_digest=digest), at=time.monotonic())
        except Refused as refused:
            problem = problem_of(refused.error)
            return problem.status, msgspec.json.encode(problem)
        return 200, frames.encode(Ack(frame.seqno))


async def _follow_script(asked: PeerRequest, script: PeerScript, writer: asyncio.StreamWriter) -> None:
    """Send the script's frames, and reset the connection; a poll's answer breaks off in the middle, or has no more."""
    if asked.path.endswith("/events"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for frame in script.frames:
            for event in _as_events(frame):
                _write_command(writer, encode(event))
        _write_command(writer, b"id: 1-2\nevent: record\ndata: {" if script.is_broken else b"")
    elif script.is_broken:
        body = b'{"frames":[%b,%b' % (b",".join(script.frames), HALF)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body) + 100, body))
    else:
        _write_polled(writer, script.frames, more=b"false")
    await writer.drain()
    await asyncio.sleep(0)
    if not asked.path.endswith("/poll") or script.is_broken:
        raise ConnectionResetError


def _as_events(frame: bytes) -> list[ServerSentEvent]:
    try:
        decoded = msgspec.json.decode(frame)
    except msgspec.DecodeError:
        return [ServerSentEvent(frame, "message")]
    if decoded["type"] != "events":
        return [ServerSentEvent(frame, decoded["type"])]
    return [
        ServerSentEvent(msgspec.json.encode(event["record"]), "record", event["id"])
        for event in decoded["events"]
    ]


async def _read(reader: asyncio.StreamReader) -> PeerRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *rest = head.split("\r\n")
    pairs = (line.partition(": ") for line in rest if line)
    headers = {name.lower(): value for name, _, value in pairs}
    target = urlsplit(first.split(" ")[1])
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return PeerRequest(target.path, parse_qs(target.query), headers, body)


def _write_whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    phrase = HTTPStatus(status).phrase
    writer.write(f"HTTP/1.1 {status} {phrase}\r\n".encode())
    length = b"" if status == HTTPStatus.NO_CONTENT else b"content-length: %d\r\n" % len(body)
    writer.write(length + b"\r\n" + body)


def _write_polled(writer: asyncio.StreamWriter, sent: Sequence[bytes], *, more: bytes = b"true") -> None:
    _write_whole(writer, 200, b'{"frames":[%b],"more":%b}' % (b",".join(sent), more))


def _write_command(writer: asyncio.StreamWriter, piece: bytes) -> None:
    if piece and not writer.is_closing():
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
