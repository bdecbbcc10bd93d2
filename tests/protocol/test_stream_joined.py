"""Both halves of the stream protocol under every fault a network, a server and a client can have.

Exactly once both ways: each command the client numbered is in the journal once, in order; the application has
applied the journal from the stream's first record to the end of its turn.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import SessionBusyError, StreamNotFoundError
from midstream.history.messages import Finish, Response, Text, ToolCall, ToolResult
from midstream.protocol import frames
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.event_inbox import Applied, Forget
from midstream.protocol.frames import CancelPayload, EventId, ResultPayload, SendPayload
from midstream.session import records
from midstream.session.calls import CallPlan, Site, digest_of
from midstream.session.records import CallStarted, CommandAccepted, Delta, StreamOpened, TurnEnded, TurnStatus
from midstream.session.turn.commands import ModelResponded, ModelStreamed, WhenBusy
from midstream.session.turn.states import AwaitingModel
from tests.protocol.stream_link import Link, MemoryCheckpoint, MemoryHost
from tests.search import tried
from tests.session.turn_stories import answers, streams
from tests.spec import spec

SECRET = "s" * 43


class Application:
    """A program with its own disk that applies events by id.

    It stores an event first and requests the next one afterwards, so that after a kill in between it receives
    that event again.
    """

    def __init__(self) -> None:
        self.log: list[Applied] = []
        self.in_hand: EventId | None = None
        self.submitted: list[bytes] = []
        self.to_answer: list[CallStarted] = []

    def step(self, link: Link) -> None:
        """Finish the current event, and take the next one."""
        if self.in_hand is not None:
            link.client.mark_handled(self.in_hand)
            link.settle()
            self.in_hand = None
        if link.unread:
            event = link.unread.popleft()
            if isinstance(event, Forget):
                self.drop_after(event.event_id.position)
            else:
                assert isinstance(event, Applied), "nothing is pruned here"
                self.drop_after(event.event_id.position - 1)
                self.log.append(event)
                self.in_hand = event.event_id
                if isinstance(event.record, CallStarted):
                    self.to_answer.append(event.record)

    def drop_after(self, position: int) -> None:
        self.log = [event for event in self.log if event.event_id.position <= position]

    def send(self, link: Link, payload: frames.Payload) -> None:
        body = frames.encode(payload)
        if link.client.submit(payload) == len(self.submitted):
            self.submitted.append(body)
        link.settle()

    def answer(self, link: Link) -> None:
        if self.to_answer and not link.client.is_ended:
            call = self.to_answer.pop()
            self.send(link, ResultPayload(call.turn, call.response, ToolResult(call.call_id, "done")))

    def abort(self, link: Link) -> None:
        link.client.abort()
        writes = link.client.writes()
        self.submitted += [write.payload for write in writes if hasattr(write, "payload")]
        link.checkpoint.write(writes)
        link.settle()


def advance_model(host: MemoryHost, *, calls: bool, ends: bool) -> None:
    """Let the model stream a word, call a tool of the client, or end its answer."""
    turn = host.session.turn
    if not isinstance(turn, AwaitingModel):
        return
    if not ends:
        delta = Delta(turn.turn, turn.response_no, turn.attempt, 0, "text", "word ")
        host.do(ModelStreamed(turn.ref, (delta,)), at=1.0)
    elif calls:
        response = Response((ToolCall("c", "look"),), Finish.CALLS)
        plans = (CallPlan("c", digest_of("look", "{}"), Site.CLIENT),)
        host.do(ModelResponded(turn.ref, response, plans), at=1.0)
    else:
        response = Response((Text("word word"),))
        host.do(ModelResponded(turn.ref, response), at=1.0)


def act(what: str, link: Link, application: Application) -> None:
    match what:
        case "up":
            link.send_up()
        case "down":
            link.send_down()
        case "cut":
            link.cut()
        case "black hole":
            link.black_hole()
        case "time":
            link.wait()
        case "word" | "call" | "end":
            advance_model(link.host, calls=what == "call", ends=what != "word")
            link.feed()
        case "server dies":
            link.cut()
            link.host.start_epoch(at=1.0)
        case "power cut":
            link.cut()
            link.host.cut_power(at=1.0)
        case "client dies":
            if link.checkpoint.state is not None:
                application.in_hand = None
                link.restart_client()
        case "read":
            application.step(link)
        case "answer":
            application.answer(link)
        case "cancel":
            application.abort(link)
        case _:
            raise AssertionError(what)


FAULTS = ["cut", "black hole", "server dies", "power cut", "client dies"]
STEPS = ["up", "down", "up", "down", "time", "word", "call", "end", "read", "answer"]


@spec("STREAM-12", "STREAM-14", "STREAM-21")
@settings(max_examples=tried(300))
@given(st.lists(st.sampled_from([*STEPS, *STEPS, *FAULTS, "cancel"]), max_size=60))
def test_delivery_is_exactly_once_both_ways_under_cuts_kills_and_losses(script: list[str]) -> None:
    link, application = _linked()
    application.send(link, SendPayload((Text("hi"),)))
    for what in script:
        act(what, link, application)
        _check_commands(link, application)
    _finish(link, application)
    _check_commands(link, application)
    assert link.client.error is None
    assert link.checkpoint.state is None
    assert _sent_by(application.log) == _lines_of_stream(link.host)


def test_a_turn_without_faults_needs_one_connection() -> None:
    link, application = _linked()
    application.send(link, SendPayload((Text("hi"),)))
    _finish(link, application)
    assert (link.connections, len(application.submitted)) == (1, 1)
    assert _sent_by(application.log) == _lines_of_stream(link.host)


@spec("STREAM-12", "STREAM-14", "STREAM-19", "STREAM-21")
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_after_each_step_of_a_turn_with_a_tool_loses_nothing(fault: str) -> None:
    script = ["time", "up", "up", "down", "down", "word", "down", "read", "call", "down", *["read"] * 9]
    script += ["answer", "up", "down", "word", "down", "end", "down", "read"]
    for place in range(len(script) + 1):
        link, application = _linked()
        application.send(link, SendPayload((Text("hi"),)))
        for what in [*script[:place], fault, *script[place:]]:
            act(what, link, application)
        _finish(link, application)
        _check_commands(link, application)
        assert (place, _sent_by(application.log)) == (place, _lines_of_stream(link.host))


def test_an_abort_without_a_connection_stops_the_turn_once() -> None:
    link, application = _linked()
    application.send(link, SendPayload((Text("hi"),)))
    link.run()
    link.cut()
    application.abort(link)
    application.abort(link)
    _finish(link, application)
    ends = [event.record for event in application.log if isinstance(event.record, TurnEnded)]
    assert [end.status for end in ends] == [TurnStatus.CANCELLED]
    assert len(application.submitted) == 2


@spec("STREAM-15")
def test_an_abort_never_stops_the_turn_of_another_client() -> None:
    link, application = _linked()
    application.send(link, SendPayload((Text("hi"),)))
    for _ in range(2):
        link.wait()
        link.send_up()  # The open and the message arrive, no response comes back.
    link.cut()
    application.abort(link)  # Its turn is not known to this client, and ends meanwhile.
    advance_model(link.host, calls=False, ends=True)
    other, another = _linked(link.host, key="b")
    another.send(other, SendPayload((Text("me too"),)))
    other.run()
    link.run()
    assert [turn for turn, status in _ends(link.host) if status is TurnStatus.CANCELLED] == []
    assert link.host.session.is_live


def test_a_second_message_during_a_turn_is_refused_with_its_type() -> None:
    link, application = _linked()
    application.send(link, SendPayload((Text("hi"),)))
    link.run()
    other, another = _linked(link.host, key="b")
    another.send(other, SendPayload((Text("me too"),), when_busy=WhenBusy.REFUSE))
    other.run()
    assert isinstance(other.client.error, SessionBusyError)


def _drain(application: Application, link: Link) -> None:
    while link.unread or application.in_hand is not None:
        application.step(link)


@spec("STREAM-35")
def test_a_queued_message_receives_its_own_turn_and_no_other() -> None:
    link, application = _linked()
    application.send(link, SendPayload((Text("hi"),)))
    link.run()
    other, another = _linked(link.host, key="b")
    another.send(other, SendPayload((Text("me too"),)))
    other.run()
    for turn in (1, 2):
        link.host.do(streams(f"for turn {turn}", turn=turn), at=0.0)
        link.host.do(answers(f"for turn {turn}", turn=turn), at=0.0)
    other.run()
    _drain(another, other)
    seen = [each.record for each in another.log]
    assert [each.text for each in seen if isinstance(each, Delta)] == ["for turn 2"]
    assert other.client.turn == 2
    assert other.client.is_ended


@spec("STREAM-35")
def test_a_withdrawn_message_ends_its_stream() -> None:
    link, application = _linked()
    application.send(link, SendPayload((Text("hi"),)))
    link.run()
    other, another = _linked(link.host, key="b")
    another.send(other, SendPayload((Text("me too"),)))
    other.run()
    other.client.abort()
    other.settle()
    other.run()
    assert other.client.is_ended
    assert other.client.error is None
    assert link.host.session.queue == ()
    assert link.host.session.is_live


def test_a_server_that_lost_the_stream_is_distinguished_from_one_that_never_had_it() -> None:
    link, application = _linked()
    application.send(link, SendPayload((Text("hi"),)))
    link.run()
    link.cut()
    link.host = MemoryHost()
    link.run()
    assert isinstance(link.client.error, StreamNotFoundError)


def test_an_abort_from_any_client_is_a_stream_of_its_own() -> None:
    link, application = _linked()
    application.send(link, SendPayload((Text("hi"),)))
    link.run()
    other, _ = _linked(link.host, key="b")
    other.client.submit(CancelPayload())
    other.client.finish()
    other.settle()
    other.run()
    assert (other.client.is_ended, other.client.error) == (True, None)
    assert _ends(link.host) == [(1, TurnStatus.CANCELLED)]


def _linked(host: MemoryHost | None = None, *, key: str = "a") -> tuple[Link, Application]:
    client = ClientStream(key, SECRET, now=0.0)
    return Link(client, MemoryCheckpoint(key, SECRET), host or MemoryHost()), Application()


def _finish(link: Link, application: Application) -> None:
    """End all faults: the model ends, the application reads, everything comes to rest."""
    for _ in range(60):
        link.run()
        advance_model(link.host, calls=False, ends=True)
        link.feed()
        link.wait()
        for _ in range(len(link.unread) + 1):
            application.step(link)
            application.answer(link)
        if link.client.is_ended and not link.unread and application.in_hand is None:
            return
    raise AssertionError("the stream did not end")


def _check_commands(link: Link, application: Application) -> None:
    """Assert that the accepted commands are a prefix of the numbered ones, and the acked ones a prefix of those."""
    accepted = [
        (record.seqno, record.digest)
        for record in _records(link.host)
        if isinstance(record, CommandAccepted) and record.stream == link.client.stream
    ]
    numbered = [(seqno, frames.digest_of(body)) for seqno, body in enumerate(application.submitted)]
    assert accepted == numbered[: len(accepted)]
    state = link.checkpoint.state
    if state is not None:
        assert state.next_seqno - len(state.unacked) <= len(accepted)


def _records(host: MemoryHost) -> list[records.Record]:
    return [records.decode(body) for _, body in host.line]


def _ends(host: MemoryHost) -> list[tuple[int, TurnStatus]]:
    return [(record.turn, record.status) for record in _records(host) if isinstance(record, TurnEnded)]


def _sent_by(log: list[Applied]) -> list[tuple[EventId, bytes]]:
    return [(event.event_id, records.encode(event.record)) for event in log]


def _lines_of_stream(host: MemoryHost) -> list[tuple[EventId, bytes]]:
    known = _records(host)
    first = next(number for number, record in enumerate(known) if isinstance(record, StreamOpened))
    last = next(number for number, record in enumerate(known) if isinstance(record, TurnEnded))
    return host.line[first : last + 1]
