"""Decision of commands: one function for each state, which returns the records to append."""

from __future__ import annotations

from typing import Literal, assert_never

from msgspec.structs import replace

from midstream.errors import (
    ContextOverflowError,
    ModelForgotError,
    ModelRestartedError,
    NothingToResumeError,
    SessionBusyError,
)
from midstream.history.messages import (
    Finish,
    Outcome,
    Response,
    ResponsePart,
    Text,
    Thinking,
    ToolResult,
    UpstreamCall,
)
from midstream.history.upstream_calls import Words, close_call
from midstream.retries import MODEL_ATTEMPTS_MAX, MODEL_BACKOFF, pause_s
from midstream.session.call_references import CallRef
from midstream.session.calls import CallState
from midstream.session.records import (
    AttemptContinued,
    AttemptFailed,
    AttemptResumable,
    AttemptStarted,
    CallProgressed,
    CancelRequested,
    Delta,
    HistoryCompacted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    ReuseDecided,
    StallEnded,
    StallNoticed,
    StepCommitted,
    TurnEnded,
    TurnResumed,
    TurnStatus,
)
from midstream.session.turn import approvals, call_batches
from midstream.session.turn.commands import (
    Answer,
    CallExpired,
    CallFinished,
    CallProbed,
    CallProgress,
    Cancel,
    CancelExpired,
    ChildStreamed,
    Command,
    ModelFailed,
    ModelResponded,
    ModelResumable,
    ModelReuseDecided,
    ModelStreamed,
    PermissionRequested,
    PermissionWithdrawn,
    QuestionExpired,
    Recover,
    Refused,
    Resume,
    SendMessage,
    Stalled,
    StallFinished,
    TurnExpired,
    UseAnswer,
)
from midstream.session.turn.states import (
    CANCEL_GRACE_S,
    CHILD_GRACE_S,
    HANDED_IN_CODE,
    HANDED_IN_CONTENT,
    SUSPECTED_CODE,
    SUSPECTED_MESSAGE,
    TURN_TIMEOUT_CODE,
    AwaitingModel,
    Cancelling,
    Idle,
    RunningCalls,
    TurnState,
)


def decide(state: TurnState, command: Command, *, epoch: int, at: float) -> tuple[Record, ...]:
    """Return the records of a command; none if it changes nothing.

    Args:
        epoch: The epoch under which the records will be appended.
        at: The current time, in seconds since 1970.

    Raises:
        Refused: The command is not possible in this state.
    """
    match state:
        case Idle():
            return _decide_idle(state, command, at=at)
        case AwaitingModel():
            return _decide_awaiting_model(state, command, epoch=epoch, at=at)
        case RunningCalls():
            return _decide_running_calls(state, command, epoch=epoch, at=at)
        case Cancelling():
            return _decide_cancelling(state, command, at=at)
        case _:
            assert_never(state)


def opening(turn: int, command: SendMessage, *, at: float, queued: int = 0) -> tuple[Record, ...]:
    """Return the records that open turn number `turn`; the session counts its turns."""
    accepted = MessageAccepted(
        turn,
        command.message,
        at,
        command.tools,
        command.stream,
        queued,
        command.timeout_s,
        command.responses_max,
        command.parent,
        keep=command.keep,
        before=command.before,
    )
    return (accepted, AttemptStarted(turn, response=1, attempt=1, at=at))


def _decide_idle(state: Idle, command: Command, *, at: float) -> tuple[Record, ...]:
    match command:
        case SendMessage():
            return opening(1, command, at=at)
        case Resume():
            if state.left is None or command.turn not in (None, state.left.turn):
                raise Refused(NothingToResumeError("no interrupted or failed turn can be resumed"))
            turn, response_no = state.left.turn, state.left.response_no
            return (
                TurnResumed(turn, response_no, at, command.stream),
                AttemptStarted(turn, response_no, attempt=1, at=at),
            )
        case Answer() | UseAnswer():
            raise approvals.closed_error(command)
        case PermissionRequested():
            raise approvals.too_late(command)
        case _:
            return ()  # TURN-9: its turn has ended


