"""The demo's judge finds each kind of fault."""

from __future__ import annotations

from pathlib import Path

from midstream.demo.check import DemoVerdict, Journaled, PrintedText, journal_of, judge
from midstream.demo.folder import LedgerEntry
from midstream.history.messages import Finish, Outcome, Response, Text, ToolCall, ToolResult, UserMessage
from midstream.session.calls import CallPlan
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallStarted,
    Delta,
    EpochStarted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    StepCommitted,
    TurnEnded,
    TurnStatus,
)

ANSWER = Response((Text("one two"),))


def delta(text: str, *, response: int = 2) -> Delta:
    return Delta(1, response, 1, 0, "text", text)


RECORDS: list[Record] = [
    EpochStarted(1, "me", 1.0),
    MessageAccepted(1, UserMessage.of("hi"), 1.0),
    AttemptStarted(1, 1, 1, 1.0),
    ResponseCompleted(
        1, 1, 1, Response((ToolCall("c1", "write_note", "{}"),), Finish.CALLS), 1.0, (CallPlan("c1", ""),)
    ),
    CallStarted(1, 1, "c1", 1, 1.0),
    CallEnded(1, 1, ToolResult("c1", "done", Outcome.OK), 2.0),
    StepCommitted(1, 1),
    AttemptStarted(1, 2, 1, 2.0),
    delta("one "),
    delta("two"),
    ResponseCompleted(1, 2, 1, ANSWER, 3.0),
    StepCommitted(1, 2),
    TurnEnded(1, TurnStatus.COMPLETED, 3.0),
]
SHOWN = [PrintedText("1-9", "one "), PrintedText("1-10", "two")]
LEDGER = [
    LedgerEntry(7, "write_note", "s/1/1/c1", "started"),
    LedgerEntry(7, "write_note", "s/1/1/c1", "finished"),
]


def judge_run(
    records: list[Record] | None = None,
    shown: list[PrintedText] | None = None,
    ledger: list[LedgerEntry] | None = None,
) -> DemoVerdict:
    journal = [
        Journaled(f"1-{position}", 1, record)
        for position, record in enumerate(RECORDS if records is None else records, start=1)
    ]
    return judge(journal, SHOWN if shown is None else shown, LEDGER if ledger is None else ledger, "s")


def test_a_run_without_faults_has_no_problem() -> None:
    verdict = judge_run()
    assert verdict.problems == []
    assert (verdict.words.shown_characters, verdict.words.journal_characters) == (7, 7)
    assert (verdict.entries, verdict.executions[0].started) == (3, 1)


def test_a_delta_that_was_not_shown_is_lost() -> None:
    assert judge_run(shown=SHOWN[:1]).problems == ["1 pieces lost"]


def test_a_delta_that_was_shown_again_is_duplicated() -> None:
    assert judge_run(shown=[*SHOWN, SHOWN[1]]).problems == ["1 pieces shown twice"]


def test_text_that_differs_from_the_journal_is_wrong() -> None:
    assert judge_run(shown=[SHOWN[0], PrintedText("1-10", "three")]).problems == [
        "1 pieces not as in the journal"
    ]
    assert judge_run(shown=[*SHOWN, PrintedText("2-3", "more")]).problems == [
        "1 pieces not as in the journal"
    ]
    assert judge_run(shown=SHOWN[::-1]).problems == ["1 pieces not as in the journal"]


def test_a_repeated_call_is_found_in_the_ledger() -> None:
    assert judge_run(ledger=LEDGER * 2).problems == ["1 calls executed twice"]


def test_an_unrequested_execution_is_found() -> None:
    stray = LedgerEntry(7, "write_note", "s/9/9/c9", "started")
    assert judge_run(ledger=[*LEDGER, stray]).problems == ["1 executions without a call"]


def test_a_killed_call_is_no_problem_if_its_outcome_is_recorded_as_unknown() -> None:
    unknown = CallEnded(1, 1, ToolResult("c1", "may have", Outcome.UNKNOWN), 2.0)
    verdict = judge_run(records=[*RECORDS[:5], unknown, *RECORDS[6:]], ledger=LEDGER[:1])
    assert verdict.problems == []
    assert (verdict.executions[0].finished, verdict.executions[0].outcome) == (0, "unknown")


def test_a_turn_that_did_not_complete_is_a_problem() -> None:
    failed = TurnEnded(1, TurnStatus.FAILED, 3.0)
    assert judge_run(records=[*RECORDS[:-1], failed]).problems == ["1 turns that did not complete"]


def test_a_call_without_result_is_a_problem() -> None:
    assert "1 calls without a result" in judge_run(records=RECORDS[:5], shown=[]).problems


def test_an_empty_journal_proves_nothing() -> None:
    assert judge_run(records=[], shown=[], ledger=[]).problems == ["1 journals that do not fold"]


def test_the_journal_is_read_from_the_file(store: Path) -> None:
    journal = journal_of(store, "harbour-1")
    assert [each.event_id for each in journal] == [f"1-{number}" for number in range(1, len(journal) + 1)]
    assert isinstance(journal[0].record, EpochStarted)
