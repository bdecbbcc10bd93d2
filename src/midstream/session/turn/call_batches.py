"""The calls of one response: their starts, questions, outcomes, and the end of the batch.

Every function returns records; `and_then_settle` adds their consequences for the batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from midstream.errors import AnswerMismatchError
from midstream.history.messages import Outcome, ToolResult
from midstream.session.call_references import CallRef
from midstream.session.calls import (
    CHOICES,
    DENIED_CONTENT,
    EDITED_CONTENT,
    HAPPENED_CONTENT,
    NO_ANSWER_CONTENT,
    NO_DECISION_CONTENT,
    NO_RESPONSE_CONTENT,
    SKIPPED_CONTENT,
    STOPPED_CONTENT,
    UNKNOWN_CONTENT,
    CallState,
    Choice,
    OnDoubt,
    QuestionKind,
    Site,
    closing_result,
    lost_result,
    question_text,
    startable,
)
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallInDoubt,
    CallStarted,
    ChildDelta,
    QuestionAnswered,
    QuestionAsked,
    Record,
    StepCommitted,
    TurnEnded,
    TurnStatus,
)
from midstream.session.rerun_policy import RERUNS_MAX, CallVerdict, judge
from midstream.session.turn.approvals import require_object
from midstream.session.turn.commands import (
    Answer,
    CallProbed,
    ChildStreamed,
    QuestionExpired,
    Recover,
    Refused,
)
from midstream.session.turn.folding import evolve
from midstream.session.turn.several_people import require_another_person
from midstream.session.turn.states import (
    MODEL_CALLS_MAX,
    MODEL_CALLS_MAX_CODE,
    SUSPECTED_CODE,
    SUSPECTED_MESSAGE,
    TURN_TIMEOUT_CODE,
    AwaitingModel,
    Cancelling,
    RunningCalls,
    TurnState,
)

Batch = RunningCalls | Cancelling


def and_then_settle(
    state: TurnState, records: tuple[Record, ...], *, epoch: int, at: float
) -> tuple[Record, ...]:
    """Return `records` and their immediate consequences: questions, starts, or the step's commit."""
    after = state
    for record in records:
        after = evolve(after, record, epoch=epoch)
    assert isinstance(after, RunningCalls)
    open_calls = [call for call in after.calls if call.result is None]
    if open_calls:
        questions = (
            _question_record(after, call, _kind_of(call), at=at) for call in open_calls if call.needs_person
        )
        started = (_start_record(after, call, at=at) for call in startable(after.calls))
        return (*records, *questions, *started)
    committed = StepCommitted(after.turn, after.response_no)
    if after.terms.has_grace and after.response_no >= after.terms.responses_max:
        return (*records, committed, AttemptStarted(after.turn, after.response_no + 1, 1, at, is_last=True))
    if after.response_no >= MODEL_CALLS_MAX:
        message = f"the turn was ended after {MODEL_CALLS_MAX} model calls"
        end = TurnEnded(after.turn, TurnStatus.FAILED, at, MODEL_CALLS_MAX_CODE, message)
        return (*records, committed, end)
    return (*records, committed, AttemptStarted(after.turn, after.response_no + 1, attempt=1, at=at))


def end_record(state: Batch | AwaitingModel, result: ToolResult, *, at: float) -> CallEnded:
    """Return the record of a call's only outcome."""
    return CallEnded(state.turn, state.response_no, result, at)


def end_call(state: RunningCalls, result: ToolResult, *, epoch: int, at: float) -> tuple[Record, ...]:
    """Return the records of the outcome of a call that ran."""
    taken = (end_record(state, _with_notice(state, result), at=at),)
    others = [call.runs for call in state.calls if call.result is None and call.call.id != result.call_id]
    if others and 0 not in others:
        return taken  # nothing to ask or to start, as for most results of a large batch
    return and_then_settle(state, taken, epoch=epoch, at=at)


