"""The rule that several people must allow one act: the same for tools of the server and of clients, and for agents."""

from __future__ import annotations

from midstream.errors import AnswerMismatchError
from midstream.session.calls import Choice
from midstream.session.turn.commands import Answer, Refused


def require_another_person(answer: Answer, approvers: int, approved_by: tuple[str, ...]) -> None:
    """Require that an act which several people must allow is allowed by one who has not done so.

    Args:
        answer: The answer that came; only an approval is checked.
        approvers: How many different people must allow the act.
        approved_by: The principals who did so far.

    Raises:
        Refused: The answer names no principal, or one who allowed the act before.
    """
    if answer.choice is not Choice.ALLOW or approvers == 1:
        return
    if not answer.by:
        message = f"{approvers} people must allow this call, and this server authenticates none"
        raise Refused(AnswerMismatchError(message))
    if answer.by in approved_by:
        raise Refused(AnswerMismatchError("you allowed this call before; another person must allow it, too"))
