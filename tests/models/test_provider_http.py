"""Promises of the HTTP layer; each model built on it has its own tests."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import re
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import pytest

from midstream.environment import World
from midstream.errors import (
    ModelError,
    ModelForgotError,
    ModelStalledError,
    ModelUnavailableError,
    UsageError,
)
from midstream.models import provider_http
from midstream.models.http_limits import HttpLimits
from midstream.models.provider_http import Provider
from midstream.protocol.sse import EVENT_BYTES_MAX, ServerSentEvent
from midstream.testing.fake_worlds import FakeWorld
from midstream.timing import StallBudgets
from tests.certificates import certificate
from tests.models.chat_server import WAIT_S, Answer, chat_server, delta, refusal, silence, stream

HEAD_ONLY = stream(ending="hang")
ONE_PIECE = stream(delta(content="a"), ending="hang")
LONG = 60.0
SHORT = 0.25
"""Seconds for a request from one end of a socket to the other, on a busy machine."""


async def test_only_the_wait_for_a_piece_counts_as_silence_and_one_timer_serves_all_pieces() -> None:
    class Timing(FakeWorld):
        timers = 0

        def later(self, seconds: float, do: Callable[[], None]) -> asyncio.Future[None]:
            self.timers += 1
            return super().later(seconds, do)

    world = Timing()
    pieces = [b"data: {}\n\n"] * 20
    async with chat_server(Answer(pieces, ending="hang")) as server:
        limits = HttpLimits(first_byte_s=LONG, between_bytes_s=5.0)
        provider = Provider(server.url, "m", limits=limits, world=world)
        asked = provider.events("POST", "/chat/completions", b"{}")
        async with contextlib.aclosing(asked) as events, asyncio.timeout(WAIT_S):
            seen = 0
            while seen < len(pieces):
                seen += len(await anext(events))
            assert world.timers <= 2, "the first byte has a limit of its own"
            await world.advance(50)  # The reader is slow.
            waiting = asyncio.ensure_future(anext(events))
            await world.settle()
            await world.advance(4)
            assert not waiting.done()
            await world.advance(2)
            with pytest.raises(ModelStalledError, match="sent nothing for 5 s"):
                await waiting


@pytest.mark.parametrize(
    ("answer", "limits", "stalls", "limit_s"),
    [
        (silence(), HttpLimits(first_byte_s=SHORT, between_bytes_s=LONG, connect_s=SHORT), None, 2 * SHORT),
        (HEAD_ONLY, HttpLimits(first_byte_s=SHORT, between_bytes_s=LONG), None, SHORT),
        (ONE_PIECE, HttpLimits(first_byte_s=LONG, between_bytes_s=SHORT), None, SHORT),
        (ONE_PIECE, HttpLimits(first_byte_s=SHORT, between_bytes_s=SHORT), None, SHORT),
        (HEAD_ONLY, None, StallBudgets(first_token_max_s=SHORT), SHORT),
        (
            ONE_PIECE,
            None,
            StallBudgets(first_token_max_s=LONG, between_tokens_max_s=0.2, upstream_tool_max_s=SHORT),
            SHORT,
        ),
    ],
    ids=["nothing", "head", "piece", "equal", "budget", "budget between"],
)
async def test_silence_is_cut_by_the_limit_in_effect(
    answer: Answer, limits: HttpLimits | None, stalls: StallBudgets | None, limit_s: float
) -> None:
    async with chat_server(answer) as server:
        provider = Provider(server.url, "m", limits=limits, world=World())
        with pytest.raises(ModelStalledError, match=f"sent nothing for {limit_s:g} s"):
            [each async for each in provider.events("POST", "/chat/completions", b"{}", stalls=stalls)]
        async with asyncio.timeout(WAIT_S):
            await server.left.wait()
        await provider.aclose()


async def test_a_first_byte_may_take_longer_than_the_later_ones() -> None:
    """The gate opens only after the limit between bytes has passed, which does not apply to the first one."""
    gate = asyncio.Event()
    answer = Answer(stream(delta(content="a")).pieces[:1], gate=gate)
    async with chat_server(answer) as server:
        limits = HttpLimits(first_byte_s=LONG, between_bytes_s=0.05)
        provider = Provider(server.url, "m", limits=limits, world=World())
        reading = asyncio.create_task(_all(provider))
        asyncio.get_running_loop().call_later(0.1, gate.set)
        assert sum(map(len, await asyncio.wait_for(reading, WAIT_S))) == 1
        await provider.aclose()


async def _all(provider: Provider) -> list[Sequence[ServerSentEvent]]:
    return [each async for each in provider.events("POST", "/chat/completions", b"{}")]


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://example.org", "http://", "http://host:port", ""])
def test_an_invalid_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(UsageError):
        Provider(url, "m", world=World())


async def test_a_missing_resource_is_reported_as_lost_and_other_refusals_are_not() -> None:
    async with chat_server(refusal(404), refusal(503), stream(delta(content="a"))) as server:
        provider = Provider(server.url, "m", world=World())
        path = "/chat/completions"
        with pytest.raises(ModelForgotError):
            [each async for each in provider.events("POST", path, b"{}", gone=(404,))]
        with pytest.raises(ModelUnavailableError):
            [each async for each in provider.events("POST", path, b"{}", gone=(404,))]
        received = [each async for each in provider.events("POST", path, b"{}", gone=(404,))]
        assert sum(len(each) for each in received) == 2
        await provider.aclose()


# --- over a scripted socket -----------------------------------------------------------------------------------------

TYPE = b"content-type: text/event-stream\r\n"
OK = b"HTTP/1.1 200 OK\r\n" + TYPE
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
HELLO = b"data: hello\n\n"
WHOLE = OK + b"content-length: 13\r\n\r\n" + HELLO

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ScriptedSocketServer:
    """A server that answers each request with the next bytes; None closes the connection."""

    def __init__(self, *answers: bytes | None, piece_bytes: int = 1 << 30) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""
        self._answers = list(answers)
        self._piece_bytes = piece_bytes

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: ([0-9]+)", head, re.IGNORECASE)
                self.requests.append(head + await reader.readexactly(int(length[1]) if length else 0))
                answer = self._answers.pop(0)
                if answer is None:
                    break
                for at in range(0, len(answer), self._piece_bytes):
                    writer.write(answer[at : at + self._piece_bytes])
                    await writer.drain()
                    await asyncio.sleep(0)
                if not self._answers or self._answers[0] is None:
                    break

    @property
    def heads(self) -> list[dict[str, str]]:
        """Return the headers of each request, with its first line under ""."""
        heads = [each.partition(b"\r\n\r\n")[0].decode().split("\r\n") for each in self.requests]
        return [{"": first, **dict(line.split(": ", 1) for line in lines)} for first, *lines in heads]


@contextlib.asynccontextmanager
async def serving(handle: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Run `handle` on each connection to an address; at the end wait for all of them."""
    open_connections: list[asyncio.Event] = []

    async def handle_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.append(is_over := asyncio.Event())
        try:
            await handle(reader, writer)
        finally:
            writer.close()
            is_over.set()

    server = await asyncio.start_server(handle_connection, "127.0.0.1", 0, ssl=tls)
    async with server, asyncio.timeout(WAIT_S):
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for is_over in open_connections:
            await is_over.wait()


