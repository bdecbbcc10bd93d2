"""Queued messages, and results that arrive after their turn."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.errors import (
    MalformedFrameError,
    SessionBusyError,
)
from midstream.history.messages import UserMessage
from midstream.session.blobs import BLOB_BYTES_MIN, digests_in
from midstream.session.call_references import CallRef
from midstream.session.records import (
    AttemptStarted,
    MessageAccepted,
    ResultArrivedLate,
    TurnEnded,
)
from midstream.session.session import (
    QUEUE_MAX,
    Received,
    Session,
    decide,
    fold,
)
from midstream.session.turn.commands import (
    CallExpired,
    Cancel,
    CancelExpired,
    Refused,
    SendMessage,
    WhenBusy,
)
from midstream.session.turn.states import AwaitingModel
from tests.session.test_session import _fold, _live, _queued, _with_result
from tests.session.turn_stories import (
    AT,
    answers,
    asks,
    at_client,
    ended,
    sends,
    writes,
)
from tests.spec import spec


@spec("TURN-70")
def test_the_session_records_whether_it_has_blobs() -> None:
    small, large = (_with_result(content) for content in ("small", "x" * BLOB_BYTES_MIN))
    assert (small.has_blobs, large.has_blobs) == (False, True)
    assert digests_in(large.history)


@spec("TURN-28")
def test_the_next_turn_opens_in_the_append_that_ends_the_one_before() -> None:
    session = _live(sends(), _queued("and then"))
    records = decide(session, answers(), epoch=1, at=AT)
    assert [type(record) for record in records[-3:]] == [TurnEnded, MessageAccepted, AttemptStarted]
    session = fold([(1, record) for record in records], session)
    assert (session.turns, session.queue, session.is_live) == (2, (), True)


@spec("TURN-28")
def test_a_queued_message_keeps_its_limits() -> None:
    later = SendMessage(UserMessage.of("later"), when_busy=WhenBusy.QUEUE, timeout_s=9.0, responses_max=3)
    session = _live(sends(), later, answers())
    assert isinstance(session.turn, AwaitingModel)
    assert (session.turn.terms.timeout_s, session.turn.terms.responses_max) == (9.0, 3)


@spec("TURN-28")
def test_the_queue_is_bounded() -> None:
    session = _live(sends(), *(_queued(str(number)) for number in range(QUEUE_MAX)))
    with pytest.raises(Refused) as refused:
        decide(session, _queued("one more"), epoch=1, at=AT)
    assert isinstance(refused.value.error, SessionBusyError)


@spec("TURN-29")
def test_a_cancel_on_a_stream_takes_back_only_its_own_message() -> None:
    session = _live(sends())
    session = _fold(session, Received("s", "secret", 0, "d0", _queued("later")))
    session = _fold(session, Received("s", "secret", 1, "d1", Cancel()))
    assert session.queue == ()
    assert session.is_live


@spec("TURN-29")
def test_a_stream_with_a_queued_message_accepts_no_other() -> None:
    session = _fold(_live(sends()), Received("s", "secret", 0, "d0", _queued("later")))
    with pytest.raises(Refused) as refused:
        decide(session, Received("s", "secret", 1, "d1", _queued("another")), epoch=1, at=AT)
    assert isinstance(refused.value.error, MalformedFrameError)


@spec("TURN-31")
def test_a_late_result_is_recorded_once() -> None:
    session = _live(sends(), asks(writes("a")), Cancel(), CancelExpired(1))
    late = ended("a", "it was sent after all")
    records = decide(session, late, epoch=1, at=AT)
    assert records == (ResultArrivedLate(1, 1, late.result, AT),)
    session = fold([(1, record) for record in records], session)
    assert decide(session, late, epoch=1, at=AT) == ()


@spec("TURN-31", "TURN-15")
def test_a_client_can_send_late_results_of_its_own_calls_only() -> None:
    message = Received("s", "secret", 0, "d0", sends())
    ours = _live(message, asks(writes("a")), Cancel(), CancelExpired(1))
    theirs = _live(message, asks(at_client("a")), CallExpired(CallRef(1, 1, "a")))
    received = Received("s", "secret", 1, "d1", ended("a", "late"))
    assert not any(isinstance(each, ResultArrivedLate) for each in decide(ours, received, epoch=1, at=AT))
    assert any(isinstance(each, ResultArrivedLate) for each in decide(theirs, received, epoch=1, at=AT))


@spec("TURN-91")
def test_a_message_can_carry_the_conversation_that_its_client_has_changed() -> None:
    session = _live(sends("one"), answers("1"), sends("two"), answers("2", turn=2))
    old = session.history.entries
    others = (UserMessage.of("dos"),)
    newest = SendMessage(UserMessage.of("three"), keep=2, before=others, turns=2)
    session = _fold(session, newest)
    assert session.history.entries == (*old[:2], *others, newest.message)
    assert (session.turns, session.is_live) == (3, True)


@spec("TURN-91")
def test_a_change_before_the_cut_shows_the_model_the_older_part_again() -> None:
    before = replace(_live(sends("one"), answers("1"), sends("two"), answers("2", turn=2)), cut=2)
    assert _fold(before, SendMessage(UserMessage.of("x"), keep=2, turns=2)).cut == 2
    assert _fold(before, SendMessage(UserMessage.of("x"), keep=1, turns=2)).cut == 0


@spec("TURN-91")
@pytest.mark.parametrize(
    ("session", "code"),
    [
        (_live(sends()), "session_busy"),
        (_live(sends(), answers(), sends(), answers(turn=2)), "journal_moved"),
    ],
)
def test_a_change_of_an_outdated_conversation_is_refused(session: Session, code: str) -> None:
    message = SendMessage(UserMessage.of("x"), when_busy=WhenBusy.QUEUE, keep=0, turns=1)
    with pytest.raises(Refused) as refused:
        decide(session, message, epoch=1, at=AT)
    assert refused.value.error.code == code
