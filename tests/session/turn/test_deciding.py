"""The turn, as stories: one for each edge of the machine."""

from __future__ import annotations

import pytest

from midstream.errors import SessionBusyError
from midstream.history.messages import (
    UPSTREAM_CUT,
    Finish,
    Outcome,
    Response,
    ResponsePart,
    Step,
    Text,
    ToolResult,
    ToolSpec,
    UpstreamCall,
    UserMessage,
)
from midstream.retries import MODEL_ATTEMPTS_MAX, RETRY_AFTER_MAX_S
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import (
    NO_ANSWER_CONTENT,
    NOT_STARTED_CONTENT,
    STOPPED_CONTENT,
    UNKNOWN_CONTENT,
    OnDoubt,
)
from midstream.session.records import (
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallStarted,
    CancelRequested,
    ClientTool,
    Delta,
    EpochStarted,
    HistoryCompacted,
    MessageAccepted,
    ResponseCompleted,
    ReuseDecision,
    StepCommitted,
    TurnEnded,
    TurnStatus,
)
from midstream.session.turn.commands import (
    CallExpired,
    CallFinished,
    Cancel,
    CancelExpired,
    Command,
    ModelFailed,
    ModelReuseDecided,
    ModelStreamed,
    Recover,
    Refused,
    SendMessage,
)
from midstream.session.turn.deciding import decide
from midstream.session.turn.folding import step_of
from midstream.session.turn.pending import AwaitCancelled, AwaitClient, CallModel, RunCall, pending_work
from midstream.session.turn.states import (
    CANCEL_GRACE_S,
    CLIENT_CALL_S,
    LOOK_BACK_S,
    MODEL_CALLS_MAX,
    SUSPECTED_CODE,
    SUSPECTED_MESSAGE,
    AwaitingModel,
    Idle,
    RunningCalls,
    TurnState,
)
from tests.session.turn_stories import (
    AT,
    after,
    answers,
    apply_command,
    asks,
    at_client,
    ended,
    fails,
    impossible,
    overflows,
    reads,
    sends,
    state_after,
    streams,
    unknown,
    writes,
)
from tests.spec import spec

# --- messages and responses -------------------------------------------------------------------------------------


@spec("TURN-2")
def test_a_message_opens_a_turn_and_announces_the_first_model_call() -> None:
    records, state = apply_command(Idle(), sends("hi"))

    assert records == (
        MessageAccepted(1, UserMessage.of("hi"), AT),
        AttemptStarted(1, response=1, attempt=1, at=AT),
    )
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 1)),)


@spec("TURN-1")
@pytest.mark.parametrize(
    "state",
    [
        state_after(sends()),
        state_after(sends(), asks(writes("a"))),
        state_after(sends(), asks(writes("a")), Cancel()),
    ],
    ids=["awaiting model", "running calls", "cancelling"],
)
def test_a_message_in_a_live_turn_is_refused(state: TurnState) -> None:
    with pytest.raises(Refused) as refused:
        decide(state, sends("and another thing"), epoch=1, at=AT)
    assert isinstance(refused.value.error, SessionBusyError)


@spec("TURN-5")
def test_a_response_without_calls_ends_the_turn_in_one_append() -> None:
    records, state = apply_command(state_after(sends(), streams("hel", "lo")), answers("hello"))

    assert records == (
        ResponseCompleted(1, 1, 1, Response((Text("hello"),)), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.COMPLETED, AT),
    )
    assert state == Idle()
    assert pending_work(state) == ()


@spec("TURN-3", "TURN-9")
@pytest.mark.parametrize("other", [{"turn": 2}, {"response": 2}, {"attempt": 2}, {"attempt": 0}])
def test_output_of_another_attempt_changes_nothing(other: dict[str, int]) -> None:
    state = state_after(sends())
    assert decide(state, streams("x", **other), epoch=1, at=AT) == ()
    assert decide(state, answers("x", **other), epoch=1, at=AT) == ()
    other = {"turn": 1, "response": 1, "attempt": 1, **other}
    failed = ModelFailed(
        AttemptRef(other["turn"], other["response"], other["attempt"]), "x", "x", is_retriable=True
    )
    assert decide(state, failed, epoch=1, at=AT) == ()


