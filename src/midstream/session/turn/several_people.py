"""The rule that several people must allow one act: the same for tools of the server and of clients, and for agents."""

from __future__ import annotations

from midstream.errors import AnswerMismatchError
from midstream.session.calls import Choice
from midstream.session.turn.commands import Answer, Refused


def require_another_person(answer: Answer, approvers: int, approved_by: tuple[str, ...]) -> None:
    """Check that an approval by several people comes from a person who has not approved yet.

    Args:
        answer: The answer; only an approval is checked.
        approvers: Number of different people who must allow the act.
        approved_by: The principals that have allowed it.

    Raises:
        Refused: The answer has no principal, or one that has already allowed the act.
    """
    if answer.choice is not Choice.ALLOW or approvers == 1:
        return
    if not answer.by:
        message = f"{approvers} people must allow this call, and this server authenticates none"
        raise Refused(AnswerMismatchError(message))
    if answer.by in approved_by:
        raise Refused(AnswerMismatchError("you allowed this call before; another person must allow it, too"))
