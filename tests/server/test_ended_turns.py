"""Clients that return after the end of their turn, and outcomes of calls that were not started."""

from __future__ import annotations

import pytest

from midstream.client.transport_selection import TransportKind
from midstream.environment import World
from midstream.protocol.checkpoint import Checkpoint
from midstream.protocol.frames import EventId
from midstream.testing import calls, text
from midstream.testing.conformance.client_wire import ClientState
from tests.server.serving import Json, Socket, make_app, opening, served
from tests.spec import spec
from tests.testing.conformance.core_client import CoreSubject

LOOKS_MAX = 2000
SEND: Json = {"type": "send", "parts": [{"type": "text", "text": "hi"}]}


class _Returning(CoreSubject):
    """A client that stored the end of its turn as handled, and died before it removed the checkpoint."""

    async def come_back(self, end: str) -> None:
        self._checkpoint = Checkpoint(self._stream.stream, self._stream.secret, EventId.parse(end), 1)
        await self.restart()


async def _ended(subject: CoreSubject) -> ClientState:
    for _ in range(LOOKS_MAX):
        if (seen := await subject.read_state()).phase == "ended":
            return seen
        await subject.advance_clock() if seen.phase == "waiting" else None
    raise TimeoutError


@spec("STREAM-26", "STREAM-54")
@pytest.mark.parametrize("way", TransportKind)
async def test_a_client_with_a_cursor_behind_the_end_of_its_turn_ends(way: TransportKind) -> None:
    async with served(make_app([text("one two")])) as server:
        subject = _Returning(server.url, World())
        await subject.begin("s1", way)
        try:
            await subject.submit(SEND)
            first = await _ended(subject)
            await subject.come_back(first.delivered[-1])
            again = await _ended(subject)
        finally:
            await subject.end()
    assert (first.code, again.code, again.delivered, again.has_checkpoint) == (None, None, (), False)


@spec("TURN-15")
async def test_an_outcome_before_the_start_of_its_call_is_refused_and_accepted_after_it() -> None:
    tool: Json = {"spec": {"name": "look"}, "needs_approval": True}
    early: Json = {
        "type": "result",
        "turn": 1,
        "response": 1,
        "result": {"call_id": "c1", "content": "seen"},
    }
    command: Json = {"type": "command", "seqno": 1, "payload": early}
    app = make_app([calls(("c1", "look", "{}")), text("done")])
    async with served(app) as server, Socket(server.socket()) as peer:
        await peer.send(opening(next_seqno=1))
        await peer.send({"type": "command", "seqno": 0, "payload": {**SEND, "tools": [tool]}})
        asked = (await peer.receive_until("question_asked"))[-1]["events"][-1]["record"]
        await peer.send(command)
        (refused,) = [each for each in await peer.receive_until("error") if each["type"] == "error"]
        assert (refused["code"], refused["retry"], refused["seqno"]) == ("call_not_started", "later", 1)
        place = {name: asked[name] for name in ("turn", "response", "call_id", "digest")}
        await peer.send(
            {"type": "command", "seqno": 1, "payload": {"type": "answer", **place, "choice": "allow"}}
        )
        await peer.receive_until("call_started")
        await peer.send({**command, "seqno": 2})
        received = await peer.receive_until("turn_ended")
    ended = [event["record"] for frame in received for event in frame.get("events", ())]
    assert [each["result"]["content"] for each in ended if each["type"] == "call_ended"] == ["seen"]
    assert ended[-1]["status"] == "completed"
