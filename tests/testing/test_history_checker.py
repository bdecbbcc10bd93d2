"""A checker that cannot fail proves nothing: each broken history is found, by its own rule."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from msgspec.structs import replace

from midstream.history.messages import Finish, Outcome, Response, Text, ToolCall, ToolResult, UserMessage
from midstream.session.calls import CallPlan, Choice, OnDoubt, QuestionKind, Site
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallStarted,
    CancelRequested,
    ChildDelta,
    CommandAccepted,
    Delta,
    EpochStarted,
    MessageAccepted,
    MessageQueued,
    MessageWithdrawn,
    QuestionAnswered,
    Record,
    ResponseCompleted,
    ResultArrivedLate,
    StepCommitted,
    StreamOpened,
    TurnEnded,
    TurnResumed,
    TurnStatus,
    encode,
)
from midstream.store.contract import StoredRecord
from midstream.testing.history_checker import (
    ClientLog,
    Evidence,
    Execution,
    Rule,
    ShownEvent,
    Violation,
    check,
    check_ended,
)
from tests.session.session_lives import SessionLife, lives

RESPONSE_WITH_CALLS = Response((Text("let me"), ToolCall("w", "write"), ToolCall("r", "read")), Finish.CALLS)
PLANS = (CallPlan("w", "d"), CallPlan("r", "d", has_effects=False, on_doubt=OnDoubt.RERUN))
# A turn that was cut while `r` ran and ended under the next node; position 1 is the first.
JOURNAL: tuple[tuple[int, Record], ...] = (
    (1, EpochStarted(1, "first", 0.0)),
    (1, StreamOpened("mine", "key")),
    (1, CommandAccepted("mine", 0, "digest 0")),
    (1, MessageAccepted(1, UserMessage.of("hi"), 0.0, stream="mine")),
    (1, AttemptStarted(1, 1, 1, 0.0)),
    (1, Delta(1, 1, 1, 0, "text", "let me")),
    (1, ResponseCompleted(1, 1, 1, RESPONSE_WITH_CALLS, 0.0, PLANS)),
    (1, CallStarted(1, 1, "w", 1, 0.0)),
    (1, CallEnded(1, 1, ToolResult("w", "written"), 0.0)),
    (1, CallStarted(1, 1, "r", 1, 0.0, has_effects=False)),
    (2, EpochStarted(2, "second", 0.0)),
    (2, CallStarted(1, 1, "r", 2, 0.0, has_effects=False)),
    (2, CallEnded(1, 1, ToolResult("r", "read"), 0.0)),
    (2, StepCommitted(1, 1)),
    (2, AttemptStarted(1, 2, 1, 0.0)),
    (2, ResponseCompleted(1, 2, 1, Response((Text("done"),)), 0.0)),
    (2, StepCommitted(1, 2)),
    (2, TurnEnded(1, TurnStatus.COMPLETED, 0.0)),
)

CHILD_ID = "s::1.1.1"
CHILD: tuple[tuple[int, Record], ...] = (
    (1, EpochStarted(1, "first", 0.0)),
    (1, MessageAccepted(1, UserMessage.of("read it"), 0.0)),
    (1, AttemptStarted(1, 1, 1, 0.0)),
    (1, ResponseCompleted(1, 1, 1, Response((Text("read"),)), 0.0)),
    (1, StepCommitted(1, 1)),
    (1, TurnEnded(1, TurnStatus.COMPLETED, 0.0)),
)
"""Records of the session that ran call `r`, in the tests where one did."""


def _stored(records: list[tuple[int, Record]]) -> list[StoredRecord]:
    return [StoredRecord(at, epoch, encode(record)) for at, (epoch, record) in enumerate(records, start=1)]


def _shown_events(stored: list[StoredRecord], after: int = 0) -> list[ShownEvent]:
    return [ShownEvent(f"{each.epoch}-{each.position}", each.body) for each in stored[after:]]


class HistoryCase:
    """A correct history; each test breaks one part of it."""

    def __init__(self) -> None:
        self.records = list(JOURNAL)
        self.is_stored = True
        self.child = [*CHILD]
        self.derive()

    def derive(self) -> None:
        """Derive all other evidence from the records."""
        self.stored = _stored(self.records)
        mine, reader = _shown_events(self.stored, after=1), _shown_events(self.stored)
        sent = {0: "digest 0", 1: "digest of a command on its way"}
        self.mine = ClientLog("mine", "s", "mine", sent=sent, acked={0}, seen=mine)
        self.reader = ClientLog("reader", "s", start=0, seen=reader)
        self.ledger = [
            Execution("s", 1, 1, "w", 1, "write"),
            Execution("s", 1, 1, "r", 1, "read", has_ended=False),
            Execution("s", 1, 1, "r", 2, "read"),
        ]

    def evidence(self) -> Evidence:
        journals = {"s": self.stored} if self.is_stored else {}
        journals[CHILD_ID] = _stored(self.child)
        return Evidence(journals, [self.mine, self.reader], self.ledger)

    def rewrite(self, position: int, record: Record | None, *, epoch: int | None = None) -> None:
        """Replace the record at a position of the journal (None: remove it); readers received the new one."""
        old, _ = self.records[position - 1]
        self.records[position - 1 : position] = [] if record is None else [(epoch or old, record)]
        self.derive()

    def show_child(self, *positions: int) -> None:
        """Insert these records of the child into the journal before the outcome of its call."""
        for position in reversed(positions):
            body = msgspec.Raw(encode(self.child[position - 1][1]))
            self.insert(13, ChildDelta(1, 1, "r", CHILD_ID, position, body), epoch=2)

    def insert(self, position: int, record: Record, *, epoch: int) -> None:
        self.records.insert(position - 1, (epoch, record))
        self.derive()


def test_a_correct_history_has_no_violation() -> None:
    assert check_ended(HistoryCase().evidence()) == []


def test_a_child_reported_unchanged_whose_last_text_is_the_outcome_is_no_violation() -> None:
    case = HistoryCase()
    case.show_child(2, 3, 4, 5, 6)
    assert check_ended(case.evidence()) == []


def test_runs_that_people_allowed_confirmed_and_resumed_are_no_violation() -> None:
    case = HistoryCase()
    case.rewrite(
        7,
        ResponseCompleted(
            1, 1, 1, RESPONSE_WITH_CALLS, 0.0, (replace(PLANS[0], needs_approval=True), PLANS[1])
        ),
    )
    case.insert(8, QuestionAnswered(1, 1, "w", QuestionKind.APPROVAL, "d", Choice.ALLOW, 0.0), epoch=1)
    case.insert(14, QuestionAnswered(1, 1, "r", QuestionKind.DOUBT, "d", Choice.HAPPENED, 0.0), epoch=2)
    case.ledger = case.ledger[:2]
    case.insert(21, ResultArrivedLate(1, 1, ToolResult("r", "late"), 0.0), epoch=2)
    case.insert(22, TurnResumed(1, 3, 0.0), epoch=2)
    case.insert(23, TurnEnded(1, TurnStatus.CANCELLED, 0.0), epoch=2)
    case.ledger = [
        Execution("s", 1, 1, "w", 1, "write"),
        Execution("s", 1, 1, "r", 1, "read", has_ended=False),
    ]
    assert check_ended(case.evidence()) == []


def test_reruns_recorded_only_in_the_clients_journal_are_no_violation_within_their_policy() -> None:
    case = HistoryCase()
    at_client = replace(PLANS[1], site=Site.CLIENT)
    case.rewrite(7, ResponseCompleted(1, 1, 1, RESPONSE_WITH_CALLS, 0.0, (PLANS[0], at_client)))
    case.ledger.append(Execution("s", 1, 1, "r", 3, "read"))
    assert check_ended(case.evidence()) == []
    case.ledger.append(Execution("s", 1, 1, "r", 4, "read"))
    assert [each.rule for each in check_ended(case.evidence())] == [Rule.RAN_AGAIN]


def test_queued_messages_that_open_turns_in_order_or_are_withdrawn_are_no_violation() -> None:
    case = HistoryCase()
    for number in (1, 2):
        case.insert(18, MessageQueued(3 - number, UserMessage.of("next"), 0.0), epoch=2)
    case.insert(21, MessageAccepted(2, UserMessage.of("next"), 0.0, queued=1), epoch=2)
    case.insert(22, MessageWithdrawn(2, 0.0), epoch=2)
    case.insert(23, TurnEnded(2, TurnStatus.CANCELLED, 0.0), epoch=2)
    assert check_ended(case.evidence()) == []


def test_events_repeated_after_a_reconnect_are_no_violation() -> None:
    case = HistoryCase()
    case.reader.seen[5:5] = case.reader.seen[2:5]
    assert check_ended(case.evidence()) == []


def test_a_reader_may_leave_early_and_come_late() -> None:
    case = HistoryCase()
    case.reader.seen = case.reader.seen[4:9]
    case.reader.start = None
    assert check_ended(case.evidence()) == []


@given(lives())
def test_decisions_of_the_core_are_never_a_violation(life: SessionLife) -> None:
    assert check(Evidence({"s": _stored(life.journal)})) == []


# --- one fault each ---------------------------------------------------------------------------------------------


def _ack_of_a_command_that_is_not_stored(case: HistoryCase) -> None:
    case.mine.acked.add(1)


def _another_payload_under_the_number(case: HistoryCase) -> None:
    case.mine.sent[0] = "another digest"


def _an_unsent_command(case: HistoryCase) -> None:
    case.insert(18, CommandAccepted("mine", 7, "digest 7"), epoch=2)


def _a_command_twice(case: HistoryCase) -> None:
    case.insert(18, CommandAccepted("mine", 0, "digest 0"), epoch=2)


def _an_event_left_out(case: HistoryCase) -> None:
    del case.reader.seen[7]


def _a_reader_that_began_too_late(case: HistoryCase) -> None:
    del case.mine.seen[0]


def _events_in_another_order(case: HistoryCase) -> None:
    case.reader.seen[3:5] = reversed(case.reader.seen[3:5])


def _two_events_for_one_position(case: HistoryCase) -> None:
    first = case.reader.seen[9]
    case.reader.seen.insert(10, ShownEvent("2-10", first.body))


def _an_event_of_another_epoch(case: HistoryCase) -> None:
    case.reader.seen[9] = ShownEvent("2-10", case.reader.seen[9].body)


def _an_event_past_the_end(case: HistoryCase) -> None:
    case.reader.seen.append(ShownEvent("2-19", encode(StepCommitted(1, 3))))


def _other_words_than_the_journal(case: HistoryCase) -> None:
    case.reader.seen[5] = case.mine.seen[4] = ShownEvent("1-6", encode(Delta(1, 1, 1, 0, "text", "let us")))


def _two_readers_with_two_truths(case: HistoryCase) -> None:
    case.is_stored = False
    case.reader.seen[5] = ShownEvent("1-6", b"{}")


def _words_after_a_cancel(case: HistoryCase) -> None:
    case.insert(15, CancelRequested(1, 0.0, 0.0), epoch=2)


def _a_start_after_a_cancel(case: HistoryCase) -> None:
    case.insert(12, CancelRequested(1, 0.0, 0.0), epoch=2)
    case.rewrite(16, None)  # The next attempt, which would be found as well.


def _a_record_after_the_end(case: HistoryCase) -> None:
    case.insert(19, StepCommitted(1, 2), epoch=2)
    del case.records[16]
    case.derive()


def _two_outcomes(case: HistoryCase) -> None:
    case.insert(14, CallEnded(1, 1, ToolResult("w", "written again"), 0.0), epoch=2)


def _a_success_that_never_happened(case: HistoryCase) -> None:
    case.ledger[0] = replace(case.ledger[0], has_ended=False)


def _a_run_without_intent(case: HistoryCase) -> None:
    case.ledger.append(Execution("s", 1, 1, "r", 3, "read"))


def _one_run_executed_twice(case: HistoryCase) -> None:
    case.ledger.append(case.ledger[0])


def _a_second_run_against_the_policy(case: HistoryCase) -> None:
    case.insert(9, CallStarted(1, 1, "w", 2, 0.0), epoch=1)
    case.ledger.append(Execution("s", 1, 1, "w", 2, "write"))


def _a_position_left_out(case: HistoryCase) -> None:
    del case.stored[9:]
    case.stored[8] = replace(case.stored[8], position=10)
    case.mine.seen.clear()
    case.reader.seen.clear()


def _an_epoch_that_goes_back(case: HistoryCase) -> None:
    case.rewrite(15, case.records[14][1], epoch=1)
    case.rewrite(16, case.records[15][1], epoch=1)
    case.rewrite(17, case.records[16][1], epoch=1)
    case.rewrite(18, case.records[17][1], epoch=1)


def _an_epoch_without_its_record(case: HistoryCase) -> None:
    case.rewrite(18, case.records[17][1], epoch=3)


def _a_step_with_a_dangling_call(case: HistoryCase) -> None:
    case.rewrite(13, None)


def _a_commit_of_nothing(case: HistoryCase) -> None:
    case.rewrite(16, None)


def _an_unreadable_record(case: HistoryCase) -> None:
    case.stored[17] = replace(case.stored[17], body=b"{")


def _a_command_of_a_stream_that_was_never_opened(case: HistoryCase) -> None:
    case.insert(3, CommandAccepted("other", 0, "digest 0"), epoch=1)


def _a_turn_without_end(case: HistoryCase) -> None:
    case.rewrite(18, None)


def _an_end_the_client_was_not_shown(case: HistoryCase) -> None:
    case.mine.seen.pop()


def _an_unapproved_run(case: HistoryCase) -> None:
    case.rewrite(
        7,
        ResponseCompleted(
            1, 1, 1, RESPONSE_WITH_CALLS, 0.0, (replace(PLANS[0], needs_approval=True), PLANS[1])
        ),
    )


def _a_third_rerun(case: HistoryCase) -> None:
    for run in (5, 4, 3):
        case.insert(13, CallStarted(1, 1, "r", run, 0.0, has_effects=False), epoch=2)
    case.ledger += [Execution("s", 1, 1, "r", run, "read") for run in (3, 4)]


def _a_record_of_a_child_left_out(case: HistoryCase) -> None:
    case.show_child(2, 3, 5, 6)


def _a_record_of_a_child_twice(case: HistoryCase) -> None:
    case.show_child(2, 3, 3, 4, 5, 6)


def _another_record_than_the_childs(case: HistoryCase) -> None:
    case.show_child(2, 3, 4, 5, 6)
    case.rewrite(14, replace(case.records[13][1], record=msgspec.Raw(encode(StepCommitted(1, 9)))))


def _other_words_than_the_childs(case: HistoryCase) -> None:
    case.show_child(2, 3, 4, 5, 6)
    case.rewrite(18, CallEnded(1, 1, ToolResult("r", "invented"), 0.0))


def _an_outcome_before_the_child_has_ended(case: HistoryCase) -> None:
    case.show_child(2, 3, 4, 5)


def _a_queued_message_that_was_forgotten(case: HistoryCase) -> None:
    case.insert(18, MessageQueued(1, UserMessage.of("next"), 0.0), epoch=2)


def _a_queued_message_that_jumped_the_queue(case: HistoryCase) -> None:
    for number in (2, 1):
        case.insert(18, MessageQueued(number, UserMessage.of("next"), 0.0), epoch=2)
    for number in (1, 2):
        case.insert(21, MessageAccepted(number + 1, UserMessage.of("next"), 0.0, queued=number), epoch=2)
    for turn in (2, 3):
        case.insert(23, TurnEnded(turn, TurnStatus.CANCELLED, 0.0), epoch=2)


def _a_message_taken_back_that_did_not_wait(case: HistoryCase) -> None:
    case.insert(18, MessageWithdrawn(1, 0.0), epoch=2)


FAULTS: list[tuple[Callable[[HistoryCase], None], Rule]] = [
    (_ack_of_a_command_that_is_not_stored, Rule.ACKED_NOT_STORED),
    (_another_payload_under_the_number, Rule.STORED_OTHERWISE),
    (_an_unsent_command, Rule.STORED_OTHERWISE),
    (_a_command_twice, Rule.STORED_OTHERWISE),
    (_an_event_left_out, Rule.SEEN_GAP),
    (_a_reader_that_began_too_late, Rule.SEEN_GAP),
    (_events_in_another_order, Rule.SEEN_GAP),
    (_two_events_for_one_position, Rule.SEEN_TWICE),
    (_an_event_of_another_epoch, Rule.SEEN_NOT_STORED),
    (_an_event_past_the_end, Rule.SEEN_NOT_STORED),
    (_other_words_than_the_journal, Rule.SEEN_NOT_STORED),
    (_two_readers_with_two_truths, Rule.READERS_DISAGREE),
    (_words_after_a_cancel, Rule.AFTER_CANCEL),
    (_a_start_after_a_cancel, Rule.AFTER_CANCEL),
    (_a_record_after_the_end, Rule.AFTER_END),
    (_two_outcomes, Rule.OUTCOME_TWICE),
    (_a_success_that_never_happened, Rule.OUTCOME_INVENTED),
    (_a_run_without_intent, Rule.RAN_UNANNOUNCED),
    (_one_run_executed_twice, Rule.RAN_TWICE),
    (_a_second_run_against_the_policy, Rule.RAN_AGAIN),
    (_a_third_rerun, Rule.RAN_AGAIN),
    (_an_unapproved_run, Rule.RAN_UNASKED),
    (_a_record_of_a_child_left_out, Rule.CHILD_SHOWN),
    (_a_record_of_a_child_twice, Rule.CHILD_SHOWN),
    (_another_record_than_the_childs, Rule.CHILD_SHOWN),
    (_other_words_than_the_childs, Rule.CHILD_OUTCOME),
    (_an_outcome_before_the_child_has_ended, Rule.CHILD_OUTCOME),
    (_a_queued_message_that_was_forgotten, Rule.QUEUE_LOST),
    (_a_queued_message_that_jumped_the_queue, Rule.QUEUE_BROKEN),
    (_a_message_taken_back_that_did_not_wait, Rule.QUEUE_BROKEN),
    (_a_position_left_out, Rule.POSITION_GAP),
    (_an_epoch_that_goes_back, Rule.EPOCH_BACK),
    (_an_epoch_without_its_record, Rule.EPOCH_BACK),
    (_a_step_with_a_dangling_call, Rule.HISTORY_INVALID),
    (_a_commit_of_nothing, Rule.HISTORY_INVALID),
    (_an_unreadable_record, Rule.HISTORY_INVALID),
    (_a_command_of_a_stream_that_was_never_opened, Rule.HISTORY_INVALID),
    (_a_turn_without_end, Rule.TURN_OPEN),
    (_an_end_the_client_was_not_shown, Rule.END_UNSEEN),
]


@pytest.mark.parametrize(("fault", "rule"), FAULTS, ids=[fault.__name__.strip("_") for fault, _ in FAULTS])
def test_a_fault_is_found_and_named_by_its_rule(fault: Callable[[HistoryCase], None], rule: Rule) -> None:
    case = HistoryCase()
    fault(case)
    found = check_ended(case.evidence())
    assert rule in {each.rule for each in found}, found
    allowed = {rule, *CONSEQUENCES.get(fault, ())}
    assert [str(each) for each in found if each.rule not in allowed] == []


# A few faults cannot be made alone.
CONSEQUENCES: dict[Callable[[HistoryCase], None], tuple[Rule, ...]] = {
    _a_record_after_the_end: (Rule.HISTORY_INVALID,),
    _a_position_left_out: (Rule.TURN_OPEN, Rule.ACKED_NOT_STORED, Rule.END_UNSEEN, Rule.RAN_UNANNOUNCED),
    _an_unreadable_record: (Rule.TURN_OPEN, Rule.SEEN_NOT_STORED),
    _another_record_than_the_childs: (Rule.CHILD_OUTCOME,),
    _a_step_with_a_dangling_call: (Rule.OUTCOME_INVENTED,),
}


def test_every_rule_has_a_history_that_breaks_it() -> None:
    assert {rule for _, rule in FAULTS} == set(Rule)


def test_a_violation_is_printed_as_a_sentence() -> None:
    case = HistoryCase()
    case.mine.acked.add(5)
    (violation,) = check(case.evidence())
    assert violation == Violation(
        Rule.ACKED_NOT_STORED, "s", "command 5 of mine was acknowledged and is not in the journal"
    )
    assert str(violation) == (
        "acked_not_stored in session 's': command 5 of mine was acknowledged and is not in the journal"
    )


def test_an_unknown_outcome_needs_no_execution() -> None:
    case = HistoryCase()
    case.rewrite(9, CallEnded(1, 1, ToolResult("w", "who knows", Outcome.UNKNOWN), 0.0))
    case.ledger[0] = replace(case.ledger[0], has_ended=False)
    assert check_ended(case.evidence()) == []
