"""Sub-agents: a call whose work is a session of its own.

The child's id follows from the place of the call, so that every node of the parent finds the same child; its call is
never in doubt. Each record of the child is copied to the parent's journal. The outcome of the call is a function of the
child's journal alone, so two reports are equal.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Protocol

from midstream.engine.agent import SubAgent
from midstream.environment import World
from midstream.errors import LeaseHeldError, LeaseLostError, MidstreamError, UnavailableError
from midstream.history.messages import Outcome, Step, ToolResult, UserMessage
from midstream.retries import STOP_CHILD_ATTEMPTS_MAX
from midstream.session.calls import CallState, Site
from midstream.session.child_names import PART_MARK
from midstream.session.records import (
    CommandAccepted,
    EpochStarted,
    Parent,
    StreamOpened,
    StreamTaken,
    TurnStatus,
    decode,
)
from midstream.session.session import Session
from midstream.session.turn.commands import CallFinished, Cancel, ChildStreamed, SendMessage
from midstream.session.turn.pending import RunChild
from midstream.session.turn.states import SUSPECTED_CODE, RunningCalls
from midstream.store.contract import StoredRecord

DEPTH_MAX = 3
"""Levels of sub-agents within sub-agents."""
POLL_S = 0.5
"""Seconds between two tries to claim a child that another process still has."""
RECORDS_PER_READ = 200
_OF_NODES = (EpochStarted, StreamOpened, StreamTaken, CommandAccepted)
"""Records without meaning for a reader of the parent."""
_AWAY = (UnavailableError, LeaseHeldError, LeaseLostError)
"""The child is on another process, or its store is unavailable: it is not lost."""


class ChildRunner(Protocol):
    """The methods of a child's runner that this module uses."""

    state: Session

    async def submit(self, command: SendMessage | Cancel) -> int:
        """Decide a command."""

    async def read(self, *, after: int, limit: int) -> Sequence[StoredRecord]:
        """Return records after a position."""

    async def wait(self, after: int) -> None:
        """Wait for a record after a position."""

    def attach(self) -> None:
        """Keep the session awake, and refreshed while another process runs it."""

    def detach(self) -> None:
        """Undo `attach`."""


class ChildSessions(Protocol):
    """Source of child sessions: the host."""

    async def child(self, session_id: str, path: tuple[str, ...]) -> ChildRunner:
        """Return the child session, awake, with the agent at `path`."""


class ParentJournal(Protocol):
    """Receiver of the child's records: the parent's runner."""

    session_id: str

    async def show(self, command: ChildStreamed) -> None:
        """Journal a record of the child."""


async def run_child(
    children: ChildSessions,
    world: World,
    shown_in: ParentJournal,
    pending_work: RunChild,
    parent: Session,
    state: CallState,
    found: SubAgent,
) -> CallFinished:
    """Run or continue the child session of a call, and return the outcome.

    A cancellation of this coroutine does not stop the child; see `stop_child`.
    """
    place = _place(shown_in.session_id, pending_work, parent, state, found)
    if len(place.path) > DEPTH_MAX:
        return _finished_call(
            pending_work,
            ToolResult(pending_work.ref.call_id, f"Sub-agents go {DEPTH_MAX} deep at most.", Outcome.ERROR),
        )
    task = found.task_of(state.call)
    shown = state.child_position
    while True:
        try:
            child = await children.child(_child_id(place, state, parent), place.path)
            if not child.state.turns:
                message = SendMessage(
                    UserMessage.of(task),
                    timeout_s=found.timeout_s,
                    responses_max=found.responses_max,
                    parent=place,
                )
                await child.submit(message)
            shown = await _follow(child, shown_in, pending_work, _child_id(place, state, parent), shown)
            end = child.state.last_turn
            is_suspect = end is not None and end.code == SUSPECTED_CODE
            return _finished_call(
                pending_work, result_of(pending_work.ref.call_id, child.state), is_suspect=is_suspect
            )
        except _AWAY:
            await world.sleep(POLL_S)
        except MidstreamError as error:
            why = f"The sub-agent could not continue: {error.message}"
            return _finished_call(pending_work, ToolResult(pending_work.ref.call_id, why, Outcome.ERROR))