def _decide_awaiting_model(
    state: AwaitingModel, command: Command, *, epoch: int, at: float
) -> tuple[Record, ...]:
    match command:
        case SendMessage():
            raise _busy(state.turn)
        case ModelStreamed():
            return command.deltas if _is_current(state, command) else ()
        case ModelResumable():
            return _take_token(state, command) if _is_current(state, command) else ()
        case ModelReuseDecided():
            place = (state.turn, state.response_no, state.attempt)
            return (ReuseDecided(*place, command.judgement, at),) if _is_current(state, command) else ()
        case Stalled() | StallFinished() if _is_about_model(state, command):
            return (_stall_record(command, at=at),)
        case Answer():
            question = approvals.open_question(state, command.ref)
            if question is None:
                raise approvals.closed_error(command)
            return approvals.take_answer(state, question, command, at=at)
        case PermissionRequested() | PermissionWithdrawn() | UseAnswer() | QuestionExpired():
            return approvals.decide(state, command, at=at)
        case _:
            did = _end_attempt(state, command, epoch=epoch, at=at)
            # No agent waits for answers to the attempt's questions any more (TURN-80).
            return (*approvals.close_open_questions(state, at=at), *did) if did else did


def _end_attempt(state: AwaitingModel, command: Command, *, epoch: int, at: float) -> tuple[Record, ...]:
    """Return the records of the end of the running attempt: its response, its failure, a stop, a new node."""
    match command:
        case ModelResponded():
            return _take_response(state, command, epoch=epoch, at=at) if _is_current(state, command) else ()
        case ModelFailed():
            return _take_failure(state, command, at=at) if _is_current(state, command) else ()
        case Cancel() if command.turn in (None, state.turn):
            return (
                CancelRequested(state.turn, at, deadline_at=at),
                *_end_without_response(state, TurnStatus.CANCELLED, at=at),
            )
        case TurnExpired() if command.turn == state.turn:
            return _take_timeout(state, at=at)
        case Recover():
            return _recover_awaiting_model(state, command, epoch=epoch, at=at)
        case _:
            return ()  # TURN-9


def _decide_running_calls(
    state: RunningCalls, command: Command, *, epoch: int, at: float
) -> tuple[Record, ...]:
    match command:
        case SendMessage():
            raise _busy(state.turn)
        case CallFinished() if is_open(state, command.ref):
            if command.is_suspect:
                return call_batches.end_with_suspect(state, command.result, at=at)
            return call_batches.end_call(state, command.result, epoch=epoch, at=at)
        case CallExpired() if is_open(state, command.ref):
            return call_batches.give_up_client(state, command.ref.call_id, epoch=epoch, at=at)
        case CallProgress() if is_open(state, command.ref):
            return (_progress_record(command, at=at),)
        case Stalled() | StallFinished() if is_open(
            state, CallRef(command.turn, command.response_no, command.call_id)
        ):
            return (_stall_record(command, at=at),)
        case ChildStreamed() if is_open(state, command.ref):
            return call_batches.show_child(state, command)
        case CallProbed():
            return call_batches.take_probe(state, command, epoch=epoch, at=at)
        case Answer():
            call = call_batches.find_asking_call(state, command.ref)
            if call is None:
                raise approvals.closed_error(command)
            return call_batches.take_answer(state, call, command, epoch=epoch, at=at)
        case QuestionExpired():
            return call_batches.expire_question(state, command, epoch=epoch, at=at)
        case Cancel() if command.turn in (None, state.turn):
            return _stop(state, TurnStatus.CANCELLED, at=at)
        case TurnExpired() if command.turn == state.turn:
            return _stop(state, TurnStatus.FAILED, at=at)
        case Recover():
            return call_batches.recover(state, command, epoch=epoch, at=at)
        case UseAnswer():
            raise approvals.closed_error(command)
        case PermissionRequested():
            raise approvals.too_late(command)
        case _:
            return ()  # TURN-9


