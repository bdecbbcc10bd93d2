"""The calls of one response that depend on people, probes and policies."""

from __future__ import annotations

import pytest

from midstream.errors import AnswerMismatchError, QuestionClosedError
from midstream.history.messages import Outcome, ToolResult
from midstream.session.call_references import AttemptRef, CallRef
from midstream.session.calls import (
    DAMAGED_CONTENT,
    DENIED_CONTENT,
    HAPPENED_CONTENT,
    NO_DECISION_CONTENT,
    NO_RESPONSE_CONTENT,
    NOT_STARTED_CONTENT,
    SKIPPED_CONTENT,
    UNKNOWN_CONTENT,
    CallPlan,
    Choice,
    OnDoubt,
    QuestionKind,
    Site,
    digest_of,
)
from midstream.session.records import (
    AttemptStarted,
    CallEnded,
    CallInDoubt,
    CallProgressed,
    CallStarted,
    CancelRequested,
    EpochStarted,
    OutcomeDamaged,
    QuestionAnswered,
    QuestionAsked,
    ResponseCompleted,
    StepCommitted,
    Sync,
    TurnEnded,
    TurnStatus,
    sync_of,
)
from midstream.session.rerun_policy import RERUNS_MAX
from midstream.session.turn.commands import (
    CallProbed,
    CallProgress,
    Cancel,
    QuestionExpired,
    Recover,
    Refused,
)
from midstream.session.turn.deciding import decide
from midstream.session.turn.folding import step_of
from midstream.session.turn.pending import AwaitPerson, CallModel, ProbeCall, RunCall, pending_work
from midstream.session.turn.states import LOOK_BACK_S, Idle, RunningCalls, TurnState
from tests.session.turn_stories import (
    AT,
    after,
    apply_command,
    asks,
    at_client,
    at_person,
    ended,
    needs_approval,
    reads,
    responses,
    sends,
    state_after,
    unknown,
    writes,
)
from tests.spec import spec

DIGEST = digest_of("work", "{}")


def _found_by_the_next_node(*plans: CallPlan, at: float = AT) -> TurnState:
    """Run a batch, and let another node recover it."""
    state = after(state_after(sends(), asks(*plans)), EpochStarted(2, "next", AT), epoch=2)
    return apply_command(state, Recover(), epoch=2, at=at)[1]


# --- approvals ------------------------------------------------------------------------------------------------


@spec("TURN-32")
def test_a_call_that_needs_approval_waits_without_pending_work() -> None:
    records, state = apply_command(state_after(sends()), asks(needs_approval("a"), reads("b")))
    assert [type(record) for record in records] == [ResponseCompleted, QuestionAsked]
    assert records[1] == QuestionAsked(1, 1, "a", QuestionKind.APPROVAL, DIGEST, AT, "Sure?")
    assert pending_work(state) == ()


@spec("TURN-32")
def test_all_approvals_are_requested_at_once_and_calls_keep_their_order() -> None:
    _, state = apply_command(state_after(sends()), asks(needs_approval("a"), needs_approval("b")))
    _, state = apply_command(state, responses("b", Choice.ALLOW))
    assert pending_work(state) == ()
    records, state = apply_command(state, responses("a", Choice.ALLOW))
    assert records == (
        QuestionAnswered(1, 1, "a", QuestionKind.APPROVAL, DIGEST, Choice.ALLOW, AT),
        CallStarted(1, 1, "a", 1, AT),
    )
    _, state = apply_command(state, ended("a"))
    assert pending_work(state) == (RunCall(CallRef(1, 1, "b"), 1),)


@spec("TURN-32")
def test_earlier_calls_without_effects_do_not_wait_for_a_person() -> None:
    _, state = apply_command(state_after(sends()), asks(reads("a"), needs_approval("b")))
    assert pending_work(state) == (RunCall(CallRef(1, 1, "a"), 1),)


@spec("TURN-33")
def test_the_model_receives_a_denial_with_its_reason() -> None:
    records, state = apply_command(
        state_after(sends(), asks(needs_approval("a"))), responses("a", Choice.DENY, "too dear")
    )
    assert (
        CallEnded(1, 1, ToolResult("a", f"{DENIED_CONTENT} They said: too dear", Outcome.DENIED), AT)
        in records
    )
    assert pending_work(state) == (CallModel(AttemptRef(1, 2, 1)),)