def end_with_suspect(state: RunningCalls, result: ToolResult, *, at: float) -> tuple[Record, ...]:
    """Return the records of a sub-agent that killed its servers, and end the turn, which would start another one."""
    last = end_record(state, _with_notice(state, result), at=at)
    *closed, _ = close(
        replace(state, calls=with_result(state.calls, last.result)), TurnStatus.INTERRUPTED, at=at
    )
    return (last, *closed, _end_suspected(state, at=at))


def end_call_while_stopping(state: Cancelling, result: ToolResult, *, at: float) -> tuple[Record, ...]:
    """Return the records of an outcome during a cancellation; the last one of a server's tool closes the step."""
    last = end_record(state, _with_notice(state, result), at=at)
    after = with_result(state.calls, last.result)
    if has_running_tools(after):
        return (last,)
    return (last, *close(replace(state, calls=after), state.status, at=at))


def show_child(state: Batch, spoke: ChildStreamed) -> tuple[Record, ...]:
    """Return each record of a sub-agent once, for the readers of this session."""
    call = _find(state, spoke.ref)
    shown = call.child_position if call else 0
    return tuple(
        ChildDelta(state.turn, state.response_no, spoke.ref.call_id, spoke.child, position, msgspec.Raw(body))
        for position, body in spoke.records
        if position > shown
    )


def give_up_client(state: RunningCalls, call_id: str, *, epoch: int, at: float) -> tuple[Record, ...]:
    """Close a call whose client did not answer in time."""
    return end_call(state, ToolResult(call_id, NO_ANSWER_CONTENT, Outcome.UNKNOWN), epoch=epoch, at=at)


def close(state: Batch, status: TurnStatus, *, at: float, is_lost: bool = False) -> tuple[Record, ...]:
    """End a turn during a batch: real results stay, the others become `unknown` or `not started`. With `is_lost`, the
    running calls died with their node; else they were stopped.
    """
    running = UNKNOWN_CONTENT if is_lost else STOPPED_CONTENT
    results = (closing_result(call, running=running) for call in state.calls if call.is_open)
    return (
        *(end_record(state, _with_notice(state, result), at=at) for result in results),
        StepCommitted(state.turn, state.response_no),
        _after_closing(state, status, at=at),
    )


def _end_suspected(state: Batch, *, at: float) -> TurnEnded:
    return TurnEnded(state.turn, TurnStatus.INTERRUPTED, at, SUSPECTED_CODE, SUSPECTED_MESSAGE)


def _after_closing(state: Batch, status: TurnStatus, *, at: float) -> Record:
    if status is not TurnStatus.FAILED:
        return TurnEnded(state.turn, status, at)
    if state.terms.has_grace:  # its time is over, and the model may hand in its result
        return AttemptStarted(state.turn, state.response_no + 1, 1, at, is_last=True)
    return TurnEnded(state.turn, status, at, TURN_TIMEOUT_CODE, timeout_message(state))


def timeout_message(state: Batch | AwaitingModel) -> str:
    """Return the reason of a turn that its time limit ended."""
    return f"the turn took longer than its {state.terms.timeout_s:g} s"


def recover(state: RunningCalls, command: Recover, *, epoch: int, at: float) -> tuple[Record, ...]:
    """Decide about every call of an older node. One that waits for a person keeps waiting."""
    if command.is_suspect:
        *closed, _ = close(state, TurnStatus.INTERRUPTED, at=at, is_lost=True)
        return (*closed, _end_suspected(state, at=at))
    is_old = at - state.touched_at > command.look_back_s
    if is_old and not (state.is_waiting_for_person or has_children(state) or _awaits_client(state, at=at)):
        return close(state, TurnStatus.INTERRUPTED, at=at, is_lost=True)
    records: list[Record] = []
    for call in state.calls:
        doubted = CallInDoubt(state.turn, state.response_no, call.call.id, at)
        match judge(call, epoch=epoch):
            case CallVerdict.GIVE_UP:
                records.append(end_record(state, _with_notice(state, lost_result(call)), at=at))
            case CallVerdict.RERUN:
                records.append(_start_record(state, call, at=at))
            case CallVerdict.PROBE:
                records.append(doubted)
            case CallVerdict.ASK:
                records += (doubted, _question_record(state, call, QuestionKind.DOUBT, at=at))
            case CallVerdict.START | CallVerdict.LEAVE | CallVerdict.DONE:
                pass
    return and_then_settle(state, tuple(records), epoch=epoch, at=at)


