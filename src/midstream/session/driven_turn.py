"""Driven turns: reports of another framework's loop become the same records as those of midstream's loop.

The framework's loop calls the model and the tools, and reports each act before and after it; this module decides the
records. No record of this module starts work: calls start one by one, when the loop reports them, and only the loop
ends the turn (it may continue after a response without calls).

    begin ──▶ ask ──▶ responded ──▶ start / ended, for each call ──▶ ask ──▶ ... ──▶ close

After a crash the loop runs again from its beginning, gets the journaled part of the turn, and reports the rest.
`rerun_policy.judge` decides about a started call without an outcome, as in midstream's own turns.
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
"""Replacement for the secret's digest in a keyed turn's stream; no secret has it, so no client can join."""


class Begin(Struct, frozen=True):
    """A user sends a message, which `driver` will answer. The same key with the same message is accepted once."""

    message: UserMessage
    driver: str
    key: str = ""
    digest: str = ""
    """Digest of the message; compared only with a key."""


class RequestModelResponse(Struct, frozen=True):
    """The loop is about to call the model for response `response_no`.

    `answers` has the loop's own results for calls of the previous response, by call id (a refused call, an accepted
    output).
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
    """The model gave no usable response; the loop decides whether to call it again."""

    code: str
    message: str


class BeginCall(Struct, frozen=True):
    """The loop is about to run a call.

    `is_approved`: a person allowed this run. `is_suspended`: its last run suspended itself to wait for that person, so
    it is not in doubt.
    """

    call_id: str
    is_approved: bool = False
    is_suspended: bool = False


class Ended(Struct, frozen=True):
    """A tool ended."""

    result: ToolResult
    native: str = ""


class EndTurn(Struct, frozen=True):
    """The turn has ended."""

    status: TurnStatus
    answers: Mapping[str, ToolResult]


DrivenCommand = (
    Begin | RequestModelResponse | AddOutput | Responded | AttemptLost | BeginCall | Ended | EndTurn
)


def decide(session: Session, command: DrivenCommand, *, epoch: int, at: float) -> tuple[Record, ...]:
    """Return the records of a command; none if it changes nothing.

    Raises:
        Refused: The command is not possible in this state.
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
    message = SendMessage(command.message)
    opened = (
        sessions.decide(
            session, Received(command.key, NO_CLIENT, 0, command.digest, message), epoch=epoch, at=at
        )
        if command.key
        else sessions.decide(session, message, epoch=epoch, at=at)
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
            # DRIVEN-5: the loop itself answered the calls without an outcome; the step is complete now.
            return (
                *_close_open_calls(state, command.answers, at=at),
                StepCommitted(state.turn, state.response_no),
                AttemptStarted(state.turn, command.response_no, attempt=1, at=at),
            )
        case AwaitingModel() if command.response_no == state.response_no:
            is_unused = (
                state.attempt == 1 and state.epoch == epoch and not state.failures and not state.deltas
            )
            if is_unused:
                return ()  # it was announced with the end of the previous step
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
    # DRIVEN-4: the loop may call the model again; it reports the end of the turn.
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
    # DRIVEN-6: the call may not run again, or only with a person's decision, which this loop cannot request.
    lost = ToolResult(call.call.id, UNKNOWN_CONTENT, Outcome.UNKNOWN)
    return _settle(state, CallEnded(state.turn, state.response_no, lost, at), epoch=epoch, at=at)


def _end_call(session: Session, command: Ended, *, epoch: int, at: float) -> tuple[Record, ...]:
    state = session.turn
    if not isinstance(state, RunningCalls):
        return ()  # TURN-9: the turn was closed without its outcome
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
    """Close the open calls: with the loop's own answers, or with an honest outcome."""
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
