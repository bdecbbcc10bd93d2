"""Tools at the client: run once, whatever dies, and judged by the client's own journal."""

from __future__ import annotations

import pytest

from midstream.client.checkpoint_file import CallAnswered, CallAsked, CallIntended, CallNoted, KeptCall
from midstream.client.local_tools import (
    ALLOWED_ONCE_CONTENT,
    RESULT_BYTES_MAX,
    LocalTools,
    StartLocally,
    declare,
    refuse_foreign,
)
from midstream.errors import ToolDefinitionError
from midstream.history.messages import Finish, Outcome, Response, ToolCall, ToolResult
from midstream.protocol.frames import ResultPayload, encode
from midstream.session.calls import UNKNOWN_CONTENT, CallPlan, CallState, OnDoubt, Site
from midstream.session.records import CallEnded, CallStarted, ResponseCompleted
from midstream.session.rerun_policy import RERUNS_MAX
from midstream.tools.function_tools import (
    DidNotHappen,
    Happened,
    Probed,
    by_name,
    current_call,
    question,
    tool,
)
from tests.spec import spec

CALL = ToolCall("c1", "look", '{"path":"a"}')
PLAN = CallPlan("c1", "digest", Site.CLIENT)
STARTED = CallStarted(1, 1, "c1", 1, 0.0)
PLACE = (1, 1, "c1")


@tool
def look(path: str) -> str:
    """Look."""
    return f"{path}: {current_call().effect_key}"


def test_a_call_is_stored_then_requested_then_run() -> None:
    tools = _tools()
    tools.take(_response())
    assert (tools.writes(), tools.to_start()) == ([CallNoted(1, 1, CALL, PLAN)], [])
    tools.take(STARTED)
    assert tools.writes() == [CallAsked(*PLACE), CallIntended(*PLACE, 1, 7)]
    assert tools.to_start() == [StartLocally(PLACE, CALL, 1)]


@spec("STREAM-18")
def test_an_outcome_is_stored_and_sent_once() -> None:
    tools = _started()
    result = ToolResult("c1", "found")
    tools.note_end(PLACE, result)
    tools.note_end(PLACE, ToolResult("c1", "found again"))
    tools.take(STARTED)
    assert tools.writes() == [CallAnswered(1, 1, result), CallAsked(*PLACE)]
    assert tools.answers() == [ResultPayload(1, 1, result)]
    assert tools.to_start() == []


def test_replayed_events_start_nothing_again() -> None:
    tools = _started()
    tools.take(_response())
    tools.take(STARTED)
    assert (tools.writes(), tools.to_start()) == ([CallAsked(*PLACE)], [])


@pytest.mark.parametrize(
    "plan",
    [CallPlan("c1", "digest", Site.SERVER), CallPlan("c1", "digest", Site.CLIENT, problem="bad arguments")],
)
def test_calls_of_others_and_invalid_ones_are_ignored(plan: CallPlan) -> None:
    tools = _tools()
    tools.take(_response(plan))
    tools.take(STARTED)
    assert (tools.writes(), tools.to_start()) == ([], [])


@spec("STREAM-18")
@pytest.mark.parametrize("on_doubt", [OnDoubt.RERUN, OnDoubt.RERUN_WITH_KEY])
def test_a_call_in_doubt_runs_again_if_its_tool_allows(on_doubt: OnDoubt) -> None:
    tools = _tools(_stored_call(on_doubt, runs=1))
    assert tools.writes() == [CallIntended(*PLACE, 2, 7)]
    assert tools.to_start() == [StartLocally(PLACE, CALL, 2)]


@spec("STREAM-18")
@pytest.mark.parametrize(
    ("on_doubt", "runs"), [(OnDoubt.UNKNOWN, 1), (OnDoubt.RERUN, RERUNS_MAX + 1), (OnDoubt.UNKNOWN, 9)]
)
def test_a_call_in_doubt_that_may_not_run_again_is_answered_as_unknown(on_doubt: OnDoubt, runs: int) -> None:
    tools = _tools(_stored_call(on_doubt, runs=runs))
    unknown = ToolResult("c1", UNKNOWN_CONTENT, Outcome.UNKNOWN)
    assert tools.writes() == [CallAnswered(1, 1, unknown)]
    assert (tools.answers(), tools.to_start()) == ([ResultPayload(1, 1, unknown)], [])


def test_a_requested_call_that_never_started_starts() -> None:
    tools = _tools(_stored_call(OnDoubt.UNKNOWN, runs=0))
    assert tools.to_start() == [StartLocally(PLACE, CALL, 1)]