@spec("TURN-4")
def test_a_failed_attempt_is_retried_after_a_pause() -> None:
    records, state = apply_command(state_after(sends(), streams("half")), fails())
    assert records == (
        AttemptFailed(1, 1, 1, "model_unavailable", "it broke", AT),
        AttemptStarted(1, 1, attempt=2, at=AT, not_before=AT + 1.0),
    )
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 2), not_before=AT + 1.0),)

    records, state = apply_command(state, fails(attempt=2))
    assert records[1] == AttemptStarted(1, 1, attempt=3, at=AT, not_before=AT + 2.0)

    records, state = apply_command(state, fails(attempt=3))
    assert records == (
        AttemptFailed(1, 1, 3, "model_unavailable", "it broke", AT),
        TurnEnded(1, TurnStatus.FAILED, AT, "model_unavailable", "it broke"),
    )
    assert isinstance(state, Idle)


@spec("TURN-25")
def test_a_conversation_that_is_too_long_is_shortened_and_the_request_repeated() -> None:
    records, state = apply_command(state_after(sends(), streams("half")), overflows(2))
    assert records == (
        AttemptFailed(1, 1, 1, "context_overflow", "too long", AT),
        HistoryCompacted(1, 1, cut=2, at=AT),
        AttemptStarted(1, 1, attempt=2, at=AT),
    )
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 2)),)


@spec("TURN-25")
def test_a_second_overflow_of_one_model_call_ends_the_turn_with_its_reason() -> None:
    records, state = apply_command(state_after(sends(), overflows(2)), overflows(4, attempt=2))
    end = records[-1]
    assert isinstance(end, TurnEnded)
    assert (end.status, end.code) == (TurnStatus.FAILED, "context_overflow")
    assert isinstance(state, Idle)
    assert "even without its older part" in end.message
    assert not any(isinstance(record, HistoryCompacted) for record in records)


@spec("TURN-25")
def test_the_turn_ends_at_once_where_nothing_can_be_left_out() -> None:
    records, _ = apply_command(state_after(sends()), overflows(None))
    end = records[-1]
    assert isinstance(end, TurnEnded)
    assert (end.status, end.code) == (TurnStatus.FAILED, "context_overflow")
    assert "nothing of it can be left out" in end.message


@spec("TURN-25")
def test_each_model_call_may_be_shortened_once() -> None:
    state = state_after(sends(), overflows(2), asks(reads("a"), attempt=2), ended("a"))
    records, _ = apply_command(state, overflows(4, response=2))
    assert HistoryCompacted(1, 2, cut=4, at=AT) in records


@spec("TURN-25")
def test_a_shortened_request_has_all_its_attempts() -> None:
    state = state_after(sends(), fails(), fails(attempt=2), overflows(2, attempt=3))
    _, state = apply_command(state, fails(attempt=4))
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 5), not_before=AT + 1.0),)


@spec("TURN-4")
def test_a_longer_pause_requested_by_the_provider_is_kept() -> None:
    _, state = apply_command(state_after(sends()), fails(retry_after_s=30.0))
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 2), not_before=AT + 30.0),)


@spec("TURN-4", "TURN-21")
def test_the_pause_requested_by_a_provider_is_bounded() -> None:
    _, state = apply_command(state_after(sends()), fails(retry_after_s=86_400.0))
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 2), not_before=AT + RETRY_AFTER_MAX_S),)


@spec("TURN-4", "TURN-19")
def test_a_permanent_failure_ends_the_turn_and_keeps_the_shown_text() -> None:
    records, state = apply_command(state_after(sends(), streams("Half a sen")), fails(retriable=False))
    assert records == (
        AttemptFailed(1, 1, 1, "model_rejected", "it broke", AT),
        ResponseCompleted(1, 1, 1, Response((Text("Half a sen"),), Finish.INTERRUPTED), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.FAILED, AT, "model_rejected", "it broke"),
    )
    assert isinstance(state, Idle)