def _awaits_client(state: RunningCalls, *, at: float) -> bool:
    """Whether a call at a client may still get its outcome: its tool has a longer limit than the look-back."""
    return any(
        call.is_running and call.plan.site is Site.CLIENT and at < call.started_at + call.plan.timeout_s
        for call in state.calls
    )


def take_probe(state: RunningCalls, probed: CallProbed, *, epoch: int, at: float) -> tuple[Record, ...]:
    """Continue after the probe of a call in doubt."""
    call = _find(state, probed.ref)
    if call is None or not call.is_in_doubt or call.asked is not None:
        return ()  # TURN-9
    if probed.result is not None:
        return end_call(state, probed.result, epoch=epoch, at=at)
    if not probed.may_run or call.runs > RERUNS_MAX:
        unknown = ToolResult(call.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN)
        return end_call(state, unknown, epoch=epoch, at=at)
    if call.plan.needs_approval:  # a start uses its permission up
        question = _question_record(state, call, QuestionKind.APPROVAL, at=at)
        return and_then_settle(state, (question,), epoch=epoch, at=at)
    return and_then_settle(state, (_start_record(state, call, at=at),), epoch=epoch, at=at)


# --- people ---------------------------------------------------------------------------------------------------


def find_asking_call(state: RunningCalls, ref: CallRef) -> CallState | None:
    """Return the call whose question is open, or None."""
    call = _find(state, ref)
    return call if call is not None and call.is_asking else None


def take_answer(
    state: RunningCalls, call: CallState, answer: Answer, *, epoch: int, at: float
) -> tuple[Record, ...]:
    """Return the records of a person's decision and its consequences, for one append."""
    kind = call.asked
    assert kind is not None
    if answer.digest != call.plan.digest:
        raise Refused(AnswerMismatchError("the answer is for other arguments than those of this call"))
    if answer.choice not in CHOICES[kind]:
        known = ", ".join(CHOICES[kind])
        raise Refused(AnswerMismatchError(f"a question of kind {kind} is answered with: {known}"))
    arguments = answer.arguments if answer.choice is Choice.ALLOW else None
    if arguments is not None:
        require_object(arguments)
    require_another_person(answer, call.plan.approvers, call.approved_by)
    answered = QuestionAnswered(
        state.turn,
        state.response_no,
        call.call.id,
        kind,
        answer.digest,
        answer.choice,
        at,
        answer.text,
        arguments,
        answer.by,
    )
    if result := _result_of(call, answer):
        return and_then_settle(
            state, (answered, end_record(state, _with_notice(state, result), at=at)), epoch=epoch, at=at
        )
    if call.runs:  # it was in doubt until now, and the question contained this
        edited = evolve(state, answered, epoch=epoch)
        assert isinstance(edited, RunningCalls)
        again = next(each for each in edited.calls if each.call.id == call.call.id)
        if answer.choice is Choice.ALLOW and not again.is_allowed:  # another person must allow it, too
            question = _question_record(edited, again, QuestionKind.APPROVAL, at=at)
            return and_then_settle(state, (answered, question), epoch=epoch, at=at)
        return and_then_settle(state, (answered, _start_record(edited, again, at=at)), epoch=epoch, at=at)
    return and_then_settle(state, (answered,), epoch=epoch, at=at)


