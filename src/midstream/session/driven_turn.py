"""A turn that another loop drives: what it reports becomes the same records as ours.

Our own runner does what a turn owes. Turns that the loop of another framework drives: it calls the model and the
tools, and reports each act before and after; this module decides about it. Nothing is started by a record of this
file: calls start one by one, when their loop reports it (a person may decide first), and only the loop decides when
    the turn is over (a response without calls may be sent back by a check of the output).

    begin ──▶ ask ──▶ responded ──▶ start / ended, for each call ──▶ ask ──▶ ... ──▶ close

After a crash the loop runs again from its beginning and is handed what the journal has of the turn; from there on
it reports on. A call that started and has no outcome is judged by `session.calls`, as in our own turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import SessionBusyError, UsageError
from midstream.history.messages import Outcome, Response, ToolResult, UserMessage
from midstream.session import session as sessions
from midstream.session.calls import UNKNOWN_CONTENT, CallPlan, closing_result
from midstream.session.records import (
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallStarted,
    Delta,
    MessageAccepted,
    Record,
    ResponseCompleted,
    StepCommitted,
    TurnEnded,
    TurnStatus,
)
from midstream.session.rerun_policy import CallVerdict, judge
from midstream.session.session import Received, Session
from midstream.session.turn.commands import Refused, SendMessage
from midstream.session.turn.deciding import partial_response
from midstream.session.turn.folding import evolve as evolve_turn
from midstream.session.turn.states import AwaitingModel, Cancelling, Idle, RunningCalls

NO_CLIENT = "driver"
"""Stands in a keyed turn's stream for the digest of a secret: no secret has it, so that no client joins that stream."""


class Begin(Struct, frozen=True):
    """A user speaks, and `driver` will answer. The same key with the same message is accepted once."""

    message: UserMessage
    driver: str
    key: str = ""
    digest: str = ""
    """Digest of the message; only looked at where there is a key."""


class RequestModelResponse(Struct, frozen=True):
    """The loop is about to ask the model for response `response_no`.

    `answers` are the results that the loop gave by itself to calls of the response before (a call it refused, an output
    it took): by call id.
    """

    response_no: int
    answers: Mapping[str, ToolResult]


class AddOutput(Struct, frozen=True):
    """The model produced more output."""

    deltas: tuple[Delta, ...]


class Responded(Struct, frozen=True):
    """The model ended its response."""

    response: Response
    plans: tuple[CallPlan, ...] = ()
    native: str = ""


class AttemptLost(Struct, frozen=True):
    """The model gave no usable response; whether it is asked again is the loop's business."""

    code: str
    message: str


class BeginCall(Struct, frozen=True):
    """The loop is about to run a call.

    `is_approved`: a person allowed this run. `is_suspended`: its last run stopped by itself to wait for that person, so
    that it is not in doubt.
    """

    call_id: str
    is_approved: bool = False
    is_suspended: bool = False


class Ended(Struct, frozen=True):
    """A tool ended."""

    result: ToolResult
    native: str = ""


class EndTurn(Struct, frozen=True):
    """The turn is over."""

    status: TurnStatus
    answers: Mapping[str, ToolResult]


DrivenCommand = (
    Begin | RequestModelResponse | AddOutput | Responded | AttemptLost | BeginCall | Ended | EndTurn
)


def decide(session: Session, command: DrivenCommand, *, epoch: int, at: float) -> tuple[Record, ...]:
    """Return what must be appended because of `command`; nothing, where it changes nothing.

    Raises:
        Refused: It cannot be taken in this state.
    """
    match command:
        case Begin():
            return _begin(session, command, epoch=epoch, at=at)
        case RequestModelResponse():
            return _request_response(session, command, epoch=epoch, at=at)
        case AddOutput():
            return command.deltas if isinstance(session.turn, AwaitingModel) else ()
        case Responded():
            return _complete_response(_awaiting(session), command, at=at)
        case AttemptLost():
            state = _awaiting(session)
            lost = AttemptFailed(
                state.turn, state.response_no, state.attempt, command.code, command.message, at
            )
            return (lost,)
        case BeginCall():
            return _start(_running(session), command, epoch=epoch, at=at)
        case Ended():
            return _end_call(session, command, epoch=epoch, at=at)
        case EndTurn():
            return _close(session, command, at=at)
        case _:
            assert_never(command)


def _begin(session: Session, command: Begin, *, epoch: int, at: float) -> tuple[Record, ...]:
    said = SendMessage(command.message)
    opened = (
        sessions.decide(
            session, Received(command.key, NO_CLIENT, 0, command.digest, said), epoch=epoch, at=at
        )
        if command.key
        else sessions.decide(session, said, epoch=epoch, at=at)
    )
    return tuple(
        replace(record, driver=command.driver) if isinstance(record, MessageAccepted) else record
        for record in opened
    )


