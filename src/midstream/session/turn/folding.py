"""The fold of one record into the state of a turn. A record is a fact: none is refused."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from midstream.history.messages import Finish, Step
from midstream.session.calls import CallPlan, CallState, Choice, approvals_after, digest_of, lost_result
from midstream.session.records import (
    AnswerUsed,
    AttemptContinued,
    AttemptFailed,
    AttemptResumable,
    AttemptStarted,
    CallEnded,
    CallInDoubt,
    CallProgressed,
    CallStarted,
    CancelRequested,
    ChildDelta,
    CommandAccepted,
    Delta,
    EpochStarted,
    HistoryCompacted,
    JournalPruned,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    OutcomeDamaged,
    QuestionAnswered,
    QuestionAsked,
    QuestionClosed,
    Record,
    ResponseCompleted,
    ResultArrivedLate,
    ReuseDecided,
    StallEnded,
    StallNoticed,
    StepCommitted,
    StreamOpened,
    StreamTaken,
    ToolsChanged,
    TranscriptAccepted,
    TurnEnded,
    TurnResumed,
    TurnStatus,
)
from midstream.session.turn import approvals
from midstream.session.turn.states import (
    HAND_IN_S,
    MODEL_CALLS_MAX_CODE,
    AwaitingModel,
    Cancelling,
    Cut,
    Idle,
    RunningCalls,
    Terms,
    TurnState,
    UnfinishedTurn,
)


def evolve(state: TurnState, record: Record, *, epoch: int) -> TurnState:
    """Fold one record into the state.

    Args:
        epoch: The epoch under which the record was appended.
    """
    # Each case costs a check, so the records of every step come first.
    match record:
        case Delta():
            if not isinstance(state, AwaitingModel):
                return state
            return replace(state, deltas=(state.deltas, record), is_mute=False)
        case CommandAccepted() | StreamOpened() | StreamTaken():
            return state
        case AttemptStarted():
            return _evolve_attempt(state, record, epoch=epoch)
        case ResponseCompleted():
            return _evolve_response(state, record)
        case CallStarted() | CallEnded() | CallInDoubt() | ChildDelta():
            return _evolve_calls(state, record, epoch=epoch)
        case QuestionAsked() | QuestionAnswered() | QuestionClosed() | AnswerUsed():
            return _evolve_question(state, record, epoch=epoch)
        case StepCommitted():
            return _evolve_commit(state, record)
        case MessageAccepted() | TranscriptAccepted():
            return _evolve_opening(record)
        case AttemptResumable():
            return replace(state, token=record.token) if isinstance(state, AwaitingModel) else state
        case AttemptContinued():
            return _evolve_continued(state, record, epoch=epoch)
        case AttemptFailed():
            return replace(state, failures=state.failures + 1) if isinstance(state, AwaitingModel) else state
        case ReuseDecided():
            return replace(state, is_upstream=True) if isinstance(state, AwaitingModel) else state
        case HistoryCompacted():
            if not isinstance(state, AwaitingModel):
                return state
            return replace(
                state, is_compacted=True, failures=0
            )  # the failure was that it had too much to read
        case OutcomeDamaged():
            return _evolve_damaged(state, record)
        case CancelRequested():
            return _evolve_cancel(state, record)
        case TurnEnded():
            return _evolve_end(state, record)
        case TurnResumed():
            return _evolve_resumed(state, record)
        case (
            EpochStarted()
            | MessageQueued()
            | MessageWithdrawn()
            | CallProgressed()
            | ResultArrivedLate()
            | ToolsChanged()
            | StallNoticed()
            | StallEnded()
            | JournalPruned()
        ):
            return state
        case _:
            assert_never(record)


def step_of(state: TurnState) -> Step | None:
    """Return the step that a `StepCommitted` adds to the history."""
    if not isinstance(state, RunningCalls | Cancelling):
        return None
    ended = (call for call in state.calls if call.result is not None or call.is_outcome_lost)
    return Step(state.response, tuple(call.result or lost_result(call) for call in ended))


def _evolve_opening(record: MessageAccepted | TranscriptAccepted) -> TurnState:
    if isinstance(record, TranscriptAccepted):
        return AwaitingModel(
            record.turn, record.response, Terms(request=record.request), touched_at=record.at
        )
    terms = Terms(record.tools, record.timeout_s, record.responses_max)
    return AwaitingModel(record.turn, 1, terms, touched_at=record.at, deadline_at=terms.deadline(record.at))


def _evolve_attempt(state: TurnState, record: AttemptStarted, *, epoch: int) -> TurnState:
    if not isinstance(state, AwaitingModel):
        return state
    next_state = replace(
        state,
        response_no=record.response,
        attempt=record.attempt,
        epoch=epoch,
        not_before=record.not_before,
        touched_at=record.at,
        deltas=(),
        token="",
        continued=0,
        is_mute=False,
        questions=approvals.undelivered_decisions(state),
        waits_since=0.0,
        is_upstream=False,
    )
    if not record.is_last:
        return next_state
    return replace(
        next_state, is_last=True, deadline_at=record.at + HAND_IN_S if state.terms.timeout_s else 0.0
    )


def _evolve_continued(state: TurnState, record: AttemptContinued, *, epoch: int) -> TurnState:
    if not isinstance(state, AwaitingModel):
        return state
    return replace(
        state,
        epoch=epoch,
        not_before=record.not_before,
        touched_at=record.at,
        continued=record.number,
        is_mute=True,
    )


def _evolve_response(state: TurnState, record: ResponseCompleted) -> TurnState:
    plans = {plan.call_id: plan for plan in record.plans}
    calls = tuple(
        CallState(call, plans.get(call.id) or CallPlan(call.id, digest_of(call.name, call.arguments)))
        for call in record.body.calls
    )
    if not isinstance(state, AwaitingModel):
        return RunningCalls(record.turn, record.response, record.body, calls, touched_at=record.at)
    return RunningCalls(
        record.turn,
        record.response,
        record.body,
        calls,
        state.terms,
        touched_at=record.at,
        deadline_at=state.deadline_at,
        is_last=state.is_last,
        cut=_cut_of(state) if record.body.finish is Finish.INTERRUPTED else Cut(),
    )


def _cut_of(state: AwaitingModel) -> Cut:
    return Cut(state.failures, approvals.undelivered_decisions(state))


def _evolve_question(
    state: TurnState, record: QuestionAsked | QuestionAnswered | QuestionClosed | AnswerUsed, *, epoch: int
) -> TurnState:
    if isinstance(state, AwaitingModel):
        return approvals.evolve(state, record)
    if isinstance(record, QuestionClosed | AnswerUsed):
        return state
    return _evolve_calls(state, record, epoch=epoch)


def _evolve_commit(state: TurnState, record: StepCommitted) -> TurnState:
    if isinstance(state, Idle):
        return AwaitingModel(record.turn, record.response + 1)
    deadline_at = 0.0 if isinstance(state, Cancelling) else state.deadline_at
    cut = state.cut if isinstance(state, RunningCalls) else Cut()
    return AwaitingModel(
        record.turn,
        record.response + 1,
        state.terms,
        failures=cut.failures,
        touched_at=state.touched_at,
        deadline_at=deadline_at,
        questions=cut.questions,
    )


def _evolve_cancel(state: TurnState, record: CancelRequested) -> TurnState:
    if isinstance(state, Cancelling):
        return replace(state, status=record.status)
    if not isinstance(state, RunningCalls):
        return state
    return Cancelling(
        state.turn,
        state.response_no,
        state.response,
        state.calls,
        record.deadline_at,
        state.terms,
        record.at,
        record.status,
    )


def _evolve_end(state: TurnState, record: TurnEnded) -> TurnState:
    is_over = (
        record.status in (TurnStatus.COMPLETED, TurnStatus.CANCELLED) or record.code == MODEL_CALLS_MAX_CODE
    )
    if is_over or isinstance(state, Idle):
        return Idle()
    return Idle(UnfinishedTurn(state.turn, state.response_no, state.terms))


def _evolve_resumed(state: TurnState, record: TurnResumed) -> TurnState:
    terms = state.left.terms if isinstance(state, Idle) and state.left else Terms()
    return AwaitingModel(
        record.turn, record.response, terms, touched_at=record.at, deadline_at=terms.deadline(record.at)
    )


# --- calls ----------------------------------------------------------------------------------------------------

_CallRecord = CallStarted | CallEnded | CallInDoubt | ChildDelta | QuestionAsked | QuestionAnswered


def _evolve_calls(state: TurnState, record: _CallRecord, *, epoch: int) -> TurnState:
    if not isinstance(state, RunningCalls | Cancelling):
        return state
    call_id = record.result.call_id if isinstance(record, CallEnded) else record.call_id
    calls = state.calls
    for place, call in enumerate(calls):
        if call.call.id == call_id:
            calls = (*calls[:place], _evolve_call(call, record, epoch=epoch), *calls[place + 1 :])
            break
    if isinstance(record, QuestionAnswered) and isinstance(state, RunningCalls) and state.deadline_at:
        asked_at = next((call.asked_at for call in state.calls if call.call.id == call_id), record.at)
        state = replace(state, deadline_at=state.deadline_at + max(0.0, record.at - asked_at))
    touched_at = state.touched_at if isinstance(record, ChildDelta) else record.at
    return replace(state, calls=calls, touched_at=touched_at)


def _evolve_damaged(state: TurnState, record: OutcomeDamaged) -> TurnState:
    """Keep a call with a damaged outcome open; a later commit closes it as unknown (TURN-72)."""
    if not isinstance(state, RunningCalls | Cancelling) or (record.turn, record.response) != (
        state.turn,
        state.response_no,
    ):
        return state
    calls = tuple(
        replace(call, is_outcome_lost=True, asked=None) if call.call.id == record.call_id else call
        for call in state.calls
    )
    return replace(state, calls=calls)


def _evolve_call(call: CallState, record: _CallRecord, *, epoch: int) -> CallState:
    match record:
        case CallEnded():
            return replace(call, result=record.result, asked=None)
        case CallStarted():
            return replace(
                call,
                runs=record.run,
                epoch=epoch,
                started_at=record.at,
                is_in_doubt=False,
                is_outcome_lost=False,
                is_allowed=False,
                approved_by=(),
                asked=None,
            )
        case ChildDelta():
            return replace(call, child_position=record.position)
        case CallInDoubt():
            return replace(call, is_in_doubt=True, epoch=epoch)
        case QuestionAsked():
            return replace(call, asked=record.kind, asked_at=record.at, expires_at=record.expires_at)
        case QuestionAnswered():
            return _evolve_answer(call, record)
        case _:
            assert_never(record)


def _evolve_answer(call: CallState, record: QuestionAnswered) -> CallState:
    answered = replace(call, asked=None, is_allowed=record.choice is Choice.ALLOW)
    if record.choice is Choice.ALLOW and call.plan.approvers > 1:
        approved_by = approvals_after(
            call.approved_by, call.plan.approvers, record.by, is_edited=record.arguments is not None
        )
        is_allowed = len(approved_by) >= call.plan.approvers
        answered = replace(answered, approved_by=approved_by, is_allowed=is_allowed)
    if record.arguments is None:
        return answered
    edited = replace(call.call, arguments=record.arguments)
    plan = replace(call.plan, digest=digest_of(edited.name, edited.arguments))
    return replace(answered, call=edited, plan=plan, is_edited=True)
