"""Bytes that are no HTTP request or no handshake are refused with a problem; other connections are unaffected."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import sys
import textwrap
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import uvicorn
import websockets
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from midstream.server import uvicorn_protocols
from midstream.server.api import request_bodies
from midstream.server.raw_connections import RawConnections, RawLimits
from midstream.server.uvicorn_protocols import HELD_BYTES_MAX, PlainHttp, protocols
from midstream.testing.scripted_model import Stall, text
from tests.server.serving import WAIT_S, command, make_app, served
from tests.spec import spec

HANDSHAKE = (
    b"GET /v1/sessions/s1/stream HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
)
KEY = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
VERSION = b"sec-websocket-version: 13\r\n"
TOO_LARGE = (431, "request_header_fields_too_large")
TOO_LONG = (414, "uri_too_long")


@pytest.mark.parametrize(
    ("data", "status", "code"),
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
        (HANDSHAKE + KEY + VERSION + b"content-length: 5\r\n\r\n", 400, "bad_request"),
        (HANDSHAKE + KEY + VERSION + b"x: " + 9000 * b"x" + b"\r\n\r\n", *TOO_LARGE),
        (HANDSHAKE + KEY + VERSION + 200 * b"x: x\r\n" + b"\r\n", *TOO_LARGE),
        (HANDSHAKE.replace(b" HTTP", b"?" + 9000 * b"x" + b" HTTP") + KEY + VERSION + b"\r\n", *TOO_LONG),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + HELD_BYTES_MAX * b"x", *TOO_LARGE),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\n" + HELD_BYTES_MAX // 6 * b"x: x\r\n", *TOO_LARGE),
        (b"GET /" + HELD_BYTES_MAX * b"x", *TOO_LONG),
        (b"GET /" + HELD_BYTES_MAX * b"x" + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", *TOO_LONG),
        ((HELD_BYTES_MAX // 2 + 1) * b"\r\n", *TOO_LARGE),
    ],
)
async def test_a_malformed_request_is_refused_with_a_problem_and_affects_no_other(
    data: bytes, status: int, code: str
) -> None:
    async with served(make_app()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        head, _, body = (await asyncio.wait_for(reader.read(), WAIT_S)).partition(b"\r\n\r\n")
        writer.close()
        assert (await server.http.get("/health")).status_code == 200
    line, *headers = head.decode().lower().split("\r\n")
    assert line.startswith(f"http/1.1 {status} ")
    assert {"content-type: application/problem+json", "connection: close"} <= {*headers}
    problem = json.loads(body)
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["next"] != "Do not repeat this request as it is."


OLD = (
    "GET /v1/sessions/s1/{} HTTP/1.0\r\nhost: localhost\r\nconnection: {}\r\n"
    "x-idempotency-key: k1\r\nx-idempotent-encryption-key: s\r\n\r\n"
)


@contextlib.asynccontextmanager
async def http_1_0_response(
    url: str, what: str, connection: str = "close"
) -> AsyncIterator[asyncio.StreamReader]:
    """Begin a turn and read it in HTTP/1.0, where the end of a body is the end of the connection."""
    headers = {"x-idempotency-key": "k1", "x-idempotent-encryption-key": "s"}
    async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        await client.post("/v1/sessions/s1/commands", json=command(), headers=headers)
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    try:
        writer.write(OLD.format(what, connection).encode())
        async with asyncio.timeout(WAIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"chunked" not in head
            yield reader
    finally:
        writer.close()


@spec("STREAM-27")
async def test_a_cut_body_without_length_resets_its_connection() -> None:
    async with served(make_app([[Stall()]])) as server, http_1_0_response(server.url, "events") as reader:
        server.stop.set()
        with pytest.raises(ConnectionResetError):
            await reader.read()


@spec("STREAM-27")
async def test_a_complete_body_without_length_ends_its_connection_cleanly() -> None:
    async with served(make_app([text("hello")])) as server:
        for what in ("events", "records", "poll?n=0"):
            async with http_1_0_response(server.url, what) as reader:
                assert await reader.read()


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
async def test_a_body_of_unknown_length_has_no_chunks_where_the_client_does_not_support_them(
    connection: str,
) -> None:
    async with served(make_app([text("hello")])) as server:
        async with http_1_0_response(server.url, "events", connection) as reader:
            events = (await reader.read()).decode()
        assert events.startswith("retry: 1000\n\nid: ")
        assert {line.partition(":")[0] for line in events.splitlines()} == {
            "retry",
            "id",
            "event",
            "data",
            "",
        }
        exported = (await server.http.get("/v1/sessions/s1/records")).content
        async with http_1_0_response(server.url, "records", connection) as reader:
            assert await reader.read() == exported


OLD_SERVER = """
    import asyncio, sys
    sys.modules["httptools"] = None  # an install without compiled parts
    from midstream import Agent, asgi
    from midstream.server.uvicorn_protocols import HttpProtocol
    from midstream.server.uvicorn_server import serve
    from midstream.testing.scripted_model import ScriptedModel, Stall

    assert HttpProtocol.__name__ == "H11Protocol"
    app = asgi(Agent(ScriptedModel([[Stall()]])), store="sessions.db")
    asyncio.run(serve(app, port=0, on_listening=lambda url: print(url, flush=True)))
