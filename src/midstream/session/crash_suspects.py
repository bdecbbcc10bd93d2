"""Rules for suspects: sessions that may have killed their server, and when one is no longer resumed.

Only a running tool can kill the server: a tool of the server, or one of an upstream agent. A session that was running
one when its process died is a suspect. Suspects resume one at a time, so that a further death identifies the cause. The
rules use only the journals, so that each process has the same verdict.
"""

from __future__ import annotations

from collections.abc import Iterable

from midstream.history.messages import UpstreamCall
from midstream.session.calls import CallState, Site
from midstream.session.session import Session
from midstream.session.turn.deciding import text_so_far
from midstream.session.turn.states import AwaitingModel, Cancelling, RunningCalls


def is_at_risk(session: Session) -> bool:
    """Whether the last node was running a tool for this session that could have killed its process."""
    turn = session.turn
    if session.driver:
        return False  # the framework's loop has a process of its own
    if isinstance(turn, RunningCalls | Cancelling):
        return any(call.epoch == session.epoch for call in turn.calls if _runs_here(call))
    if isinstance(turn, AwaitingModel) and turn.epoch == session.epoch:
        return any(
            isinstance(part, UpstreamCall) and part.outcome is None for part in text_so_far(turn).values()
        )
    return False


def is_untried(session: Session) -> bool:
    """Whether the last node held this suspect: it did not run it, and did not begin its trial."""
    turn = session.turn
    if not session.suspected:
        return False
    if isinstance(turn, RunningCalls | Cancelling):
        return any(call.epoch < session.epoch for call in turn.calls if _runs_here(call))
    return isinstance(turn, AwaitingModel) and turn.epoch < session.epoch


def deaths_of(session: Session, company: Iterable[Session]) -> int:
    """Return the number of deaths that a session is suspected of after one more; 0 if it cannot have caused this one.

    The first death makes a suspect. A further one counts if no other suspect was at risk in the same process.

    Args:
        session: Its state when its last node died.
        company: The other sessions of that node, with their states.
    """
    if is_untried(session):
        return session.suspected
    if not is_at_risk(session):
        return 0
    is_alone = not any(other.suspected and is_at_risk(other) for other in company)
    return session.suspected + (1 if is_alone or not session.suspected else 0)


def is_at_work(session: Session) -> bool:
    """Whether a trial continues: the turn needs this process, and does not only wait for clients and people."""
    turn = session.turn
    if isinstance(turn, RunningCalls | Cancelling):
        return any(call.is_running and call.plan.site is not Site.CLIENT for call in turn.calls)
    return session.needs_node


def _runs_here(call: CallState) -> bool:
    return call.is_open and call.runs > 0 and call.asked is None and call.plan.site is Site.SERVER
