"""Permission requests of an upstream's agent during its answer: asked, answered, used.

    asked ──answered──▶ (the agent waits) ──used──▶ sent
      │                        │
    closed: expired,    its attempt was cut: the answer is kept for the first question
    withdrawn           like it that a later attempt of the same response asks

A record uses the answer up before the agent receives it, so it is never used twice; a crash in between wastes it.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec.structs import replace

from midstream.errors import AnswerMismatchError, QuestionClosedError
from midstream.json_depth import require_shallow_text
from midstream.session.call_references import CallRef
from midstream.session.calls import (
    CHOICES,
    Choice,
    QuestionKind,
    approvals_after,
    digest_of,
    text_for_several,
)
from midstream.session.records import (
    AnswerUsed,
    CloseReason,
    QuestionAnswered,
    QuestionAsked,
    QuestionClosed,
    Record,
)
from midstream.session.turn.commands import (
    Answer,
    PermissionRequested,
    PermissionWithdrawn,
    QuestionExpired,
    Refused,
    UseAnswer,
)
from midstream.session.turn.several_people import require_another_person
from midstream.session.turn.states import AgentQuestion, AwaitingModel

QUESTIONS_MAX = 64
"""Questions of one attempt that may wait for a person; the next one is refused, and the agent gets the refusal."""

_KIND = QuestionKind.APPROVAL


def decide(
    state: AwaitingModel,
    command: PermissionRequested | PermissionWithdrawn | UseAnswer | QuestionExpired,
    *,
    at: float,
) -> tuple[Record, ...]:
    """Return the records when an agent requests a permission, withdraws it, or gets an answer or none in time."""
    match command:
        case PermissionRequested():
            return _open_questions(state, command, at=at)
        case PermissionWithdrawn():
            dropped = _find(state, command)
            return () if dropped is None else (_close_question(state, dropped, at=at),)
        case UseAnswer():
            question = _find(state, command)
            if question is None or question.is_open:
                raise closed_error(command)
            return (AnswerUsed(state.turn, state.response_no, state.attempt, question.id, at),)
        case QuestionExpired():
            late = open_question(state, command.ref)
            if late is None or not late.expires_at or at < late.expires_at:
                return ()  # TURN-9
            return (_close_question(state, late, at=at, why=CloseReason.EXPIRED),)
        case _:
            assert_never(command)


def open_question(state: AwaitingModel, ref: CallRef) -> AgentQuestion | None:
    """Return the question with this id that a person may answer, or None."""
    if (ref.turn, ref.response_no) != (state.turn, state.response_no):
        return None
    return next((each for each in state.questions if each.id == ref.call_id and each.is_open), None)


def take_answer(
    state: AwaitingModel, question: AgentQuestion, answer: Answer, *, at: float
) -> tuple[Record, ...]:
    """Return the records of a person's decision; the agent receives it next.

    Raises:
        Refused: The answer is for other arguments, has an impossible choice, or has invalid arguments.
    """
    if answer.digest != question.digest:
        raise Refused(AnswerMismatchError("the answer is for other arguments than those of this question"))
    if answer.choice not in CHOICES[_KIND]:
        known = ", ".join(CHOICES[_KIND])
        raise Refused(AnswerMismatchError(f"a question of kind {_KIND} is answered with: {known}"))
    arguments = answer.arguments if answer.choice is Choice.ALLOW else None
    if arguments is not None:
        _refuse_unfit(question, arguments)
    require_another_person(answer, question.approvers, question.approved_by)
    answered = QuestionAnswered(
        state.turn,
        state.response_no,
        question.id,
        _KIND,
        question.digest,
        answer.choice,
        at,
        answer.text,
        arguments,
        answer.by,
    )
    after = _answered(question, answered)
    return (answered,) if after.choice is not None else (answered, _ask_others(state, after, answered))


def _ask_others(state: AwaitingModel, question: AgentQuestion, answered: QuestionAnswered) -> QuestionAsked:
    """Return the question for the other people who must allow it, with the current arguments."""
    arguments = question.arguments if question.edited is None else question.edited
    done = f"{answered.by} allowed this."
    if answered.arguments is not None:
        done = f"{answered.by} changed the arguments and allowed that; approvals before do not count."
    return QuestionAsked(
        state.turn,
        state.response_no,
        question.id,
        _KIND,
        digest_of(question.name, arguments),
        answered.at,
        f"{question.text}\n{done}",
        question.expires_at,
        question.attempt,
        question.name,
        arguments,
        question.is_fixed,
        question.id,
        question.approvers,
    )


def close_open_questions(state: AwaitingModel, *, at: float) -> tuple[Record, ...]:
    """Return the ends of all open questions, whose answers are not awaited any more."""
    return tuple(_close_question(state, each, at=at) for each in state.questions if each.is_open)


def undelivered_decisions(state: AwaitingModel) -> tuple[AgentQuestion, ...]:
    """Return the decisions that no agent has received, which outlive the attempt."""
    return tuple(each for each in state.questions if each.choice is not None)


def closed_error(command: Answer | UseAnswer) -> Refused:
    """Return the refusal of an answer after a question was closed."""
    name = command.ref.call_id if isinstance(command, Answer) else command.question_id
    message = (
        f"call {name!r} of turn {command.ref.turn} has no open question: it was answered, or the turn ended"
    )
    return Refused(QuestionClosedError(message))


def too_late(command: PermissionRequested) -> Refused:
    """Return the refusal of a question whose attempt has ended."""
    message = (
        f"attempt {command.ref.attempt} of turn {command.ref.turn} has ended; it accepts no more questions"
    )
    return Refused(QuestionClosedError(message))


def evolve(
    state: AwaitingModel, record: QuestionAsked | QuestionAnswered | QuestionClosed | AnswerUsed
) -> AwaitingModel:
    """Fold a record about an agent's question."""
    match record:
        case QuestionAsked():
            kept = tuple(each for each in state.questions if each.id != record.repeats)
            before = next((each for each in state.questions if each.id == record.repeats), None)
            since = state.waits_since or record.at
            questions = (*kept, _question(record, before))
            return replace(state, questions=questions, waits_since=since, touched_at=record.at)
        case QuestionAnswered():
            questions = tuple(
                _answered(each, record) if each.id == record.call_id else each for each in state.questions
            )
        case QuestionClosed(why=CloseReason.EXPIRED):
            questions = tuple(
                replace(each, is_expired=True) if each.id == record.call_id else each
                for each in state.questions
            )
        case QuestionClosed() | AnswerUsed():
            questions = tuple(each for each in state.questions if each.id != record.call_id)
        case _:
            assert_never(record)
    after = replace(state, questions=questions, touched_at=record.at)
    if after.is_waiting_for_person or not after.waits_since:
        return after
    # The time during which a person was asked does not count (TURN-78).
    waited_s = max(0.0, record.at - after.waits_since)
    deadline_at = after.deadline_at + waited_s if after.deadline_at else 0.0
    return replace(after, waits_since=0.0, deadline_at=deadline_at)