@spec("TURN-3", "TURN-16")
def test_text_of_a_failed_attempt_is_not_kept_with_the_next() -> None:
    state = state_after(sends(), streams("wrong"), fails(), streams("right", attempt=2))
    records, _ = apply_command(state, Cancel())
    assert records[1] == ResponseCompleted(1, 1, 2, Response((Text("right"),), Finish.INTERRUPTED), AT)


@spec("TURN-20")
def test_a_turn_ends_at_the_limit_of_model_calls() -> None:
    state: TurnState = AwaitingModel(1, MODEL_CALLS_MAX, attempt=1, epoch=1)
    _, state = apply_command(state, asks(reads("a"), response=MODEL_CALLS_MAX))
    records, state = apply_command(state, ended("a", response=MODEL_CALLS_MAX))

    end = records[-1]
    assert isinstance(end, TurnEnded)
    assert (end.status, end.code) == (TurnStatus.FAILED, "model_calls_max")
    assert state == Idle()


# --- calls ------------------------------------------------------------------------------------------------------


@spec("TURN-6", "TURN-10")
def test_nothing_is_committed_until_the_last_tool_returns() -> None:
    records, state = apply_command(state_after(sends()), asks(reads("a"), reads("b")))
    assert [type(record) for record in records] == [ResponseCompleted, CallStarted, CallStarted]
    assert pending_work(state) == (RunCall(CallRef(1, 1, "a"), 1), RunCall(CallRef(1, 1, "b"), 1))

    records, state = apply_command(state, ended("b", "2"))
    assert records == (CallEnded(1, 1, ToolResult("b", "2"), AT),)
    assert pending_work(state) == (RunCall(CallRef(1, 1, "a"), 1),)

    records = decide(state, ended("a", "1"), epoch=1, at=AT)
    assert records == (
        CallEnded(1, 1, ToolResult("a", "1"), AT),
        StepCommitted(1, 1),
        AttemptStarted(1, 2, attempt=1, at=AT),
    )
    assert step_of(after(state, records[0])) == Step(
        state.response if isinstance(state, RunningCalls) else Response(()),
        (ToolResult("a", "1"), ToolResult("b", "2")),
    )
    assert pending_work(after(state, *records)) == (CallModel(AttemptRef(1, 2, 1)),)


@spec("TURN-10")
def test_calls_with_effects_run_alone_and_in_order() -> None:
    state = state_after(sends(), asks(reads("a"), writes("b"), reads("c"), writes("d")))
    started = []
    for call_id in ("a", "b", "c", "d"):
        assert pending_work(state) == (RunCall(CallRef(1, 1, call_id), 1),)
        started.append(call_id)
        _, state = apply_command(state, ended(call_id))
    assert pending_work(state) == (CallModel(AttemptRef(1, 2, 1)),)


@spec("TURN-10")
def test_the_start_of_the_next_call_is_in_the_append_of_the_outcome_before_it() -> None:
    records, _ = apply_command(state_after(sends(), asks(writes("a"), writes("b"))), ended("a"))
    assert records == (CallEnded(1, 1, ToolResult("a", "done"), AT), CallStarted(1, 1, "b", 1, AT))


@spec("TURN-11")
def test_a_call_that_cannot_run_gets_an_error_and_the_others_continue() -> None:
    records, state = apply_command(state_after(sends()), asks(impossible("a"), writes("b")))
    assert records[1:] == (
        CallEnded(1, 1, ToolResult("a", "There is no such tool.", Outcome.ERROR), AT),
        CallStarted(1, 1, "b", 1, AT),
    )
    assert pending_work(state) == (RunCall(CallRef(1, 1, "b"), 1),)


