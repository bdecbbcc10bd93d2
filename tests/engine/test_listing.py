"""The listing of a session."""

from __future__ import annotations

from midstream.engine.listing import TITLE_CHARS_MAX, mark_of
from midstream.history.messages import UserMessage
from midstream.session.calls import Choice
from midstream.session.records import EpochStarted, MessageAccepted, Record
from midstream.session.session import Session, decide, fold
from midstream.session.turn.commands import Cancel, Command, SendMessage, WhenBusy
from midstream.store.contract import SessionListing
from tests.session.turn_stories import AT, answers, asks, ended, needs_approval, reads, responses, sends


def _listings(*commands: Command) -> tuple[list[SessionListing | None], Session]:
    """Return the change of the listing after each command, and the session."""
    session = fold([(1, EpochStarted(1, "node", AT))])
    marks: list[SessionListing | None] = []
    for command in commands:
        records = decide(session, command, epoch=1, at=AT)
        after = _after(session, records)
        marks.append(mark_of(records, session, after))
        session = after
    return marks, session


def _after(session: Session, records: tuple[Record, ...]) -> Session:
    return fold([(1, record) for record in records], session)


def test_a_turn_is_running_until_it_ends() -> None:
    marks, _ = _listings(sends("  what \n is it? "), asks(reads("a")), ended("a"), answers(response=2))
    assert marks == [
        SessionListing(is_live=True, at=AT, title="what is it?", turns=1, status="running"),
        None,
        None,
        SessionListing(is_live=False, at=AT, turns=1, status="completed"),
    ]


def test_the_title_is_the_start_of_the_first_message() -> None:
    (first, *_, second), _ = _listings(sends("x" * 500), Cancel(), sends("another"))
    assert first is not None
    assert first.title == "x" * TITLE_CHARS_MAX
    assert second is not None
    assert second.title == "", "the old one stays"


def test_a_turn_that_waits_only_for_people_is_waiting_and_not_live() -> None:
    marks, _ = _listings(sends(), asks(needs_approval("a")), responses("a", Choice.ALLOW))
    assert [(mark.is_live, mark.status) for mark in marks if mark] == [
        (True, "running"),
        (False, "waiting"),
        (True, "running"),
    ]


def test_the_next_turn_of_the_queue_keeps_the_session_running() -> None:
    queued = SendMessage(UserMessage.of("and then"), when_busy=WhenBusy.QUEUE)
    marks, _ = _listings(sends(), queued, answers())
    assert marks[-1] == SessionListing(is_live=True, at=AT, turns=2, status="running")


def test_a_turn_of_another_loop_is_not_ours() -> None:
    opened = MessageAccepted(1, UserMessage.of("hi"), AT, driver="pydantic-ai")
    before = Session()
    mark = mark_of([opened], before, _after(before, (opened,)))
    assert mark == SessionListing(is_live=False, at=AT, title="hi", turns=1, status="running")
