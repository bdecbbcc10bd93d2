"""A session as a thread: its runs, and their events."""

from __future__ import annotations

import pytest

from midstream.dialects.run_fold import (
    AnswerCompleted,
    AnswerVoided,
    RunBegan,
    RunEnded,
    RunFold,
    RunPaused,
    ToolBegan,
    ToolFinished,
    WordsCame,
    derived_run_id,
    ids_in,
)
from midstream.history.messages import Outcome, UpstreamCall
from midstream.session.records import (
    AttemptStarted,
    CancelRequested,
    Delta,
    EpochStarted,
    Record,
    TurnEnded,
    TurnResumed,
    TurnStatus,
)
from midstream.session.session import prune_session, restore_session
from tests.dialects.langgraph_journal import RUN, approved, cut, delta, facts_of, opening, whole


def test_a_run_ends_at_a_question_and_its_answer_starts_the_next() -> None:
    fold = RunFold("t")
    facts = facts_of(approved(), fold)
    assert [(run.number, run.status, run.id) for run in fold.runs] == [
        (0, "paused", RUN),
        (1, "success", derived_run_id("t", 1, 1)),
    ]
    paused = next(each for each in facts if isinstance(each, RunPaused))
    assert paused.interrupts[0]["value"]["action_requests"][0]["args"] == {"what": "paper"}
    kinds = [
        type(each)
        for each in facts
        if isinstance(each, RunBegan | RunPaused | RunEnded | ToolBegan | ToolFinished)
    ]
    assert kinds == [RunBegan, RunPaused, RunEnded, RunBegan, ToolBegan, ToolFinished, RunEnded]


def test_the_text_of_an_interrupted_attempt_is_void_and_the_answer_is_another_message() -> None:
    fold = RunFold("t")
    facts = facts_of(cut(), fold)
    words = [(each.message_id, each.words) for each in facts if isinstance(each, WordsCame)]
    assert words == [("ai-1", "Hello "), ("ai-1.2", "Hello "), ("ai-1.2", "you")]
    (voided,) = [each for each in facts if isinstance(each, AnswerVoided)]
    assert (voided.message_id, voided.shown.text) == ("ai-1", "Hello ")
    assert [run.attempt for run in fold.runs] == [2]
    assert [each["id"] for each in fold.state.values()["messages"]] == ["m1", "ai-1.2"]


@pytest.mark.parametrize("shown", [["Hello "], ["Hello ", "you"], []])
def test_the_rest_of_a_response_follows_its_shown_part(shown: list[str]) -> None:
    facts = facts_of([*opening(), *(delta(each) for each in shown), *whole("Hello you")])
    assert "".join(each.words for each in facts if isinstance(each, WordsCame)) == "Hello you"
    assert not any(isinstance(each, AnswerVoided) for each in facts)


def test_a_response_that_differs_from_its_shown_part_is_another_message() -> None:
    facts = facts_of([*opening(), delta("Hi"), *whole("Hello you")])
    (done,) = [each for each in facts if isinstance(each, AnswerCompleted)]
    assert done.message_id == "ai-1.whole"
    assert [
        each.words for each in facts if isinstance(each, WordsCame) and each.message_id == done.message_id
    ] == ["Hello you"]


def test_tools_of_the_upstream_are_shown_and_end_with_their_attempt() -> None:
    call = UpstreamCall("u", "grep", "{}")
    shown = Delta(1, 1, 1, 0, "thinking", "", call)
    facts = facts_of([*opening(), shown, shown, EpochStarted(2, "n", 3.0), AttemptStarted(1, 1, 2, 3.0)])
    tools = [each for each in facts if isinstance(each, ToolBegan | ToolFinished)]
    assert [type(each) for each in tools] == [ToolBegan, ToolFinished]
    last = tools[-1]
    assert isinstance(last, ToolFinished)
    assert (last.is_upstream, last.result.outcome) == (True, Outcome.UNKNOWN)


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ([CancelRequested(1, 3.0, 3.0), TurnEnded(1, TurnStatus.CANCELLED, 3.0)], "interrupted"),
        ([TurnEnded(1, TurnStatus.FAILED, 3.0, "model", "broken")], "error"),
        ([TurnEnded(1, TurnStatus.INTERRUPTED, 3.0)], "error"),
    ],
)
def test_an_incomplete_run_has_its_reason(ending: list[Record], status: str) -> None:
    fold = RunFold("t")
    facts_of([*opening(), *ending], fold)
    (run,) = fold.runs
    assert (run.status, bool(run.error), bool(run.message)) == (status, True, True)


def test_a_resumed_turn_is_another_run() -> None:
    fold = RunFold("t")
    failed = TurnEnded(1, TurnStatus.FAILED, 3.0, "model", "broken")
    facts_of([*opening(), failed, TurnResumed(1, 1, 4.0), AttemptStarted(1, 1, 1, 4.0), *whole("Yes.")], fold)
    assert [run.status for run in fold.runs] == ["error", "success"]


@pytest.mark.parametrize("story", [approved, cut])
def test_a_copy_of_a_fold_continues_with_the_same_facts(story: object) -> None:
    records = approved() if story is approved else cut()
    for place in range(len(records)):
        fold = RunFold("t")
        before = facts_of(records[:place], fold)
        copy = fold.copy()
        epoch = fold.session.epoch
        after = [fact for record in records[place:] for fact in copy.take(record, epoch=max(1, epoch))]
        assert [type(each) for each in before + after] == [type(each) for each in facts_of(records)]


def test_a_pruned_journal_keeps_its_newest_run_and_the_ids_of_messages() -> None:
    fold = RunFold("t")
    facts_of([*opening(), delta("Hello you"), *whole("Hello you")], fold)
    pruned = RunFold("t", restore_session(prune_session(fold.session, at=9.0)))
    assert pruned.state.values() == fold.state.values()
    assert [(run.id, run.status) for run in pruned.runs] == [(RUN, "success")]


def test_foreign_stream_names_contain_no_ids() -> None:
    assert ids_in("chat-abc-0") == ("", "")
    assert ids_in(f"langgraph-{RUN}.") == (RUN, "")