@spec("TURN-33")
def test_a_person_may_change_the_arguments_and_the_model_is_informed() -> None:
    answer = responses("a", Choice.ALLOW, arguments='{"amount": 1}')
    records, state = apply_command(state_after(sends(), asks(needs_approval("a"))), answer)
    assert records[-1] == CallStarted(1, 1, "a", 1, AT, arguments='{"amount": 1}')

    records, _ = apply_command(state, ended("a", "paid"))
    assert isinstance(records[0], CallEnded)
    assert records[0].result.content == (
        '[a person changed the arguments before this ran, to: {"amount": 1}]\npaid'
    )


@spec("TURN-33")
@pytest.mark.parametrize("arguments", ['{"amount": 1', "[]", "", "1", '{"a": ' + "[" * 5000])
def test_changed_arguments_that_are_no_json_object_are_refused_and_the_question_stays_open(
    arguments: str,
) -> None:
    state = state_after(sends(), asks(needs_approval("a")))
    with pytest.raises(Refused) as refused:
        decide(state, responses("a", Choice.ALLOW, arguments=arguments), epoch=1, at=AT)
    assert isinstance(refused.value.error, AnswerMismatchError)
    records, _ = apply_command(state, responses("a", Choice.ALLOW))
    assert isinstance(records[-1], CallStarted)


@spec("TURN-33")
def test_an_answer_is_bound_to_the_shown_arguments() -> None:
    state = state_after(sends(), asks(needs_approval("a")))
    other = responses("a", Choice.ALLOW)
    other = type(other)(CallRef(1, 1, "a"), digest_of("work", '{"amount": 1000}'), Choice.ALLOW)
    with pytest.raises(Refused) as refused:
        decide(state, other, epoch=1, at=AT)
    assert isinstance(refused.value.error, AnswerMismatchError)


@spec("TURN-33")
@pytest.mark.parametrize("choice", [Choice.RESPOND, Choice.HAPPENED, Choice.RERUN, Choice.SKIP])
def test_a_question_accepts_only_its_own_kinds_of_answers(choice: Choice) -> None:
    with pytest.raises(Refused) as refused:
        decide(state_after(sends(), asks(needs_approval("a"))), responses("a", choice), epoch=1, at=AT)
    assert isinstance(refused.value.error, AnswerMismatchError)


@spec("TURN-33")
@pytest.mark.parametrize("choice", Choice)
def test_a_question_is_answered_once(choice: Choice) -> None:
    state = state_after(sends(), asks(needs_approval("a")), responses("a", Choice.ALLOW))
    with pytest.raises(Refused) as refused:
        decide(state, responses("a", choice), epoch=1, at=AT)
    assert isinstance(refused.value.error, QuestionClosedError)


@spec("TURN-33")
@pytest.mark.parametrize(
    "state", [Idle(), state_after(sends()), state_after(sends(), asks(writes("a")), Cancel())], ids=repr
)
def test_an_answer_without_a_question_is_refused(state: TurnState) -> None:
    with pytest.raises(Refused) as refused:
        decide(state, responses("a", Choice.ALLOW), epoch=1, at=AT)
    assert isinstance(refused.value.error, QuestionClosedError)


@spec("TURN-34")
def test_a_question_expires_where_it_has_a_limit() -> None:
    state = state_after(sends(), asks(needs_approval("a", answer_s=60.0)))
    assert pending_work(state) == (AwaitPerson(CallRef(1, 1, "a"), AT + 60.0),)
    assert decide(state, QuestionExpired(CallRef(1, 1, "a")), epoch=1, at=AT + 59.0) == ()
    records = decide(state, QuestionExpired(CallRef(1, 1, "a")), epoch=1, at=AT + 60.0)
    assert records[0] == CallEnded(1, 1, ToolResult("a", NO_DECISION_CONTENT, Outcome.CANCELLED), AT + 60.0)