def _decide_cancelling(state: Cancelling, command: Command, *, at: float) -> tuple[Record, ...]:
    match command:
        case SendMessage():
            raise _busy(state.turn)
        case CallFinished() if is_open(state, command.ref):
            # An outcome that arrives during a cancel is kept (TURN-7).
            return call_batches.end_call_while_stopping(state, command.result, at=at)
        case CallProgress() if is_open(state, command.ref):
            return (_progress_record(command, at=at),)
        case ChildStreamed() if is_open(state, command.ref):
            return call_batches.show_child(state, command)
        case Cancel() if command.turn in (None, state.turn) and state.status is not TurnStatus.CANCELLED:
            # Its own time limit was stopping it; a cancellation has no hand-in either.
            return (CancelRequested(state.turn, at, state.deadline_at),)
        case CancelExpired() if command.turn == state.turn:
            return call_batches.close(state, state.status, at=at)
        case Recover():
            return call_batches.close(state, state.status, at=at, is_lost=True)
        case Answer() | UseAnswer():
            raise approvals.closed_error(command)
        case PermissionRequested():
            raise approvals.too_late(command)
        case _:
            return ()  # TURN-9; a second cancel changes nothing


def is_open(state: RunningCalls | Cancelling, ref: CallRef) -> bool:
    """Whether a call is running, so that its outcome can still come."""
    return open_call(state, ref) is not None


def open_call(state: RunningCalls | Cancelling, ref: CallRef) -> CallState | None:
    """Return a running call, whose outcome can still come; else None."""
    if (ref.turn, ref.response_no) != (state.turn, state.response_no):
        return None
    for call in state.calls:
        if call.call.id == ref.call_id and call.is_running:
            return call
    return None


def _busy(turn: int) -> Refused:
    return Refused(SessionBusyError(f"turn {turn} is still running: wait for its end or cancel it"))


def _progress_record(progress: CallProgress, *, at: float) -> Record:
    return CallProgressed(
        progress.ref.turn, progress.ref.response_no, progress.ref.call_id, progress.run, progress.text, at
    )


def _stall_record(seen: Stalled | StallFinished, *, at: float) -> Record:
    kind = StallNoticed if isinstance(seen, Stalled) else StallEnded
    return kind(seen.turn, seen.response_no, seen.waiting_for, seen.silent_s, at, seen.call_id)


def _is_current(
    state: AwaitingModel,
    command: ModelStreamed | ModelResumable | ModelReuseDecided | ModelResponded | ModelFailed,
) -> bool:
    return command.ref == state.ref


def _stop(state: RunningCalls, status: TurnStatus, *, at: float) -> tuple[Record, ...]:
    """Stop a batch: at once if no tool runs here, else within the grace."""
    grace_s = CANCEL_GRACE_S + (CHILD_GRACE_S if call_batches.has_children(state) else 0.0)
    requested = CancelRequested(state.turn, at, at + grace_s, status)
    if call_batches.has_running_tools(state.calls):
        return (requested,)
    return (requested, *call_batches.close(state, status, at=at))


def _is_about_model(state: AwaitingModel, seen: Stalled | StallFinished) -> bool:
    return (seen.turn, seen.response_no, seen.call_id) == (state.turn, state.response_no, "")


# --- responses --------------------------------------------------------------------------------------------------


def _take_response(
    state: AwaitingModel, command: ModelResponded, *, epoch: int, at: float
) -> tuple[Record, ...]:
    place = (state.turn, state.response_no, state.attempt)
    completed = ResponseCompleted(*place, command.response, at, command.plans, prompt=command.prompt)
    if state.is_last or not command.response.calls:
        not_run = (
            ToolResult(call.id, HANDED_IN_CONTENT, Outcome.CANCELLED) for call in command.response.calls
        )
        return (
            completed,
            *(call_batches.end_record(state, result, at=at) for result in not_run),
            StepCommitted(state.turn, state.response_no),
            TurnEnded(state.turn, TurnStatus.COMPLETED, at, HANDED_IN_CODE if state.is_last else ""),
        )
    # A call that cannot start (unknown tool, bad arguments) goes back to the model as an error result.
    impossible = tuple(
        call_batches.end_record(state, ToolResult(plan.call_id, plan.problem, Outcome.ERROR), at=at)
        for plan in command.plans
        if plan.problem is not None
    )
    return call_batches.and_then_settle(state, (completed, *impossible), epoch=epoch, at=at)