def expire_question(
    state: RunningCalls, expired: QuestionExpired, *, epoch: int, at: float
) -> tuple[Record, ...]:
    """Close a call whose question was not answered in time."""
    call = find_asking_call(state, expired.ref)
    if call is None or not call.expires_at or at < call.expires_at:
        return ()  # TURN-9
    match call.asked:
        case QuestionKind.DOUBT:
            result = ToolResult(call.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN)
        case QuestionKind.QUESTION:
            result = ToolResult(call.call.id, NO_RESPONSE_CONTENT, Outcome.CANCELLED)
        case _:
            result = ToolResult(call.call.id, NO_DECISION_CONTENT, Outcome.CANCELLED)
    return end_call(state, result, epoch=epoch, at=at)


def _result_of(call: CallState, answer: Answer) -> ToolResult | None:
    """Return the outcome that an answer itself gives to a call, or None if the call continues."""
    call_id = call.call.id
    match answer.choice:
        case Choice.RESPOND:
            return ToolResult(call_id, answer.text)
        case Choice.DENY:
            why = f" They said: {answer.text}" if answer.text else ""
            return ToolResult(call_id, f"{DENIED_CONTENT}{why}", Outcome.DENIED)
        case Choice.HAPPENED:
            return ToolResult(call_id, answer.text or HAPPENED_CONTENT)
        case Choice.SKIP:
            return ToolResult(call_id, SKIPPED_CONTENT, Outcome.UNKNOWN)
        case Choice.ALLOW | Choice.RERUN:
            return None


def _kind_of(call: CallState) -> QuestionKind:
    return QuestionKind.QUESTION if call.plan.site is Site.PERSON else QuestionKind.APPROVAL


def _question_record(state: Batch, call: CallState, kind: QuestionKind, *, at: float) -> QuestionAsked:
    expires_at = at + call.plan.answer_s if call.plan.answer_s else 0.0
    return QuestionAsked(
        state.turn,
        state.response_no,
        call.call.id,
        kind,
        call.plan.digest,
        at,
        question_text(call, kind),
        expires_at,
    )


# --- calls ----------------------------------------------------------------------------------------------------


def has_running_tools(calls: Iterable[CallState]) -> bool:
    """Whether a tool of the server is running, so that a cancellation must wait for it."""
    return any(call.is_running and call.plan.site in (Site.SERVER, Site.CHILD) for call in calls)


def with_result(calls: tuple[CallState, ...], result: ToolResult) -> tuple[CallState, ...]:
    """Return the calls with the outcome of one of them."""
    return tuple(replace(call, result=result) if call.call.id == result.call_id else call for call in calls)


def has_children(state: Batch) -> bool:
    """Whether a sub-agent is running; its own turn has time limits and waits for people."""
    return any(call.is_running and call.plan.site is Site.CHILD for call in state.calls)


def _find(state: Batch, ref: CallRef) -> CallState | None:
    if (ref.turn, ref.response_no) != (state.turn, state.response_no):
        return None
    return next((call for call in state.calls if call.call.id == ref.call_id and call.is_open), None)


def _start_record(state: Batch, call: CallState, *, at: float) -> CallStarted:
    arguments = call.call.arguments if call.is_edited else None
    # An effect in the transaction of its outcome cannot exist without it, so its start need not be synced.
    has_effects = call.plan.has_effects and call.plan.on_doubt is not OnDoubt.IN_TRANSACTION
    return CallStarted(state.turn, state.response_no, call.call.id, call.runs + 1, at, has_effects, arguments)


def _with_notice(state: Batch, result: ToolResult) -> ToolResult:
    """Return a result with a notice to the model that a call ran with other arguments."""
    for call in state.calls:
        if call.is_edited and call.runs and call.call.id == result.call_id:
            changed = EDITED_CONTENT.format(arguments=call.call.arguments)
            return replace(result, content=f"{changed}\n{result.content}")
    return result