def test_an_unrequested_call_waits() -> None:
    tools = _tools(KeptCall(1, 1, CallState(CALL, PLAN), is_asked=False))
    assert (tools.writes(), tools.to_start()) == ([], [])
    tools.take(STARTED)
    assert tools.to_start() == [StartLocally(PLACE, CALL, 1)]


def test_a_call_with_an_outcome_is_not_run() -> None:
    kept = KeptCall(1, 1, CallState(CALL, PLAN, runs=1, epoch=3, result=ToolResult("c1", "x")), is_asked=True)
    tools = _tools(kept)
    tools.take(STARTED)
    assert (tools.writes(), tools.answers(), tools.to_start()) == ([CallAsked(*PLACE)], [], [])


def test_another_call_in_the_same_place_is_another_call() -> None:
    tools = _started()
    tools.note_end(PLACE, ToolResult("c1", "of the first"))
    tools.writes()
    other = CallPlan("c1", "another digest", Site.CLIENT)
    tools.take(_response(other))
    tools.take(STARTED)
    assert tools.writes() == [CallNoted(1, 1, CALL, other), CallAsked(*PLACE), CallIntended(*PLACE, 1, 7)]
    assert tools.to_start() == [StartLocally(PLACE, CALL, 1)]


def test_an_outcome_from_the_server_ends_a_running_call() -> None:
    tools = _started()
    tools.take(CallEnded(1, 1, ToolResult("c1", "too late", Outcome.UNKNOWN), 0.0))
    assert tools.to_stop() == [PLACE]
    tools.note_end(PLACE, ToolResult("c1", "found"))
    assert (tools.answers(), tools.writes()) == ([], [])


async def test_a_tool_receives_the_identity_of_its_call() -> None:
    tools = _started()
    result = await tools.run(StartLocally(PLACE, CALL, 1))
    assert result == ToolResult("c1", "a: s1/1/1/c1")


async def test_a_missing_tool_is_reported_to_the_model() -> None:
    result = await _tools().run(StartLocally(PLACE, ToolCall("c1", "gone"), 1))
    assert result is not None
    assert (result.outcome, "no tool named 'gone'" in result.content) == (Outcome.ERROR, True)


@pytest.mark.parametrize("letter", ["x", "\0", "\U0001f600"])
def test_a_result_is_cut_to_fit_its_frame(letter: str) -> None:
    tools = _started()
    content = letter * 2_000_000
    tools.note_end(PLACE, ToolResult("c1", content))
    (answer,) = tools.answers()
    kept, _, mark = answer.result.content.rpartition("\n")
    assert len(encode(answer)) <= RESULT_BYTES_MAX
    assert content.startswith(kept)
    assert mark == f"[+{len(content) - len(kept)} characters]"
    assert tools.writes() == [CallAnswered(1, 1, answer.result)]


EDITED = CallStarted(1, 1, "c1", 1, 0.0, arguments='{"path":"b"}')


@spec("TURN-33")
def test_a_call_runs_with_the_edited_arguments_in_this_process_and_the_next() -> None:
    tools = _tools()
    tools.take(_response())
    tools.writes()
    tools.take(EDITED)
    edited = ToolCall("c1", "look", '{"path":"b"}')
    assert tools.writes() == [CallNoted(1, 1, edited, PLAN), CallAsked(*PLACE), CallIntended(*PLACE, 1, 7)]
    assert tools.to_start() == [StartLocally(PLACE, edited, 1)]
    for again in (_response(), EDITED):  # replayed events
        tools.take(again)
    assert (tools.writes(), tools.to_start()) == ([CallAsked(*PLACE)], [])

    kept = KeptCall(1, 1, CallState(edited, PLAN), is_asked=True)
    later = _tools(kept)
    later.take(_response())
    assert later.to_start() == [StartLocally(PLACE, edited, 1)]


@pytest.mark.parametrize(
    ("outcome", "content", "runs"),
    [(Happened("a: seen"), "a: seen", 0), (DidNotHappen(), "a: s1/1/1/c1", 1), (None, UNKNOWN_CONTENT, 0)],
)
@spec("TURN-37", "STREAM-18")
async def test_a_call_in_doubt_with_a_probe_is_probed(outcome: Probed, content: str, runs: int) -> None:
    @tool(name="look", probe=lambda path: outcome)
    def probe_path(path: str) -> str:
        """Look."""
        return look.function(path)  # type: ignore[no-any-return] # it is the function above

    tools = LocalTools("s1", by_name([probe_path]), epoch=7, kept=[_stored_call(OnDoubt.PROBE, runs=1)])
    (probe,) = tools.to_start()
    assert probe == StartLocally(PLACE, CALL, 1, is_probe=True)
    tools.note_end(PLACE, await tools.run(probe))
    again = tools.to_start()
    assert len(again) == runs
    for start in again:
        assert tools.writes() == [CallIntended(*PLACE, 2, 7)]
        tools.note_end(PLACE, await tools.run(start))
    assert [answer.result.content for answer in tools.answers()] == [content]