def _take_timeout(state: AwaitingModel, *, at: float) -> tuple[Record, ...]:
    """End a turn whose time is over, or let the model hand in its result, once."""
    if not state.terms.has_grace or state.is_last:
        message = call_batches.timeout_message(state)
        return _end_without_response(state, TurnStatus.FAILED, at=at, code=TURN_TIMEOUT_CODE, message=message)
    partial = partial_response(state)
    if partial is None:
        return (AttemptStarted(state.turn, state.response_no, state.attempt + 1, at, is_last=True),)
    return (
        ResponseCompleted(state.turn, state.response_no, state.attempt, partial, at),
        StepCommitted(state.turn, state.response_no),
        AttemptStarted(state.turn, state.response_no + 1, 1, at, is_last=True),
    )


def _take_token(state: AwaitingModel, command: ModelResumable) -> tuple[Record, ...]:
    if command.token == state.token:
        return ()
    return (AttemptResumable(state.turn, state.response_no, state.attempt, command.token),)


def _take_failure(state: AwaitingModel, command: ModelFailed, *, at: float) -> tuple[Record, ...]:
    failed = AttemptFailed(state.turn, state.response_no, state.attempt, command.code, command.message, at)
    if state.terms.request is not None:  # its application retries and shortens its conversation itself
        failed = replace(failed, retry_after_s=command.retry_after_s)
        status, code, message = TurnStatus.FAILED, command.code, command.message
        return (failed, *_end_without_response(state, status, at=at, code=code, message=message))
    if command.code == ContextOverflowError.code:
        return (failed, *_after_overflow(state, command, at=at))
    if command.code == ModelForgotError.code and state.continued:
        # TURN-61: resuming it was worth a try, and its cut was counted.
        return _retry_attempt(state, at=at)
    failures = state.failures + 1
    if not command.is_retriable or failures >= MODEL_ATTEMPTS_MAX:
        ended = _end_without_response(
            state, TurnStatus.FAILED, at=at, code=command.code, message=command.message
        )
        return (failed, *ended)
    if command.code == ModelRestartedError.code:
        # The agent dropped its output: none of it is kept.
        return (failed, AttemptStarted(state.turn, state.response_no, state.attempt + 1, at))
    not_before = at + max(
        MODEL_BACKOFF.wait_s(failures, chance=command.chance), pause_s(command.retry_after_s)
    )
    if command.is_cut and state.token and not state.is_mute:
        return (failed, _continue_attempt(state, at=at, not_before=not_before))
    return (failed, *_retry_attempt(state, at=at, not_before=not_before))


def _retry_attempt(state: AwaitingModel, *, at: float, not_before: float = 0.0) -> tuple[Record, ...]:
    """Call the model again. Acts of a stateful agent in the cut attempt enter the history first (TURN-83)."""
    partial = partial_response(state)
    if partial is None or not _has_acted(state, partial):
        return (AttemptStarted(state.turn, state.response_no, state.attempt + 1, at, not_before),)
    return (
        ResponseCompleted(state.turn, state.response_no, state.attempt, partial, at),
        StepCommitted(state.turn, state.response_no),
        AttemptStarted(state.turn, state.response_no + 1, 1, at, not_before, is_last=state.is_last),
    )


def _has_acted(state: AwaitingModel, partial: Response) -> bool:
    """Whether a repetition would do something twice, or contradict an agent's memory. Thinking alone is neither."""
    has_called = any(isinstance(part, UpstreamCall) for part in partial.parts)
    is_shown = state.is_upstream or state.terms.request is not None  # dialects cannot withdraw text
    return has_called or (is_shown and bool(partial.text.strip()))


