"""Rules for running the calls of a batch."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from midstream.history.messages import Outcome, ToolCall, ToolResult
from midstream.session.calls import (
    NOT_STARTED_CONTENT,
    STOPPED_CONTENT,
    CallPlan,
    CallState,
    closing_result,
    digest_of,
    startable,
)
from tests.session.turn_stories import at_client, reads, writes
from tests.spec import spec

DONE = ToolResult("a", "done")


def _call(plan: CallPlan, *, runs: int = 0, epoch: int = 0, result: ToolResult | None = None) -> CallState:
    return CallState(ToolCall(plan.call_id, "work"), plan, runs=runs, epoch=epoch, result=result)


plans = st.lists(st.sampled_from([reads, writes, at_client]), min_size=1, max_size=6).map(
    lambda makers: [make(f"c{number}") for number, make in enumerate(makers)]
)


@given(plans, st.randoms(use_true_random=False))
@spec("TURN-10")
def test_every_batch_runs_to_its_end_and_calls_with_effects_run_alone(
    batch: list[CallPlan], random: Random
) -> None:
    calls = [_call(plan) for plan in batch]
    for _ in range(2 * len(batch)):
        for ready in startable(calls):
            calls[calls.index(ready)] = _call(ready.plan, runs=1, epoch=1)
        running = [call for call in calls if call.is_running]
        if not running:
            break
        if any(call.plan.has_effects for call in running):
            assert len(running) == 1, "a call with effects runs alone"
            before = calls[: calls.index(running[0])]
            assert [call for call in before if call.is_open] == []
        ends = random.choice(running)
        calls[calls.index(ends)] = _call(ends.plan, runs=1, epoch=1, result=ToolResult(ends.call.id, ""))
    assert [call for call in calls if call.is_open] == []


def test_a_digest_binds_name_and_arguments() -> None:
    digests = {digest_of("ab", "c"), digest_of("a", "bc"), digest_of("abc", ""), digest_of("ab", "c ")}
    assert len(digests) == 4
    assert digest_of("ab", "c") in digests


@spec("TURN-8")
def test_a_closed_call_has_a_truthful_result() -> None:
    assert closing_result(_call(writes("a"))) == ToolResult("a", NOT_STARTED_CONTENT, Outcome.CANCELLED)
    assert closing_result(_call(writes("a"), runs=1)) == ToolResult("a", STOPPED_CONTENT, Outcome.UNKNOWN)
    assert closing_result(_call(writes("a"), runs=1), running="gone") == ToolResult(
        "a", "gone", Outcome.UNKNOWN
    )
    assert closing_result(_call(writes("a"), runs=1, result=DONE)) is DONE