@spec("TURN-35")
def test_a_wait_for_a_person_survives_nodes_and_days() -> None:
    state = _found_by_the_next_node(needs_approval("a"), at=AT + 100 * LOOK_BACK_S)
    _, state = apply_command(state, responses("a", Choice.ALLOW), epoch=2)
    assert pending_work(state) == (RunCall(CallRef(1, 1, "a"), 1),)


@spec("TURN-35")
def test_a_permission_is_used_up_by_the_start() -> None:
    state = state_after(sends(), asks(needs_approval("a", OnDoubt.RERUN)), responses("a", Choice.ALLOW))
    state = after(state, EpochStarted(2, "next", AT), epoch=2)
    records, state = apply_command(state, Recover(), epoch=2)
    assert records == (
        CallInDoubt(1, 1, "a", AT),
        QuestionAsked(1, 1, "a", QuestionKind.DOUBT, DIGEST, AT, "Sure?"),
    )
    assert pending_work(state) == ()


@spec("TURN-8", "TURN-32")
def test_a_cancel_closes_calls_that_wait_for_a_person() -> None:
    records, state = apply_command(state_after(sends(), asks(needs_approval("a"))), Cancel())
    assert CallEnded(1, 1, ToolResult("a", NOT_STARTED_CONTENT, Outcome.CANCELLED), AT) in records
    assert state == Idle()


# --- questions --------------------------------------------------------------------------------------------------


@spec("TURN-32")
def test_a_text_answers_a_question() -> None:
    records, state = apply_command(state_after(sends()), asks(at_person("a"), reads("b")))
    assert QuestionAsked(1, 1, "a", QuestionKind.QUESTION, DIGEST, AT, "Which one?") in records
    assert pending_work(state) == (RunCall(CallRef(1, 1, "b"), 1),)
    records, _ = apply_command(state, responses("a", Choice.RESPOND, "the blue one"))
    assert records[1] == CallEnded(1, 1, ToolResult("a", "the blue one"), AT)


@spec("TURN-34")
def test_an_unanswered_question_is_closed() -> None:
    state = state_after(sends(), asks(at_person("a", answer_s=60.0)))
    records = decide(state, QuestionExpired(CallRef(1, 1, "a")), epoch=1, at=AT + 60.0)
    assert records[0] == CallEnded(1, 1, ToolResult("a", NO_RESPONSE_CONTENT, Outcome.CANCELLED), AT + 60.0)


# --- in doubt ---------------------------------------------------------------------------------------------------


@spec("TURN-36")
@pytest.mark.parametrize(
    ("choice", "text", "result"),
    [
        (Choice.HAPPENED, "", ToolResult("a", HAPPENED_CONTENT)),
        (Choice.HAPPENED, "sent at noon", ToolResult("a", "sent at noon")),
        (Choice.SKIP, "", unknown("a", SKIPPED_CONTENT)),
    ],
)
def test_a_held_call_gets_the_outcome_that_a_person_states(
    choice: Choice, text: str, result: ToolResult
) -> None:
    state = _found_by_the_next_node(writes("a", OnDoubt.HOLD))
    records, state = apply_command(state, responses("a", choice, text), epoch=2)
    assert CallEnded(1, 1, result, AT) in records
    assert pending_work(state) == (CallModel(AttemptRef(1, 2, 1)),)


@spec("TURN-36")
def test_a_held_call_runs_again_where_a_person_permits_it() -> None:
    state = _found_by_the_next_node(writes("a", OnDoubt.HOLD), writes("b"))
    assert pending_work(state) == ()
    _, state = apply_command(state, responses("a", Choice.RERUN), epoch=2)
    assert pending_work(state) == (RunCall(CallRef(1, 1, "a"), 2),)


@spec("TURN-37")
def test_a_call_in_doubt_is_probed_and_gets_the_found_outcome() -> None:
    state = _found_by_the_next_node(writes("a", OnDoubt.PROBE), writes("b"))
    assert pending_work(state) == (ProbeCall(CallRef(1, 1, "a")),)
    _, state = apply_command(state, CallProbed(CallRef(1, 1, "a"), ToolResult("a", "sent")), epoch=2)
    assert pending_work(state) == (RunCall(CallRef(1, 1, "b"), 1),)


