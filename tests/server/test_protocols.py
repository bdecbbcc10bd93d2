"""What is no HTTP, or no handshake, is refused in the words of all else; nobody beside it notices."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
import uvicorn
import websockets
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from midstream.server import protocols
from midstream.server.protocols import WEBSOCKETS, PlainHttp, WebSockets
from tests.server.serving import WAIT_S, make_app, served

HANDSHAKE = (
    b"GET /v1/sessions/s1/stream HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
)
KEY = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (b"\x16\x03\x01\x00\r\n\r\n", 400, "bad_request"),
        (b"GET / HTTP/x\r\n\r\n", 400, "bad_request"),
        (b"GET /\0 HTTP/1.1\r\n\r\n", 400, "bad_request"),
        (
            b"POST /v1/probe/chunks HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n",
            400,
            "bad_request",
        ),
        (HANDSHAKE + b"\r\n", 400, "bad_request"),
        (HANDSHAKE + KEY + b"sec-websocket-version: 7\r\n\r\n", 400, "bad_request"),
    ],
)
async def test_what_is_no_request_is_refused_as_all_else_and_harms_nobody(
    said: bytes, status: int, code: str
) -> None:
    async with served(make_app()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        head, _, body = (await asyncio.wait_for(reader.read(), WAIT_S)).partition(b"\r\n\r\n")
        writer.close()
        assert (await server.http.get("/health")).status_code == 200
    line, *headers = head.decode().lower().split("\r\n")
    assert line.startswith(f"http/1.1 {status} ")
    assert {"content-type: application/problem+json", "connection: close"} <= {*headers}
    problem = json.loads(body)
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["next"] != "Do not repeat this request as it is."


@pytest.mark.parametrize(
    ("said", "is_second"), [(b"", False), (b"GET /health HT", False), (b"GET /hea", True)]
)
async def test_headers_that_do_not_come_are_not_waited_for_for_ever(
    said: bytes,
    is_second: bool,  # noqa: FBT001 - a case
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(make_app()) as server:
        if not is_second:
            monkeypatch.setattr(protocols, "HEADERS_S", 0.05)
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        if is_second:
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), WAIT_S)
            monkeypatch.setattr(protocols, "HEADERS_S", 0.05)
        writer.write(said)
        with contextlib.suppress(ConnectionResetError):  # what came after the end is answered so
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()


async def test_who_has_said_what_it_wants_may_wait_for_the_answer() -> None:
    """The time for headers is over while an answer is under way, and while a WebSocket is open: nothing happens."""
    made: list[PlainHttp] = []
    asked, go = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            assert (await receive())["text"] == "still here"
            await send({"type": "websocket.close"})
            return
        asked.set()
        await go.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    config, state = uvicorn.Config(app, ws=WEBSOCKETS, lifespan="off", log_config=None), ServerState()

    def make() -> PlainHttp:
        made.append(PlainHttp(config, state, {}))
        return made[-1]

    config.load()
    async with await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(asked.wait(), WAIT_S)
        async with websockets.connect(f"ws://{host}:{port}/") as socket:
            for each in made:
                each._give_up()
            await socket.send("still here")
            await asyncio.wait_for(socket.wait_closed(), WAIT_S)
            assert socket.close_code == 1000
        go.set()
        assert (await asyncio.wait_for(reader.readline(), WAIT_S)).startswith(b"HTTP/1.1 204")
        writer.close()
        assert len(made) == 2


class Line(asyncio.Transport):
    """A connection that keeps what is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_answered = asyncio.Event()
        self.pauses = 0
        self.is_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))
        self.is_answered.set()

    def pause_reading(self) -> None:
        self.pauses, self.is_paused = self.pauses + 1, True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """What has ended is not looked at."""


BODY: list[Message] = [
    {"type": "http.response.body", "body": b"o", "more_body": True},
    {"type": "http.response.body", "body": b"k"},
]


@pytest.mark.parametrize(
    ("asked", "headers", "body", "with_head", "after_it"),
    [
        (b"GET / HTTP/1.1", [(b"content-length", b"2")], BODY, b"o", b"k"),
        (b"GET / HTTP/1.1", [(b"content-length", b"0")], [{"type": "http.response.body"}], b"", b""),
        (b"GET / HTTP/1.1", [(b"content-length", b"2")], [], b"", b""),  # it breaks off: nothing is held back
        (b"GET / HTTP/1.1", [], BODY, b"", b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n"),
        (b"HEAD / HTTP/1.1", [(b"content-length", b"2")], BODY, b"", b""),
        (b"GET / HTTP/1.1\r\nexpect: 100-continue", [(b"content-length", b"2")], BODY, b"", b"ok"),
    ],
)
async def test_a_head_that_tells_a_length_goes_with_the_body(
    asked: bytes, headers: list[tuple[bytes, bytes]], body: list[Message], with_head: bytes, after_it: bytes
) -> None:
    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for message in body:
            await send(message)

    line, config = Line(), uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    protocol = PlainHttp(config, ServerState(), {})
    protocol.connection_made(line)
    for _ in range(2 if body else 1):  # a kept connection begins anew, one that broke off does not
        line.written.clear()
        protocol.data_received(asked + b"\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(asyncio.gather(*protocol.tasks), WAIT_S)
        *_, head = (number for number, each in enumerate(line.written) if each.startswith(b"HTTP/1.1"))
        assert line.written[head].partition(b"\r\n\r\n")[2] == with_head
        assert b"".join(line.written[head + 1 :]) == after_it
    protocol.connection_lost(None)


async def _talk(line: Line, app: ASGIApp, *said: bytes) -> None:
    """Let an app have a WebSocket over which all this comes at once, and wait until it is done."""
    config = uvicorn.Config(app, ws=WEBSOCKETS, lifespan="off", log_config=None)
    config.load()
    protocol = WebSockets(config, ServerState(), {})
    protocol.connection_made(line)
    protocol.data_received(HANDSHAKE + KEY + b"sec-websocket-version: 13\r\n\r\n")
    await asyncio.wait_for(line.is_answered.wait(), WAIT_S)
    masked = (bytes([0x81, 0x80 | len(each)]) + b"\0\0\0\0" + each for each in said)
    protocol.data_received(b"".join(masked))
    await asyncio.wait_for(asyncio.gather(*protocol.tasks), WAIT_S)
    protocol.connection_lost(None)


async def test_a_message_that_says_that_more_follows_goes_with_that() -> None:
    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        for text, more in (("one", True), ("two", False), ("three", False)):
            await send({"type": "websocket.send", "text": text, "more": more})

    line = Line()
    await _talk(line, app)
    assert line.written[1:3] == [b"\x81\x03one\x81\x03two", b"\x81\x05three"]


@pytest.mark.parametrize(("said", "pauses"), [([b"a"], 0), ([b"a", b"b"], 1), ([b"a", b"b", b"c"], 1)])
async def test_reading_stops_where_a_second_message_waits(said: list[bytes], pauses: int) -> None:
    line, heard = Line(), list[tuple[str, bool]]()

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        for _ in said:
            heard.append(((await receive())["text"], line.is_paused))

    await _talk(line, app, *said)
    last = len(said) - 1  # when that is taken, nothing waits any more
    assert heard == [(each.decode(), number < last) for number, each in enumerate(said)]
    assert line.pauses == pauses


async def test_compression_is_not_agreed_upon() -> None:
    async with served(make_app()) as server:
        asked = websockets.connect(
            f"{server.url.replace('http', 'ws')}/v1/sessions/s1/stream", compression="deflate"
        )
        async with asked as socket:
            assert socket.response is not None
            assert "sec-websocket-extensions" not in socket.response.headers