@spec("TURN-11", "TURN-6")
def test_the_model_is_called_again_at_once_where_no_call_can_run() -> None:
    records, state = apply_command(state_after(sends()), asks(impossible("a")))
    assert [type(record) for record in records] == [
        ResponseCompleted,
        CallEnded,
        StepCommitted,
        AttemptStarted,
    ]
    assert pending_work(state) == (CallModel(AttemptRef(1, 2, 1)),)


@spec("TURN-9", "TURN-12")
@pytest.mark.parametrize(
    "late",
    [
        ended("a", "again"),
        ended("b"),
        ended("nobody"),
        ended("c", response=2),
        ended("c", turn=2),
        CallExpired(CallRef(1, 1, "a")),
        CallExpired(CallRef(1, 2, "c")),
        streams("x"),
        answers("x"),
        fails(),
        CancelExpired(1),
        Cancel(turn=2),
    ],
    ids=repr,
)
def test_late_repeated_and_foreign_commands_change_nothing(late: Command) -> None:
    """`a` has ended, `b` waits for `c`: neither accepts an outcome."""
    state = state_after(sends(), asks(reads("a"), reads("c"), writes("b")), ended("a"))
    assert decide(state, late, epoch=1, at=AT) == ()


@spec("TURN-9")
@pytest.mark.parametrize(
    "late",
    [
        streams("x"),
        answers(),
        fails(),
        ended("a"),
        CallExpired(CallRef(1, 1, "a")),
        Cancel(),
        CancelExpired(1),
        Recover(),
    ],
    ids=repr,
)
def test_an_ended_turn_ignores_all_commands_but_a_message(late: Command) -> None:
    assert decide(state_after(sends(), answers()), late, epoch=1, at=AT) == ()


@spec("TURN-14")
def test_a_call_at_a_client_waits_for_the_resume_window_and_then_expires() -> None:
    assert pending_work(state_after(sends(), asks(at_client("a", timeout_s=9_000.0)))) == (
        AwaitClient(CallRef(1, 1, "a"), AT + 9_000.0),
    )
    state = state_after(sends(), asks(at_client("a", timeout_s=30.0)))
    assert pending_work(state) == (AwaitClient(CallRef(1, 1, "a"), AT + CLIENT_CALL_S),)

    records, state = apply_command(state, CallExpired(CallRef(1, 1, "a")))
    assert records[0] == CallEnded(1, 1, unknown("a", NO_ANSWER_CONTENT), AT)
    assert pending_work(state) == (CallModel(AttemptRef(1, 2, 1)),)


@spec("TURN-14")
def test_a_call_at_a_client_without_a_timeout_waits_for_two_hours() -> None:
    assert pending_work(state_after(sends(), asks(at_client("a")))) == (
        AwaitClient(CallRef(1, 1, "a"), AT + CLIENT_CALL_S),
    )


# --- cancel -----------------------------------------------------------------------------------------------------


@spec("TURN-8", "TURN-19")
def test_a_cancel_during_a_model_call_ends_the_turn_at_once() -> None:
    records, state = apply_command(state_after(sends(), streams("Once upon", " a time")), Cancel())
    assert records == (
        CancelRequested(1, AT, deadline_at=AT),
        ResponseCompleted(1, 1, 1, Response((Text("Once upon a time"),), Finish.INTERRUPTED), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.CANCELLED, AT),
    )
    assert state == Idle()


@spec("TURN-8", "REUSE-55")
def test_a_call_running_upstream_at_a_cancel_is_recorded_as_unknown() -> None:
    runs, ran = UpstreamCall("u", "grep"), UpstreamCall("v", "ls", "{}", "x", Outcome.OK)
    deltas = (Delta(1, 1, 1, 0, "thinking", "", runs), Delta(1, 1, 1, 1, "thinking", "", ran))
    records, _ = apply_command(state_after(sends(), ModelStreamed(AttemptRef(1, 1, 1), deltas)), Cancel())

    cut = UpstreamCall("u", "grep", "{}", UPSTREAM_CUT, Outcome.UNKNOWN)
    assert records[1] == ResponseCompleted(1, 1, 1, Response((cut, ran), Finish.INTERRUPTED), AT)


