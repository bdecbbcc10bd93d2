"""Short names for the commands of a turn, so that a test reads like its story."""

from __future__ import annotations

from midstream.history.messages import Finish, Outcome, Response, Text, ToolCall, ToolResult, UserMessage
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import CallPlan, Choice, OnDoubt, Site, digest_of
from midstream.session.records import ClientTool, Delta, Record
from midstream.session.turn import deciding, folding
from midstream.session.turn.commands import (
    Answer,
    CallFinished,
    Command,
    ModelFailed,
    ModelResponded,
    ModelResumable,
    ModelStreamed,
    PermissionRequested,
    SendMessage,
)
from midstream.session.turn.states import Idle, TurnState

AT = 1000.0
"""Time of every command without a time of its own."""


def sends(words: str = "hi", *, tools: tuple[ClientTool, ...] = (), stream: str = "") -> SendMessage:
    return SendMessage(UserMessage.of(words), tools, stream)


def streams(*pieces: str, turn: int = 1, response: int = 1, attempt: int = 1) -> ModelStreamed:
    return ModelStreamed(
        AttemptRef(turn, response, attempt),
        tuple(Delta(turn, response, attempt, 0, "text", piece) for piece in pieces),
    )


def answers(words: str = "hello", *, turn: int = 1, response: int = 1, attempt: int = 1) -> ModelResponded:
    return ModelResponded(AttemptRef(turn, response, attempt), Response((Text(words),)))


def asks(*plans: CallPlan, turn: int = 1, response: int = 1, attempt: int = 1) -> ModelResponded:
    parts = tuple(ToolCall(plan.call_id, "work", "{}") for plan in plans)
    return ModelResponded(AttemptRef(turn, response, attempt), Response(parts, Finish.CALLS), plans)


def fails(
    *,
    retriable: bool = True,
    turn: int = 1,
    response: int = 1,
    attempt: int = 1,
    retry_after_s: float | None = None,
) -> ModelFailed:
    code = "model_unavailable" if retriable else "model_rejected"
    return ModelFailed(AttemptRef(turn, response, attempt), code, "it broke", retriable, retry_after_s)


def resumable(token: str = "resp_1", *, turn: int = 1, response: int = 1, attempt: int = 1) -> ModelResumable:
    return ModelResumable(AttemptRef(turn, response, attempt), token)


def breaks(*, turn: int = 1, response: int = 1, attempt: int = 1) -> ModelFailed:
    """The connection to the model broke; its provider may continue."""
    return ModelFailed(
        AttemptRef(turn, response, attempt), "model_cut", "it broke", is_retriable=True, is_cut=True
    )


def response_lost(*, turn: int = 1, response: int = 1, attempt: int = 1) -> ModelFailed:
    """Report that the provider does not have the response to be continued."""
    return ModelFailed(AttemptRef(turn, response, attempt), "model_forgot", "it is gone", is_retriable=True)


def overflows(cut: int | None, *, turn: int = 1, response: int = 1, attempt: int = 1) -> ModelFailed:
    return ModelFailed(
        AttemptRef(turn, response, attempt), "context_overflow", "too long", is_retriable=False, cut=cut
    )


def reads(call_id: str) -> CallPlan:
    """Plan a call without effects: it may run beside others, and again."""
    return CallPlan(call_id, digest_of("work", "{}"), has_effects=False, on_doubt=OnDoubt.RERUN)


def writes(call_id: str, on_doubt: OnDoubt = OnDoubt.UNKNOWN) -> CallPlan:
    """Plan a call with effects: it runs alone, and by default never again."""
    return CallPlan(call_id, digest_of("work", "{}"), on_doubt=on_doubt)


def at_client(call_id: str, timeout_s: float = 0.0) -> CallPlan:
    return CallPlan(call_id, digest_of("work", "{}"), Site.CLIENT, timeout_s=timeout_s)


def needs_approval(call_id: str, on_doubt: OnDoubt = OnDoubt.UNKNOWN, *, answer_s: float = 0.0) -> CallPlan:
    """Plan a call with effects that a person must allow."""
    digest = digest_of("work", "{}")
    return CallPlan(
        call_id, digest, on_doubt=on_doubt, needs_approval=True, question="Sure?", answer_s=answer_s
    )


def at_person(call_id: str, answer_s: float = 0.0) -> CallPlan:
    """Plan a call that is a question to a person."""
    digest = digest_of("work", "{}")
    return CallPlan(call_id, digest, Site.PERSON, has_effects=False, question="Which one?", answer_s=answer_s)


def at_child(call_id: str) -> CallPlan:
    """Plan a call whose work is a session of its own."""
    return CallPlan(call_id, digest_of("work", "{}"), Site.CHILD, has_effects=False)


def responses(call_id: str, choice: Choice, text: str = "", *, arguments: str | None = None) -> Answer:
    """Let a person answer the question of a call of the first response."""
    return Answer(CallRef(1, 1, call_id), digest_of("work", "{}"), choice, text, arguments)


def requests_permission(
    question_id: str = "leave-1",
    name: str = "work",
    *,
    attempt: int = 1,
    answer_s: float = 0.0,
    is_fixed: bool = False,
    is_vague: bool = False,
    turn: int = 1,
    response: int = 1,
) -> PermissionRequested:
    """Let an upstream agent request a permission in the middle of its answer."""
    return PermissionRequested(
        AttemptRef(turn, response, attempt),
        question_id,
        name,
        "{}",
        "Sure?",
        answer_s,
        is_fixed,
        is_vague,
    )


def impossible(call_id: str) -> CallPlan:
    return CallPlan(call_id, digest_of("work", "{}"), problem="There is no such tool.")


def ended(call_id: str, content: str = "done", *, turn: int = 1, response: int = 1) -> CallFinished:
    return CallFinished(turn, response, ToolResult(call_id, content))


def unknown(call_id: str, content: str) -> ToolResult:
    return ToolResult(call_id, content, Outcome.UNKNOWN)


def apply_command(
    state: TurnState, command: Command, *, epoch: int = 1, at: float = AT
) -> tuple[tuple[Record, ...], TurnState]:
    """Return the records of a command, and the state after them."""
    records = deciding.decide(state, command, epoch=epoch, at=at)
    return records, after(state, *records, epoch=epoch)


def after(state: TurnState, *records: Record, epoch: int = 1) -> TurnState:
    for record in records:
        state = folding.evolve(state, record, epoch=epoch)
    return state


def state_after(*commands: Command, epoch: int = 1, at: float = AT) -> TurnState:
    """Return the state that a story leads to."""
    state: TurnState = Idle()
    for command in commands:
        _, state = apply_command(state, command, epoch=epoch, at=at)
    return state
