"""A connection as requests: what is sent and when, what is received and how much of it, and how each ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2
import msgspec
import pytest

from midstream.client.http_transport import (
    FRAMES_WAITING_MAX,
    EventStream,
    HttpPaths,
    HttpTransport,
    LongPoll,
    http_client,
)
from midstream.errors import AccessError, ConnectionLostError, DrainingError, MidstreamError
from midstream.protocol import frames
from midstream.protocol.frames import (
    Ack,
    Close,
    CommandFrame,
    Error,
    Events,
    HeartbeatFrame,
    Open,
    Ping,
    Welcome,
)
from midstream.server.api.problems import problem_of
from tests.client.http_peer import HttpPeer
from tests.client.peer import PeerScript, after_frames, after_half_a_frame, busy_proxy
from tests.spec import spec

WAIT_S = 60.0
OPENING = Open("k1", "the secret", "1-4", 3, 5)
WELCOME = Welcome("k1", "1-4", "1-4")
SAY = CommandFrame(3, msgspec.Raw(b'{"type":"send","parts":[{"type":"text","text":"hi"}]}'))
Ways = type[EventStream] | type[LongPoll]


@pytest.fixture(params=[EventStream, LongPoll])
def down(request: pytest.FixtureRequest) -> Ways:
    way: Ways = request.param
    return way


@asynccontextmanager
async def at(url: str, down: Ways) -> AsyncIterator[HttpTransport]:
    """A connection to one session at a server."""
    async with http_client(url) as client, asyncio.timeout(WAIT_S):
        paths = HttpPaths(f"{url}/v1/sessions/s1", "connection-1", {"authorization": "Bearer x"})
        transport = HttpTransport(client, paths, down())
        yield transport
        await transport.close()


class _Whole(httpx2.AsyncByteStream):
    """A body in one piece."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._body


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110 - the awaited state has no event
            await asyncio.sleep(0)


class Answers:
    """Requests answered by the test: a status and a body for each path, or no answer for a while."""

    def __init__(self) -> None:
        self.asked: list[httpx2.Request] = []
        self.posts: list[tuple[int, bytes]] = []
        self.polls: list[tuple[int, bytes]] = []

    @asynccontextmanager
    async def transport(self) -> AsyncIterator[HttpTransport]:
        mock = httpx2.MockTransport(self._answer)
        async with httpx2.AsyncClient(transport=mock) as client, asyncio.timeout(WAIT_S):
            transport = HttpTransport(client, HttpPaths("http://s/v1/sessions/s1", "c", {}), LongPoll())
            yield transport
            await transport.close()

    async def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        if request.url.path.endswith("/commands"):
            status, body = self.posts.pop(0)
        elif self.polls:
            status, body = self.polls.pop(0)
        else:
            await asyncio.Event().wait()
        return httpx2.Response(status, stream=_Whole(body))


def polled(*sent: frames.ServerFrame, more: bool = True) -> tuple[int, bytes]:
    body = b",".join(frames.encode(frame) for frame in sent)
    return 200, b'{"frames":[%b],"more":%b}' % (body, b"true" if more else b"false")


# --- the wire -----------------------------------------------------------------------------------------------------


@spec("STREAM-37")
async def test_an_open_is_a_body_and_its_secret_is_in_no_url(down: Ways) -> None:
    async with HttpPeer(after_frames(WELCOME)).serving() as peer, at(peer.url, down) as transport:
        await transport.send([frames.encode(OPENING)])
        assert await transport.receive() == frames.encode(WELCOME)
    (asked,) = peer.requests
    assert asked.opening == OPENING
    assert (asked.headers["authorization"], asked.headers["x-midstream-connection"]) == (
        "Bearer x",
        "connection-1",
    )
    assert asked.headers["accept-encoding"] == "identity"
    assert "secret" not in f"{asked.path}{asked.query}"


async def test_a_reader_sends_no_stream(down: Ways) -> None:
    async with HttpPeer(after_frames(WELCOME)).serving() as peer, at(peer.url, down) as transport:
        await transport.send([frames.encode(Open(event_id="1-4"))])
        await transport.receive()
    assert peer.requests[0].opening == Open(event_id="1-4")