"""


@spec("STREAM-27")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_server_without_compiled_parts_resets_cut_bodies_too(
    number: signal.Signals, tmp_path: Path
) -> None:
    program = (sys.executable, "-c", textwrap.dedent(OLD_SERVER))
    process = await asyncio.create_subprocess_exec(*program, cwd=tmp_path, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), WAIT_S)).decode().strip()
        async with http_1_0_response(url, "events") as reader:
            process.send_signal(number)
            with pytest.raises(ConnectionResetError):
                await reader.read()
        await asyncio.wait_for(process.wait(), WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize(
    ("data", "is_second"), [(b"", False), (b"GET /health HT", False), (b"GET /hea", True)]
)
async def test_the_wait_for_headers_is_bounded(
    data: bytes,
    is_second: bool,  # noqa: FBT001 - a case
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(make_app()) as server:
        if not is_second:
            monkeypatch.setattr(uvicorn_protocols, "HEADERS_S", 0.05)
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        if is_second:
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), WAIT_S)
            monkeypatch.setattr(uvicorn_protocols, "HEADERS_S", 0.05)
        writer.write(data)
        with contextlib.suppress(ConnectionResetError):  # Bytes after the end are answered this way.
            assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()


POST = b"POST /v1/sessions/s1/commands HTTP/1.1\r\nhost: localhost\r\ncontent-length: 15\r\n\r\n"
"""The head of a chunk."""


@pytest.mark.parametrize("pieces", [[POST, b"{}"], [POST + b"{}"]])
async def test_the_wait_for_a_body_is_bounded(pieces: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_bodies, "BODY_S", 0.05)
    async with served(make_app()) as server:
        reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
        assert head.startswith(b"HTTP/1.1 503 ")
        writer.close()


async def test_the_wait_for_trailers_is_bounded() -> None:
    made: list[PlainHttp] = []
    asked = asyncio.Event()

    async def app(_: Scope, receive: Receive, __: Send) -> None:
        asked.set()
        while (await receive()).get("more_body"):
            pass

    async with listening(app, made) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        await asyncio.wait_for(asked.wait(), WAIT_S)
        for piece in (HELD_BYTES_MAX * b"1\r\nx\r\n", b"0\r\n", b"x: " + HELD_BYTES_MAX * b"x"):
            made[0].data_received(piece)
        assert (await asyncio.wait_for(reader.read(), WAIT_S)).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_no_time_limit_holds_for_a_client_whose_answer_or_websocket_is_open() -> None:
    """The limit for headers is lifted during an answer, and while a WebSocket is open."""
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

    async with listening(app, made) as (host, port):
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


async def test_the_protocol_of_a_handshake_is_freed_without_the_garbage_collector() -> None:
    made: list[weakref.ref[PlainHttp]] = []
    received: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        assert (b"x-long", b"words") in scope["headers"]
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            received.append(message["text"])
            await send({"type": "websocket.send", "text": message["text"]})

    raw = RawConnections(RawLimits())
    of_sockets = protocols(raw)[1]
    config, state = uvicorn.Config(app, ws=of_sockets, lifespan="off", log_config=None), ServerState()

    def make() -> PlainHttp:
        http = PlainHttp(config, state, {}, raw=raw)
        made.append(weakref.ref(http))
        return http

    config.load()
    gc.disable()  # A garbage collection may be years away.
    try:
        async with await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            headers = {"x-long": "words"}
            async with websockets.connect(f"ws://{host}:{port}/", additional_headers=headers) as socket:
                for word in ("one", "two"):
                    await socket.send(word)
                    assert await asyncio.wait_for(socket.recv(), WAIT_S) == word
                assert [each() for each in made] == [None]
            await asyncio.wait_for(asyncio.gather(*state.tasks), WAIT_S)
    finally:
        gc.enable()
    assert received == ["one", "two"]


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, made: list[PlainHttp]) -> AsyncIterator[tuple[str, int]]:
    """Serve an app with only our protocols, and collect the created ones."""
    raw = RawConnections(RawLimits())
    of_sockets = protocols(raw)[1]
    config, state = uvicorn.Config(app, ws=of_sockets, lifespan="off", log_config=None), ServerState()

    def make() -> PlainHttp:
        made.append(PlainHttp(config, state, {}, raw=raw))
        return made[-1]

    config.load()
    async with await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()


async def test_compression_is_not_negotiated() -> None:
    async with served(make_app()) as server:
        asked = websockets.connect(
            f"{server.url.replace('http', 'ws')}/v1/sessions/s1/stream", compression="deflate"
        )
        async with asked as socket:
            assert socket.response is not None
            assert "sec-websocket-extensions" not in socket.response.headers