@spec("TURN-35")
def test_a_call_that_did_not_happen_needs_a_new_approval_to_run() -> None:
    plan = CallPlan("c1", "digest", Site.CLIENT, on_doubt=OnDoubt.PROBE, needs_approval=True)
    tools = _tools(KeptCall(1, 1, CallState(CALL, plan, runs=1, epoch=3), is_asked=True))
    assert [start.is_probe for start in tools.to_start()] == [True]
    tools.note_end(PLACE, None)
    assert tools.to_start() == []
    assert [answer.result for answer in tools.answers()] == [
        ToolResult("c1", ALLOWED_ONCE_CONTENT, Outcome.ERROR)
    ]


async def test_the_reruns_after_probes_are_limited_and_a_missing_probe_means_unknown() -> None:
    tools = _tools(_stored_call(OnDoubt.PROBE, runs=RERUNS_MAX + 1))
    tools.note_end(PLACE, None)
    assert [answer.result.outcome for answer in tools.answers()] == [Outcome.UNKNOWN]
    gone = LocalTools("s1", {}, epoch=7, kept=[_stored_call(OnDoubt.PROBE, runs=1)])
    (probe,) = gone.to_start()
    assert await gone.run(probe) == ToolResult("c1", UNKNOWN_CONTENT, Outcome.UNKNOWN)


@pytest.mark.parametrize(
    "plan",
    [
        CallPlan("c1", "digest", Site.CLIENT, on_doubt=OnDoubt.HOLD),
        CallPlan("c1", "digest", Site.CLIENT, on_doubt=OnDoubt.RERUN, needs_approval=True),
    ],
)
def test_a_call_in_doubt_on_hold_for_a_person_is_answered_as_unknown(plan: CallPlan) -> None:
    tools = _tools(KeptCall(1, 1, CallState(CALL, plan, runs=1, epoch=3), is_asked=True))
    assert [answer.result.outcome for answer in tools.answers()] == [Outcome.UNKNOWN]
    assert tools.to_start() == []


def test_a_tool_with_an_approval_rule_needs_approval_for_every_call() -> None:
    sometimes = tool(name="some", needs_approval=lambda path: path == "/")(lambda: None)
    always = tool(name="all", needs_approval=True, answer_s=60.0)(lambda: None)
    assert [offer.needs_approval for offer in declare([look, sometimes, always])] == [False, True, True]
    assert [offer.answer_s for offer in declare([look, always])] == [0.0, 60.0]


def test_a_tool_that_a_person_answers_is_refused() -> None:
    refuse_foreign([look])
    with pytest.raises(ToolDefinitionError):
        refuse_foreign([look, question()])


def test_the_description_of_a_tool_for_the_server() -> None:
    (offer,) = declare([look])
    assert (offer.spec, offer.has_effects, offer.on_doubt, offer.timeout_s) == (
        look.spec,
        True,
        OnDoubt.UNKNOWN,
        look.timeout_s,
    )


def _tools(*kept: KeptCall) -> LocalTools:
    return LocalTools("s1", by_name([look]), epoch=7, kept=kept)


def _started() -> LocalTools:
    tools = _tools()
    tools.take(_response())
    tools.take(STARTED)
    tools.writes()
    assert len(tools.to_start()) == 1
    return tools


def _response(plan: CallPlan = PLAN) -> ResponseCompleted:
    return ResponseCompleted(1, 1, 1, Response((CALL,), Finish.CALLS), 0.0, (plan,))


def _stored_call(on_doubt: OnDoubt, *, runs: int) -> KeptCall:
    plan = CallPlan("c1", "digest", Site.CLIENT, on_doubt=on_doubt)
    return KeptCall(1, 1, CallState(CALL, plan, runs=runs, epoch=3), is_asked=True)


@spec("TURN-67")
def test_a_tool_that_uses_the_stores_transaction_cannot_be_a_clients() -> None:
    @tool(on_doubt="in_transaction")
    def note() -> str:
        return ""

    with pytest.raises(ToolDefinitionError, match="note"):
        refuse_foreign([note])
