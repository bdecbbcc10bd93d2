"""A WebSocket below ASGI: what an app hears and says, what the other side does, and what neither may do."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvicorn
import websockets
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

from midstream.server import sockets
from midstream.server.protocols import HTTP, WEBSOCKETS
from midstream.server.sockets import AsgiSocket, answer_to, scope_of
from tests.server.serving import WAIT_S

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
ANSWER = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
"""Of RFC 6455, section 1.3."""
HANDSHAKE = (
    b"GET /a%%20b?c=d HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: %b\r\n\r\n" % KEY
)

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def _asked(*headers: tuple[bytes, bytes], method: str = "GET", version: str = "1.1") -> Scope:
    return {"method": method, "http_version": version, "headers": [*headers]}


@contextlib.asynccontextmanager
async def serving(
    app: App, *, ping_s: float | None = None, bytes_max: int = 2**20
) -> AsyncIterator[tuple[str, int, ServerState]]:
    """Serve an app without a server around it: what it has open is to be seen."""
    config = _config(app, ping_s=ping_s, bytes_max=bytes_max)
    state = ServerState()
    made = lambda: HTTP(config, state, {})  # type: ignore[call-arg]  # noqa: E731
    async with await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0) as server:
        yield *server.sockets[0].getsockname(), state


def _config(app: App, *, ping_s: float | None = None, bytes_max: int = 2**20) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        ws=WEBSOCKETS,
        lifespan="off",
        log_config=None,
        proxy_headers=False,
        ws_ping_interval=ping_s,
        ws_max_size=bytes_max,
    )
    config.load()
    return config


def _frame(opcode: Opcode, body: bytes, *, is_last: bool = True) -> bytes:
    return Frame(opcode, body, is_last).serialize(mask=True)


async def _opened(
    host: str, port: int, more: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(HANDSHAKE)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
    assert head.startswith(b"HTTP/1.1 101 ")
    assert ANSWER in head
    writer.write(more)
    return reader, writer


def test_a_handshake_is_answered_by_its_key_and_what_is_none_is_not() -> None:
    key, version = (b"sec-websocket-key", KEY), (b"sec-websocket-version", b"13")
    assert answer_to(_asked(key, version)) == ANSWER
    for wrong in (
        _asked(version),
        _asked(key),
        _asked(key, key, version),
        _asked(key, version, version),
        _asked(key, (b"sec-websocket-version", b"8")),
        _asked((b"sec-websocket-key", b"?" * 24), version),
        _asked((b"sec-websocket-key", base64.b64encode(b"too short")), version),
        _asked(key, version, method="POST"),
        _asked(key, version, version="1.0"),
    ):
        assert answer_to(wrong) is None


def test_the_scope_of_a_socket_is_that_of_its_handshake() -> None:
    asked = {
        **_asked((b"sec-websocket-protocol", b"one, two"), (b"sec-websocket-protocol", b"three")),
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "scheme": "https",
        "root_path": "/mounted",
    }
    scope = scope_of(asked, b"/a%20b?c=d?e")
    assert (scope["type"], scope["scheme"], scope["path"]) == ("websocket", "wss", "/mounted/a b")
    assert (scope["raw_path"], scope["query_string"]) == (b"/mounted/a%20b", b"c=d?e")
    assert scope["subprotocols"] == ["one", "two", "three"]
    assert "method" not in scope


async def test_messages_go_both_ways_and_the_end_is_heard() -> None:
    heard: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append(await receive())
        await send(
            {"type": "websocket.accept", "subprotocol": scope["subprotocols"][0], "headers": [(b"x-a", b"b")]}
        )
        await send({"type": "websocket.send", "text": "welcome"})
        while heard[-1]["type"] != "websocket.disconnect":
            heard.append(await receive())
            if heard[-1]["type"] == "websocket.receive":
                await send({**heard[-1], "type": "websocket.send"})
        with pytest.raises(ClientDisconnected):
            await send({"type": "websocket.send", "text": "too late"})

    async with (
        serving(app) as (host, port, state),
        websockets.connect(f"ws://{host}:{port}/", subprotocols=[websockets.Subprotocol("s")]) as socket,
    ):
        assert socket.response is not None
        assert (socket.subprotocol, socket.response.headers["x-a"]) == ("s", "b")
        assert await asyncio.wait_for(socket.recv(), WAIT_S) == "welcome"
        for said in ("größer", b"\0\xff", ["a", "b"]):
            await socket.send(said)
            assert await asyncio.wait_for(socket.recv(), WAIT_S) == ("ab" if isinstance(said, list) else said)
        task = next(iter(state.tasks))
        await socket.close(4001, "enough")
        await asyncio.wait_for(task, WAIT_S)
    assert heard[0] == {"type": "websocket.connect"}
    assert heard[-1] == {"type": "websocket.disconnect", "code": 4001}


async def test_the_answer_and_the_first_words_are_one_packet() -> None:
    """Each packet of its own wakes the client once more."""
    written: list[bytes] = []

    class Counting(asyncio.Transport):
        def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
            assert isinstance(protocol, AsgiSocket)

        def write(self, data: bytes | bytearray | memoryview) -> None:
            written.append(bytes(data))

        def close(self) -> None:
            written.append(b"closed")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "one"})
        await send({"type": "websocket.send", "text": "two"})
        await asyncio.get_running_loop().create_future()

    state = ServerState()
    socket = AsgiSocket(_config(app), state, Counting(), {}, ANSWER)
    (task,) = state.tasks
    for _ in range(5):
        await asyncio.sleep(0)
    (packet,) = written
    assert packet.endswith(b"\r\n\r\n" + b"\x81\x03one" + b"\x81\x03two")
    task.cancel()
    await asyncio.wait([task])
    assert written[1:] == [b"closed"]
    socket.connection_lost(None)
    assert not state.connections


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (_frame(Opcode.TEXT, b"\xff"), 1007),
        (_frame(Opcode.CONT, b"of nothing"), 1002),
        (_frame(Opcode.TEXT, b"x" * 100), 1009),
        (b"\x81\x01x", 1002),
    ],
)
async def test_who_breaks_the_rules_is_told_and_the_app_hears_the_end(said: bytes, code: int) -> None:
    heard: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        messages = [await receive()]
        await send({"type": "websocket.accept"})
        while messages[-1]["type"] != "websocket.disconnect":
            messages.append(await receive())
        heard.set_result(messages)

    async with serving(app, bytes_max=64) as (host, port, state):
        reader, writer = await _opened(host, port, said)
        told = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        await asyncio.wait_for(heard, WAIT_S)
        assert not state.connections
    assert told[0] == 0x88
    assert int.from_bytes(told[2:4]) == code
    assert heard.result()[-1] == {"type": "websocket.disconnect", "code": code}


class Ear:
    """An app that accepts and listens to the end."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.is_over = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while not self.is_over.is_set():
            self.heard.append(await receive())
            if self.heard[-1]["type"] == "websocket.disconnect":
                self.is_over.set()


