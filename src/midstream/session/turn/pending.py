"""Pending work of a turn. The runner starts new work, and stops work that is no longer pending."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from msgspec import Struct

from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import CallState, Site
from midstream.session.turn.commands import CallFinished
from midstream.session.turn.deciding import open_call
from midstream.session.turn.states import (
    CLIENT_CALL_S,
    AwaitingModel,
    Cancelling,
    Idle,
    RunningCalls,
    TurnState,
)


class CallModel(Struct, frozen=True, gc=False):
    """Call the model and journal its output; `continued` counts the continuations of this attempt."""

    ref: AttemptRef
    not_before: float = 0.0
    continued: int = 0


class RunCall(Struct, frozen=True, gc=False):
    """Run one tool call; its start is in the journal."""

    ref: CallRef
    run: int


class RunChild(Struct, frozen=True, gc=False):
    """Run the child session of a call, and take the outcome from there."""

    ref: CallRef


class ProbeCall(Struct, frozen=True, gc=False):
    """Find out whether a call in doubt took effect."""

    ref: CallRef


class AwaitClient(Struct, frozen=True, gc=False):
    """Wait for a client's outcome of a call; it expires at `deadline_at`."""

    ref: CallRef
    deadline_at: float


class AwaitPerson(Struct, frozen=True, gc=False):
    """Wait for a person's answer; it expires at `deadline_at`. A question without a deadline is no work."""

    ref: CallRef
    deadline_at: float


class AnswerAgent(Struct, frozen=True, gc=False):
    """Give an upstream's agent the decision about its question."""

    ref: AttemptRef
    question_id: str


class AwaitCancelled(Struct, frozen=True, gc=False):
    """Wait for the end of stopped tools; at `deadline_at` the cancellation proceeds without them."""

    turn: int
    deadline_at: float


class AwaitEnd(Struct, frozen=True, gc=False):
    """Wait until `deadline_at`, when the whole turn must have ended."""

    turn: int
    deadline_at: float


PendingWork = (
    CallModel
    | RunCall
    | RunChild
    | ProbeCall
    | AwaitClient
    | AwaitPerson
    | AnswerAgent
    | AwaitCancelled
    | AwaitEnd
)


def pending_work(state: TurnState) -> tuple[PendingWork, ...]:
    """Return the pending work of a state, without duplicates; calls in order."""
    match state:
        case Idle():
            return ()
        case AwaitingModel():
            if state.attempt == 0:
                return ()  # the announcement is in the same append
            model_call = CallModel(state.ref, state.not_before, state.continued)
            if not state.questions:
                return (model_call, *_end_of(state))
            end = () if state.is_waiting_for_person else _end_of(state)
            return (model_call, *_pending_questions(state), *end)
        case RunningCalls() if state.is_waiting_for_application:
            return ()
        case RunningCalls():
            each = [_pending_call(state, call) for call in state.calls if call.result is None]
            # Time does not count while a person is asked.
            end = () if not state.deadline_at or state.is_waiting_for_person else _end_of(state)
            return (*[one for one in each if one is not None], *end)
        case Cancelling():
            return (AwaitCancelled(state.turn, state.deadline_at),)
        case _:
            assert_never(state)


def is_pending_for_client(state: TurnState, finished: CallFinished) -> bool:
    """Whether a client may send this outcome: the call runs at a client."""
    if not isinstance(state, RunningCalls | Cancelling):
        return False
    call = open_call(state, finished.ref)
    return call is not None and call.plan.site is Site.CLIENT


def _end_of(state: AwaitingModel | RunningCalls) -> tuple[AwaitEnd, ...]:
    return (AwaitEnd(state.turn, state.deadline_at),) if state.deadline_at else ()


def _pending_questions(state: AwaitingModel) -> Iterator[PendingWork]:
    for question in state.questions:
        if question.attempt != state.attempt:
            continue  # no agent waits for it; its answer may apply to a later question
        if not question.is_open:
            yield AnswerAgent(state.ref, question.id)
        elif question.expires_at:
            yield AwaitPerson(CallRef(state.turn, state.response_no, question.id), question.expires_at)


def _pending_call(state: RunningCalls, call: CallState) -> PendingWork | None:
    """Return the pending work of an open call. Each attribute is read once: a batch may have many calls."""
    ref = CallRef(state.turn, state.response_no, call.call.id)
    if call.asked is not None:
        return AwaitPerson(ref, call.expires_at) if call.expires_at else None
    if call.is_in_doubt:
        return ProbeCall(ref)
    if not call.runs:
        return None
    if call.plan.site is Site.CLIENT:
        # The tool's own time counts while its client is connected: `server/transports/client_calls.py`.
        return AwaitClient(ref, call.started_at + max(call.plan.timeout_s, CLIENT_CALL_S))
    if call.plan.site is Site.CHILD:
        return RunChild(ref)
    return RunCall(ref, call.runs)
