"""Raw peers against the real server: every transport carries the same frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from midstream.client.connection_headers import ConnectionHeaders
from midstream.client.transport_selection import RememberedTransports, TransportKind, TransportSelection
from midstream.client.transports import Transport
from midstream.errors import MidstreamError
from midstream.history.messages import Text
from midstream.models.responses import TextDelta
from midstream.protocol import frames
from midstream.protocol.frames import (
    Ack,
    CancelPayload,
    Close,
    CommandFrame,
    Error,
    Events,
    Gone,
    HeartbeatFrame,
    Open,
    Payload,
    Ping,
    SendPayload,
    ServerFrame,
    Welcome,
)
from midstream.testing import Gate, text
from midstream.testing.scripted_model import Script
from tests.server.serving import Served, make_app, served
from tests.spec import spec

WAIT_S = 60.0
SECRET = "s" * 43
WORDS = "one two three four five"


def stuck() -> Script:
    """Return a model that starts to send and does not end."""
    return [[TextDelta("half a"), Gate(asyncio.Event())]]


@pytest.fixture(params=[*TransportKind])
def way(request: pytest.FixtureRequest) -> TransportKind:
    return TransportKind(request.param)


class RawPeer:
    """One connection; received frames are stored by kind."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.received: list[ServerFrame] = []

    async def send(self, *sent: frames.ClientFrame) -> None:
        await self._transport.send([frames.encode(frame) for frame in sent])

    async def receive(self) -> ServerFrame:
        """Receive one frame; an HTTP refusal is the `error` that it stands for (STREAM-37)."""
        try:
            async with asyncio.timeout(WAIT_S):
                frame = frames.decode_server(await self._transport.receive())
        except MidstreamError as error:
            frame = Error(error.code, error.message, error.retry)
        self.received.append(frame)
        return frame

    async def until(self, kind: type[ServerFrame] | str) -> ServerFrame:
        """Receive up to the first frame of a kind, or the first that carries a record of it."""
        while True:
            frame = await self.receive()
            if kind in self.kinds(frame) or (isinstance(kind, type) and isinstance(frame, kind)):
                return frame
            assert not isinstance(frame, Error), frame

    @staticmethod
    def kinds(frame: ServerFrame) -> set[str]:
        events = frame.events if isinstance(frame, Events) else ()
        return {msgspec.json.decode(event.record)["type"] for event in events}

    @property
    def ids(self) -> list[str]:
        return [event.id for frame in self.received if isinstance(frame, Events) for event in frame.events]


@contextlib.asynccontextmanager
async def raw(server: Served, way: TransportKind) -> AsyncIterator[RawPeer]:
    ways = TransportSelection(
        server.url,
        transport=way,
        headers=ConnectionHeaders(server.url, {}),
        remembered=RememberedTransports(None),
    )
    transport = await ways.connect("s1")
    try:
        yield RawPeer(transport)
    finally:
        await transport.close()
        await ways.close()


def opening(
    event_id: str | None = None, next_seqno: int = 0, *, stream: str = "k1", secret: str = SECRET
) -> Open:
    return Open(stream, secret, event_id, next_seqno)


def command(seqno: int, payload: Payload = SendPayload((Text("hi"),))) -> CommandFrame:  # noqa: B008 - a frozen value
    return CommandFrame(seqno, msgspec.Raw(frames.encode(payload)))


@spec("STREAM-3", "STREAM-7", "STREAM-13", "STREAM-20")
async def test_a_turn_is_welcome_ack_and_events_in_order(way: TransportKind) -> None:
    async with served(make_app([text(WORDS)])) as server, raw(server, way) as peer:
        await peer.send(opening(), command(0))
        welcome = await peer.receive()
        assert isinstance(welcome, Welcome)
        assert (welcome.stream, welcome.acked, welcome.resume_from) == ("k1", 0, "0-0")
        await peer.until("turn_ended")
        assert peer.ids == [f"1-{n}" for n in range(1, len(peer.ids) + 1)]
        if Ack(0) not in peer.received:
            await peer.until(Ack)
        assert {type(frame) for frame in peer.received} == {Welcome, Ack, Events}


@spec("STREAM-4", "STREAM-21")
async def test_a_reconnected_reader_receives_exactly_the_following_events(way: TransportKind) -> None:
    async with served(make_app([text(WORDS)])) as server:
        async with raw(server, way) as first:
            await first.send(opening(), command(0))
            await first.until("turn_ended")
        async with raw(server, way) as again:
            await again.send(opening(first.ids[3], 1))
            welcome = await again.receive()
            assert isinstance(welcome, Welcome)
            assert (welcome.acked, welcome.turn, welcome.resume_from) == (1, 1, first.ids[3])
            await again.until("turn_ended")
            assert again.ids == first.ids[4:]


@spec("STREAM-12", "STREAM-28")
async def test_a_repeated_command_a_gap_and_a_used_number_are_distinguished(way: TransportKind) -> None:
    async with served(make_app(stuck())) as server, raw(server, way) as peer:
        await peer.send(opening(), command(0))
        await peer.until("delta")
        if Ack(0) not in peer.received:
            await peer.until(Ack)
        await peer.send(command(0))
        assert await peer.until(Ack) == Ack(0)
        await peer.send(command(5, CancelPayload()))
        refused = await peer.until(Error)
        assert isinstance(refused, Error)
        assert (refused.code, refused.seqno, refused.expected) == ("seqno_gap", 5, 1)
        await peer.send(command(0, SendPayload((Text("something else"),))))
        reused = await peer.until(Error)
        assert isinstance(reused, Error)
        assert (reused.code, reused.seqno, reused.retry) == ("stream_reused", 0, "never")