def _request_response(
    session: Session, command: RequestModelResponse, *, epoch: int, at: float
) -> tuple[Record, ...]:
    state = session.turn
    match state:
        case RunningCalls() if command.response_no == state.response_no + 1:
            # DRIVEN-5: what no tool answered was answered by the loop itself; the step is whole now.
            return (
                *_close_open_calls(state, command.answers, at=at),
                StepCommitted(state.turn, state.response_no),
                AttemptStarted(state.turn, command.response_no, attempt=1, at=at),
            )
        case AwaitingModel() if command.response_no == state.response_no:
            is_unused = state.attempt == 1 and state.epoch == epoch and not state.failures and not state.said
            if is_unused:
                return ()  # it was announced with the end of the step before
            return (AttemptStarted(state.turn, state.response_no, state.attempt + 1, at),)
        case _:
            raise Refused(
                UsageError(f"the loop requests response {command.response_no} of a turn that does not exist")
            )


def _complete_response(state: AwaitingModel, command: Responded, *, at: float) -> tuple[Record, ...]:
    completed = ResponseCompleted(
        state.turn, state.response_no, state.attempt, command.response, at, command.plans, command.native
    )
    if command.response.calls:
        return (completed,)
    # DRIVEN-4: the loop may yet request again; it reports when the turn is over.
    return (completed, StepCommitted(state.turn, state.response_no))


def _start(state: RunningCalls, command: BeginCall, *, epoch: int, at: float) -> tuple[Record, ...]:
    call = next((each for each in state.calls if each.call.id == command.call_id), None)
    if call is None:
        raise Refused(UsageError(f"no call {command.call_id!r} in response {state.response_no}"))
    started = CallStarted(
        state.turn,
        state.response_no,
        call.call.id,
        call.runs + 1,
        at,
        call.plan.has_effects,
        call.call.arguments if command.is_approved else None,
    )
    verdict = judge(call, epoch=epoch)
    if verdict is CallVerdict.DONE:
        return ()
    if verdict in (CallVerdict.START, CallVerdict.RERUN) or command.is_suspended:
        return (started,)
    if verdict is CallVerdict.LEAVE:
        raise Refused(SessionBusyError(f"call {command.call_id!r} is running already"))
    # DRIVEN-6: it may not run again, or only with a person's decision, which this loop has no way to request.
    lost = ToolResult(call.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN)
    return _settle(state, CallEnded(state.turn, state.response_no, lost, at), epoch=epoch, at=at)


def _end_call(session: Session, command: Ended, *, epoch: int, at: float) -> tuple[Record, ...]:
    state = session.turn
    if not isinstance(state, RunningCalls):
        return ()  # TURN-9: the turn was closed without it
    call = next((each for each in state.calls if each.call.id == command.result.call_id), None)
    if call is None or not call.is_open:
        return ()
    ended = CallEnded(state.turn, state.response_no, command.result, at, command.native)
    return _settle(state, ended, epoch=epoch, at=at)


def _settle(state: RunningCalls, ended: CallEnded, *, epoch: int, at: float) -> tuple[Record, ...]:
    after = evolve_turn(state, ended, epoch=epoch)
    assert isinstance(after, RunningCalls)
    if any(call.is_open for call in after.calls):
        return (ended,)
    return (
        ended,
        StepCommitted(state.turn, state.response_no),
        AttemptStarted(state.turn, state.response_no + 1, attempt=1, at=at),
    )


def _close(session: Session, command: EndTurn, *, at: float) -> tuple[Record, ...]:
    state = session.turn
    match state:
        case Idle():
            return ()
        case AwaitingModel():
            return (*_partial(state, at=at), TurnEnded(state.turn, command.status, at))
        case RunningCalls() | Cancelling():
            return (
                *_close_open_calls(state, command.answers, at=at),
                StepCommitted(state.turn, state.response_no),
                TurnEnded(state.turn, command.status, at),
            )
        case _:
            assert_never(state)


def _partial(state: AwaitingModel, *, at: float) -> tuple[Record, ...]:
    partial = partial_response(state)
    if partial is None:
        return ()
    return (
        ResponseCompleted(state.turn, state.response_no, state.attempt, partial, at),
        StepCommitted(state.turn, state.response_no),
    )


def _close_open_calls(
    state: RunningCalls | Cancelling, answers: Mapping[str, ToolResult], *, at: float
) -> tuple[Record, ...]:
    """Close what is open: with the loop's own answer, or truthfully without one."""
    return tuple(
        CallEnded(
            state.turn,
            state.response_no,
            answers.get(call.call.id) or closing_result(call, running=UNKNOWN_CONTENT),
            at,
        )
        for call in state.calls
        if call.is_open
    )


def _awaiting(session: Session) -> AwaitingModel:
    if not isinstance(session.turn, AwaitingModel):
        raise Refused(UsageError("the loop reports a model call that was not announced"))
    return session.turn


def _running(session: Session) -> RunningCalls:
    if not isinstance(session.turn, RunningCalls):
        raise Refused(UsageError("the loop runs a tool of a turn that has none to run"))
    return session.turn