@spec("TURN-8")
def test_a_cancel_before_the_first_token_leaves_no_empty_response() -> None:
    records, _ = apply_command(state_after(sends()), Cancel(turn=1))
    assert records == (CancelRequested(1, AT, deadline_at=AT), TurnEnded(1, TurnStatus.CANCELLED, AT))


@spec("TURN-9")
def test_a_cancel_of_another_turn_changes_nothing() -> None:
    assert decide(state_after(sends()), Cancel(turn=7), epoch=1, at=AT) == ()


@spec("TURN-7", "TURN-8")
def test_an_outcome_during_a_cancel_is_kept() -> None:
    state = state_after(sends(), asks(writes("a"), writes("b")))
    records, state = apply_command(state, Cancel())
    assert records == (CancelRequested(1, AT, deadline_at=AT + CANCEL_GRACE_S),)
    assert pending_work(state) == (AwaitCancelled(1, AT + CANCEL_GRACE_S),)

    records, state = apply_command(state, ended("a", "it was done"))
    assert records == (
        CallEnded(1, 1, ToolResult("a", "it was done"), AT),
        CallEnded(1, 1, ToolResult("b", NOT_STARTED_CONTENT, Outcome.CANCELLED), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.CANCELLED, AT),
    )
    assert state == Idle()


@spec("TURN-7")
def test_a_cancel_waits_for_every_running_tool() -> None:
    state = state_after(sends(), asks(reads("a"), reads("b")), Cancel())
    records, state = apply_command(state, ended("b"))
    assert records == (CallEnded(1, 1, ToolResult("b", "done"), AT),)
    assert pending_work(state) == (AwaitCancelled(1, AT + CANCEL_GRACE_S),)


@spec("TURN-8")
def test_a_tool_that_does_not_stop_is_abandoned() -> None:
    state = state_after(sends(), asks(reads("a"), reads("b"), writes("c")), ended("b"), Cancel())
    assert decide(state, CancelExpired(2), epoch=1, at=AT) == ()

    records, state = apply_command(state, CancelExpired(1))
    assert records == (
        CallEnded(1, 1, unknown("a", STOPPED_CONTENT), AT),
        CallEnded(1, 1, ToolResult("c", NOT_STARTED_CONTENT, Outcome.CANCELLED), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.CANCELLED, AT),
    )
    assert state == Idle()


@spec("TURN-8", "TURN-9")
@pytest.mark.parametrize(
    "late", [Cancel(), Cancel(1), streams("x"), answers(), fails(), CallExpired(CallRef(1, 1, "a"))], ids=repr
)
def test_during_a_cancel_all_other_commands_are_ignored(late: Command) -> None:
    assert decide(state_after(sends(), asks(writes("a")), Cancel()), late, epoch=1, at=AT) == ()


@spec("TURN-8")
def test_a_cancel_does_not_wait_for_a_client() -> None:
    records, state = apply_command(state_after(sends(), asks(at_client("a"))), Cancel())
    assert [type(record) for record in records] == [CancelRequested, CallEnded, StepCommitted, TurnEnded]
    assert records[1] == CallEnded(1, 1, unknown("a", STOPPED_CONTENT), AT)
    assert state == Idle()


# --- nodes -----------------------------------------------------------------------------------------------------


def _taken_over(state: TurnState, *, epoch: int = 2) -> TurnState:
    return after(state, EpochStarted(epoch, "next", AT), epoch=epoch)


@spec("TURN-16")
def test_a_cut_model_call_is_announced_again() -> None:
    records, state = apply_command(_taken_over(state_after(sends(), streams("hel"))), Recover(), epoch=2)
    assert records == (AttemptStarted(1, 1, attempt=2, at=AT),)
    assert pending_work(state) == (CallModel(AttemptRef(1, 1, 2)),)


