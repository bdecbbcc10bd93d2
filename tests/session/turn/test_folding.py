"""State of a turn: its time limit, and the point of its resumption."""

from __future__ import annotations

import pytest

from midstream.errors import NothingToResumeError
from midstream.history.messages import Outcome, UserMessage
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import Choice
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CancelRequested,
    EpochStarted,
    MessageAccepted,
    TurnEnded,
    TurnResumed,
    TurnStatus,
)
from midstream.session.turn.commands import (
    Cancel,
    Command,
    Recover,
    Refused,
    Resume,
    SendMessage,
    TurnExpired,
)
from midstream.session.turn.deciding import decide
from midstream.session.turn.pending import AwaitCancelled, AwaitEnd, CallModel, RunCall, pending_work
from midstream.session.turn.states import LOOK_BACK_S, Idle, TurnState
from tests.session.turn_stories import (
    AT,
    after,
    answers,
    apply_command,
    asks,
    ended,
    fails,
    needs_approval,
    responses,
    sends,
    state_after,
    streams,
    writes,
)
from tests.spec import spec

LIMIT_S = 30.0


def _limited() -> SendMessage:
    return SendMessage(UserMessage.of("hi"), timeout_s=LIMIT_S)


def _interrupted(*commands: Command) -> TurnState:
    state = after(state_after(*commands), EpochStarted(2, "next", AT), epoch=2)
    return apply_command(state, Recover(), epoch=2, at=AT + LOOK_BACK_S + 1)[1]


# --- time -------------------------------------------------------------------------------------------------------


@spec("TURN-39")
def test_a_turn_with_a_limit_has_its_deadline_as_pending_work() -> None:
    state = state_after(_limited())
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 1)), AwaitEnd(1, AT + LIMIT_S))
    state = state_after(_limited(), asks(writes("a")))
    assert pending_work(state) == (RunCall(CallRef(1, 1, "a"), 1), AwaitEnd(1, AT + LIMIT_S))
    state = state_after(_limited(), asks(writes("a")), ended("a"))
    assert pending_work(state) == (CallModel(AttemptRef(1, 2, 1)), AwaitEnd(1, AT + LIMIT_S))


@spec("TURN-39")
def test_a_turn_beyond_its_limit_fails_and_keeps_its_text() -> None:
    records, state = apply_command(state_after(_limited(), streams("so far")), TurnExpired(1))
    end = records[-1]
    assert isinstance(end, TurnEnded)
    assert (end.status, end.code) == (TurnStatus.FAILED, "turn_timeout")
    assert "30 s" in end.message
    assert isinstance(state, Idle)


@spec("TURN-39", "TURN-7")
def test_tools_of_a_turn_beyond_its_limit_have_the_grace_of_a_cancel() -> None:
    records, state = apply_command(state_after(_limited(), asks(writes("a"), writes("b"))), TurnExpired(1))
    assert records == (CancelRequested(1, AT, AT + 5.0, TurnStatus.FAILED),)
    assert pending_work(state) == (AwaitCancelled(1, AT + 5.0),)
    records, state = apply_command(state, ended("a", "made it"))
    outcomes = [record.result.outcome for record in records if isinstance(record, CallEnded)]
    assert outcomes == [Outcome.OK, Outcome.CANCELLED]
    end = records[-1]
    assert isinstance(end, TurnEnded)
    assert (end.status, end.code) == (TurnStatus.FAILED, "turn_timeout")


@spec("TURN-8", "TURN-39")
@pytest.mark.parametrize("responses_max", [0, 2])
def test_cancelling_a_turn_that_its_limit_is_stopping_cancels_it(responses_max: int) -> None:
    limited = SendMessage(UserMessage.of("hi"), timeout_s=LIMIT_S, responses_max=responses_max)
    stopping = state_after(limited, asks(writes("a")), TurnExpired(1))
    records, state = apply_command(stopping, Cancel(1), at=AT + 1.0)
    assert records == (CancelRequested(1, AT + 1.0, AT + 5.0),)
    assert decide(state, Cancel(), epoch=1, at=AT + 2.0) == ()
    records, state = apply_command(state, ended("a"))
    assert records[-1] == TurnEnded(1, TurnStatus.CANCELLED, AT)
    assert state == Idle()


@spec("TURN-39")
def test_the_time_limit_is_paused_while_a_person_decides() -> None:
    state = state_after(_limited(), asks(needs_approval("a")))
    assert pending_work(state) == ()
    _, state = apply_command(state, responses("a", Choice.ALLOW), at=AT + 1000.0)
    assert pending_work(state) == (RunCall(CallRef(1, 1, "a"), 1), AwaitEnd(1, AT + 1000.0 + LIMIT_S))


@spec("TURN-39", "TURN-9")
def test_the_limit_of_another_turn_changes_nothing() -> None:
    for state in (state_after(_limited()), state_after(_limited(), asks(writes("a"))), Idle()):
        assert decide(state, TurnExpired(7), epoch=1, at=AT) == ()


# --- resuming ---------------------------------------------------------------------------------------------------


@spec("TURN-30")
@pytest.mark.parametrize(
    ("state", "response_no"),
    [
        (_interrupted(sends()), 1),
        (_interrupted(sends(), streams("half")), 2),
        (_interrupted(sends(), asks(writes("a"))), 2),
        (state_after(sends(), fails(retriable=False)), 1),
        (state_after(_limited(), TurnExpired(1)), 1),
    ],
    ids=["silent", "half said", "in a tool", "failed", "too long"],
)
def test_an_unfinished_turn_resumes_where_it_stopped(state: TurnState, response_no: int) -> None:
    records, resumed = apply_command(state, Resume(), at=AT + 5.0)
    assert records == (TurnResumed(1, response_no, AT + 5.0), AttemptStarted(1, response_no, 1, AT + 5.0))
    assert CallModel(AttemptRef(1, response_no, 1)) in pending_work(resumed)


@spec("TURN-30", "TURN-39")
def test_a_resumed_turn_has_its_whole_time_again() -> None:
    state = state_after(_limited(), TurnExpired(1))
    _, state = apply_command(state, Resume(1), at=AT + 100.0)
    assert AwaitEnd(1, AT + 100.0 + LIMIT_S) in pending_work(state)


@spec("TURN-30")
@pytest.mark.parametrize(
    ("state", "command"),
    [
        (Idle(), Resume()),
        (state_after(sends(), answers()), Resume()),
        (state_after(sends(), Cancel()), Resume()),
        (_interrupted(sends()), Resume(7)),
    ],
    ids=["new", "completed", "cancelled", "another"],
)
def test_a_finished_or_cancelled_turn_cannot_be_resumed(state: TurnState, command: Command) -> None:
    with pytest.raises(Refused) as refused:
        decide(state, command, epoch=1, at=AT)
    assert isinstance(refused.value.error, NothingToResumeError)


@spec("TURN-30", "TURN-9")
@pytest.mark.parametrize(
    "state", [state_after(sends()), state_after(sends(), asks(writes("a")))], ids=["model", "tool"]
)
def test_resuming_a_running_turn_changes_nothing(state: TurnState) -> None:
    assert decide(state, Resume(), epoch=1, at=AT) == ()


@spec("TURN-30")
def test_the_next_message_leaves_an_interrupted_turn_behind() -> None:
    state = after(_interrupted(sends()), MessageAccepted(2, UserMessage.of("never mind"), AT))
    assert decide(state, Resume(), epoch=2, at=AT) == ()