def _finished_call(pending_work: RunChild, result: ToolResult, *, is_suspect: bool = False) -> CallFinished:
    return CallFinished(pending_work.ref.turn, pending_work.ref.response_no, result, is_suspect)


def children_at_work(session_id: str, parent: Session) -> list[str]:
    """Return the session ids of the sub-agents that work for a session's turn."""
    turn = parent.turn
    if not isinstance(turn, RunningCalls):
        return []
    numbered = enumerate(turn.calls)
    at_work = [number for number, call in numbered if call.is_running and call.plan.site is Site.CHILD]
    return [_id_at(session_id, turn.turn, turn.response_no, number) for number in at_work]


async def stop_child(
    children: ChildSessions,
    world: World,
    shown_in: ParentJournal,
    pending_work: RunChild,
    parent: Session,
    state: CallState,
    found: SubAgent,
) -> CallFinished:
    """Stop the child of a call and return its outcome so far.

    Raises:
        MidstreamError: The child cannot be reached, or this session has failed. A child that still runs is cancelled
            when it is opened, because its call is closed.
    """
    place = _place(shown_in.session_id, pending_work, parent, state, found)
    name = _child_id(place, state, parent)
    for tries in itertools.count(1):
        try:
            child = await children.child(name, place.path)
            await child.submit(Cancel())
            break
        except _AWAY:
            if tries == STOP_CHILD_ATTEMPTS_MAX:
                raise
            await world.sleep(POLL_S)
    with contextlib.suppress(*_AWAY):
        await _follow(child, shown_in, pending_work, name, state.child_position)
    return _finished_call(pending_work, result_of(pending_work.ref.call_id, child.state))


def result_of(call_id: str, child: Session) -> ToolResult:
    """Return the outcome of a call whose child has ended: its last text, and how it ended."""
    last = child.history.entries[-1] if child.history.entries else None
    words = last.response.text if isinstance(last, Step) else ""
    end = child.last_turn
    if end is None:
        return ToolResult(call_id, "The sub-agent never began.", Outcome.CANCELLED)
    match end.status:
        case TurnStatus.COMPLETED:
            return ToolResult(call_id, words)
        case TurnStatus.CANCELLED:
            return ToolResult(
                call_id, f"The sub-agent was stopped. Its text so far: {words}", Outcome.CANCELLED
            )
        case TurnStatus.FAILED | TurnStatus.INTERRUPTED:
            why = end.message or end.code or end.status.value
            return ToolResult(
                call_id, f"The sub-agent failed: {why}. Its text so far: {words}", Outcome.ERROR
            )


async def _follow(
    child: ChildRunner, shown_in: ParentJournal, pending_work: RunChild, name: str, after: int
) -> int:
    """Copy the child's records to the parent until its turn has ended; return the last copied position."""
    child.attach()
    try:
        return await _copy_records(child, shown_in, pending_work, name, after)
    finally:
        child.detach()


async def _copy_records(
    child: ChildRunner, shown_in: ParentJournal, pending_work: RunChild, name: str, after: int
) -> int:
    while True:
        is_live = child.state.turns == 0 or child.state.is_live
        page = await child.read(after=after, limit=RECORDS_PER_READ)
        if page:
            after = page[-1].position
            records = tuple(
                (each.position, each.body) for each in page if not isinstance(decode(each.body), _OF_NODES)
            )
            await shown_in.show(ChildStreamed(pending_work.ref, name, records))
        elif not is_live:
            return after
        else:
            await child.wait(after)


def _place(
    session_id: str, pending_work: RunChild, parent: Session, state: CallState, found: SubAgent
) -> Parent:
    above = parent.parent.path if parent.parent else ()
    return Parent(
        session_id, pending_work.ref.turn, pending_work.ref.response_no, state.call.id, (*above, found.name)
    )


def _child_id(place: Parent, state: CallState, parent: Session) -> str:
    """Return the session id of a call's child. It has the call's place, because a call id may contain anything."""
    calls = getattr(parent.turn, "calls", ())
    index = next(number for number, call in enumerate(calls) if call.call.id == state.call.id)
    return _id_at(place.session, place.turn, place.response, index)


def _id_at(session_id: str, turn: int, response: int, index: int) -> str:
    return f"{session_id}{PART_MARK}{turn}.{response}.{index}"