@spec("TURN-18")
def test_a_response_is_requested_again_however_many_nodes_die() -> None:
    state = state_after(sends(), streams("boom"))
    for epoch in range(2, 20):
        records, state = apply_command(_taken_over(state, epoch=epoch), Recover(), epoch=epoch)
        assert records == (AttemptStarted(1, 1, attempt=epoch, at=AT),)
        _, state = apply_command(state, streams("boom", attempt=epoch), epoch=epoch)


@spec("TURN-85", "TURN-19")
def test_a_turn_suspected_of_too_many_deaths_ends_and_keeps_its_finished_parts() -> None:
    suspect = Recover(is_suspect=True)
    records, _ = apply_command(_taken_over(state_after(sends(), streams("boom"))), suspect, epoch=2)
    assert records == (
        ResponseCompleted(1, 1, 1, Response((Text("boom"),), Finish.INTERRUPTED), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.INTERRUPTED, AT, SUSPECTED_CODE, SUSPECTED_MESSAGE),
    )
    running = state_after(sends(), asks(reads("a"), writes("b")), ended("a"))
    records, _ = apply_command(_taken_over(running), suspect, epoch=2)
    assert records == (
        CallEnded(1, 1, unknown("b", UNKNOWN_CONTENT), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.INTERRUPTED, AT, SUSPECTED_CODE, SUSPECTED_MESSAGE),
    )


def _reuse_decided(attempt: int = 1, *, response: int = 1) -> ModelReuseDecided:
    return ModelReuseDecided(AttemptRef(1, response, attempt), ReuseDecision("new", "", "fresh"))


def _upstream_call_ended(outcome: Outcome | None, *, response: int = 1) -> ModelStreamed:
    call = UpstreamCall("u", "shell", "{}", "" if outcome is None else "done", outcome)
    return ModelStreamed(AttemptRef(1, response, 1), (Delta(1, response, 1, 0, "thinking", "", call),))


@spec("TURN-83")
@pytest.mark.parametrize(
    ("command", "part"),
    [
        (streams("I pay."), Text("I pay.")),
        (_upstream_call_ended(Outcome.OK), UpstreamCall("u", "shell", "{}", "done", Outcome.OK)),
        (_upstream_call_ended(None), UpstreamCall("u", "shell", "{}", UPSTREAM_CUT, Outcome.UNKNOWN)),
    ],
    ids=["words", "a call that ended", "a call in doubt"],
)
def test_acts_of_an_agent_in_a_cut_attempt_enter_the_history_before_the_next_request(
    command: ModelStreamed, part: ResponsePart
) -> None:
    cut = (
        ResponseCompleted(1, 1, 1, Response((part,), Finish.INTERRUPTED), AT),
        StepCommitted(1, 1),
    )
    state = state_after(sends(), _reuse_decided(), command)
    records, _ = apply_command(_taken_over(state), Recover(), epoch=2)
    assert records == (*cut, AttemptStarted(1, 2, attempt=1, at=AT))

    records, after_failure = apply_command(state, fails())
    assert records[1:3] == cut
    assert isinstance(records[3], AttemptStarted)
    assert (records[3].response, records[3].attempt) == (2, 1)
    assert pending_work(after_failure)[0] == CallModel(AttemptRef(1, 2, 1), not_before=records[3].not_before)


@spec("TURN-83")
def test_an_agent_that_only_thought_or_a_plain_model_gets_the_same_request_again() -> None:
    thought = ModelStreamed(AttemptRef(1, 1, 1), (Delta(1, 1, 1, 0, "thinking", "hm"),))
    for state in (state_after(sends(), _reuse_decided(), thought), state_after(sends(), streams("hel"))):
        records, _ = apply_command(_taken_over(state), Recover(), epoch=2)
        assert records == (AttemptStarted(1, 1, attempt=2, at=AT),)


@spec("TURN-83")
def test_an_agent_that_is_cut_each_time_fails_after_as_many_attempts_as_any_model() -> None:
    state = state_after(sends())
    for response in range(1, MODEL_ATTEMPTS_MAX + 1):
        for command in (
            _reuse_decided(response=response),
            _upstream_call_ended(Outcome.OK, response=response),
            fails(response=response),
        ):
            records, state = apply_command(state, command)
    assert isinstance(records[-1], TurnEnded)
    assert records[-1].status is TurnStatus.FAILED


