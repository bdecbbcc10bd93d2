"""HTTP/1.1 over one connection: every way a body can come, and every way it can break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx2
import pytest

from midstream.integrations.plain_http import PlainTransport, is_plain

WAIT_S = 10.0
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


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
                self.requests.append(head + await reader.readexactly(2))
                answer = self._answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if not self._answers or self._answers[0] is None:
                    break
        writer.close()


@contextlib.asynccontextmanager
async def scripted(*answers: bytes | None) -> AsyncIterator[tuple[Scripted, httpx2.AsyncClient]]:
    peer = Scripted(*answers)
    server = await asyncio.start_server(peer.talk, "127.0.0.1", 0)
    peer.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a?b=c"
    async with server, httpx2.AsyncClient(transport=PlainTransport(), timeout=WAIT_S) as client:
        yield peer, client


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
        response = await client.post(peer.url, content=b"hi")
        assert (response.status_code, response.text) == (200, "hello")
        assert peer.requests[0].startswith(b"POST /a?b=c HTTP/1.1\r\n")
        assert peer.requests[0].endswith(b"\r\n\r\nhi")
        assert b"content-length: 2" in peer.requests[0].lower()


@pytest.mark.parametrize(
    ("first", "connections"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na", 1),
        (CHUNKED + b"1\r\na\r\n0\r\n\r\n", 1),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 1),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\na", 2),
    ],
)
async def test_a_connection_is_kept_unless_the_server_ends_it(first: bytes, connections: int) -> None:
    second = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nb"
    async with scripted(first, second) as (peer, client):
        await client.post(peer.url, content=b"hi")
        assert (await client.post(peer.url, content=b"hi")).text == "b"
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
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000,
    ],
)
async def test_what_breaks_off_or_is_no_http_is_an_error_of_httpx2(answer: bytes | None) -> None:
    async with scripted(answer) as (peer, client):
        with pytest.raises(httpx2.HTTPError):
            await client.post(peer.url, content=b"hi")


async def test_nobody_listens() -> None:
    async with scripted() as (peer, client):
        pass
    async with httpx2.AsyncClient(transport=PlainTransport()) as client:
        with pytest.raises(httpx2.ConnectError):
            await client.post(peer.url, content=b"hi")


async def test_silence_is_bounded() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    async with server, httpx2.AsyncClient(transport=PlainTransport(), timeout=0.01) as client:
        with pytest.raises(httpx2.ReadTimeout):
            await client.post(url, content=b"hi")


async def test_a_body_that_was_not_read_to_its_end_costs_the_connection() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nb"
    async with scripted(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel", whole) as (peer, client):
        async with client.stream("POST", peer.url, content=b"hi") as response:
            assert await anext(response.aiter_raw()) == b"hel"
        assert (await client.post(peer.url, content=b"hi")).text == "b"
        assert peer.connections == 2


def test_only_what_needs_neither_tls_nor_a_proxy_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", dict)
    assert is_plain(httpx2.URL("http://127.0.0.1/v1"))
    assert not is_plain(httpx2.URL("https://a.example/v1"))
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"http": "http://proxy.example"})
    assert not is_plain(httpx2.URL("http://127.0.0.1/v1"))
