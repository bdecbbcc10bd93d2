"""Snapshot of a session as one JSON document, for clients that follow its events afterwards."""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.history.messages import Entry, Response, ToolCall, ToolResult, UserMessage
from midstream.protocol.server_stream import waiting_on
from midstream.session.calls import CHOICES, CallState, Choice, QuestionKind
from midstream.session.records import QuestionAsked, SessionStatus
from midstream.session.session import Session
from midstream.session.turn.deciding import response_so_far
from midstream.session.turn.states import AgentQuestion, AwaitingModel, Cancelling, Idle, RunningCalls

SNAPSHOT_BYTES_MAX = 8 * 2**20
"""Bytes of a snapshot that replaces events: half of the clients' frame limit. `GET` returns the whole snapshot."""


class QuestionSnapshot(Struct, frozen=True, omit_defaults=True):
    """An open question about a call.

    Args:
        kind: approval, question or doubt.
        digest: Digest that an answer must repeat.
        choices: The permitted answers.
        text: Text to show with the call.
        expires_at: Time after which answers are refused (seconds since 1970); 0 for never.
    """

    kind: QuestionKind
    digest: str
    choices: tuple[Choice, ...]
    text: str = ""
    expires_at: float = 0.0


class QueuedSnapshot(Struct, frozen=True):
    """A message that waits for the running turn to end."""

    number: int
    message: UserMessage
    at: float


class CallSnapshot(Struct, frozen=True, omit_defaults=True):
    """One call of the running batch.

    Args:
        call: The tool call.
        site: Place of the tool: server or client.
        status: waiting, asking (for a person's decision), running, in doubt or ended.
        started_at: Start of its last run, in seconds since 1970.
        result: Its outcome, after its end.
        question: The open question about it.
    """

    call: ToolCall
    site: str
    status: str
    started_at: float = 0.0
    result: ToolResult | None = None
    question: QuestionSnapshot | None = None


class RunningTurn(Struct, frozen=True, omit_defaults=True):
    """The open turn. The history contains only its user message and complete steps.

    Args:
        turn, response: Their numbers.
        attempt: Number of the current attempt; 0 when the response is complete.
        output: The response, or its part so far.
        calls: The calls of a complete response, in the model's order.
        questions: Permissions that the upstream agent requests during this response; see `question_asked`.
    """

    turn: int
    response: int
    attempt: int = 0
    output: Response | None = None
    calls: tuple[CallSnapshot, ...] = ()
    questions: tuple[QuestionAsked, ...] = ()


class SessionSnapshot(Struct, frozen=True):
    """A session at one event.

    Args:
        session: Its id.
        event_id: The last event in this state; follow the session from here.
        status: Current status, as in the listing.
        waiting_on: Thing for which the turn waits: nothing, model, tool, client, person or agent.
        turns: Number of turns so far.
        last: Status of the last ended turn; "" without one.
        history: User messages and steps (a response with the results of all its calls), in order.
        running: The open turn, or null.
        queue: Messages that wait for the end of the turn, in order.
        is_resumable: Whether the last turn was interrupted or failed, and can continue.
        left_out: Number of the oldest history entries that were omitted because of the size limit.
    """

    session: str
    event_id: str
    status: SessionStatus
    waiting_on: str
    turns: int
    last: str
    history: tuple[Entry, ...]
    running: RunningTurn | None
    queue: tuple[QueuedSnapshot, ...] = ()
    is_resumable: bool = False
    left_out: int = 0


def body_within(snapshot: SessionSnapshot, bytes_max: int) -> bytes:
    """Return a snapshot as JSON; omit the oldest history entries beyond `bytes_max`."""
    while len(body := msgspec.json.encode(snapshot)) > bytes_max and len(snapshot.history) > 1:
        going = (len(snapshot.history) + 1) // 2
        snapshot = replace(snapshot, history=snapshot.history[going:], left_out=snapshot.left_out + going)
    return body


def snapshot_of(session_id: str, state: Session, event_id: str, waits_for: str = "") -> SessionSnapshot:
    """Return the snapshot of a session; `waits_for` is from `AwakeSessions.waits_for`, or "" if the session sleeps."""
    return SessionSnapshot(
        session=session_id,
        event_id=event_id,
        status=state.status,
        waiting_on=waits_for or waiting_on(state),
        turns=state.turns,
        last=state.last_turn.status.value if state.last_turn else "",
        history=state.history.entries,
        running=_running_turn(state),
        queue=tuple(QueuedSnapshot(each.number, each.message, each.at) for each in state.queue),
        is_resumable=isinstance(state.turn, Idle) and state.turn.left is not None,
    )


def _running_turn(state: Session) -> RunningTurn | None:
    match state.turn:
        case Idle():
            return None
        case AwaitingModel() as turn:
            questions = tuple(_question_record(turn, each) for each in turn.questions if each.is_open)
            return RunningTurn(
                turn.turn, turn.response_no, turn.attempt, response_so_far(turn), questions=questions
            )
        case RunningCalls() | Cancelling() as turn:
            calls = tuple(_call_snapshot(call) for call in turn.calls)
            return RunningTurn(turn.turn, turn.response_no, output=turn.response, calls=calls)


def _question_record(turn: AwaitingModel, question: AgentQuestion) -> QuestionAsked:
    return QuestionAsked(
        turn.turn,
        turn.response_no,
        question.id,
        QuestionKind.APPROVAL,
        question.digest,
        question.asked_at,
        question.text,
        question.expires_at,
        question.attempt,
        question.name,
        question.arguments,
        question.is_fixed,
        approvers=question.approvers,
    )


def _call_snapshot(call: CallState) -> CallSnapshot:
    return CallSnapshot(
        call.call, call.plan.site.value, _status_of(call), call.started_at, call.result, _question_of(call)
    )


def _status_of(call: CallState) -> str:
    if not call.is_open:
        return "ended"
    if call.is_asking:
        return "asking"
    if call.is_in_doubt:
        return "in doubt"
    return "running" if call.is_running else "waiting"


def _question_of(call: CallState) -> QuestionSnapshot | None:
    if call.asked is None or not call.is_open:
        return None
    return QuestionSnapshot(
        call.asked, call.plan.digest, CHOICES[call.asked], call.plan.question, call.expires_at
    )