async def test_what_was_said_before_a_close_is_heard_and_what_comes_after_it_is_not() -> None:
    ear = Ear()
    async with serving(ear) as (host, port, _):
        said = [
            _frame(Opcode.TEXT, b"one"),
            _frame(Opcode.TEXT, b"a piece", is_last=False),
            _frame(Opcode.PING, b"p"),
            _frame(Opcode.CLOSE, b"\x0f\xa1"),
            _frame(Opcode.TEXT, b"two"),
        ]
        reader, writer = await _opened(host, port, b"".join(said))
        told = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        await asyncio.wait_for(ear.is_over.wait(), WAIT_S)
    assert told == b"\x8a\x01p" + b"\x88\x02\x0f\xa1"
    assert ear.heard == [
        {"type": "websocket.receive", "text": "one"},
        {"type": "websocket.disconnect", "code": 4001},
    ]


async def test_a_client_that_goes_without_a_word_is_heard_to_have_gone() -> None:
    ear = Ear()
    async with serving(ear) as (host, port, state):
        _, writer = await _opened(host, port)
        writer.transport.abort()
        await asyncio.wait_for(ear.is_over.wait(), WAIT_S)
        assert not state.connections
    assert ear.heard == [{"type": "websocket.disconnect", "code": 1006}]


async def test_a_message_that_nobody_takes_waits_on_the_other_side() -> None:
    go, taken = asyncio.Event(), asyncio.Event()
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await go.wait()
        while (message := await receive())["type"] == "websocket.receive":
            heard.append(message["text"])
        taken.set()

    async with serving(app) as (host, port, state):
        reader, writer = await _opened(host, port)
        body = b"x" * 2**16
        sending = 0
        async with asyncio.timeout(WAIT_S):
            while writer.transport.get_write_buffer_size() < 2**20:  # as much as the system takes, and more
                writer.write(_frame(Opcode.TEXT, body))
                sending += 1
                await asyncio.sleep(0)
        (socket,) = state.connections
        assert isinstance(socket, AsgiSocket)
        assert 0 < len(socket._heard) <= 8 < sending, "more than one read"
        go.set()
        writer.write(_frame(Opcode.CLOSE, b""))
        await asyncio.wait_for(taken.wait(), WAIT_S)
        await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
    assert (len(heard), {*map(len, heard)}) == (sending, {len(body)})


async def test_a_client_that_does_not_read_holds_the_app_up_and_frees_it_when_it_goes() -> None:
    sent = 0
    freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await receive()
        await send({"type": "websocket.accept"})
        try:
            while True:
                await send({"type": "websocket.send", "bytes": bytes(2**20)})
                sent += 1
                await asyncio.sleep(0)
        except ClientDisconnected:
            freed.set_result(None)
            raise

    async with serving(app) as (host, port, state):
        _, writer = await _opened(host, port)
        (socket,) = state.connections
        assert isinstance(socket, AsgiSocket)
        async with asyncio.timeout(WAIT_S):
            while socket._writable is None:  # noqa: ASYNC110 - nobody tells when the system takes no more
                await asyncio.sleep(0)
        before = sent
        for _ in range(100):
            await asyncio.sleep(0)
        assert sent == before
        writer.transport.abort()
        await asyncio.wait_for(freed, WAIT_S)