@spec("TURN-18")
def test_a_turn_left_for_too_long_is_ended() -> None:
    late = AT + LOOK_BACK_S + 1
    records, state = apply_command(_taken_over(state_after(sends())), Recover(), epoch=2, at=late)
    assert records == (TurnEnded(1, TurnStatus.INTERRUPTED, late),)

    state = state_after(sends(), asks(reads("a"), reads("b"), writes("c")), ended("a", "found"))
    records, state = apply_command(_taken_over(state), Recover(), epoch=2, at=late)
    assert records == (
        CallEnded(1, 1, unknown("b", UNKNOWN_CONTENT), late),
        CallEnded(1, 1, ToolResult("c", NOT_STARTED_CONTENT, Outcome.CANCELLED), late),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.INTERRUPTED, late),
    )
    assert isinstance(state, Idle)


@spec("TURN-13")
def test_a_tool_in_doubt_is_not_run_again_by_default() -> None:
    state = _taken_over(state_after(sends(), asks(writes("a"), writes("b"))))
    records, state = apply_command(state, Recover(), epoch=2)
    assert records == (
        CallEnded(1, 1, unknown("a", UNKNOWN_CONTENT), AT),
        CallStarted(1, 1, "b", 1, AT),
    )
    assert pending_work(state) == (RunCall(CallRef(1, 1, "b"), 1),)


@spec("TURN-13")
@pytest.mark.parametrize("on_doubt", [OnDoubt.RERUN, OnDoubt.RERUN_WITH_KEY])
def test_a_tool_with_a_rerun_policy_is_run_again_twice_and_no_more(on_doubt: OnDoubt) -> None:
    state = state_after(sends(), asks(writes("a", on_doubt)))
    for epoch, run in ((2, 2), (3, 3)):
        records, state = apply_command(_taken_over(state, epoch=epoch), Recover(), epoch=epoch)
        assert records == (CallStarted(1, 1, "a", run, AT),)
        assert pending_work(state) == (RunCall(CallRef(1, 1, "a"), run),)

    records, state = apply_command(_taken_over(state, epoch=4), Recover(), epoch=4)
    assert records == (
        CallEnded(1, 1, unknown("a", UNKNOWN_CONTENT), AT),
        StepCommitted(1, 1),
        AttemptStarted(1, 2, attempt=1, at=AT),
    )


@spec("TURN-13", "TURN-12")
def test_a_call_with_an_outcome_is_not_in_doubt() -> None:
    state = _taken_over(state_after(sends(), asks(reads("a"), reads("b")), ended("a", "found")))
    records, _ = apply_command(state, Recover(), epoch=2)
    assert records == (CallStarted(1, 1, "b", 2, AT, has_effects=False),)


@spec("TURN-14")
def test_a_call_at_a_client_survives_its_server() -> None:
    state = _taken_over(state_after(sends(), asks(at_client("a"))))
    assert decide(state, Recover(), epoch=2, at=AT + 60) == ()
    assert pending_work(state) == (AwaitClient(CallRef(1, 1, "a"), AT + CLIENT_CALL_S),)

    records, _ = apply_command(state, ended("a", "yes"), epoch=2)
    assert records[0] == CallEnded(1, 1, ToolResult("a", "yes"), AT)


@spec("TURN-8", "TURN-13")
def test_a_cancel_is_finished_by_the_next_node() -> None:
    state = _taken_over(state_after(sends(), asks(writes("a"), writes("b")), Cancel()))
    records, state = apply_command(state, Recover(), epoch=2)
    assert records == (
        CallEnded(1, 1, unknown("a", UNKNOWN_CONTENT), AT),
        CallEnded(1, 1, ToolResult("b", NOT_STARTED_CONTENT, Outcome.CANCELLED), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.CANCELLED, AT),
    )
    assert state == Idle()