@contextlib.asynccontextmanager
async def scripted(
    *answers: bytes | None, piece_bytes: int = 1 << 30, headers: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[ScriptedSocketServer, Provider]]:
    peer = ScriptedSocketServer(*answers, piece_bytes=piece_bytes)
    async with serving(peer.handle) as peer.url:
        provider = Provider(peer.url, "m", headers=headers, world=World())
        yield peer, provider
        await provider.aclose()


async def _event_data(provider: Provider, body: bytes = b"{}") -> list[bytes]:
    asked = provider.events("POST", "/chat/completions?b=c", body)
    return [event.data async for each in asked for event in each]


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 1 << 30])
@pytest.mark.parametrize(
    "answer",
    [
        WHOLE,
        CHUNKED + b"2\r\nda\r\nb;x=y\r\nta: hello\n\n\r\n0\r\ntrailer: x\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" + WHOLE,
        OK + b"\r\n" + HELLO,
        WHOLE.replace(b"1.1", b"1.0"),
        OK + b"content-encoding: gzip\r\n\r\n" + gzip.compress(HELLO),
    ],
    ids=["length", "chunks", "hints", "close", "1.0", "gzip"],
)
async def test_a_body_is_complete_however_it_is_split(answer: bytes, piece_bytes: int) -> None:
    async with scripted(answer, piece_bytes=piece_bytes) as (_, provider):
        assert await _event_data(provider) == [b"hello"]