def _open_questions(state: AwaitingModel, request: PermissionRequested, *, at: float) -> tuple[Record, ...]:
    if request.ref != state.ref:
        raise too_late(request)
    if sum(each.is_open for each in state.questions) >= QUESTIONS_MAX:
        message = f"{QUESTIONS_MAX} questions already wait for a person"
        raise Refused(QuestionClosedError(message))
    digest = digest_of(request.name, request.arguments)
    given = None if request.is_vague else _find_given_answer(state, digest, request.approvers)
    question = QuestionAsked(
        state.turn,
        state.response_no,
        request.question_id,
        _KIND,
        digest,
        at,
        text_for_several(request.text, request.approvers),
        at + request.answer_s if request.answer_s else 0.0,
        state.attempt,
        request.name,
        request.arguments,
        request.is_fixed,
        given.id if given else "",
        request.approvers,
    )
    if given is None or given.choice is None:
        return (question,)
    answer = QuestionAnswered(
        state.turn,
        state.response_no,
        request.question_id,
        _KIND,
        digest,
        given.choice,
        at,
        given.words,
        given.edited,
        given.by,
    )
    return (question, answer)


def _find_given_answer(state: AwaitingModel, digest: str, approvers: int) -> AgentQuestion | None:
    """Return an unused answer to the same question of an earlier attempt.

    An approval is valid if the same number of people must allow the act now. Approvals by several people are valid only
    for the agent's own arguments, because not all of them saw a change.
    """
    return next(
        (
            each
            for each in state.questions
            if each.attempt != state.attempt
            and each.digest == digest
            and each.choice is not None
            and (each.choice is not Choice.ALLOW or _is_allowed_by(each, approvers))
        ),
        None,
    )


def _is_allowed_by(question: AgentQuestion, approvers: int) -> bool:
    return question.approvers == approvers and (approvers == 1 or question.edited is None)


def _answered(question: AgentQuestion, record: QuestionAnswered) -> AgentQuestion:
    """Return a question after an answer: decided, or allowed by one more of the necessary people."""
    is_edited = record.arguments is not None
    edited = record.arguments if is_edited else question.edited
    if record.choice is not Choice.ALLOW:
        return replace(question, choice=record.choice, words=record.text, edited=None, by=record.by)
    approved_by = approvals_after(question.approved_by, question.approvers, record.by, is_edited=is_edited)
    if len(approved_by) < question.approvers and question.approvers > 1:
        return replace(question, edited=edited, approved_by=approved_by)
    return replace(
        question,
        choice=record.choice,
        words=record.text,
        edited=edited,
        by=record.by,
        approved_by=approved_by,
    )


def _question(record: QuestionAsked, before: AgentQuestion | None) -> AgentQuestion:
    """Return the question of a record; `before` is the one that it repeats."""
    return AgentQuestion(
        record.call_id,
        record.attempt,
        record.name,
        record.arguments,
        record.digest,
        record.at,
        record.text,
        record.expires_at,
        record.is_fixed,
        edited=before.edited if before else None,
        approvers=record.approvers,
        approved_by=before.approved_by if before else (),
    )


def _find(state: AwaitingModel, command: PermissionWithdrawn | UseAnswer) -> AgentQuestion | None:
    if command.ref != state.ref:
        return None
    ids = (command.question_id, state.attempt)
    return next((each for each in state.questions if (each.id, each.attempt) == ids), None)


def _close_question(
    state: AwaitingModel, question: AgentQuestion, *, at: float, why: CloseReason = CloseReason.WITHDRAWN
) -> QuestionClosed:
    return QuestionClosed(state.turn, state.response_no, question.id, why, at)


def _refuse_unfit(question: AgentQuestion, arguments: str) -> None:
    if question.is_fixed:
        message = f"{question.name!r} runs with its agent's arguments; allow it as it is, or deny it"
        raise Refused(AnswerMismatchError(message))
    require_object(arguments)


def require_object(arguments: str) -> None:
    """Check that a person's arguments are a JSON object: else a typing error would use up the approval.

    Raises:
        Refused: They are not.
    """
    try:
        require_shallow_text(arguments)
        is_object = isinstance(msgspec.json.decode(arguments), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        is_object = False
    if not is_object:
        raise Refused(AnswerMismatchError("arguments are a JSON object"))
