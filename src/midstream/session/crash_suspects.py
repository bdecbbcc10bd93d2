"""Which sessions may have killed their server, and when one of them is not resumed any more.

Only code that runs in the server can kill it: a tool of the server, or one that an upstream agent runs. A session that
was running one when its process died is a suspect. Suspects resume one at a time, so that a further death shows which
of them it was. Everything here is folded from the journals, so that each process comes to the same verdict.
"""

from __future__ import annotations

from collections.abc import Iterable

from midstream.history.messages import UpstreamCall
from midstream.session.calls import CallState, Site
from midstream.session.session import Session
from midstream.session.turn.deciding import text_so_far
from midstream.session.turn.states import AwaitingModel, Cancelling, RunningCalls


def is_at_risk(session: Session) -> bool:
    """Return whether the last node was running code for this session that could have killed its process."""
    turn = session.turn
    if session.driver:
        return False  # that loop lives in a process of its own
    if isinstance(turn, RunningCalls | Cancelling):
        return any(call.epoch == session.epoch for call in turn.calls if _runs_here(call))
    if isinstance(turn, AwaitingModel) and turn.epoch == session.epoch:
        return any(
            isinstance(part, UpstreamCall) and part.outcome is None for part in text_so_far(turn).values()
        )
    return False


def is_untried(session: Session) -> bool:
    """Return whether the last node held this suspect back: it ran nothing of it, and did not try it."""
    turn = session.turn
    if not session.suspected:
        return False
    if isinstance(turn, RunningCalls | Cancelling):
        return any(call.epoch < session.epoch for call in turn.calls if _runs_here(call))
    return isinstance(turn, AwaitingModel) and turn.epoch < session.epoch


def deaths_of(session: Session, company: Iterable[Session]) -> int:
    """Return how many deaths a session is suspected of after one more; 0 where it cannot have caused this one.

    The first death makes a suspect. A further one counts where no other suspect was at risk in the same process.

    Args:
        session: As its last node left it, which died.
        company: The other sessions of that node, as it left them.
    """
    if is_untried(session):
        return session.suspected
    if not is_at_risk(session):
        return 0
    is_alone = not any(other.suspected and is_at_risk(other) for other in company)
    return session.suspected + (1 if is_alone or not session.suspected else 0)


def is_at_work(session: Session) -> bool:
    """Return whether a trial goes on: the turn needs this process for more than to wait for clients and people."""
    turn = session.turn
    if isinstance(turn, RunningCalls | Cancelling):
        return any(call.is_running and call.plan.site is not Site.CLIENT for call in turn.calls)
    return session.needs_node


def _runs_here(call: CallState) -> bool:
    return call.is_open and call.runs > 0 and call.asked is None and call.plan.site is Site.SERVER
