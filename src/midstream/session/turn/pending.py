"""owed: what the world owes a turn. The runner starts what is new and stops what is gone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from msgspec import Struct

from midstream.session.calls import CallState, Site
from midstream.session.references import AttemptRef, CallRef
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
    """Call the model and journal its output; `continued` counts how often this attempt was taken up again."""

    ref: AttemptRef
    not_before: float = 0.0
    continued: int = 0


class RunCall(Struct, frozen=True, gc=False):
    """Run one tool call; its start is in the journal."""

    ref: CallRef
    run: int


class RunChild(Struct, frozen=True, gc=False):
    """Let a session of its own do the work of a call, and take its outcome from there."""

    ref: CallRef


class ProbeCall(Struct, frozen=True, gc=False):
    """Ask the outside world whether a call in doubt happened."""

    ref: CallRef


class AwaitClient(Struct, frozen=True, gc=False):
    """A client owes the outcome of a call; at `deadline_at` it has expired."""

    ref: CallRef
    deadline_at: float


class AwaitPerson(Struct, frozen=True, gc=False):
    """A person owes the answer to a question; at `deadline_at` it has expired. One without a deadline is no work."""

    ref: CallRef
    deadline_at: float


class AnswerAgent(Struct, frozen=True, gc=False):
    """An upstream's agent waits for what was decided about its question."""

    ref: AttemptRef
    question_id: str


class AwaitCancelled(Struct, frozen=True, gc=False):
    """Stopped tools owe their end; at `deadline_at` the cancel goes on without them."""

    turn: int
    deadline_at: float


class AwaitEnd(Struct, frozen=True, gc=False):
    """The turn as a whole must have ended at `deadline_at`."""

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
    """Return what the world owes this state, each thing once; calls in their order."""
    match state:
        case Idle():
            return ()
        case AwaitingModel():
            if state.attempt == 0:
                return ()  # the announcement stands in the same append
            asked = CallModel(state.ref, state.not_before, state.continued)
            if not state.questions:
                return (asked, *_end_of(state))
            end = () if state.is_waiting_for_person else _end_of(state)
            return (asked, *_pending_questions(state), *end)
        case RunningCalls() if state.is_waiting_for_application:
            return ()
        case RunningCalls():
            each = [_pending_call(state, call) for call in state.calls if call.result is None]
            # Nobody's time runs while a person is being waited for.
            end = () if not state.deadline_at or state.is_waiting_for_person else _end_of(state)
            return (*[one for one in each if one is not None], *end)
        case Cancelling():
            return (AwaitCancelled(state.turn, state.deadline_at),)
        case _:
            assert_never(state)


def is_pending_for_client(state: TurnState, finished: CallFinished) -> bool:
    """Return whether a client may send this outcome: the call runs, and it runs at a client."""
    if not isinstance(state, RunningCalls | Cancelling):
        return False
    call = open_call(state, finished.ref)
    return call is not None and call.plan.site is Site.CLIENT


def _end_of(state: AwaitingModel | RunningCalls) -> tuple[AwaitEnd, ...]:
    return (AwaitEnd(state.turn, state.deadline_at),) if state.deadline_at else ()


def _pending_questions(state: AwaitingModel) -> Iterator[PendingWork]:
    for question in state.questions:
        if question.attempt != state.attempt:
            continue  # no agent waits for it; its answer may fit a question that is still to come
        if not question.is_open:
            yield AnswerAgent(state.ref, question.id)
        elif question.expires_at:
            yield AwaitPerson(CallRef(state.turn, state.response_no, question.id), question.expires_at)


def _pending_call(state: RunningCalls, call: CallState) -> PendingWork | None:
    """Return what is owed for an open call. Each attribute is looked at once: a result is one of many calls'."""
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
