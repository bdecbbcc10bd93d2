"""Open questions of a session and of the sub-agents below it, from the records that its readers receive.

What a sub-agent does is in the journal of the session that it works for, record by record. So its state follows from
that journal, also that of a sub-agent of a sub-agent.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from midstream.dialects.waiting_turns import is_waiting
from midstream.errors import RecordUndecodableError
from midstream.session.calls import Site
from midstream.session.journal_reading import JournalReader
from midstream.session.questions import Question, questions_of
from midstream.session.records import ChildDelta, Record
from midstream.session.session import Session, evolve
from midstream.session.turn.states import Cancelling, RunningCalls, TurnState


class ShownSubAgent(Struct, frozen=True):
    """The session that does the work of a call, as far as its records were shown.

    Args:
        session: Its name in the store.
        state: Its state.
        below: The sub-agents of its own open calls.
    """

    session: str
    state: Session = Session()
    below: ShownSubAgents = {}


ShownSubAgents = Mapping[str, ShownSubAgent]
"""Sub-agents that work for a session, by the ids of their calls."""


def take_record(
    before: ShownSubAgents, turn: TurnState, record: Record, *, epoch: int, session: str = ""
) -> tuple[ShownSubAgents, str, Record]:
    """Return the sub-agents of a session after its next record, the session that has done something, and what.

    That is the session and the record, or a sub-agent and the record of it that is shown.

    Args:
        before: The sub-agents so far.
        turn: The turn of the session after the record.
        record: The record.
        epoch: Its epoch.
        session: The name of the session.
    """
    if not isinstance(record, ChildDelta):
        return before if isinstance(turn, RunningCalls | Cancelling) else {}, session, record
    child = before.get(record.call_id) or ShownSubAgent(record.child)
    try:
        inner = JournalReader().read(bytes(record.record))
    except RecordUndecodableError:  # of a newer version
        return before, session, record
    state = evolve(child.state, inner, epoch=epoch)
    below, where, done = take_record(child.below, state.turn, inner, epoch=epoch, session=record.child)
    return {**before, record.call_id: ShownSubAgent(child.session, state, below)}, where, done


def open_questions(state: Session, below: ShownSubAgents, session: str = "") -> tuple[Question, ...]:
    """Return the open questions of a session, and then those of the sub-agents at work for it.

    `Question.session` is where each is answered; `session`, which is "" by default, for the session itself.
    """
    found = questions_of(session, state)
    for child in _at_work(state.turn, below):
        found += open_questions(child.state, child.below, child.session)
    return found


def is_turn_waiting(turn: TurnState, below: ShownSubAgents, *, on_clients: bool) -> bool:
    """Whether a turn and all sub-agents at work for it wait for people only; see `is_waiting`."""
    waiting = {
        name
        for name, child in below.items()
        if is_turn_waiting(child.state.turn, child.below, on_clients=False)
    }
    return is_waiting(turn, on_clients=on_clients, sub_agents=waiting)


def _at_work(turn: TurnState, below: ShownSubAgents) -> list[ShownSubAgent]:
    calls = turn.calls if isinstance(turn, RunningCalls) else ()
    at_work = (each.call.id for each in calls if each.is_running and each.plan.site is Site.CHILD)
    return [below[name] for name in at_work if name in below]
