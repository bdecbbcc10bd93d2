"""Open questions of a session, with all that a person needs to decide."""

from __future__ import annotations

from msgspec import Struct

from midstream.session.calls import CHOICES, CallState, Choice, QuestionKind, question_text
from midstream.session.session import Session
from midstream.session.turn.states import AgentQuestion, AwaitingModel, RunningCalls


class Question(Struct, frozen=True, omit_defaults=True):
    """An open question about a call, or about a permission that an upstream agent requests in the middle of its answer.

    Args:
        session: Where it is answered: for a sub-agent's, the sub-agent's own session.
        turn, response, call_id: The place of the call; an agent's question has an id of its own there.
        kind: approval (may it run?), question (the call is itself one), doubt (did it happen?).
        digest: Digest of the arguments as they are shown here; an answer must repeat it.
        name, arguments: What the model asked for; the arguments are JSON text.
        choices: The answers it takes.
        asked_at: When it was asked, in seconds since 1970.
        text: What to show beside the call: the question itself, or why a person is asked.
        expires_at: When it is too late (seconds since 1970); 0 for never.
        agents: Names of the sub-agents from the session's agent down to the one that asks; () for the agent itself.
        is_fixed: With an approval its arguments cannot be changed.
        approvers: How many different people must allow the call.
        approved_by: Those who did.
    """

    session: str
    turn: int
    response: int
    call_id: str
    kind: QuestionKind
    digest: str
    name: str
    arguments: str
    choices: tuple[Choice, ...]
    asked_at: float
    text: str = ""
    expires_at: float = 0.0
    agents: tuple[str, ...] = ()
    is_fixed: bool = False
    approvers: int = 1
    approved_by: tuple[str, ...] = ()


def questions_of(session_id: str, session: Session) -> tuple[Question, ...]:
    """Return the open questions of a session, in the order of their calls."""
    turn = session.turn
    agents = session.parent.path if session.parent else ()
    match turn:
        case AwaitingModel():
            return tuple(_of_agent(session_id, turn, each, agents) for each in turn.questions if each.is_open)
        case RunningCalls():
            return tuple(
                _question(session_id, turn, call, agents)
                for call in turn.calls
                if call.asked is not None and call.is_asking
            )
        case _:
            return ()


def _of_agent(
    session_id: str, turn: AwaitingModel, asked: AgentQuestion, agents: tuple[str, ...]
) -> Question:
    return Question(
        session_id,
        turn.turn,
        turn.response_no,
        asked.id,
        QuestionKind.APPROVAL,
        asked.digest,
        asked.name,
        asked.arguments,
        CHOICES[QuestionKind.APPROVAL],
        asked.asked_at,
        asked.text,
        asked.expires_at,
        agents,
        asked.is_fixed,
        asked.approvers,
        asked.approved_by,
    )


def _question(session_id: str, turn: RunningCalls, call: CallState, agents: tuple[str, ...]) -> Question:
    kind = call.asked
    assert kind is not None
    return Question(
        session_id,
        turn.turn,
        turn.response_no,
        call.call.id,
        kind,
        call.plan.digest,
        call.call.name,
        call.call.arguments,
        CHOICES[kind],
        call.asked_at,
        question_text(call, kind),
        call.expires_at,
        agents,
        approvers=call.plan.approvers,
        approved_by=call.approved_by,
    )