@spec("TURN-37")
def test_a_call_that_did_not_happen_runs_again_a_bounded_number_of_times() -> None:
    state = _found_by_the_next_node(writes("a", OnDoubt.PROBE))
    for run in range(2, RERUNS_MAX + 2):
        _, state = apply_command(state, CallProbed(CallRef(1, 1, "a"), may_run=True), epoch=run)
        assert pending_work(state) == (RunCall(CallRef(1, 1, "a"), run),)
        state = after(state, EpochStarted(run + 1, "next", AT), epoch=run + 1)
        _, state = apply_command(state, Recover(), epoch=run + 1)
    records, _ = apply_command(state, CallProbed(CallRef(1, 1, "a"), may_run=True), epoch=9)
    assert CallEnded(1, 1, unknown("a", UNKNOWN_CONTENT), AT) in records


@spec("TURN-37")
def test_the_outcome_is_unknown_where_a_probe_cannot_find_it() -> None:
    state = _found_by_the_next_node(writes("a", OnDoubt.PROBE))
    records, _ = apply_command(state, CallProbed(CallRef(1, 1, "a")), epoch=2)
    assert CallEnded(1, 1, unknown("a", UNKNOWN_CONTENT), AT) in records


@spec("TURN-37", "TURN-17")
def test_a_node_that_dies_while_probing_leaves_the_probe_to_the_next() -> None:
    state = _found_by_the_next_node(writes("a", OnDoubt.PROBE))
    state = after(state, EpochStarted(3, "third", AT), epoch=3)
    records, state = apply_command(state, Recover(), epoch=3)
    assert records == ()
    assert pending_work(state) == (ProbeCall(CallRef(1, 1, "a")),)


@spec("TURN-37", "TURN-35")
def test_a_call_with_approval_that_did_not_happen_needs_a_new_approval() -> None:
    state = state_after(sends(), asks(needs_approval("a", OnDoubt.PROBE)), responses("a", Choice.ALLOW))
    state = after(state, EpochStarted(2, "next", AT), epoch=2)
    _, state = apply_command(state, Recover(), epoch=2)
    records, state = apply_command(state, CallProbed(CallRef(1, 1, "a"), may_run=True), epoch=2)
    assert records == (QuestionAsked(1, 1, "a", QuestionKind.APPROVAL, DIGEST, AT, "Sure?"),)
    records, state = apply_command(state, responses("a", Choice.ALLOW, arguments='{"x": 1}'), epoch=2)
    assert records[-1] == CallStarted(1, 1, "a", 2, AT, arguments='{"x": 1}')


@spec("TURN-9", "TURN-37")
@pytest.mark.parametrize("plan", [writes("a"), writes("a", OnDoubt.HOLD)], ids=["unknown", "hold"])
def test_the_result_of_a_probe_of_another_call_changes_nothing(plan: CallPlan) -> None:
    assert (
        decide(state_after(sends(), asks(plan)), CallProbed(CallRef(1, 1, "a"), may_run=True), epoch=1, at=AT)
        == ()
    )
    state = _found_by_the_next_node(plan)
    assert decide(state, CallProbed(CallRef(1, 1, "a"), may_run=True), epoch=2, at=AT) == ()


@spec("TURN-36")
def test_a_cancel_leaves_a_call_in_doubt_unknown() -> None:
    state = _found_by_the_next_node(writes("a", OnDoubt.HOLD))
    records, state = apply_command(state, Cancel(), epoch=2)
    assert records == (
        CancelRequested(1, AT, AT + 5.0),
        CallEnded(1, 1, unknown("a", UNKNOWN_CONTENT), AT),
        StepCommitted(1, 1),
        TurnEnded(1, TurnStatus.CANCELLED, AT),
    )
    assert state == Idle()


@spec("TURN-13")
def test_a_call_in_the_transaction_of_its_outcome_runs_again() -> None:
    state = _found_by_the_next_node(writes("a", OnDoubt.IN_TRANSACTION))
    assert pending_work(state) == (RunCall(CallRef(1, 1, "a"), 2),)


# --- progress ---------------------------------------------------------------------------------------------------