@spec("TURN-17")
@pytest.mark.parametrize(
    "state",
    [
        Idle(),
        state_after(sends(), streams("x")),
        state_after(sends(), asks(reads("a"), reads("b"), writes("c"))),
        state_after(sends(), asks(writes("a"), reads("b"))),
        state_after(sends(), asks(at_client("a"))),
        state_after(sends(), asks(writes("a")), Cancel()),
    ],
    ids=["idle", "model", "reads", "write", "client", "cancelling"],
)
def test_recovering_twice_is_recovering_once(state: TurnState) -> None:
    _, once = apply_command(_taken_over(state), Recover(), epoch=2)
    assert decide(once, Recover(), epoch=2, at=AT) == ()


def test_the_client_tools_are_kept_for_the_whole_turn() -> None:
    tools = (ClientTool(ToolSpec("ask")),)
    state = state_after(sends(tools=tools), asks(reads("a")), ended("a"))
    assert isinstance(state, AwaitingModel)
    assert state.terms.tools == tools


# --- all states, all commands
# -------------------------------------------------------------------------------------

STATES: dict[str, TurnState] = {
    "idle": Idle(),
    "asked": state_after(sends()),
    "speaking": state_after(sends(), streams("x")),
    "failed once": state_after(sends(), fails()),
    "reading": state_after(sends(), asks(reads("a"), reads("b"), writes("c"))),
    "writing": state_after(sends(), asks(writes("a"), reads("b"))),
    "half done": state_after(sends(), asks(reads("a"), reads("b")), ended("a")),
    "at a client": state_after(sends(), asks(at_client("a"))),
    "second response": state_after(sends(), asks(reads("a")), ended("a"), streams("y", response=2)),
    "cancelling": state_after(sends(), asks(writes("a"), writes("b")), Cancel()),
    "cancelling two": state_after(sends(), asks(reads("a"), reads("b")), Cancel()),
}
COMMANDS = (
    sends("more"),
    streams("x"),
    streams("y", response=2),
    answers(),
    answers(response=2),
    asks(writes("a"), reads("b")),
    asks(at_client("a"), response=2),
    asks(impossible("a")),
    fails(),
    fails(retriable=False),
    fails(attempt=2),
    ended("a"),
    ended("b"),
    ended("c", response=2),
    CallExpired(CallRef(1, 1, "a")),
    Cancel(),
    Cancel(1),
    Cancel(9),
    CancelExpired(1),
    CancelExpired(9),
    Recover(),
    Recover(look_back_s=-1.0),
)


@spec("TURN-1", "TURN-21")
@pytest.mark.parametrize("epoch", [1, 2], ids=["same node", "next node"])
@pytest.mark.parametrize("command", COMMANDS, ids=repr)
def test_every_state_decides_every_command_and_keeps_pending_work(command: Command, epoch: int) -> None:
    for name, state in STATES.items():
        if isinstance(command, SendMessage) and name != "idle":
            with pytest.raises(Refused, match="still running"):
                decide(state, command, epoch=epoch, at=AT)
            continue
        records, then = apply_command(state, command, epoch=epoch)
        assert (pending_work(then) == ()) == isinstance(then, Idle), (name, records)
        assert records or then == state, name


@spec("TURN-87")
def test_a_sub_agent_that_killed_its_servers_ends_the_turn_of_its_parent() -> None:
    running = state_after(sends(), asks(reads("a"), reads("b")))
    result = ToolResult("a", "The sub-agent failed: it killed its server.", Outcome.ERROR)
    records, ended_state = apply_command(running, CallFinished(1, 1, result, is_suspect=True))
    assert records == (
        CallEnded(1, 1, result, AT),
        CallEnded(1, 1, unknown("b", STOPPED_CONTENT), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.INTERRUPTED, AT, SUSPECTED_CODE, SUSPECTED_MESSAGE),
    )
    late = CallFinished(1, 1, result, is_suspect=True)
    assert apply_command(ended_state, late)[0] == (), "of no open call"
