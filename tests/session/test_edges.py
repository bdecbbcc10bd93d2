"""The whole machine in a small world: every state accepts or refuses every command, along known edges."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings

from midstream.history.messages import UserMessage
from midstream.session import session as sessions
from midstream.session.application_request import ApplicationRequest
from midstream.session.records import EpochStarted, Record
from midstream.session.session import Session
from midstream.session.turn.commands import (
    CallFinished,
    Cancel,
    CancelExpired,
    Command,
    Recover,
    Refused,
    SendTranscript,
)
from midstream.session.turn.pending import CallModel, pending_work
from midstream.session.turn.states import Cancelling, Idle, TurnState
from tests.search import tried
from tests.session.edges import MachineEdge, edge_of, explored, steps_of, strays
from tests.session.session_lives import SessionLife, lives
from tests.session.turn_stories import AT
from tests.spec import spec
from tools import docs

STATES = {kind.__name__ for kind in get_args(TurnState)}
# A session of a client application takes transcripts: `test_applications.py` covers them in every state.
COMMANDS = {kind.__name__ for kind in get_args(Command)} - {"SendTranscript"}
RECORDS = {kind.__name__ for kind in get_args(Record)}
# Records that no command of a turn creates: nodes, streams and changing tools write them.
OF_OTHERS = {
    "JournalPruned",
    "OutcomeDamaged",
    "StreamOpened",
    "StreamTaken",
    "CommandAccepted",
    "ToolsChanged",
    "TranscriptAccepted",
}

pytestmark = pytest.mark.slow  # One search of a few seconds, in whichever test comes first.


def test_the_diagram_of_the_specification_is_current() -> None:
    assert list(docs.wrong_blocks(docs.ROOT / "docs" / "spec" / "turn.md")) == []


@spec("TURN-9", "TURN-22")
def test_every_state_handles_every_kind_of_command_and_raises_only_refusals() -> None:
    assert explored().pairs() == {(state, command) for state in STATES for command in COMMANDS}


def test_every_kind_of_record_is_created_by_some_command() -> None:
    kinds = {step.record.partition("(")[0] for step in explored().steps}
    assert kinds == RECORDS - OF_OTHERS


@spec("REUSE-76")
def test_a_transcript_of_a_client_application_closes_all_open_work() -> None:
    sent = SendTranscript(ApplicationRequest("r1"), 0, 0, (UserMessage.of("hi"),))
    for before in explored().states:
        decided = sessions.decide(before, sent, epoch=before.epoch, at=AT)
        after = sessions.fold([(before.epoch, record) for record in decided], before)
        assert after.history.entries == sent.tail
        (asked,) = pending_work(after.turn)
        assert isinstance(asked, CallModel)
        assert asked.ref.turn == after.turns == before.turns + 1


@spec("TURN-1", "TURN-28", "TURN-91")
def test_a_busy_session_refuses_or_queues_every_message() -> None:
    taken = {
        (edge.state, edge.records, edge.after) for edge in explored().edges if edge.command == "SendMessage"
    }
    busy = STATES - {"Idle"}
    assert taken == {
        ("Idle", ("MessageAccepted", "AttemptStarted"), "AwaitingModel"),
        ("Idle", ("[journal_moved]",), "Idle"),
        *((state, ("[session_busy]",), state) for state in busy),
        *((state, ("MessageQueued",), state) for state in busy),
    }


@spec("TURN-8", "TURN-9")
def test_an_ended_turn_accepts_only_a_message_a_resumption_and_a_late_result() -> None:
    taken = {edge for edge in explored().edges if edge.state == "Idle" and edge.records}
    assert taken == {
        MachineEdge("Idle", "SendMessage", ("MessageAccepted", "AttemptStarted"), "AwaitingModel"),
        MachineEdge("Idle", "SendMessage", ("[journal_moved]",), "Idle"),
        MachineEdge("Idle", "Resume", ("TurnResumed", "AttemptStarted"), "AwaitingModel"),
        MachineEdge("Idle", "Resume", ("[nothing_to_resume]",), "Idle"),
        MachineEdge("Idle", "Answer", ("[question_closed]",), "Idle"),
        MachineEdge("Idle", "PermissionRequested", ("[question_closed]",), "Idle"),
        MachineEdge("Idle", "UseAnswer", ("[question_closed]",), "Idle"),
        MachineEdge("Idle", "CallFinished", ("ResultArrivedLate",), "Idle"),
    }


@spec("TURN-8")
def test_from_every_state_a_cancel_and_its_deadline_lead_to_rest() -> None:
    for session in explored().states:
        turn = session.turns
        after = _state_after(session, Cancel())
        assert isinstance(after.turn, Idle | Cancelling) or after.turns > turn
        after = _state_after(after, CancelExpired(turn))
        # After the rest comes the turn of a queued message, or the last response of a turn whose time was
        # over.
        if not (after.turns > turn or getattr(after.turn, "is_last", False)):
            assert isinstance(after.turn, Idle)


@spec("TURN-9")
def test_in_no_state_is_a_command_about_another_call_or_turn_accepted() -> None:
    for session in explored().states:
        unsettled = {(each.turn, each.response, each.call_id) for each in session.unsettled}
        for command in strays(session):
            if isinstance(command, CallFinished):
                if (command.turn, command.response_no, command.result.call_id) in unsettled:
                    continue
            try:
                accepted = sessions.decide(session, command, epoch=session.epoch, at=AT)
            except Refused:
                continue
            assert accepted == ()


@spec("TURN-21", "TURN-17")
def test_every_live_state_has_pending_work_or_a_question_and_recovery_is_idempotent() -> None:
    for session in explored().states:
        is_waiting = getattr(session.turn, "is_waiting_for_person", False)
        assert bool(pending_work(session.turn)) == session.is_live or is_waiting
        epoch = session.epoch + 1
        begun = sessions.fold([(epoch, EpochStarted(epoch, "next", AT))], session)
        once = sessions.fold(
            [(epoch, each) for each in sessions.decide(begun, Recover(), epoch=epoch, at=AT)], begun
        )
        assert sessions.decide(once, Recover(), epoch=epoch, at=AT) == ()


@given(lives())
@settings(max_examples=tried(50))
def test_no_record_of_a_random_life_has_an_effect_that_the_search_has_not_seen(life: SessionLife) -> None:
    begin = Session()
    found = explored().steps
    for step in life.steps:
        if step.records:
            assert set(steps_of(step.before, step.records, epoch=step.epoch)) <= found
        if step.records is not None:
            edge = edge_of(step.before, step.command, step.records, step.after)
            assert (edge.state, edge.command) in explored().pairs()
    assert sessions.fold(life.journal, begin) == life.session


def _state_after(session: Session, command: Command) -> Session:
    records = sessions.decide(session, command, epoch=session.epoch, at=AT)
    return sessions.fold([(session.epoch, each) for each in records], session)
