"""Streams of clients in the state of a session: which are kept, and outcomes of calls that a power cut has taken."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.session import session as sessions
from midstream.session.records import CallEnded, CommandAccepted, EpochStarted
from midstream.session.session import Received, Session, decide, fold
from midstream.session.turn.commands import Cancel, Command, Recover, Refused, Resume, WhenBusy
from tests.session.turn_stories import AT, answers, asks, at_client, ended, sends
from tests.spec import spec

OPENED = fold([(1, EpochStarted(1, "node", AT))])


def _received(seqno: int, command: Command, stream: str = "s") -> Received:
    return Received(stream, "secret", seqno, f"digest of {command!r}", command)


def _after(session: Session, *commands: Command | Received) -> Session:
    for command in commands:
        decided = decide(session, command, epoch=session.epoch, at=AT)
        session = fold([(session.epoch, record) for record in decided], session)
    return session


def _on_next_node(session: Session) -> Session:
    epoch = session.epoch + 1
    return _after(fold([(epoch, EpochStarted(epoch, "next", AT))], session), Recover())


@spec("STREAM-12")
def test_the_stream_of_the_open_turn_and_of_a_queued_message_is_kept_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "STREAMS_KEPT_MAX", 4)
    session = _after(OPENED, _received(0, sends(), "old"), answers())
    session = _after(
        session,
        _received(0, sends("go"), "mine"),
        _received(0, replace(sends("next"), when_busy=WhenBusy.QUEUE), "queued"),
    )
    for number in range(8):
        session = _after(session, _received(0, Cancel(turn=1), f"other {number}"))
    assert [*session.streams] == ["mine", "queued", "other 6", "other 7"]
    assert decide(session, _received(0, sends("go"), "mine"), epoch=1, at=AT) == (), "it was accepted before"
    session = _after(session, answers(turn=2), _received(0, Cancel(turn=1), "last"))
    assert [*session.streams] == ["queued", "other 6", "other 7", "last"], "the turn of `mine` has ended"


@spec("TURN-15")
def test_the_outcome_of_a_call_that_a_power_cut_has_taken_waits_for_the_call() -> None:
    """The response with the call was not on disk. The next node calls the model again, which requests the same call."""
    session = _on_next_node(_after(OPENED, _received(0, sends())))
    early = _received(1, ended("a", "found"))
    with pytest.raises(Refused) as refused:
        decide(session, early, epoch=2, at=AT)
    assert (refused.value.error.code, refused.value.error.retry) == ("call_not_started", "later")
    session = _after(session, asks(at_client("a"), attempt=2))
    decided = decide(session, early, epoch=2, at=AT)
    assert [type(record) for record in decided[:2]] == [CommandAccepted, CallEnded]


@spec("TURN-15")
def test_the_outcome_of_a_lost_call_that_is_not_requested_again_is_acknowledged() -> None:
    session = _on_next_node(_after(OPENED, _received(0, sends())))
    session = _after(session, asks(at_client("b"), attempt=2))
    decided = decide(session, _received(1, ended("a", "found")), epoch=2, at=AT)
    assert [type(record) for record in decided] == [CommandAccepted]
    with pytest.raises(Refused) as refused:  # a stream that began at this node has lost nothing
        decide(session, _received(0, ended("a", "found"), "another"), epoch=2, at=AT)
    assert refused.value.error.code == "not_found"


@spec("STREAM-15")
@pytest.mark.parametrize("command", [Cancel(), Resume()])
def test_a_session_without_a_message_refuses_a_command_with_a_message_that_fits_each(
    command: Command,
) -> None:
    with pytest.raises(Refused) as refused:
        decide(OPENED, _received(0, command), epoch=1, at=AT)
    error = refused.value.error
    assert (error.code, error.message) == ("session_not_found", "this session has no message yet")
