"""The body of an event stream: comments in silence, a clean end, and disconnection of the client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Send
from typing_extensions import override

from midstream.dialects.record_events import RecordEvents
from midstream.errors import DrainingError
from midstream.server.api.event_body import COMMENT, QUIET_S, EventBody, PieceBody, RecordBody
from midstream.server.api.http_endpoints import StreamCutError
from midstream.server.auth.caller import UnauthenticatedCaller
from midstream.session.records import MessageAccepted, Record, TurnEnded
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import text
from tests.server.serving import WAIT_S, asgi_client, make_app


class OneTextPump(EventBody):
    """A pump that sends one text, and ends on request."""

    def __init__(self, *given: Any) -> None:  # noqa: ANN401 - as the class it tests
        super().__init__(*given)
        self.may_end = asyncio.Event()

    @override
    async def pump(self, send: Send) -> None:
        await self.write(send, [])
        await self.write(send, [b"data: a\n\n", b"data: b\n\n"])
        await self.may_end.wait()


class ConnectionEnds:
    """The two ends of a connection."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [each["body"] for each in self.sent if each["type"] == "http.response.body"]


def body(world: FakeWorld | None = None) -> OneTextPump:
    app = make_app(world=world)
    return OneTextPump(app.host, app.connections, "s1", UnauthenticatedCaller())


async def test_a_body_ends_cleanly_when_its_pump_ends() -> None:
    async with asyncio.timeout(WAIT_S):
        line, words = ConnectionEnds(), body()
        words.may_end.set()
        assert await words.send_to(line.receive, line.send, [("x-more", "1")])
        assert (b"x-more", b"1") in line.sent[0]["headers"]
        assert line.bodies == [b"data: a\n\ndata: b\n\n", b""]


async def test_a_body_cut_by_its_client_or_the_server_has_no_clean_end() -> None:
    async with asyncio.timeout(WAIT_S):
        line, words = ConnectionEnds(), body()
        line.gone.set()
        assert not await words.send_to(line.receive, line.send)
        line, words = ConnectionEnds(), body()
        words.end(DrainingError("later"))
        with pytest.raises(StreamCutError):
            await words.send_to(line.receive, line.send)
        assert b"" not in line.bodies


async def test_a_silent_body_sends_comments() -> None:
    world = FakeWorld()
    line, words = ConnectionEnds(), body(world)
    async with asyncio.timeout(WAIT_S):
        sending = asyncio.create_task(words.send_to(line.receive, line.send))
        while COMMENT not in line.bodies:
            await world.advance(QUIET_S)
        words.may_end.set()
        assert await sending


class Turns(RecordEvents):
    """A source that sends the ends of turns, with none to follow for now; it is over with the second turn."""

    @override
    def begin(self) -> list[bytes]:
        return [b"begin "]

    @override
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        self.is_over = self.is_over or (isinstance(record, TurnEnded) and record.turn > 1)
        return [b"%d " % record.turn] if isinstance(record, MessageAccepted) else []

    @override
    def rest(self) -> list[bytes]:
        return [b"rest "]


async def test_a_body_of_records_ends_when_its_reader_has_them_all() -> None:
    app = make_app([text("Hello"), text("you")])
    async with asgi_client(app), asyncio.timeout(WAIT_S):
        await app.start()
        for words in ("one", "two"):
            async for _ in app.host.send("s1", words):
                pass
        for kind in (RecordBody, PieceBody):
            line = ConnectionEnds()
            records = kind(app.host, app.connections, "s1", UnauthenticatedCaller(), Turns(), 0)
            assert await records.send_to(line.receive, line.send)
            assert line.bodies == [b"begin ", b"1 2 ", b""]
            types = [value for name, value in line.sent[0]["headers"] if name == b"content-type"]
            assert types == [
                b"application/json" if kind is PieceBody else b"text/event-stream; charset=utf-8"
            ]


async def test_a_body_of_records_whose_turns_are_already_over_reads_none() -> None:
    app, turns, line = make_app(), Turns(), ConnectionEnds()
    turns.is_over = True
    async with asyncio.timeout(WAIT_S):
        body = RecordBody(app.host, app.connections, "nothing", UnauthenticatedCaller(), turns, 0)
        assert await body.send_to(line.receive, line.send)
    assert line.bodies == [b"begin ", b""]
