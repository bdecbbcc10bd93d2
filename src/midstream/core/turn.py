"""The turn: decide, evolve, owed.

All rules of a turn stand in this file, one function per state and verb, and nothing here acts. Theory of
operation: `decide` judges a command and returns the records to append; `evolve` folds a record that is in the
journal; `owed` says what the world owes the state. The runner appends what is decided, folds it, and starts or
stops whatever `owed` gained or lost. A new owner does the same after one `Recover`, so recovery is no special
path; and neither is cancelling: what is no longer owed is stopped.

    Idle ──message──▶ AwaitingModel ──reply──▶ RunningCalls ──last outcome──▶ AwaitingModel (next reply)
                          │    ▲                   │                               │
                          │    └─attempt n+1       └──cancel──▶ Cancelling         └─ a reply without calls
                          └────── cancel, failure, end ──────────────┴──────────────▶ Idle

A command that is late, repeated or about something else decides to no record at all (TURN-9): that happens
whenever an owner died or a cancel was faster, and it is no error.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from midstream.core.calls import (
    NO_ANSWER_CONTENT,
    UNKNOWN_CONTENT,
    CallPlan,
    CallState,
    Site,
    Verdict,
    closing_result,
    digest_of,
    judge,
    startable,
)
from midstream.core.messages import (
    Exchange,
    Finish,
    Outcome,
    Reply,
    ReplyPart,
    Result,
    Text,
    Thinking,
    UserMessage,
)
from midstream.core.records import (
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallStarted,
    CancelRequested,
    ChunkAccepted,
    ClientTool,
    Delta,
    EpochStarted,
    ExchangeCommitted,
    HistoryCompacted,
    MessageAccepted,
    Record,
    ReplyCompleted,
    StreamOpened,
    TurnEnded,
    TurnStatus,
)
from midstream.core.timing import MODEL_BACKOFF
from midstream.errors import ContextOverflowError, MidstreamError, SessionBusyError

ATTEMPTS_MAX = 3
"""Failed attempts of one model call before the turn fails."""
RETRY_AFTER_MAX_S = 120.0
"""Seconds a provider may ask us to wait before the next attempt; who asks for more is asked again after these."""
MODEL_CALLS_MAX = 1000
"""Replies in one turn; an agent that loops ends here."""
RESTARTS_MAX = 2
"""Owners that may die on one turn without any progress before it is `interrupted` instead of taken up again. One that
hands it over does not count."""
LOOK_BACK_S = 2 * 60 * 60.0
"""A turn untouched for longer is ended as `interrupted` by a new owner (the seed's two hours)."""
CANCEL_GRACE_S = 5.0
"""Seconds a running tool has to end after a cancel before its call is closed without it."""
CLIENT_CALL_S = 2 * 60 * 60.0
"""Seconds a call waits for its client where its tool names no timeout."""


class Refused(Exception):  # noqa: N818 - not an error of ours but the wrapped answer to a command
    """A command that cannot be taken now; `error` says why. Nothing was decided."""

    def __init__(self, error: MidstreamError) -> None:
        super().__init__(error.message)
        self.error = error


# --- states ---------------------------------------------------------------------------------------------------


class Idle(Struct, frozen=True):
    """No turn. Nothing is owed and nothing is pending: the history says it all."""


class AwaitingModel(Struct, frozen=True):
    """A reply is owed. Nothing the model says is in the history until the whole reply is.

    `said` is a linked list of deltas, newest first, so that a long reply costs the same per token as a short one.
    """

    turn: int
    reply_no: int
    tools: tuple[ClientTool, ...] = ()
    attempt: int = 0
    """0: not yet announced."""
    epoch: int = 0
    """The epoch that announced it; an attempt of an older one was cut."""
    failures: int = 0
    is_compacted: bool = False
    """Whether older exchanges were left out for this model call already."""
    restarts: int = 0
    not_before: float = 0.0
    touched_at: float = 0.0
    said: tuple[object, ...] = ()


class RunningCalls(Struct, frozen=True):
    """The model asked for tools; some outcomes may be in. Nothing of this exchange is in the history yet."""

    turn: int
    reply_no: int
    reply: Reply
    calls: tuple[CallState, ...]
    tools: tuple[ClientTool, ...] = ()
    touched_at: float = 0.0


class Cancelling(Struct, frozen=True):
    """Somebody stopped the turn while tools ran. The exchange is still out of the history; nothing more starts."""

    turn: int
    reply_no: int
    reply: Reply
    calls: tuple[CallState, ...]
    deadline_at: float
    touched_at: float = 0.0


TurnState = Idle | AwaitingModel | RunningCalls | Cancelling


# --- commands -------------------------------------------------------------------------------------------------


class SendMessage(Struct, frozen=True):
    """A user speaks."""

    message: UserMessage
    tools: tuple[ClientTool, ...] = ()
    stream: str = ""


class ModelSaid(Struct, frozen=True):
    """The model said some more of a reply."""

    turn: int
    reply_no: int
    attempt: int
    deltas: tuple[Delta, ...]


class ModelReplied(Struct, frozen=True):
    """The model ended its reply. `plans` has one entry per call, in order."""

    turn: int
    reply_no: int
    attempt: int
    reply: Reply
    plans: tuple[CallPlan, ...] = ()


class ModelFailed(Struct, frozen=True):
    """The attempt gave no usable reply. `chance` in [0, 1) spreads the next try.

    Where the conversation was too long, `cut` is how many entries to leave out, or None where none can be.
    """

    turn: int
    reply_no: int
    attempt: int
    code: str
    message: str
    is_retriable: bool
    retry_after_s: float | None = None
    chance: float = 0.0
    cut: int | None = None


class CallFinished(Struct, frozen=True):
    """A tool ended, here or at a client."""

    turn: int
    reply_no: int
    result: Result


class CallExpired(Struct, frozen=True):
    """No client answered a call within its time."""

    turn: int
    reply_no: int
    call_id: str


class Cancel(Struct, frozen=True):
    """Stop the turn `turn`, or whichever runs where it is None."""

    turn: int | None = None


class CancelExpired(Struct, frozen=True):
    """The grace of a cancel is over: close the exchange without the tools that still run."""

    turn: int


class Recover(Struct, frozen=True):
    """A new owner takes up what an older one left, in the epoch it just started."""

    look_back_s: float = LOOK_BACK_S


Command = (
    SendMessage
    | ModelSaid
    | ModelReplied
    | ModelFailed
    | CallFinished
    | CallExpired
    | Cancel
    | CancelExpired
    | Recover
)


# --- obligations ----------------------------------------------------------------------------------------------


class AskModel(Struct, frozen=True):
    """Call the model and journal what it says."""

    turn: int
    reply_no: int
    attempt: int
    not_before: float = 0.0


class RunCall(Struct, frozen=True):
    """Run one tool call; its start is in the journal."""

    turn: int
    reply_no: int
    call_id: str
    run: int


class AwaitClient(Struct, frozen=True):
    """A client owes the outcome of a call; at `deadline_at` it has expired."""

    turn: int
    reply_no: int
    call_id: str
    deadline_at: float


class AwaitCancelled(Struct, frozen=True):
    """Stopped tools owe their end; at `deadline_at` the cancel goes on without them."""

    turn: int
    deadline_at: float


Obligation = AskModel | RunCall | AwaitClient | AwaitCancelled


# --- decide ---------------------------------------------------------------------------------------------------


def decide(state: TurnState, command: Command, *, epoch: int, at: float) -> tuple[Record, ...]:
    """Return what must be appended because of `command`; nothing, where it changes nothing.

    Args:
        epoch: The epoch under which the records will be appended.
        at: Now, in seconds since 1970.

    Raises:
        Refused: The command cannot be taken in this state.
    """
    match state:
        case Idle():
            return _decide_idle(command, at=at)
        case AwaitingModel():
            return _decide_awaiting_model(state, command, epoch=epoch, at=at)
        case RunningCalls():
            return _decide_running_calls(state, command, epoch=epoch, at=at)
        case Cancelling():
            return _decide_cancelling(state, command, at=at)
        case _:
            assert_never(state)


def opening(turn: int, command: SendMessage, *, at: float) -> tuple[Record, ...]:
    """Return the records that open turn number `turn`; the session counts its turns."""
    return (
        MessageAccepted(turn, command.message, at, command.tools, command.stream),
        AttemptStarted(turn, reply=1, attempt=1, at=at),
    )


def _decide_idle(command: Command, *, at: float) -> tuple[Record, ...]:
    match command:
        case SendMessage():
            return opening(1, command, at=at)
        case (
            ModelSaid()
            | ModelReplied()
            | ModelFailed()
            | CallFinished()
            | CallExpired()
            | Cancel()
            | CancelExpired()
            | Recover()
        ):
            return ()  # TURN-9: the turn this is about has ended
        case _:
            assert_never(command)


def _decide_awaiting_model(
    state: AwaitingModel, command: Command, *, epoch: int, at: float
) -> tuple[Record, ...]:
    match command:
        case SendMessage():
            raise _busy(state.turn)
        case ModelSaid():
            return command.deltas if _is_current(state, command) else ()
        case ModelReplied():
            return _take_reply(state, command, epoch=epoch, at=at) if _is_current(state, command) else ()
        case ModelFailed():
            return _take_failure(state, command, at=at) if _is_current(state, command) else ()
        case Cancel():
            if command.turn not in (None, state.turn):
                return ()
            return (
                CancelRequested(state.turn, at, deadline_at=at),
                *_end_without_reply(state, TurnStatus.CANCELLED, at=at),
            )
        case Recover():
            return _recover_awaiting_model(state, command, epoch=epoch, at=at)
        case CallFinished() | CallExpired() | CancelExpired():
            return ()  # TURN-9
        case _:
            assert_never(command)


def _decide_running_calls(
    state: RunningCalls, command: Command, *, epoch: int, at: float
) -> tuple[Record, ...]:
    match command:
        case SendMessage():
            raise _busy(state.turn)
        case CallFinished() if _is_open(state, command.turn, command.reply_no, command.result.call_id):
            return _end_call(state, command.result, epoch=epoch, at=at)
        case CallExpired() if _is_open(state, command.turn, command.reply_no, command.call_id):
            unanswered = Result(command.call_id, NO_ANSWER_CONTENT, Outcome.UNKNOWN)
            return _end_call(state, unanswered, epoch=epoch, at=at)
        case Cancel():
            if command.turn not in (None, state.turn):
                return ()
            requested = CancelRequested(state.turn, at, deadline_at=at + CANCEL_GRACE_S)
            if any(call.is_running and call.plan.site is Site.SERVER for call in state.calls):
                return (requested,)
            return (requested, *_close_calls(state, TurnStatus.CANCELLED, at=at))
        case Recover():
            return _recover_running_calls(state, command, epoch=epoch, at=at)
        case CallFinished() | CallExpired() | ModelSaid() | ModelReplied() | ModelFailed() | CancelExpired():
            return ()  # TURN-9
        case _:
            assert_never(command)


def _decide_cancelling(state: Cancelling, command: Command, *, at: float) -> tuple[Record, ...]:
    match command:
        case SendMessage():
            raise _busy(state.turn)
        case CallFinished() if _is_open(state, command.turn, command.reply_no, command.result.call_id):
            # An outcome that arrives during a cancel is kept (TURN-7).
            ended = CallEnded(state.turn, state.reply_no, command.result, at)
            after = _with_result(state.calls, command.result)
            if any(call.is_running and call.plan.site is Site.SERVER for call in after):
                return (ended,)
            return (ended, *_close_calls(replace(state, calls=after), TurnStatus.CANCELLED, at=at))
        case CancelExpired() if command.turn == state.turn:
            return _close_calls(state, TurnStatus.CANCELLED, at=at)
        case Recover():
            return _close_calls(state, TurnStatus.CANCELLED, at=at, running=UNKNOWN_CONTENT)
        case (
            CallFinished()
            | CallExpired()
            | Cancel()
            | CancelExpired()
            | ModelSaid()
            | ModelReplied()
            | ModelFailed()
        ):
            return ()  # TURN-9; a second cancel changes nothing
        case _:
            assert_never(command)


def _busy(turn: int) -> Refused:
    return Refused(SessionBusyError(f"turn {turn} is still running: wait for its end or cancel it"))


def _is_current(state: AwaitingModel, command: ModelSaid | ModelReplied | ModelFailed) -> bool:
    return (command.turn, command.reply_no, command.attempt) == (state.turn, state.reply_no, state.attempt)


def _is_open(state: RunningCalls | Cancelling, turn: int, reply_no: int, call_id: str) -> bool:
    if (turn, reply_no) != (state.turn, state.reply_no):
        return False
    return any(call.call.id == call_id and call.is_running for call in state.calls)


def _take_reply(state: AwaitingModel, command: ModelReplied, *, epoch: int, at: float) -> tuple[Record, ...]:
    completed = ReplyCompleted(state.turn, state.reply_no, state.attempt, command.reply, at, command.plans)
    if not command.reply.calls:
        return (
            completed,
            ExchangeCommitted(state.turn, state.reply_no),
            TurnEnded(state.turn, TurnStatus.COMPLETED, at),
        )
    # A call that cannot start (unknown tool, bad arguments) goes back to the model as an error result.
    impossible = tuple(
        CallEnded(state.turn, state.reply_no, Result(plan.call_id, plan.problem, Outcome.ERROR), at)
        for plan in command.plans
        if plan.problem is not None
    )
    return _and_then_settle(state, (completed, *impossible), epoch=epoch, at=at)


def _end_call(state: RunningCalls, result: Result, *, epoch: int, at: float) -> tuple[Record, ...]:
    return _and_then_settle(state, (CallEnded(state.turn, state.reply_no, result, at),), epoch=epoch, at=at)


def _and_then_settle(
    state: TurnState, records: tuple[Record, ...], *, epoch: int, at: float
) -> tuple[Record, ...]:
    """Return `records` and what follows from them at once: calls that may start now, or the exchange's commit."""
    for record in records:
        state = evolve(state, record, epoch=epoch)
    assert isinstance(state, RunningCalls)
    if any(call.is_open for call in state.calls):
        starts = (
            CallStarted(state.turn, state.reply_no, call.call.id, call.runs + 1, at, call.plan.has_effects)
            for call in startable(state.calls)
        )
        return (*records, *starts)
    committed = ExchangeCommitted(state.turn, state.reply_no)
    if state.reply_no >= MODEL_CALLS_MAX:
        message = f"the turn was ended after {MODEL_CALLS_MAX} model calls"
        return (*records, committed, TurnEnded(state.turn, TurnStatus.FAILED, at, "model_calls_max", message))
    return (*records, committed, AttemptStarted(state.turn, state.reply_no + 1, attempt=1, at=at))


def _take_failure(state: AwaitingModel, command: ModelFailed, *, at: float) -> tuple[Record, ...]:
    failed = AttemptFailed(state.turn, state.reply_no, state.attempt, command.code, command.message, at)
    if command.code == ContextOverflowError.code:
        return (failed, *_after_overflow(state, command, at=at))
    failures = state.failures + 1
    if not command.is_retriable or failures >= ATTEMPTS_MAX:
        ended = _end_without_reply(
            state, TurnStatus.FAILED, at=at, code=command.code, message=command.message
        )
        return (failed, *ended)
    asked_s = min(command.retry_after_s or 0.0, RETRY_AFTER_MAX_S)
    wait_s = max(MODEL_BACKOFF.wait_s(failures, chance=command.chance), asked_s)
    again = AttemptStarted(state.turn, state.reply_no, state.attempt + 1, at, not_before=at + wait_s)
    return (failed, again)


def _after_overflow(state: AwaitingModel, command: ModelFailed, *, at: float) -> tuple[Record, ...]:
    """Ask again with less to read, once for each model call (TURN-25)."""
    if command.cut is not None and not state.is_compacted:
        return (
            HistoryCompacted(state.turn, state.reply_no, command.cut, at),
            AttemptStarted(state.turn, state.reply_no, state.attempt + 1, at),
        )
    why = "without its older part too" if state.is_compacted else "and nothing of it can be left out"
    message = f"the conversation is longer than the model can read, {why}: {command.message}"
    return _end_without_reply(state, TurnStatus.FAILED, at=at, code=command.code, message=message)


def _end_without_reply(
    state: AwaitingModel, status: TurnStatus, *, at: float, code: str = "", message: str = ""
) -> tuple[Record, ...]:
    """End a turn whose reply never ended; the text readers were shown is kept as an interrupted reply."""
    ended = TurnEnded(state.turn, status, at, code, message)
    partial = partial_reply(state)
    if partial is None:
        return (ended,)
    return (
        ReplyCompleted(state.turn, state.reply_no, state.attempt, partial, at),
        ExchangeCommitted(state.turn, state.reply_no),
        ended,
    )


def _close_calls(
    state: RunningCalls | Cancelling, status: TurnStatus, *, at: float, running: str | None = None
) -> tuple[Record, ...]:
    """End a turn in the middle of a batch: real results stay, the rest is told apart (unknown, not started)."""
    results = (
        closing_result(call) if running is None else closing_result(call, running=running)
        for call in state.calls
        if call.is_open
    )
    return (
        *(CallEnded(state.turn, state.reply_no, result, at) for result in results),
        ExchangeCommitted(state.turn, state.reply_no),
        TurnEnded(state.turn, status, at),
    )


def _recover_awaiting_model(
    state: AwaitingModel, command: Recover, *, epoch: int, at: float
) -> tuple[Record, ...]:
    if state.epoch == epoch:
        return ()  # TURN-17: our own attempt was not cut
    if at - state.touched_at > command.look_back_s or state.restarts > RESTARTS_MAX:
        return _end_without_reply(state, TurnStatus.INTERRUPTED, at=at)
    return (AttemptStarted(state.turn, state.reply_no, state.attempt + 1, at),)


def _recover_running_calls(
    state: RunningCalls, command: Recover, *, epoch: int, at: float
) -> tuple[Record, ...]:
    if at - state.touched_at > command.look_back_s:
        return _close_calls(state, TurnStatus.INTERRUPTED, at=at, running=UNKNOWN_CONTENT)
    records: list[Record] = []
    for call in state.calls:
        match judge(call, epoch=epoch):
            case Verdict.GIVE_UP:
                lost = Result(call.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN)
                records.append(CallEnded(state.turn, state.reply_no, lost, at))
            case Verdict.RERUN:
                run = call.runs + 1
                records.append(
                    CallStarted(state.turn, state.reply_no, call.call.id, run, at, call.plan.has_effects)
                )
            case Verdict.START | Verdict.LEAVE | Verdict.DONE:
                pass
    return _and_then_settle(state, tuple(records), epoch=epoch, at=at)


# --- evolve ---------------------------------------------------------------------------------------------------


def evolve(state: TurnState, record: Record, *, epoch: int) -> TurnState:
    """Fold one record into the state. A record is a fact: nothing is refused here.

    Args:
        epoch: The epoch under which the record was appended.
    """
    match record:
        case Delta():
            if isinstance(state, AwaitingModel):
                return replace(state, said=(state.said, record))
            return state
        case MessageAccepted():
            return AwaitingModel(record.turn, 1, record.tools, touched_at=record.at)
        case AttemptStarted():
            return _evolve_attempt(state, record, epoch=epoch)
        case AttemptFailed():
            return replace(state, failures=state.failures + 1) if isinstance(state, AwaitingModel) else state
        case HistoryCompacted():
            # What failed before was about more than is asked now.
            return (
                replace(state, is_compacted=True, failures=0) if isinstance(state, AwaitingModel) else state
            )
        case ReplyCompleted():
            return _evolve_reply(state, record)
        case CallStarted() | CallEnded():
            return _evolve_call(state, record, epoch=epoch)
        case ExchangeCommitted():
            tools = state.tools if isinstance(state, RunningCalls) else ()
            touched_at = 0.0 if isinstance(state, Idle) else state.touched_at
            return AwaitingModel(record.turn, record.reply + 1, tools, touched_at=touched_at)
        case CancelRequested():
            if isinstance(state, RunningCalls):
                return Cancelling(
                    state.turn, state.reply_no, state.reply, state.calls, record.deadline_at, record.at
                )
            return state
        case TurnEnded():
            return Idle()
        case EpochStarted(is_handover=False):
            return replace(state, restarts=state.restarts + 1) if isinstance(state, AwaitingModel) else state
        case EpochStarted() | StreamOpened() | ChunkAccepted():
            return state
        case _:
            assert_never(record)


def _evolve_attempt(state: TurnState, record: AttemptStarted, *, epoch: int) -> TurnState:
    if not isinstance(state, AwaitingModel):
        return state
    return replace(
        state,
        reply_no=record.reply,
        attempt=record.attempt,
        epoch=epoch,
        not_before=record.not_before,
        touched_at=record.at,
        said=(),
    )


def _evolve_reply(state: TurnState, record: ReplyCompleted) -> TurnState:
    plans = {plan.call_id: plan for plan in record.plans}
    calls = tuple(
        CallState(call, plans.get(call.id) or CallPlan(call.id, digest_of(call.name, call.arguments)))
        for call in record.body.calls
    )
    tools = state.tools if isinstance(state, AwaitingModel) else ()
    return RunningCalls(record.turn, record.reply, record.body, calls, tools, touched_at=record.at)


def _evolve_call(state: TurnState, record: CallStarted | CallEnded, *, epoch: int) -> TurnState:
    if not isinstance(state, RunningCalls | Cancelling):
        return state
    if isinstance(record, CallEnded):
        return replace(state, calls=_with_result(state.calls, record.result), touched_at=record.at)
    calls = tuple(
        replace(call, runs=record.run, epoch=epoch, started_at=record.at)
        if call.call.id == record.call_id
        else call
        for call in state.calls
    )
    return replace(state, calls=calls, touched_at=record.at)


def _with_result(calls: tuple[CallState, ...], result: Result) -> tuple[CallState, ...]:
    return tuple(replace(call, result=result) if call.call.id == result.call_id else call for call in calls)


def exchange_of(state: TurnState) -> Exchange | None:
    """Return the exchange that an `ExchangeCommitted` puts into history from this state."""
    if not isinstance(state, RunningCalls | Cancelling):
        return None
    return Exchange(state.reply, tuple(call.result for call in state.calls if call.result is not None))


def partial_reply(state: AwaitingModel) -> Reply | None:
    """Return what the running attempt has said so far as an interrupted reply, or None if it said nothing."""
    deltas: list[Delta] = []
    said = state.said
    while said:
        before, delta = said
        assert isinstance(delta, Delta)
        assert isinstance(before, tuple)
        deltas.append(delta)
        said = before
    texts: dict[int, list[str]] = {}
    kinds: dict[int, str] = {}
    for delta in reversed(deltas):
        texts.setdefault(delta.part, []).append(delta.text)
        kinds.setdefault(delta.part, delta.kind)
    parts: list[ReplyPart] = []
    for part in sorted(texts):
        text = "".join(texts[part])
        parts.append(Thinking(text) if kinds[part] == "thinking" else Text(text))
    return Reply(tuple(parts), Finish.INTERRUPTED) if parts else None


# --- owed -----------------------------------------------------------------------------------------------------


def owed(state: TurnState) -> frozenset[Obligation]:
    """Return what the world owes this state. The runner starts what is new and stops what is gone."""
    match state:
        case Idle():
            return frozenset()
        case AwaitingModel():
            if state.attempt == 0:
                return frozenset()  # the announcement stands in the same append
            return frozenset((AskModel(state.turn, state.reply_no, state.attempt, state.not_before),))
        case RunningCalls():
            return frozenset(_owed_call(state, call) for call in state.calls if call.is_running)
        case Cancelling():
            return frozenset((AwaitCancelled(state.turn, state.deadline_at),))
        case _:
            assert_never(state)


def is_owed_by_client(state: TurnState, finished: CallFinished) -> bool:
    """Say whether a client may give this outcome: the call runs, and it runs at a client."""
    if not isinstance(state, RunningCalls | Cancelling):
        return False
    site = {call.call.id: call.plan.site for call in state.calls}.get(finished.result.call_id)
    return site is Site.CLIENT and _is_open(state, finished.turn, finished.reply_no, finished.result.call_id)


def _owed_call(state: RunningCalls, call: CallState) -> Obligation:
    if call.plan.site is Site.CLIENT:
        deadline_at = call.started_at + (call.plan.timeout_s or CLIENT_CALL_S)
        return AwaitClient(state.turn, state.reply_no, call.call.id, deadline_at)
    return RunCall(state.turn, state.reply_no, call.call.id, call.runs)