@spec("TURN-38")
def test_a_running_tool_reports_its_progress() -> None:
    state = state_after(sends(), asks(writes("a"), writes("b")))
    records, after_it = apply_command(state, CallProgress(CallRef(1, 1, "a"), 1, "half way"))
    assert records == (CallProgressed(1, 1, "a", 1, "half way", AT),)
    assert after_it == state
    assert decide(state, CallProgress(CallRef(1, 1, "b"), 1, "not started"), epoch=1, at=AT) == ()


@spec("TURN-6")
def test_the_last_outcome_of_people_and_tools_commits_the_step() -> None:
    state = state_after(sends(), asks(at_person("a"), reads("b")), ended("b"))
    records, _ = apply_command(state, responses("a", Choice.RESPOND, "yes"))
    assert records[-2:] == (StepCommitted(1, 1), AttemptStarted(1, 2, 1, AT))


# --- unreadable outcomes
# ------------------------------------------------------------------------------------------


def _lost(plan: CallPlan, *, at: float = AT) -> TurnState:
    """Run two calls, lose the outcome of the first, and let another node recover."""
    began = state_after(sends(), asks(plan, reads("b")))
    state = after(began, OutcomeDamaged(1, 1, plan.call_id), EpochStarted(2, "next", AT), epoch=2)
    return apply_command(state, Recover(), epoch=2, at=at)[1]


@spec("TURN-72")
@pytest.mark.parametrize(
    ("on_doubt", "site", "content"),
    [
        (OnDoubt.UNKNOWN, Site.SERVER, DAMAGED_CONTENT),
        (OnDoubt.IN_TRANSACTION, Site.SERVER, DAMAGED_CONTENT),
        (OnDoubt.RERUN, Site.CLIENT, DAMAGED_CONTENT),
        (OnDoubt.RERUN, Site.SERVER, None),
    ],
)
def test_a_call_with_a_lost_outcome_is_in_doubt_and_does_not_run_again_if_it_surely_happened(
    on_doubt: OnDoubt, site: Site, content: str | None
) -> None:
    state = _lost(CallPlan("a", DIGEST, site, has_effects=False, on_doubt=on_doubt))
    assert isinstance(state, RunningCalls)
    first, second = state.calls
    if content is None:
        assert (first.result, first.runs, first.is_outcome_lost) == (None, 2, False)
    else:
        assert first.result == ToolResult("a", content, Outcome.UNKNOWN)
    assert second.runs == 2


@spec("TURN-72")
def test_a_lost_outcome_of_a_committed_step_leaves_the_history_complete() -> None:
    began = state_after(sends(), asks(reads("a"), reads("b")))
    lost = after(began, OutcomeDamaged(1, 1, "a"), CallEnded(1, 1, ToolResult("b", "it says"), AT))
    step = step_of(lost)
    assert step is not None
    assert step.results == (ToolResult("a", DAMAGED_CONTENT, Outcome.UNKNOWN), ToolResult("b", "it says"))


@spec("TURN-72")
@pytest.mark.parametrize("place", [(1, 2), (2, 1)])
def test_a_lost_outcome_of_another_batch_does_not_affect_this_one(place: tuple[int, int]) -> None:
    began = state_after(sends(), asks(reads("a")))
    assert after(began, OutcomeDamaged(*place, "a")) == began


@spec("TURN-67")
def test_a_start_in_a_transaction_need_not_be_synced_first() -> None:
    plan = CallPlan("a", DIGEST, on_doubt=OnDoubt.IN_TRANSACTION)
    records, _ = apply_command(state_after(sends()), asks(plan))
    assert CallStarted(1, 1, "a", 1, AT, has_effects=False) in records
    assert sync_of(records) is Sync.NORMAL
    records, _ = apply_command(state_after(sends()), asks(writes("a")))
    assert sync_of(records) is Sync.FULL


@spec("TURN-18")
@pytest.mark.parametrize(("limit_h", "goes_on"), [(24.0, True), (3.0, False), (0.0, False)])
def test_a_call_at_a_client_keeps_an_old_turn_open_within_its_limit(limit_h: float, *, goes_on: bool) -> None:
    state = state_after(sends(), asks(at_client("a", timeout_s=3600 * limit_h)))
    records, after = apply_command(state, Recover(), epoch=2, at=AT + 4 * 3600)
    assert (records == (), isinstance(after, RunningCalls)) == (goes_on, goes_on)
