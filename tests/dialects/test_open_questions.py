"""Open questions of sub-agents, from the records of their parent session."""

from __future__ import annotations

import msgspec

from midstream.dialects.run_fold import RunBegan, RunEnded, RunFold, RunPaused
from midstream.history.messages import Finish, Response, ToolCall, ToolResult, UserMessage
from midstream.session.calls import CallPlan, Choice, QuestionKind, Site
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallStarted,
    ChildDelta,
    MessageAccepted,
    Parent,
    QuestionAnswered,
    QuestionAsked,
    Record,
    ResponseCompleted,
    StepCommitted,
    encode,
)
from tests.dialects.langgraph_journal import facts_of, opening

ASKED = QuestionAsked(1, 1, "q", QuestionKind.APPROVAL, "d", 5.0)
ALLOWED = QuestionAnswered(1, 1, "q", QuestionKind.APPROVAL, "d", Choice.ALLOW, 6.0)


def response(*plans: CallPlan) -> ResponseCompleted:
    called = tuple(ToolCall(each.call_id, "work", "{}") for each in plans)
    return ResponseCompleted(1, 1, 1, Response(called, Finish.CALLS), 3.0, plans)


def delegating(*names: str) -> list[Record]:
    """Return a response whose calls sub-agents run."""
    plans = (CallPlan(name, "d", Site.CHILD, has_effects=False) for name in names)
    return [response(*plans), *(CallStarted(1, 1, name, 1, 3.0) for name in names)]


def child_start(session: str, call_id: str, *path: str) -> list[Record]:
    """Return the records with which a sub-agent starts."""
    parent = Parent(session, 1, 1, call_id, path)
    return [MessageAccepted(1, UserMessage.of("go"), 4.0, parent=parent), AttemptStarted(1, 1, 1, 4.0)]


def child_approval(session: str, call_id: str) -> list[Record]:
    """Return the records with which a sub-agent asks for an approval."""
    return [
        *child_start(session, call_id, "worker"),
        response(CallPlan("q", "d", needs_approval=True)),
        ASKED,
    ]


def child_records(call_id: str, child: str, *records: Record) -> list[Record]:
    """Return the records of a sub-agent as the parent session has them."""
    return [
        ChildDelta(1, 1, call_id, child, position, msgspec.Raw(encode(record)))
        for position, record in enumerate(records, 2)
    ]


def sessions(fold: RunFold) -> list[str]:
    return [each.session for each in fold.questions]


def test_a_run_ends_when_all_sub_agents_wait_and_an_answer_starts_the_next_one() -> None:
    fold = RunFold("t")
    facts_of(
        [*opening(), *delegating("a", "b"), *child_records("a", "t::0", *child_approval("t", "a"))], fold
    )
    assert (fold.is_running, sessions(fold)) == (True, ["t::0"])
    facts = facts_of(child_records("b", "t::1", *child_approval("t", "b")), fold)
    assert [type(each) for each in facts] == [RunPaused, RunEnded]
    assert sessions(fold) == ["t::0", "t::1"]
    (first, _) = [each for fact in facts if isinstance(fact, RunPaused) for each in fact.interrupts]
    began, *_ = facts_of(child_records("b", "t::1", ALLOWED), fold)
    assert isinstance(began, RunBegan)
    assert (began.run.number, sessions(fold)) == (1, ["t::0"])
    (given,) = fold.answers
    assert (given.question.session, given.record) == ("t::1", ALLOWED)
    assert given.interrupt != first["id"]
    assert not fold.is_waiting


def test_questions_are_found_at_any_depth_and_end_with_their_call() -> None:
    deep = child_records("x", "t::0::0", *child_approval("t::0", "x"))
    above = [*child_start("t", "a", "chief"), *delegating("x"), *deep]
    fold = RunFold("t")
    facts_of([*opening(), *delegating("a"), *child_records("a", "t::0", *above)], fold)
    (question,) = fold.questions
    assert (question.session, question.agents, fold.run and fold.run.status) == (
        "t::0::0",
        ("worker",),
        "paused",
    )
    copied = fold.copy()
    facts_of([CallEnded(1, 1, ToolResult("a", "stopped"), 7.0)], fold)
    assert (sessions(fold), sessions(copied)) == ([], ["t::0::0"])
    facts_of([StepCommitted(1, 1), AttemptStarted(1, 2, 1, 7.0)], fold)
    assert not fold.is_waiting


def test_a_record_of_a_newer_version_leaves_a_sub_agent_unchanged() -> None:
    fold = RunFold("t")
    newer = ChildDelta(1, 1, "a", "t::0", 9, msgspec.Raw(b'{"type":"from_the_future"}'))
    facts_of(
        [*opening(), *delegating("a"), *child_records("a", "t::0", *child_approval("t", "a")), newer], fold
    )
    assert sessions(fold) == ["t::0"]