@pytest.mark.parametrize(
    ("first", "connections"),
    [
        (WHOLE, 1),
        (CHUNKED + b"d\r\n" + HELLO + b"\r\n0\r\n\r\n", 1),
        (OK + b"connection: close\r\ncontent-length: 13\r\n\r\n" + HELLO, 2),
        (WHOLE + WHOLE, 2),
        (WHOLE.replace(b"1.1", b"1.0"), 2),
    ],
)
async def test_a_connection_is_kept_unless_the_server_ends_it(first: bytes, connections: int) -> None:
    async with scripted(first, WHOLE) as (peer, provider):
        assert await _event_data(provider) == [b"hello"]
        assert await _event_data(provider) == [b"hello"]
        assert peer.connections == connections


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200",
        OK + b"content-length: 20\r\n\r\n" + HELLO,
        OK + b"content-length: five\r\n\r\n" + HELLO,
        CHUNKED + b"5\r\nhe",
        CHUNKED + b"-5\r\nhello\r\n",
        CHUNKED + b"\r\nhello\r\n",
        CHUNKED + b"2\r\nhello\r\n",
        OK + b"content-encoding: gzip\r\n\r\n" + HELLO,
        WHOLE + b"and more",
        OK + b"x: " + b"y" * 200_000,
        OK + b"x: y\r\n" * 100_000,
    ],
)
async def test_a_response_that_is_cut_or_not_http_is_an_outage(answer: bytes | None) -> None:
    async with scripted(answer) as (_, provider):
        with pytest.raises(ModelUnavailableError, match="the connection to m failed"):
            await _event_data(provider)


async def test_a_server_that_does_not_listen_is_an_outage() -> None:
    async with scripted() as (_, provider):
        pass
    with pytest.raises(ModelUnavailableError, match="ClientConnectorError"):
        await _event_data(provider)


@pytest.mark.skipif(sys.platform != "linux", reason="a full backlog refuses on other systems")
async def test_a_connection_not_established_in_time_is_an_outage() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):  # More than its backlog holds.
            waiting = stack.enter_context(socket.socket())
            waiting.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(listening.getsockname())
        limits = HttpLimits(connect_s=0.1, first_byte_s=LONG)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        provider = Provider(url, "m", limits=limits, world=World())
        with pytest.raises(ModelUnavailableError, match="ConnectionTimeoutError"):
            await _event_data(provider)
        await provider.aclose()


@pytest.mark.slow
async def test_a_small_response_that_unpacks_to_a_large_event_is_refused() -> None:
    packed = gzip.compress(b"data: " + bytes(8 * EVENT_BYTES_MAX))
    answer = OK + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
    async with scripted(answer + packed) as (_, provider):
        with pytest.raises(ModelUnavailableError, match="above the limit"):
            await _event_data(provider)


