"""Open questions of a session, with all data for a decision."""

from __future__ import annotations

from msgspec import Struct

from midstream.session.call_references import CallRef
from midstream.session.calls import CHOICES, CallState, Choice, QuestionKind, question_text
from midstream.session.session import Session
from midstream.session.turn.states import AgentQuestion, AwaitingModel, RunningCalls


class Question(Struct, frozen=True, omit_defaults=True):
    """An open question about a call, or about a permission request of an upstream agent.

    Args:
        session: The session of the answer: for a sub-agent, its own session.
        turn, response, call_id: The place of the call; an agent's question has an id of its own there.
        kind: approval (may it run?), question (the call is itself one), doubt (did it take effect?).
        digest: Digest of the arguments as they are shown here; an answer must repeat it.
        name, arguments: The requested call; the arguments are JSON text.
        choices: The possible answers.
        asked_at: Time of the question, in seconds since 1970.
        text: The text beside the call: the question itself, or the reason for it.
        expires_at: Time of its expiry (seconds since 1970); 0 for never.
        agents: Names of the sub-agents from the session's agent down to the asking one; () for the agent itself.
        is_fixed: Whether an approval cannot change the arguments.
        approvers: Number of different people who must allow the call.
        approved_by: The principals that have allowed it.
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

    @property
    def ref(self) -> CallRef:
        """The place of the call, for an answer."""
        return CallRef(self.turn, self.response, self.call_id)


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
    session_id: str, turn: AwaitingModel, question: AgentQuestion, agents: tuple[str, ...]
) -> Question:
    return Question(
        session_id,
        turn.turn,
        turn.response_no,
        question.id,
        QuestionKind.APPROVAL,
        question.digest,
        question.name,
        question.arguments,
        CHOICES[QuestionKind.APPROVAL],
        question.asked_at,
        question.text,
        question.expires_at,
        agents,
        question.is_fixed,
        question.approvers,
        question.approved_by,
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
