"""HTTP/1.1 over one connection: every way a body can come, and every way it can break."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx2
import pytest

from midstream.integrations import plain_http
from midstream.integrations.plain_http import PlainClient, is_plain

WAIT_S = 30.0
LIMITS = httpx2.Timeout(WAIT_S)
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Scripted:
    """A server that answers each request with the next bytes; None closes the connection."""

    def __init__(self, *answers: bytes | None) -> None:
        self.url = ""
        self.requests: list[bytes] = []
        self.connections = 0
        self._answers = list(answers)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: ([0-9]+)", head)
                self.requests.append(head + await reader.readexactly(int(length[1]) if length else 0))
                answer = self._answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if not self._answers or self._answers[0] is None:
                    break


class Client(PlainClient):
    """One that reads whole answers."""

    async def post(self, url: str, content: bytes = b"hi", **headers: str) -> tuple[int, bytes]:
        async with (
            asyncio.timeout(WAIT_S),
            self.stream("POST", url, content=content, headers=headers) as answer,
        ):
            return answer.status_code, b"".join([piece async for piece in answer.aiter_bytes()])


@contextlib.asynccontextmanager
async def serving(talk: Talk) -> AsyncIterator[str]:
    """Talk so to whoever connects at the address; in the end wait until all was said."""
    talks: list[asyncio.Event] = []

    async def talked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        talks.append(is_over := asyncio.Event())
        try:
            await talk(reader, writer)
        finally:
            writer.close()
            is_over.set()

    server = await asyncio.start_server(talked, "127.0.0.1", 0)
    async with server, asyncio.timeout(WAIT_S):
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        for is_over in talks:
            await is_over.wait()


@contextlib.asynccontextmanager
async def scripted(*answers: bytes | None) -> AsyncIterator[tuple[Scripted, Client]]:
    peer = Scripted(*answers)
    client = Client(LIMITS)
    async with serving(peer.talk) as url:
        peer.url = f"{url}a?b=c"
        yield peer, client
        await client.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        CHUNKED + b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\ntrailer: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    ],
)
async def test_a_body_is_whole_however_it_comes(answer: bytes) -> None:
    async with scripted(answer) as (peer, client):
        assert await client.post(peer.url) == (200, b"hello")
        assert peer.requests[0].startswith(b"POST /a?b=c HTTP/1.1\r\n")
        assert peer.requests[0].endswith(b"\r\n\r\nhi")
        assert b"content-length: 2" in peer.requests[0].lower()


@pytest.mark.parametrize(
    ("first", "connections"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na", 1),
        (CHUNKED + b"1\r\na\r\n0\r\n\r\n", 1),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 1),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 1),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\na", 2),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nand more", 2),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\na", 2),
    ],
)
async def test_a_connection_is_kept_unless_the_server_ends_it(first: bytes, connections: int) -> None:
    second = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nb"
    async with scripted(first, second) as (peer, client):
        await client.post(peer.url)
        assert await client.post(peer.url) == (200, b"b")
        assert peer.connections == connections


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello",
        CHUNKED + b"5\r\nhe",
        CHUNKED + b"-5\r\nhello\r\n",
        CHUNKED + b"\r\nhello\r\n",
        CHUNKED + b"2\r\nhello\r\n",
        CHUNKED + b"1;" + b"x" * 100_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: five\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000,
    ],
)
async def test_what_breaks_off_or_is_no_http_is_an_error_of_httpx2(answer: bytes | None) -> None:
    async with scripted(answer) as (peer, client):
        with pytest.raises(httpx2.HTTPError):
            await client.post(peer.url)


async def test_nobody_listens() -> None:
    async with scripted() as (peer, client):
        pass
    with pytest.raises(httpx2.ConnectError):
        await client.post(peer.url)


async def test_silence_is_bounded() -> None:
    async def talk(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(talk) as url:
        with pytest.raises(httpx2.ReadTimeout):
            await Client(httpx2.Timeout(0.01)).post(url)


async def test_a_body_that_was_not_read_to_its_end_costs_the_connection() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nb"
    async with scripted(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel", whole) as (peer, client):
        async with client.stream("POST", peer.url, content=b"hi") as answer:
            assert await anext(answer.aiter_bytes()) == b"hel"
        assert await client.post(peer.url) == (200, b"b")
        assert peer.connections == 2


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_it_does_not_matter_where_the_network_cuts(size: int) -> None:
    answer = b"HTTP/1.1 103 Early Hints\r\n\r\n" + CHUNKED + b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\na: b\r\n\r\n"
    reading = plain_http._Reading()
    for at in range(0, len(answer), size):
        assert not reading.is_done
        reading.feed(answer[at : at + size])
    assert (reading.status, reading.headers) == (200, {"transfer-encoding": "chunked"})
    assert (reading.is_done, reading.is_kept, reading.taken()) == (True, True, b"hello")


async def test_what_nobody_reads_stays_with_the_server() -> None:
    """A reader that waits must not fill the memory: the server cannot send the end before it reads."""
    size, sent = 64 << 20, asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        writer.write(bytes(size))
        await writer.drain()
        sent.set()

    async with serving(talk) as url, Client(LIMITS).stream("GET", url) as answer:
        pieces = answer.aiter_bytes()
        first = len(await anext(pieces))
        for _ in range(100):  # rounds of the loop, in which it could have come
            await asyncio.sleep(0)
        assert not sent.is_set()
        assert first + sum([len(piece) async for piece in pieces]) == size


async def test_a_large_request_goes_out_whole() -> None:
    async with scripted(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nb") as (peer, client):
        content = b"x" * (8 << 20)
        assert await client.post(peer.url, content) == (200, b"b")
        assert peer.requests[0].endswith(b"\r\n\r\n" + content)


async def test_a_server_that_takes_nothing_is_given_up() -> None:
    is_given_up = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await is_given_up.wait()
        with contextlib.suppress(OSError):
            while await reader.read(1 << 20):
                pass

    async with serving(talk) as url:
        with pytest.raises(httpx2.WriteTimeout):
            await Client(httpx2.Timeout(WAIT_S, write=0.01)).post(url, b"x" * (32 << 20))
        is_given_up.set()


async def test_what_a_server_says_unasked_costs_the_connection() -> None:
    one = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na"
    is_answered = asyncio.Event()
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(one)
        await is_answered.wait()
        if connections == 1:
            writer.write(one)
        with contextlib.suppress(OSError):
            await reader.read()

    client = Client(LIMITS)
    async with serving(talk) as url:
        assert await client.post(url, b"") == (200, b"a")
        line = client._line
        assert line is not None
        is_answered.set()
        await line.closed.wait()
        assert await client.post(url, b"") == (200, b"a")
        assert connections == 2
        await client.aclose()


async def test_the_head_says_what_a_server_must_know() -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nb"
    async with scripted(answer, answer) as (peer, client):
        await client.post(peer.url.replace("127", "me:pass%40word@127"), accept="text/event-stream")
        head = peer.requests[0].decode().removesuffix("\r\n\r\nhi").split("\r\n")
        assert head[0] == "POST /a?b=c HTTP/1.1"
        said = dict(line.split(": ") for line in head[1:])
        assert said.pop("user-agent").startswith("midstream/")
        assert said == {
            "host": peer.url.split("/")[2],
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            "connection": "keep-alive",
            "authorization": "Basic bWU6cGFzc0B3b3Jk",
            "content-length": "2",
        }
        with pytest.raises(httpx2.LocalProtocolError):
            await client.post(peer.url, accept="a\r\nx: y")


def test_only_what_needs_neither_tls_nor_a_proxy_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", dict)
    assert is_plain(httpx2.URL("http://127.0.0.1/v1"))
    assert not is_plain(httpx2.URL("https://a.example/v1"))
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://proxy.example"})
    assert not is_plain(httpx2.URL("http://127.0.0.1/v1"))