@spec("STREAM-8", "STREAM-40")
async def test_a_newer_connection_ends_the_older_one_over_every_transport(way: TransportKind) -> None:
    async with served(make_app(stuck())) as server, raw(server, way) as older:
        await older.send(opening(), command(0))
        await older.until("delta")
        async with raw(server, way) as newer:
            await newer.send(opening(older.ids[-1], 1))
            assert isinstance(await newer.receive(), Welcome)
            ended = await older.until(Error)
            assert isinstance(ended, Error)
            assert (ended.code, ended.seqno) == ("stream_fenced", None)
            await newer.send(command(1, CancelPayload()))
            await newer.until("turn_ended")


@spec("STREAM-15", "STREAM-25")
async def test_an_abort_ends_the_turn_and_a_disconnect_does_not(way: TransportKind) -> None:
    async with served(make_app(stuck())) as server:
        async with raw(server, way) as first:
            await first.send(opening(), command(0))
            await first.until("delta")
        async with raw(server, way) as again:
            await again.send(opening(first.ids[-1], 1), command(1, CancelPayload()))
            await again.until("turn_ended")
            last = msgspec.json.decode(again.received[-1].events[-1].record)  # type: ignore[union-attr] # they are events
            assert last["status"] == "cancelled"


@spec("STREAM-55")
async def test_the_cancel_delay_of_a_turn_without_its_client_is_stored_with_its_stream(
    way: TransportKind,
) -> None:
    async with served(make_app(stuck())) as server, raw(server, way) as peer:
        await peer.send(Open("k1", SECRET, cancel_after_s=29.5), command(0))
        await peer.until("delta")
        kept = (await server.app.host.session("s1")).state.streams["k1"].cancel_after_s
        assert kept == (29.5 if way is TransportKind.WEBSOCKET else 30.0)


@spec("STREAM-31", "STREAM-39")
async def test_a_ping_is_answered_by_a_heartbeat(way: TransportKind) -> None:
    async with served(make_app(stuck())) as server, raw(server, way) as peer:
        await peer.send(opening(), command(0))
        await peer.until("delta")
        await peer.send(Ping())
        heartbeat = await peer.until(HeartbeatFrame)
        assert heartbeat == HeartbeatFrame(peer.ids[-1], "model")


@spec("STREAM-25", "STREAM-39")
async def test_a_close_releases_the_stream(way: TransportKind) -> None:
    async with served(make_app(stuck())) as server, raw(server, way) as peer:
        await peer.send(opening(), command(0))
        await peer.until("delta")
        await peer.send(Close())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while not isinstance(await peer.receive(), Error):
                    pass
        assert isinstance(peer.received[-1], Error), "the connection is over"
        assert server.app.open_streams == 0


@spec("STREAM-23")
async def test_an_event_of_another_history_is_gone(way: TransportKind) -> None:
    async with served(make_app([text(WORDS)])) as server:
        async with raw(server, way) as first:
            await first.send(opening(), command(0))
            await first.until("turn_ended")
        async with raw(server, way) as again:
            await again.send(opening("7-3", 1))
            gone = await again.until(Gone)
            assert isinstance(gone, Gone)
            await again.until("turn_ended")
            assert again.ids == first.ids[first.ids.index(gone.resume_from) + 1 :]


@spec("STREAM-5", "STREAM-6", "STREAM-37")
@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (opening(secret="x" * 43), "wrong_secret"),
        (opening("1-2", 1, stream="k2"), "stream_not_found"),
        (opening("nonsense"), "malformed_frame"),
        (Open("k" * 300, SECRET), "malformed_frame"),
    ],
)
async def test_a_refused_client_receives_the_reason(way: TransportKind, sent: Open, code: str) -> None:
    async with served(make_app([text(WORDS)])) as server:
        async with raw(server, way) as first:
            await first.send(opening(), command(0))
            await first.until("turn_ended")
        async with raw(server, way) as other:
            await other.send(sent)
            refused = await other.receive()
            assert isinstance(refused, Error)
            assert (refused.code, refused.retry) == (code, "never")


async def test_a_draining_server_announces_it_and_a_retry_delay(way: TransportKind) -> None:
    async with served(make_app(stuck())) as server, raw(server, way) as peer:
        await peer.send(opening(), command(0))
        await peer.until("delta")
        server.app.drain()
        ended = await peer.until(Error)
        assert isinstance(ended, Error)
        assert (ended.code, ended.retry) == ("draining", "later")


async def test_a_reader_sends_nothing_and_receives_events(way: TransportKind) -> None:
    async with (
        served(make_app([text(WORDS)])) as server,
        raw(server, way) as speaker,
        raw(server, way) as reader,
    ):
        await speaker.send(opening(), command(0))
        await speaker.until("turn_ended")
        await reader.send(Open(event_id="0-0"))
        await reader.until("turn_ended")
        assert reader.ids == speaker.ids