async def test_records_arrive_as_event_frames_with_their_stored_bytes(down: Ways) -> None:
    records = [frames.EventFrame(f"1-{n}", msgspec.Raw(b'{"type":"x","n":%d}' % n)) for n in (5, 6)]
    sent = (WELCOME, Events(tuple(records)), HeartbeatFrame("1-6", "model"))
    async with HttpPeer(after_frames(*sent)).serving() as peer, at(peer.url, down) as transport:
        await transport.send([frames.encode(OPENING)])
        received: list[frames.ServerFrame] = []
        while not received or not isinstance(received[-1], HeartbeatFrame):
            received.append(frames.decode_server(await transport.receive()))
        assert transport.received_bytes > 0
    assert (received[0], received[-1]) == (WELCOME, sent[-1])
    events = [event for each in received if isinstance(each, Events) for event in each.events]
    assert [(event.id, bytes(event.record)) for event in events] == [
        (event.id, bytes(event.record)) for event in records
    ]


@spec("STREAM-38", "STREAM-103")
async def test_no_command_is_sent_before_the_welcome() -> None:
    answers = Answers()
    async with answers.transport() as transport:
        await transport.send([frames.encode(OPENING), frames.encode(SAY)])
        await _until(lambda: bool(answers.asked))
        assert [request.url.path for request in answers.asked] == ["/v1/sessions/s1/poll"]
    answers = Answers()
    answers.polls, answers.posts = [polled(WELCOME)], [(200, frames.encode(Ack(3)))]
    async with answers.transport() as transport:
        await transport.send([frames.encode(OPENING), frames.encode(SAY)])
        assert [await transport.receive(), await transport.receive()] == [
            frames.encode(WELCOME),
            frames.encode(Ack(3)),
        ]
        posted = next(request for request in answers.asked if request.content == frames.encode(SAY))
        assert (posted.url.path, posted.content) == ("/v1/sessions/s1/commands", frames.encode(SAY))
        assert posted.headers["x-idempotent-encryption-key"] == OPENING.secret
        assert posted.headers["x-idempotency-connection"] == str(OPENING.connection)


@spec("STREAM-39")
async def test_a_post_is_answered_by_a_frame() -> None:
    refused = problem_of(DrainingError("restarting", retry_after_s=2.0))
    answers = Answers()
    answers.polls = [polled(WELCOME)]
    answers.posts = [
        (200, frames.encode(Ack(3))),
        (200, frames.encode(HeartbeatFrame("1-4"))),
        (refused.status, msgspec.json.encode(refused)),
        (404, b"{}"),
        (204, b""),
    ]
    async with answers.transport() as transport:
        sent = (OPENING, SAY, Ping(), CommandFrame(4, SAY.payload), Ping())
        await transport.send([frames.encode(frame) for frame in sent])
        received = [frames.decode_server(await transport.receive()) for _ in range(4)]
        assert received[1:] == [
            Ack(3),
            HeartbeatFrame("1-4"),
            Error("draining", "restarting", "later", 4, retry_after_s=2.0),
        ]
        await transport.send([frames.encode(Close())])
        await _until(lambda: not answers.posts)


@spec("STREAM-39")
async def test_a_waiting_close_is_sent_and_unacknowledged_commands_are_left_to_the_next_connection() -> None:
    answers = Answers()
    answers.polls, answers.posts = [polled(WELCOME)], [(204, b"")]
    async with answers.transport() as transport:
        await transport.send([frames.encode(OPENING)])
        await transport.receive()
        await transport.send([frames.encode(SAY), frames.encode(Close())])
    sent = [request.content for request in answers.asked if request.url.path.endswith("/commands")]
    assert sent == [frames.encode(Close())]


# --- polls ------------------------------------------------------------------------------------------------------


@spec("STREAM-41")
async def test_each_poll_contains_the_last_event_of_the_previous_one() -> None:
    record = msgspec.Raw(b"{}")
    answers = Answers()
    answers.polls = [
        polled(Welcome("k1", "1-9", "1-7")),
        polled(Events((frames.EventFrame("1-8", record), frames.EventFrame("2-9", record)))),
        polled(HeartbeatFrame("2-9")),
        polled(frames.Gone("1-2", "lost"), more=False),
    ]
    async with answers.transport() as transport:
        await transport.send([frames.encode(Open("k1", "s", None, 3))])
        for _ in range(4):
            await transport.receive()
        with pytest.raises(ConnectionLostError):
            await transport.receive()
    asked = [(each.url.query, frames.decode_client(each.content)) for each in answers.asked]
    assert asked == [
        (b"n=0", Open("k1", "s", None, 3)),
        (b"n=1", Open("k1", "s", "1-7")),
        (b"n=2", Open("k1", "s", "2-9")),
        (b"n=3", Open("k1", "s", "2-9")),
    ]