@pytest.mark.slow
async def test_an_unread_response_stays_at_the_server() -> None:
    """A waiting reader must not fill the memory: the server cannot send the end before it reads."""
    size, sent = 64 << 20, asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"content-length: %d\r\n\r\n" % size)
        writer.write((b":" * 63 + b"\n") * (size // 64))
        await writer.drain()
        sent.set()

    async with serving(handle) as url:
        provider = Provider(url, "m", world=World())
        asked = provider.events("GET", "/responses/r")
        await anext(asked)
        for _ in range(100):  # Rounds of the loop, in which it could have come.
            await asyncio.sleep(0)
        assert not sent.is_set()
        async for _ in asked:
            pass
        await sent.wait()
        await provider.aclose()


async def test_a_large_request_is_sent_completely() -> None:
    async with scripted(WHOLE) as (peer, provider):
        body = b"x" * (8 << 20)
        assert await _event_data(provider, body) == [b"hello"]
        assert peer.requests[0].endswith(b"\r\n\r\n" + body)


async def test_a_server_that_reads_nothing_is_a_stall() -> None:
    is_given_up = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await is_given_up.wait()
        with contextlib.suppress(OSError):
            while await reader.read(1 << 20):
                pass

    async with serving(handle) as url:
        limits = HttpLimits(connect_s=SHORT, first_byte_s=SHORT)
        provider = Provider(url, "m", limits=limits, world=World())
        with pytest.raises(ModelStalledError):
            await _event_data(provider, b"x" * (32 << 20))
        is_given_up.set()
        await provider.aclose()


@pytest.mark.slow
async def test_unrequested_bytes_close_the_connection() -> None:
    is_answered, is_left = asyncio.Event(), asyncio.Event()
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(WHOLE)
        await is_answered.wait()
        if connections == 1:
            writer.write(WHOLE)
        with contextlib.suppress(OSError):
            await reader.read()
        is_left.set()

    async with serving(handle) as url:
        provider = Provider(url, "m", world=World())
        assert await _event_data(provider) == [b"hello"]
        is_answered.set()
        await is_left.wait()
        assert await _event_data(provider) == [b"hello"]
        assert connections == 2
        await provider.aclose()


async def test_the_request_head_has_only_the_needed_headers() -> None:
    async with scripted(WHOLE, WHOLE, headers={"X-Mine": "a", "User-Agent": "mine"}) as (peer, provider):
        await _event_data(provider)
        with_password = peer.url.replace("127", "me:pass%40word@127", 1)
        other = Provider(with_password, "m", headers={"Accept-Encoding": "gzip"}, world=World())
        await _event_data(other)
        await other.aclose()
    shared = {
        "": "POST /chat/completions?b=c HTTP/1.1",
        "Host": peer.url.removeprefix("http://"),
        "accept": "text/event-stream",
        "content-type": "application/json",
        "Content-Length": "2",
    }
    first, second = peer.heads
    assert first == shared | {"accept-encoding": "identity", "user-agent": "mine", "x-mine": "a"}
    assert second.pop("user-agent").startswith("midstream/")
    assert second == shared | {"accept-encoding": "gzip", "authorization": "Basic bWU6cGFzc0B3b3Jk"}


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\n", "a\0"])
def test_an_invalid_header_is_refused_at_once(value: str) -> None:
    with pytest.raises(UsageError, match="no header can carry"):
        Provider("http://127.0.0.1", "m", value, world=World())
    with pytest.raises(UsageError, match="no header can carry"):
        Provider("http://127.0.0.1", "m", headers={"x": value}, world=World())


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_never_receives_the_key(status: int) -> None:
    elsewhere = ScriptedSocketServer(WHOLE)
    async with serving(elsewhere.handle) as url:
        moved = f"HTTP/1.1 {status} Moved\r\nlocation: {url}/\r\ncontent-length: 0\r\n\r\n"
        async with scripted(moved.encode(), headers={"authorization": "Bearer key"}) as (_, provider):
            with pytest.raises(ModelError):
                await _event_data(provider)
    assert elsewhere.connections == 0


async def test_a_cookie_of_one_response_is_not_in_later_requests() -> None:
    async with scripted(WHOLE.replace(TYPE, TYPE + b"set-cookie: a=b\r\n"), WHOLE) as (peer, provider):
        await _event_data(provider)
        await _event_data(provider)
    assert [head.get("Cookie") for head in peer.heads] == [None, None]


async def test_the_users_netrc_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password word\n")
    monkeypatch.setenv("NETRC", str(netrc))
    async with scripted(WHOLE) as (peer, provider):
        await _event_data(provider)
    assert "authorization" not in {name.lower() for name in peer.heads[0]}


@pytest.mark.parametrize("prefix", ["http://", ""])
async def test_a_proxy_of_the_environment_is_used(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = ScriptedSocketServer(WHOLE)
    async with serving(proxy.handle) as url:
        monkeypatch.setenv("http_proxy", prefix + url.removeprefix("http://"))
        monkeypatch.setenv("no_proxy", "other.example")
        provider = Provider("http://model.example/v1", "m", "key", world=World())
        assert await _event_data(provider) == [b"hello"]
        await provider.aclose()
    assert proxy.heads[0][""] == "POST http://model.example/v1/chat/completions?b=c HTTP/1.1"


async def test_a_proxy_tunnels_tls_and_never_receives_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = ScriptedSocketServer(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
    async with serving(proxy.handle) as url:
        monkeypatch.setenv("all_proxy", url)
        provider = Provider("https://model.example/v1", "m", "secret-key", world=World())
        with pytest.raises(ModelUnavailableError):
            await _event_data(provider)
        await provider.aclose()
    assert proxy.requests[0].startswith(b"CONNECT model.example:443 ")
    assert b"secret-key" not in proxy.requests[0]


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_a_server_certificate_trusted_by_the_system_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_trusted: bool
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate(tmp_path / "server.pem"))
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem"))
    provider_http._tls.cache_clear()
    peer = ScriptedSocketServer(WHOLE)
    try:
        async with serving(peer.handle, tls=tls) as url:
            provider = Provider(url.replace("http:", "https:"), "m", "key", world=World())
            if is_trusted:
                assert await _event_data(provider) == [b"hello"]
            else:
                with pytest.raises(ModelUnavailableError, match="Certificate"):
                    await _event_data(provider)
            await provider.aclose()
    finally:
        provider_http._tls.cache_clear()
    assert len(peer.requests) == is_trusted


async def test_an_excepted_address_does_not_use_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    async with scripted(WHOLE) as (_, provider):
        assert await _event_data(provider) == [b"hello"]


def test_an_unsupported_proxy_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1")
    with pytest.raises(UsageError, match="socks5"):
        Provider("http://model.example/v1", "m", world=World())


def test_unclosed_connections_end_with_their_loop(caplog: pytest.LogCaptureFixture) -> None:
    def handle(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(WAIT_S)
            connection.recv(1 << 16)
            connection.sendall(WHOLE)
            while connection.recv(1 << 16):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT_S)
        thread = threading.Thread(target=handle, args=(listening,))
        thread.start()
        provider = Provider(f"http://127.0.0.1:{listening.getsockname()[1]}", "m", world=World())
        assert asyncio.run(_event_data(provider)) == [b"hello"]
        thread.join(WAIT_S)  # The connection was closed.
        assert not thread.is_alive()
    del provider
    gc.collect()
    assert not caplog.records
