"""Permissions that an upstream agent requests in the middle of its answer: one question, one answer, used once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from midstream.history.messages import Response, Text
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import NO_DECISION_CONTENT, Choice, OnDoubt, QuestionKind, digest_of
from midstream.session.records import (
    AnswerUsed,
    AttemptFailed,
    AttemptStarted,
    CancelRequested,
    CloseReason,
    EpochStarted,
    QuestionAnswered,
    QuestionAsked,
    QuestionClosed,
    ResponseCompleted,
    StepCommitted,
    Sync,
    TurnEnded,
    TurnStatus,
    sync_of,
)
from midstream.session.turn.approvals import QUESTIONS_MAX
from midstream.session.turn.commands import (
    Answer,
    Cancel,
    PermissionWithdrawn,
    QuestionExpired,
    Recover,
    Refused,
    SendMessage,
    TurnExpired,
    UseAnswer,
)
from midstream.session.turn.deciding import decide
from midstream.session.turn.pending import AnswerAgent, AwaitEnd, AwaitPerson, CallModel, pending_work
from midstream.session.turn.states import LOOK_BACK_S, AwaitingModel, Idle, TurnState
from tests.session.session_lives import SessionLife, lives
from tests.session.turn_stories import (
    AT,
    after,
    answers,
    apply_command,
    asks,
    fails,
    reads,
    requests_permission,
    sends,
    state_after,
    writes,
)
from tests.spec import spec

DIGEST = digest_of("work", "{}")
QUESTION = QuestionAsked(
    1,
    1,
    "leave-1",
    QuestionKind.APPROVAL,
    DIGEST,
    AT,
    "Sure?",
    attempt=1,
    name="work",
    arguments="{}",
)
WITHDRAWN = QuestionClosed(1, 1, "leave-1", CloseReason.WITHDRAWN, AT)
ALLOWED = QuestionAnswered(1, 1, "leave-1", QuestionKind.APPROVAL, DIGEST, Choice.ALLOW, AT)
MODEL = CallModel(AttemptRef(1, 1, 1))
DELIVER_ANSWER = AnswerAgent(AttemptRef(1, 1, 1), "leave-1")
USE = UseAnswer(AttemptRef(1, 1, 1), "leave-1")


def allows(question_id: str = "leave-1", choice: Choice = Choice.ALLOW, **more: str) -> Answer:
    return Answer(CallRef(1, 1, question_id), **{"digest": DIGEST, "choice": choice, **more})  # type: ignore[arg-type]


def is_waiting(state: TurnState) -> bool:
    return isinstance(state, AwaitingModel) and state.is_waiting_for_person


def refused(state: TurnState, command: Answer | UseAnswer) -> str:
    with pytest.raises(Refused) as caught:
        decide(state, command, epoch=1, at=AT)
    return caught.value.error.code


@spec("TURN-77")
def test_a_question_has_all_information_for_the_person_and_the_agent_waits() -> None:
    records, state = apply_command(state_after(sends()), requests_permission())
    assert records == (QUESTION,)
    assert is_waiting(state)
    assert pending_work(state) == (MODEL,)  # The agent waits inside, for as long as people take.


@spec("TURN-79")
def test_an_answer_and_its_use_are_synced_before_the_agent_receives_it() -> None:
    records, state = apply_command(state_after(sends(), requests_permission()), allows())
    assert records == (ALLOWED,)
    assert pending_work(state) == (MODEL, DELIVER_ANSWER)
    assert not is_waiting(state)

    records, state = apply_command(state, USE)
    assert records == (AnswerUsed(1, 1, 1, "leave-1", AT),)
    assert sync_of(records) is Sync.FULL
    assert pending_work(state) == (MODEL,)


@spec("TURN-79")
def test_an_answer_is_used_once() -> None:
    state = state_after(sends(), requests_permission(), allows(), USE)
    assert refused(state, USE) == "question_closed"
    assert refused(state, allows()) == "question_closed"
    # A repetition is another question.
    again, _ = apply_command(state, requests_permission("leave-2"))
    assert [type(each) for each in again] == [QuestionAsked]


@spec("TURN-79")
def test_an_answer_that_is_missing_or_late_cannot_be_used() -> None:
    waiting = state_after(sends(), requests_permission())
    assert refused(waiting, USE) == "question_closed"
    for state in (
        state_after(sends(), requests_permission(), allows(), Cancel()),
        state_after(sends(), asks(writes("a"))),
    ):
        assert refused(state, USE) == "question_closed"
    cut = state_after(sends(), requests_permission(), allows(), fails())
    assert refused(cut, USE) == "question_closed"
    assert refused(cut, UseAnswer(AttemptRef(1, 1, 2), "leave-1")) == "question_closed"


@spec("TURN-77", "TURN-33")
def test_an_answer_is_bound_to_the_shown_arguments_and_the_first_one_stands() -> None:
    waiting = state_after(sends(), requests_permission())
    assert refused(waiting, allows(digest="of other arguments")) == "answer_mismatch"
    assert refused(waiting, allows(choice=Choice.RERUN)) == "answer_mismatch"
    assert refused(waiting, allows("leave-2")) == "question_closed"
    assert (
        refused(state_after(sends(), requests_permission(), allows()), allows(choice=Choice.DENY))
        == "question_closed"
    )


@spec("TURN-81")
def test_changed_arguments_are_a_json_object_and_accepted_only_where_the_agent_supports_them() -> None:
    edited = '{"path": "b"}'
    records, _ = apply_command(state_after(sends(), requests_permission()), allows(arguments=edited))
    assert isinstance(records[0], QuestionAnswered)
    assert records[0].arguments == edited
    assert refused(state_after(sends(), requests_permission()), allows(arguments="[]")) == "answer_mismatch"
    fixed = state_after(sends(), requests_permission(is_fixed=True))
    assert refused(fixed, allows(arguments=edited)) == "answer_mismatch"
    assert is_waiting(fixed)
    denied, _ = apply_command(fixed, allows(choice=Choice.DENY, arguments=edited))
    assert isinstance(denied[0], QuestionAnswered)
    assert denied[0].arguments is None


@spec("TURN-80")
def test_the_end_of_an_attempt_closes_its_questions_first() -> None:
    waiting = state_after(sends(), requests_permission())
    ended, state = apply_command(waiting, Cancel())
    assert ended == (
        WITHDRAWN,
        CancelRequested(1, AT, AT),
        TurnEnded(1, TurnStatus.CANCELLED, AT),
    )
    assert state == Idle()
    assert apply_command(waiting, fails())[0][:2] == (
        WITHDRAWN,
        AttemptFailed(1, 1, 1, "model_unavailable", "it broke", AT),
    )
    assert apply_command(waiting, answers())[0] == (
        WITHDRAWN,
        ResponseCompleted(1, 1, 1, Response((Text("hello"),)), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.COMPLETED, AT),
    )
    assert apply_command(waiting, asks(reads("a")))[0][0] == WITHDRAWN
    assert apply_command(waiting, TurnExpired(1))[0][0] == WITHDRAWN


@spec("TURN-80")
def test_an_agent_that_continues_without_an_answer_closes_its_question() -> None:
    dropped = PermissionWithdrawn(AttemptRef(1, 1, 1), "leave-1")
    records, state = apply_command(state_after(sends(), requests_permission()), dropped)
    assert records == (WITHDRAWN,)
    assert refused(state, allows()) == "question_closed"
    assert apply_command(state, dropped) == ((), state)
    # Decided, and the agent is no longer there to receive it: nothing of it is left.
    _, state = apply_command(state_after(sends(), requests_permission(), allows()), dropped)
    assert pending_work(state) == (MODEL,)


@spec("TURN-80")
def test_the_agent_is_informed_when_the_time_for_an_answer_is_over() -> None:
    waiting = state_after(sends(), requests_permission(answer_s=60.0))
    assert pending_work(waiting) == (MODEL, AwaitPerson(CallRef(1, 1, "leave-1"), AT + 60.0))
    expired = QuestionExpired(CallRef(1, 1, "leave-1"))
    assert apply_command(waiting, expired, at=AT + 59.0)[0] == ()
    records, state = apply_command(waiting, expired, at=AT + 60.0)
    assert records == (QuestionClosed(1, 1, "leave-1", CloseReason.EXPIRED, AT + 60.0),)
    assert pending_work(state) == (MODEL, DELIVER_ANSWER)
    assert refused(state, allows()) == "question_closed"
    assert "Nobody" in NO_DECISION_CONTENT


@spec("TURN-80", "TURN-16")
def test_a_new_node_closes_the_question_and_begins_the_next_attempt_however_long_people_took() -> None:
    waiting = after(state_after(sends(), requests_permission()), EpochStarted(2, "next", AT), epoch=2)
    late = AT + LOOK_BACK_S + 1.0
    records, state = apply_command(waiting, Recover(), epoch=2, at=late)
    closed = QuestionClosed(1, 1, "leave-1", CloseReason.WITHDRAWN, late)
    assert records == (closed, AttemptStarted(1, 1, 2, late))
    assert not is_waiting(state)


@spec("TURN-79")
def test_an_undelivered_answer_holds_once_for_the_same_question_of_the_next_attempt() -> None:
    cut = after(
        state_after(sends(), requests_permission(), allows(text="go", by="ann")),
        EpochStarted(2, "next", AT),
        epoch=2,
    )
    _, state = apply_command(cut, Recover(), epoch=2)
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 2)),)
    other, _ = apply_command(state, requests_permission("leave-2", "another", attempt=2), epoch=2)
    assert [type(each) for each in other] == [QuestionAsked]
    vague, _ = apply_command(state, requests_permission("leave-2", attempt=2, is_vague=True), epoch=2)
    assert [type(each) for each in vague] == [QuestionAsked]

    records, state = apply_command(state, requests_permission("leave-2", attempt=2), epoch=2)
    asked, answered = records
    assert isinstance(asked, QuestionAsked)
    assert (asked.call_id, asked.repeats) == ("leave-2", "leave-1")
    assert answered == QuestionAnswered(
        1, 1, "leave-2", QuestionKind.APPROVAL, DIGEST, Choice.ALLOW, AT, "go", by="ann"
    )
    assert pending_work(state) == (
        CallModel(AttemptRef(1, 1, 2)),
        AnswerAgent(AttemptRef(1, 1, 2), "leave-2"),
    )
    again, _ = apply_command(state, requests_permission("leave-3", attempt=2), epoch=2)
    assert [type(each) for each in again] == [QuestionAsked]  # Used up.


@spec("TURN-79")
def test_an_expired_question_is_asked_again() -> None:
    waiting = state_after(sends(), requests_permission(answer_s=60.0))
    _, expired = apply_command(waiting, QuestionExpired(CallRef(1, 1, "leave-1")), at=AT + 60.0)
    _, state = apply_command(expired, fails(), at=AT + 61.0)
    records, _ = apply_command(state, requests_permission("leave-2", attempt=2), at=AT + 62.0)
    assert [type(each) for each in records] == [QuestionAsked]


@spec("TURN-78")
def test_the_time_limit_of_a_turn_is_paused_while_people_decide() -> None:
    newest = SendMessage(sends().message, timeout_s=100.0)
    _, state = apply_command(state_after(newest), requests_permission(), at=AT + 10.0)
    _, state = apply_command(state, requests_permission("leave-2"), at=AT + 20.0)
    assert pending_work(state) == (MODEL,)
    _, state = apply_command(state, allows(), at=AT + 30.0)
    assert pending_work(state) == (MODEL, DELIVER_ANSWER)
    _, state = apply_command(state, allows("leave-2"), at=AT + 60.0)
    assert pending_work(state)[-1] == AwaitEnd(1, AT + 150.0)


@spec("TURN-77")
def test_an_agent_that_asks_endlessly_is_refused() -> None:
    state = state_after(sends(), *(requests_permission(f"leave-{number}") for number in range(QUESTIONS_MAX)))
    with pytest.raises(Refused, match="64 questions already wait"):
        decide(state, requests_permission("one more"), epoch=1, at=AT)


@given(lives())
@spec("TURN-79")
def test_no_answer_is_used_twice_or_without_a_person(life: SessionLife) -> None:
    used = Counter(record.call_id for _, record in life.journal if isinstance(record, AnswerUsed))
    given_once = {record.call_id for _, record in life.journal if isinstance(record, QuestionAnswered)}
    late = {
        record.call_id
        for _, record in life.journal
        if isinstance(record, QuestionClosed) and record.why is CloseReason.EXPIRED
    }
    repeated = Counter(
        record.repeats for _, record in life.journal if isinstance(record, QuestionAsked) and record.repeats
    )
    assert set((used | repeated).values()) <= {1}
    assert not set(used) & set(repeated)  # Used up here, or handed on to one question: never both.
    assert set(used) <= given_once | late
    assert set(repeated) <= given_once


def test_a_call_in_doubt_is_no_question_of_an_agent() -> None:
    held = after(state_after(sends(), asks(writes("a", OnDoubt.HOLD))), EpochStarted(2, "next", AT), epoch=2)
    records, _ = apply_command(held, Recover(), epoch=2)
    assert [each.attempt for each in records if isinstance(each, QuestionAsked)] == [0]