@pytest.mark.parametrize(
    "body", [b"<html>", b'{"frames":[1],"more":true}', b'{"frames":[],"more":true}', b"\xff"]
)
async def test_an_invalid_poll_answer_ends_the_connection_and_is_not_requested_again(body: bytes) -> None:
    answers = Answers()
    answers.polls = [(200, body)]
    async with answers.transport() as transport:
        await transport.send([frames.encode(OPENING)])
        for _ in range(2):
            with pytest.raises(ConnectionLostError):
                await transport.receive()
    assert len(answers.asked) == 1


async def _receive(transport: HttpTransport) -> bytes | MidstreamError:
    try:
        return await transport.receive()
    except MidstreamError as error:
        return error


# --- ends -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"), [(401, AccessError), (503, ConnectionLostError), (502, ConnectionLostError)]
)
async def test_a_refusal_is_received_as_its_type(down: Ways, status: int, kind: type[MidstreamError]) -> None:
    async with HttpPeer(status).serving() as peer, at(peer.url, down) as transport:
        await transport.send([frames.encode(OPENING)])
        with pytest.raises(kind):
            await transport.receive()


@spec("STREAM-29")
async def test_a_proxys_retry_after_is_received(down: Ways) -> None:
    async with busy_proxy("7") as url, at(url, down) as transport:
        await transport.send([frames.encode(OPENING)])
        with pytest.raises(ConnectionLostError) as caught:
            await transport.receive()
    assert caught.value.retry_after_s == 7.0


@pytest.mark.parametrize("script", [after_frames(WELCOME), after_half_a_frame(WELCOME)])
@spec("STREAM-27")
async def test_the_end_of_the_download_is_a_cut_clean_or_not(down: Ways, script: PeerScript) -> None:
    async with HttpPeer(script).serving() as peer, at(peer.url, down) as transport:
        await transport.send([frames.encode(OPENING)])
        received = [await _receive(transport) for _ in range(3)]
    assert isinstance(received[-1], ConnectionLostError)
    assert sum(isinstance(each, bytes) for each in received) <= 1


async def test_a_page_in_the_servers_place_is_a_lost_connection() -> None:
    async with HttpPeer().serving() as peer, at(peer.url, EventStream) as transport:
        transport._paths = HttpPaths(f"{peer.url}/login", "c", {})
        peer._following = {}

        async def answer(asked: object, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 0\r\n\r\n")

        peer._answer = answer  # type: ignore[method-assign] # another server stands there
        await transport.send([frames.encode(OPENING)])
        with pytest.raises(ConnectionLostError, match="not an event stream"):
            await transport.receive()


@pytest.mark.parametrize("status", [500, 502])
async def test_a_failed_post_drops_the_connection(status: int) -> None:
    answers = Answers()
    answers.polls, answers.posts = [polled(WELCOME)], [(status, b"<html>")]
    async with answers.transport() as transport:
        await transport.send([frames.encode(OPENING), frames.encode(SAY)])
        await transport.receive()
        with pytest.raises(ConnectionLostError):
            await transport.receive()


async def test_an_application_that_does_not_read_stops_the_server() -> None:
    answers = Answers()
    answers.polls = [polled(WELCOME)] + [polled(HeartbeatFrame("1-4"))] * 50
    async with answers.transport() as transport:
        await transport.send([frames.encode(OPENING)])
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(answers.asked) <= FRAMES_WAITING_MAX + 1
        for _ in range(51):
            await transport.receive()


async def test_a_programming_error_is_raised_and_not_retried(down: Ways) -> None:
    async with httpx2.AsyncClient() as client:
        paths = HttpPaths("http://127.0.0.1:1/v1/sessions/s1", "c1", {"x-a": "\u20ac"})
        transport = HttpTransport(client, paths, down())
        await transport.send([frames.encode(Open())])
        with pytest.raises(UnicodeEncodeError):
            await asyncio.wait_for(transport.receive(), WAIT_S)
        await transport.close()


async def test_cancelling_a_receive_loses_no_frame() -> None:
    answers = Answers()
    answers.polls = [polled(WELCOME)]
    async with answers.transport() as transport:
        waiting = asyncio.ensure_future(transport.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait((waiting,))
        await transport.send([frames.encode(OPENING)])
        assert await transport.receive() == frames.encode(WELCOME)


async def test_closing_twice_or_before_anything_was_sent_is_harmless() -> None:
    async with Answers().transport() as transport:
        await transport.close()
        await transport.close()
