"""A snapshot shows the recorded state, and no more."""

from __future__ import annotations

from midstream.history.messages import Finish, Response, Text, ToolCall, ToolResult, UserMessage
from midstream.server.api.session_snapshot import CallSnapshot, RunningTurn, SessionSnapshot, snapshot_of
from midstream.session.calls import CallPlan, Choice, QuestionKind
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallStarted,
    CancelRequested,
    Delta,
    EpochStarted,
    MessageAccepted,
    QuestionAnswered,
    QuestionAsked,
    Record,
    ResponseCompleted,
    SessionStatus,
    TurnEnded,
    TurnStatus,
)
from midstream.session.session import fold

HI = UserMessage.of("hi")
ASKS = Response(
    (Text("look"), ToolCall("a", "read"), ToolCall("b", "write"), ToolCall("c", "write")), Finish.CALLS
)
OPENED: tuple[Record, ...] = (
    EpochStarted(1, "me", 1.0),
    MessageAccepted(1, HI, 2.0),
    AttemptStarted(1, 1, 1, 2.0),
)
PLANS = (CallPlan("a", "da", has_effects=False), CallPlan("b", "db"), CallPlan("c", "dc"))
RUNNING = (
    *OPENED,
    ResponseCompleted(1, 1, 1, ASKS, 3.0, PLANS),
    CallStarted(1, 1, "a", 1, 3.5),
    CallStarted(1, 1, "b", 1, 4.0),
)


def snapshot_after(*records: Record) -> SessionSnapshot:
    state = fold((1, record) for record in records)
    return snapshot_of("s1", state, f"1-{state.position}")


def test_a_session_at_rest() -> None:
    assert snapshot_after(*OPENED, TurnEnded(1, TurnStatus.FAILED, 5.0)) == SessionSnapshot(
        session="s1",
        event_id="1-4",
        status=SessionStatus.FAILED,
        waiting_on="nothing",
        turns=1,
        last="failed",
        history=(HI,),
        running=None,
        is_resumable=True,
    )


def test_a_partial_response_is_shown_beside_the_history() -> None:
    snapshot = snapshot_after(*OPENED, Delta(1, 1, 1, 0, "text", "he"), Delta(1, 1, 1, 0, "text", "llo"))
    response = Response((Text("hello"),), Finish.INTERRUPTED)
    assert snapshot.history == (HI,)
    assert snapshot.running == RunningTurn(1, 1, attempt=1, output=response)


def test_the_text_of_an_abandoned_attempt_is_dropped() -> None:
    again = AttemptStarted(1, 1, 2, 3.0)
    assert snapshot_after(*OPENED, Delta(1, 1, 1, 0, "text", "he"), again).running == RunningTurn(
        1, 1, attempt=2
    )


def test_each_call_is_shown_with_its_status() -> None:
    result = ToolResult("a", "contents")
    snapshot = snapshot_after(*RUNNING, CallEnded(1, 1, result, 4.5))
    assert (snapshot.status, snapshot.waiting_on, snapshot.history) == ("running", "tool", (HI,))
    assert snapshot.running == RunningTurn(
        1,
        1,
        output=ASKS,
        calls=(
            CallSnapshot(ToolCall("a", "read"), "server", "ended", 3.5, result),
            CallSnapshot(ToolCall("b", "write"), "server", "running", 4.0),
            CallSnapshot(ToolCall("c", "write"), "server", "waiting"),
        ),
    )


def test_a_requested_cancellation_is_shown_before_the_turn_has_ended() -> None:
    snapshot = snapshot_after(*RUNNING, CancelRequested(1, 5.0, 10.0))
    assert snapshot.status == "running"
    assert snapshot.running is not None
    assert [call.status for call in snapshot.running.calls] == ["running", "running", "waiting"]


def test_an_approval_that_an_upstream_agent_requests_is_shown_with_its_response() -> None:
    asked = QuestionAsked(
        1,
        1,
        "leave-1",
        QuestionKind.APPROVAL,
        "d",
        3.0,
        "Sure?",
        attempt=1,
        name="Bash",
        arguments='{"a":1}',
        is_fixed=True,
    )
    snapshot = snapshot_after(*OPENED, asked)
    assert snapshot.running == RunningTurn(1, 1, 1, questions=(asked,))
    assert (snapshot.status, snapshot.waiting_on) == ("running", "person")
    answered = QuestionAnswered(1, 1, "leave-1", QuestionKind.APPROVAL, "d", Choice.ALLOW, 4.0)
    assert snapshot_after(*OPENED, asked, answered).running == RunningTurn(1, 1, 1)