async def test_a_client_that_does_not_read_is_not_waited_for_when_the_app_is_done() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        try:
            async with asyncio.timeout(0.2):
                while True:
                    await send({"type": "websocket.send", "bytes": bytes(2**20)})
        except TimeoutError:
            return

    async with serving(app) as (host, port, state):
        _, writer = await _opened(host, port)
        (socket,) = state.connections
        async with asyncio.timeout(WAIT_S):
            while state.connections:  # noqa: ASYNC110 - it leaves without telling anybody
                await asyncio.sleep(0)
        assert isinstance(socket, AsgiSocket)
        assert socket._heard[-1] == {"type": "websocket.disconnect", "code": 1006}
        writer.close()


@pytest.mark.parametrize(
    "wrong",
    [
        [{"type": "websocket.send", "text": "before the handshake was answered"}],
        [{"type": "websocket.accept"}, {"type": "websocket.accept"}],
        [
            {"type": "websocket.accept"},
            {"type": "websocket.http.response.start", "status": 200, "headers": []},
        ],
    ],
)
async def test_an_app_that_says_what_it_may_not_is_stopped(wrong: list[Message]) -> None:
    stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        for message in wrong[:-1]:
            await send(message)
        with pytest.raises(RuntimeError):
            await send(wrong[-1])
        stopped.set_result(None)

    async with serving(app) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HANDSHAKE)
        await asyncio.wait_for(stopped, WAIT_S)
        await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()


async def test_a_handshake_is_refused_by_a_status() -> None:
    async def forbids(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.close"})

    async def answers(scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "websocket.http.response.start", "status": 404, "headers": [(b"x-a", b"b")]}
        await send(start)
        await send({"type": "websocket.http.response.body", "body": b"no", "more_body": True})
        await send({"type": "websocket.http.response.body", "body": b"where"})

    async def forgets(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.send", "text": "not yet accepted"})

    async def refusal_of(app: App) -> tuple[int, dict[str, str], bytes]:
        async with serving(app) as (host, port, state):
            with pytest.raises(websockets.InvalidStatus) as refused:
                await websockets.connect(f"ws://{host}:{port}/")
            assert not state.connections
        response = refused.value.response
        return response.status_code, dict(response.headers.raw_items()), bytes(response.body or b"")

    status, headers, body = await refusal_of(answers)
    assert (status, headers["x-a"], headers["connection"], body) == (404, "b", "close", b"nowhere")
    for app, expected in ((forbids, 403), (forgets, 500), (fails, 500)):
        status, headers, body = await refusal_of(app)
        assert (status, headers["content-type"]) == (expected, "application/problem+json")
        assert json.loads(body)["status"] == expected


async def test_an_app_that_fails_ends_without_a_close(caplog: pytest.LogCaptureFixture) -> None:
    async def fails(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        raise ValueError("a bug")

    async with serving(fails) as (host, port, _):
        reader, writer = await _opened(host, port)
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [
        "Exception in ASGI application"
    ]


async def test_a_client_that_answers_no_ping_is_given_up_and_one_that_does_is_not() -> None:
    ear = Ear()
    async with serving(ear, ping_s=0.05) as (host, port, _):
        reader, writer = await _opened(host, port)
        first = await asyncio.wait_for(reader.readexactly(3), WAIT_S)
        assert first[:2] == b"\x89\x01"
        writer.write(_frame(Opcode.PONG, b"of another") + _frame(Opcode.PONG, first[2:]))
        second = await asyncio.wait_for(reader.readexactly(3), WAIT_S)
        assert second[:2] == b"\x89\x01"
        assert second != first
        told = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        await asyncio.wait_for(ear.is_over.wait(), WAIT_S)
    assert (told[0], int.from_bytes(told[2:4])) == (0x88, 1011)
    assert ear.heard == [{"type": "websocket.disconnect", "code": 1011}]


async def test_a_server_that_ends_says_goodbye() -> None:
    ear = Ear()
    async with serving(ear) as (host, port, state):
        reader, writer = await _opened(host, port)
        for each in {*state.connections}:
            each.shutdown()
        told = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
        await asyncio.wait_for(ear.is_over.wait(), WAIT_S)
    assert told == b"\x88\x02\x03\xf4"
    assert ear.heard == [{"type": "websocket.disconnect", "code": 1012}]


async def test_a_client_that_does_not_answer_a_close_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "CLOSE_S", 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.close", "code": 1013, "reason": "later"})
        with pytest.raises(ClientDisconnected):
            await send({"type": "websocket.close"})

    async with serving(app) as (host, port, _):
        reader, writer = await _opened(host, port)
        told = await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()
    assert told == b"\x88\x07\x03\xf5later"