def _continue_attempt(state: AwaitingModel, *, at: float, not_before: float = 0.0) -> Record:
    place = (state.turn, state.response_no, state.attempt)
    return AttemptContinued(*place, state.continued + 1, at, not_before)


def _after_overflow(state: AwaitingModel, command: ModelFailed, *, at: float) -> tuple[Record, ...]:
    """Call the model again with a shorter history, once for each model call (TURN-25)."""
    if command.cut is not None and not state.is_compacted:
        return (
            HistoryCompacted(state.turn, state.response_no, command.cut, at),
            *_retry_attempt(state, at=at),
        )
    why = "even without its older part" if state.is_compacted else "and nothing of it can be left out"
    message = f"the conversation is longer than the model can read, {why}: {command.message}"
    return _end_without_response(state, TurnStatus.FAILED, at=at, code=command.code, message=message)


def _end_without_response(
    state: AwaitingModel, status: TurnStatus, *, at: float, code: str = "", message: str = ""
) -> tuple[Record, ...]:
    """End a turn whose response is incomplete; the text that readers have is kept as an interrupted response."""
    ended = TurnEnded(state.turn, status, at, code, message)
    partial = partial_response(state)
    if partial is None:
        return (ended,)
    return (
        ResponseCompleted(state.turn, state.response_no, state.attempt, partial, at),
        StepCommitted(state.turn, state.response_no),
        ended,
    )


def text_so_far(state: AwaitingModel) -> dict[int, Words]:
    """Return the text of the running attempt so far, by part."""
    deltas: list[Delta] = []
    rest = state.deltas
    while rest:
        before, delta = rest
        assert isinstance(delta, Delta)
        assert isinstance(before, tuple)
        deltas.append(delta)
        rest = before
    texts: dict[int, list[str]] = {}
    kinds: dict[int, Literal["text", "thinking"]] = {}
    calls: dict[int, UpstreamCall] = {}
    for delta in reversed(deltas):
        if delta.requested is not None or not (delta.text or delta.call):
            continue  # for applications only
        texts.setdefault(delta.part, []).append(delta.text)
        kinds.setdefault(delta.part, delta.kind)
        if delta.call is not None:
            calls[delta.part] = delta.call
    return {part: calls.get(part) or (kinds[part], "".join(texts[part])) for part in sorted(texts)}


def response_so_far(state: AwaitingModel) -> Response | None:
    """Return the response of the running attempt so far, or None if it is empty. Upstream calls may be running."""
    parts = [_part(words) for words in text_so_far(state).values()]
    return Response(tuple(parts), Finish.INTERRUPTED) if parts else None


def partial_response(state: AwaitingModel) -> Response | None:
    """Return the interrupted response of the running attempt, or None if it is empty."""
    response = response_so_far(state)
    if response is None:
        return None
    return replace(
        response, parts=tuple(close_call(p) if isinstance(p, UpstreamCall) else p for p in response.parts)
    )


def _part(words: Words) -> ResponsePart:
    if isinstance(words, UpstreamCall):
        return words
    kind, text = words
    return Thinking(text) if kind == "thinking" else Text(text)


def _recover_awaiting_model(
    state: AwaitingModel, command: Recover, *, epoch: int, at: float
) -> tuple[Record, ...]:
    if state.epoch == epoch:
        return ()  # TURN-17: this node's own attempt was not cut
    is_old = at - state.touched_at > command.look_back_s and not state.is_waiting_for_person
    if command.is_suspect:
        code, message = SUSPECTED_CODE, SUSPECTED_MESSAGE
        return _end_without_response(state, TurnStatus.INTERRUPTED, at=at, code=code, message=message)
    if is_old:
        return _end_without_response(state, TurnStatus.INTERRUPTED, at=at)
    if state.token:
        return (_continue_attempt(state, at=at),)
    return _retry_attempt(state, at=at)
