"""Decisions on the reports of a foreign agent loop: the records of each command, and their fold."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from midstream.errors import SeqnoReusedError, SessionBusyError, UsageError
from midstream.history.messages import (
    Finish,
    Outcome,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    UserMessage,
)
from midstream.session import session as sessions
from midstream.session.calls import NOT_STARTED_CONTENT, UNKNOWN_CONTENT, CallPlan, OnDoubt
from midstream.session.driven_turn import (
    AddOutput,
    AttemptLost,
    Begin,
    BeginCall,
    DrivenCommand,
    Ended,
    EndTurn,
    RequestModelResponse,
    Responded,
    decide,
)
from midstream.session.records import (
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallStarted,
    CancelRequested,
    CommandAccepted,
    Delta,
    EpochStarted,
    MessageAccepted,
    Record,
    ResponseCompleted,
    StepCommitted,
    StreamOpened,
    TurnEnded,
    TurnStatus,
)
from midstream.session.rerun_policy import RERUNS_MAX
from midstream.session.session import Session
from midstream.session.turn.commands import Cancel, Recover, Refused
from tests.spec import spec

AT = 1000.0
GO = UserMessage.of("go")
NOTHING: Mapping[str, ToolResult] = {}
ASKS = Response((ToolCall("a", "work"), ToolCall("b", "work")), Finish.CALLS)
DONE = Response((Text("done"),))


class DrivenStory:
    """A session that receives commands one after the other."""

    def __init__(self) -> None:
        self.state = Session()
        self.epoch = 1

    def decide(self, command: DrivenCommand) -> tuple[Record, ...]:
        decided = decide(self.state, command, epoch=self.epoch, at=AT)
        self.fold(*decided)
        return decided

    def fold(self, *records: Record) -> None:
        for record in records:
            self.state = sessions.evolve(self.state, record, epoch=self.epoch)

    def dies(self) -> None:
        self.epoch += 1
        self.fold(EpochStarted(self.epoch, "next", AT))


def story(*commands: DrivenCommand) -> DrivenStory:
    driven = DrivenStory()
    for command in (Begin(GO, "loop"), *commands):
        driven.decide(command)
    return driven


def test_a_turn_begins_with_its_driver_and_a_first_attempt() -> None:
    assert DrivenStory().decide(Begin(GO, "loop")) == (
        MessageAccepted(1, GO, AT, driver="loop"),
        AttemptStarted(1, 1, 1, AT),
    )


@spec("DRIVEN-3")
def test_a_key_is_a_stream_of_one_command() -> None:
    driven = DrivenStory()
    assert driven.decide(Begin(GO, "loop", "k", "d")) == (
        StreamOpened("k", "driver"),
        CommandAccepted("k", 0, "d"),
        MessageAccepted(1, GO, AT, stream="k", driver="loop"),
        AttemptStarted(1, 1, 1, AT),
    )
    assert driven.decide(Begin(GO, "loop", "k", "d")) == ()
    with pytest.raises(Refused) as refused:
        driven.decide(Begin(GO, "loop", "k", "another"))
    assert isinstance(refused.value.error, SeqnoReusedError)


def test_a_turn_within_a_turn_is_refused() -> None:
    with pytest.raises(Refused) as refused:
        story().decide(Begin(GO, "loop"))
    assert isinstance(refused.value.error, SessionBusyError)


def test_an_announced_attempt_is_used_and_a_cut_or_failed_one_is_followed_by_the_next() -> None:
    driven = story()
    assert driven.decide(RequestModelResponse(1, NOTHING)) == ()
    words = Delta(1, 1, 1, 0, "text", "o")
    assert driven.decide(AddOutput((words,))) == (words,)
    assert driven.decide(AttemptLost("model_failed", "HTTP")) == (
        AttemptFailed(1, 1, 1, "model_failed", "HTTP", AT),
    )
    assert driven.decide(RequestModelResponse(1, NOTHING)) == (AttemptStarted(1, 1, 2, AT),)
    driven.dies()
    assert driven.decide(RequestModelResponse(1, NOTHING)) == (AttemptStarted(1, 1, 3, AT),)


@spec("DRIVEN-4")
def test_a_response_without_calls_enters_history_and_leaves_the_turn_open() -> None:
    driven = story(RequestModelResponse(1, NOTHING))
    assert driven.decide(Responded(DONE, native="{}")) == (
        ResponseCompleted(1, 1, 1, DONE, AT, native="{}"),
        StepCommitted(1, 1),
    )
    assert driven.state.is_live
    assert driven.decide(RequestModelResponse(2, NOTHING)) == (AttemptStarted(1, 2, 1, AT),)
    assert driven.decide(EndTurn(TurnStatus.COMPLETED, NOTHING)) == (TurnEnded(1, TurnStatus.COMPLETED, AT),)
    assert (driven.state.is_live, driven.state.driver) == (False, "")
    assert driven.decide(EndTurn(TurnStatus.COMPLETED, NOTHING)) == ()


@spec("DRIVEN-5")
def test_calls_start_on_request_of_the_loop_and_the_last_outcome_commits_the_step() -> None:
    driven = story(RequestModelResponse(1, NOTHING))
    assert driven.decide(Responded(ASKS)) == (ResponseCompleted(1, 1, 1, ASKS, AT),)
    assert driven.decide(BeginCall("b")) == (CallStarted(1, 1, "b", 1, AT),)
    ended = ToolResult("b", "2")
    assert driven.decide(Ended(ended, "n")) == (CallEnded(1, 1, ended, AT, "n"),)
    assert driven.decide(Ended(ToolResult("b", "other"))) == ()
    driven.decide(BeginCall("a"))
    assert driven.decide(Ended(ToolResult("a", "1"))) == (
        CallEnded(1, 1, ToolResult("a", "1"), AT),
        StepCommitted(1, 1),
        AttemptStarted(1, 2, 1, AT),
    )
    assert driven.state.history.entries[-1] == Step(ASKS, (ToolResult("a", "1"), ended))


@spec("DRIVEN-5")
def test_results_that_the_loop_created_are_in_the_step() -> None:
    driven = story(RequestModelResponse(1, NOTHING), Responded(ASKS))
    answer = ToolResult("a", "no such tool", Outcome.ERROR)
    never = ToolResult("b", NOT_STARTED_CONTENT, Outcome.CANCELLED)
    assert driven.decide(RequestModelResponse(2, {"a": answer})) == (
        CallEnded(1, 1, answer, AT),
        CallEnded(1, 1, never, AT),
        StepCommitted(1, 1),
        AttemptStarted(1, 2, 1, AT),
    )


@spec("DRIVEN-6")
@pytest.mark.parametrize(
    ("policy", "runs", "is_run_again"),
    [
        (OnDoubt.UNKNOWN, 1, False),
        (OnDoubt.RERUN, 1, True),
        (OnDoubt.RERUN_WITH_KEY, RERUNS_MAX, True),
        (OnDoubt.RERUN, RERUNS_MAX + 1, False),
    ],
)
def test_a_call_in_doubt_is_decided_when_the_loop_begins_it(
    policy: OnDoubt,
    runs: int,
    is_run_again: bool,  # noqa: FBT001 - pytest's parameter
) -> None:
    plans = (CallPlan("a", "d", on_doubt=policy), CallPlan("b", "d"))
    driven = story(RequestModelResponse(1, NOTHING), Responded(ASKS, plans))
    for run in range(1, runs + 1):
        driven.fold(CallStarted(1, 1, "a", run, AT))
    with pytest.raises(Refused) as refused:
        driven.decide(BeginCall("a"))  # It runs.
    assert isinstance(refused.value.error, SessionBusyError)
    driven.dies()
    unknown = ToolResult("a", UNKNOWN_CONTENT, Outcome.UNKNOWN)
    expected = CallStarted(1, 1, "a", runs + 1, AT) if is_run_again else CallEnded(1, 1, unknown, AT)
    assert driven.decide(BeginCall("a")) == (expected,)


def test_a_call_stopped_for_a_person_starts_again_and_an_approved_one_is_in_doubt() -> None:
    driven = story(RequestModelResponse(1, NOTHING), Responded(ASKS), BeginCall("a"))
    driven.dies()
    allowed = CallStarted(1, 1, "a", 2, AT, arguments="{}")
    assert driven.decide(BeginCall("a", is_approved=True, is_suspended=True)) == (allowed,)
    driven.dies()
    unknown = ToolResult("a", UNKNOWN_CONTENT, Outcome.UNKNOWN)
    assert driven.decide(BeginCall("a", is_approved=True)) == (CallEnded(1, 1, unknown, AT),)


@pytest.mark.parametrize(
    "command",
    [RequestModelResponse(3, NOTHING), Responded(DONE), AttemptLost("c", "m"), BeginCall("z")],
    ids=repr,
)
def test_a_command_out_of_order_is_refused(command: DrivenCommand) -> None:
    driven = story(RequestModelResponse(1, NOTHING), Responded(ASKS))
    with pytest.raises(Refused) as refused:
        driven.decide(command)
    assert isinstance(refused.value.error, UsageError)


def test_closing_in_the_middle_keeps_texts_and_results() -> None:
    driven = story(RequestModelResponse(1, NOTHING), AddOutput((Delta(1, 1, 1, 0, "text", "half"),)))
    kept = Response((Text("half"),), Finish.INTERRUPTED)
    assert driven.decide(EndTurn(TurnStatus.CANCELLED, NOTHING)) == (
        ResponseCompleted(1, 1, 1, kept, AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.CANCELLED, AT),
    )
    driven = story(RequestModelResponse(1, NOTHING), Responded(ASKS), BeginCall("a"))
    assert driven.decide(EndTurn(TurnStatus.CANCELLED, NOTHING)) == (
        CallEnded(1, 1, ToolResult("a", UNKNOWN_CONTENT, Outcome.UNKNOWN), AT),
        CallEnded(1, 1, ToolResult("b", NOT_STARTED_CONTENT, Outcome.CANCELLED), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.CANCELLED, AT),
    )


@spec("DRIVEN-2")
def test_a_driven_turn_has_no_pending_work_for_the_host_and_a_cancel_ends_it_at_once() -> None:
    driven = story(RequestModelResponse(1, NOTHING), Responded(ASKS), BeginCall("a"))
    assert sessions.pending_work(driven.state) == ()
    driven.dies()
    assert sessions.decide(driven.state, Recover(), epoch=2, at=AT) == ()
    decided = sessions.decide(driven.state, Cancel(), epoch=2, at=AT)
    assert [type(record) for record in decided] == [
        CancelRequested,
        CallEnded,
        CallEnded,
        StepCommitted,
        TurnEnded,
    ]
    driven.fold(*decided)
    assert not driven.state.is_live
