"""The contract with pydantic-ai: its own agents and models, run, cut and run again inside a turn.

Run against the pinned release by `make test`, against the newest one by `make contract`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent, RunContext, ToolReturn
from pydantic_ai.exceptions import (
    ApprovalRequired,
    ModelHTTPError,
    ModelRetry,
    RunCancelled,
    ToolFailed,
    UsageLimitExceeded,
)
from pydantic_ai.messages import (
    AgentStreamEvent,
    ModelMessage,
    ModelMessagesTypeAdapter,
    ModelRequest,
    ModelResponse,
    PartDeltaEvent,
    PartStartEvent,
    TextPart,
    TextPartDelta,
    ThinkingPart,
    ToolCallPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.tools import DeferredToolRequests, DeferredToolResults
from pydantic_ai.usage import UsageLimits

from midstream.errors import SeqnoReusedError, SessionBusyError, UsageError
from midstream.history.messages import Outcome
from midstream.session.calls import UNKNOWN_CONTENT, OnDoubtName
from midstream.session.records import (
    AttemptFailed,
    AttemptStarted,
    CallEnded,
    CallStarted,
    Delta,
    Record,
    ResponseCompleted,
    TurnEnded,
    TurnStatus,
    decode,
)
from midstream.session.turn_durations import Intervals
from midstream.tools.function_tools import current_call
from tests.frameworks.pydantic_ai_lab import SESSION, STEPS, Lab, answers, call
from tests.spec import spec


class DurationObserver:
    """An observer that computes durations from its records."""

    def __init__(self) -> None:
        self._intervals = Intervals()
        self.ended: list[tuple[str, str, str]] = []

    def on_append(self, session: str, records: Sequence[Record]) -> None:
        for record in records:
            self.ended += [
                (each.kind.value, each.name, each.outcome)
                for each in self._intervals.add(session, record)
                if not each.is_open
            ]


async def test_an_observer_receives_model_calls_tools_and_the_turn() -> None:
    watching = DurationObserver()
    lab = Lab([call("c1")], [TextPart("done")], observers=[watching])
    await lab.run()
    model = ("model", watching.ended[0][1], "ok")
    assert watching.ended == [model, ("call", "act", "ok"), model, ("turn", "", "completed")]


# --- replays of a turn ----------------------------------------------------------------------------------------


@spec("DRIVEN-3")
async def test_a_turn_with_a_key_is_replayed_without_model_and_tools() -> None:
    lab = Lab(*STEPS)
    first = await lab.run(key="k")
    lab.start_process()
    again = await lab.run(key="k")
    assert (first.output, again.output) == ("all done", "all done")
    assert (lab.asked, sorted(lab.ran)) == ([1, 2, 3], ["c1", "p1", "p2", "p3"])
    assert answers(again.all_messages()) == answers(first.all_messages())
    assert again.usage == first.usage
    assert [record.status for record in await lab.kinds(TurnEnded)] == [TurnStatus.COMPLETED]


@spec("DRIVEN-1", "DRIVEN-6")
async def test_a_run_interrupted_in_a_batch_keeps_finished_siblings_and_marks_unknown_ones() -> None:
    lab = Lab(*STEPS)
    lab.hangs_in = "p2"
    await lab.cut()
    result = await lab.run()
    assert result.output == "all done"
    assert (lab.asked, sorted(lab.ran)) == ([1, 2, 3], ["c1", "p1", "p2", "p3"])
    assert answers(result.all_messages()) == {
        "c1": "result of c1",
        "p1": "result of p1",
        "p2": UNKNOWN_CONTENT,
        "p3": "result of p3",
    }
    outcomes = {each.result.call_id: each.result.outcome for each in await lab.kinds(CallEnded)}
    assert outcomes == {"c1": Outcome.OK, "p1": Outcome.OK, "p2": Outcome.UNKNOWN, "p3": Outcome.OK}


@spec("DRIVEN-6")
async def test_an_interrupted_call_is_in_doubt_within_one_process_too() -> None:
    lab = Lab([call("c1")], [TextPart("done")])
    lab.hangs_in = "c1"
    task = asyncio.create_task(lab.run())
    await lab.running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answers((await lab.run()).all_messages()) == {"c1": UNKNOWN_CONTENT}


@pytest.mark.parametrize("policy", ["rerun", "rerun_with_key"])
async def test_a_policy_lets_an_interrupted_call_run_again(policy: OnDoubtName) -> None:
    lab = Lab([call("c1")], [TextPart("done")], on_doubt={"act": policy})
    lab.hangs_in = "c1"
    await lab.cut()
    result = await lab.run()
    assert (lab.ran, answers(result.all_messages())) == (["c1", "c1"], {"c1": "result of c1"})
    assert [record.run for record in await lab.kinds(CallStarted)] == [1, 2]


async def test_a_tool_receives_the_key_of_its_effect() -> None:
    lab = Lab([call("c1", "pay", amount=1)], [TextPart("done")])
    agent = lab.agent()

    @agent.tool_plain
    def pay(amount: int) -> str:
        return current_call().effect_key  # a plain function: it runs in a thread

    assert answers((await lab.run(agent)).all_messages()) == {"c1": "s/1/1/c1"}


async def test_policies_come_from_the_tool_and_from_hints() -> None:
    lab = Lab([call("c1", "own"), call("c2", "hinted"), call("c3", "act")], [TextPart("done")])
    agent = lab.agent()

    @agent.tool_plain(metadata={"midstream": "rerun_with_key"})
    def own(name: str) -> str:
        return name

    @agent.tool_plain(metadata={"annotations": {"readOnlyHint": True}})
    def hinted(name: str) -> str:
        return name

    await lab.run(agent)
    (plans,) = [record.plans for record in await lab.kinds(ResponseCompleted) if record.plans]
    assert [(plan.on_doubt.value, plan.has_effects) for plan in plans] == [
        ("rerun_with_key", True),
        ("rerun", False),
        ("unknown", True),
    ]


# --- failures -------------------------------------------------------------------------------------------------


@spec("DRIVEN-4")
async def test_a_failed_model_call_leaves_the_turn_open() -> None:
    lab = Lab([call("c1")], [TextPart("done")])
    agent = lab.agent()
    lab.responses = ([call("c1")],)
    with pytest.raises(IndexError):
        await lab.run(agent)
    lab.responses = ([call("c1")], [TextPart("done")])
    lab.model_error = ModelHTTPError(503, "model")
    with pytest.raises(ModelHTTPError):
        await lab.run(agent)
    assert (await lab.run(agent)).output == "done"
    assert lab.ran == ["c1"]
    assert [record.message for record in await lab.kinds(AttemptFailed)] == [
        "IndexError",
        "ModelHTTPError (503)",
    ]


async def test_an_exception_of_a_tool_ends_the_run_once_and_the_model_receives_it_afterwards() -> None:
    lab = Lab([call("c1", "fail")], [TextPart("done")])
    agent = lab.agent()

    @agent.tool_plain
    def fail(name: str) -> str:
        lab.ran.append(name)
        raise RuntimeError("no paper")

    with pytest.raises(RuntimeError, match="no paper"):
        await lab.run(agent)
    result = await lab.run(agent)
    assert (lab.ran, answers(result.all_messages())) == (["c1"], {"c1": "RuntimeError: no paper"})


async def test_a_retry_requested_by_a_tool_is_one_call_of_each_response() -> None:
    lab = Lab([call("c1", "picky")], [call("c2", "picky")], [TextPart("done")])
    agent = lab.agent()

    @agent.tool_plain
    def picky(name: str) -> str:
        lab.ran.append(name)
        if name == "c1":
            raise ModelRetry("another name, please")
        return name

    first = await lab.run(agent, key="k")
    again = await lab.run(agent, key="k")
    assert (lab.ran, lab.asked) == (["c1", "c2"], [1, 2, 3])
    kinds = [[part.part_kind for part in each.parts] for each in again.all_messages()]
    assert kinds == [[part.part_kind for part in each.parts] for each in first.all_messages()]


async def test_invalid_arguments_and_unknown_tools_have_recorded_outcomes() -> None:
    lab = Lab([call("c1", "act", nom=1), call("c2", "nowhere")], [TextPart("done")])
    await lab.run(key="k")
    outcomes = {each.result.call_id: each.result.outcome for each in await lab.kinds(CallEnded)}
    assert outcomes == {"c1": Outcome.ERROR, "c2": Outcome.ERROR}
    assert (await lab.run(key="k")).output == "done"
    assert lab.asked == [1, 2]


@spec("DRIVEN-4")
async def test_a_text_rejected_by_the_output_check_does_not_end_the_turn() -> None:
    lab = Lab([TextPart("bad")], [TextPart("good")])
    agent = lab.agent()

    @agent.output_validator
    def check(text: str) -> str:
        if text == "bad":
            raise ModelRetry("not this one")
        return text

    assert (await lab.run(agent, key="k")).output == "good"
    assert (await lab.run(agent, key="k")).output == "good"
    assert lab.asked == [1, 2]


@spec("DRIVEN-5")
async def test_an_output_tool_has_a_result_and_ends_the_turn() -> None:
    class City(BaseModel):
        name: str

    lab = Lab([call("c1")], [ToolCallPart("final_result", {"name": "Oslo"}, "out")])
    agent = lab.agent(output_type=City)
    assert (await lab.run(agent, key="k")).output == City(name="Oslo")
    assert (await lab.run(agent, key="k")).output == City(name="Oslo")
    ended = await lab.kinds(CallEnded)
    assert [(each.result.call_id, each.result.outcome) for each in ended] == [
        ("c1", Outcome.OK),
        ("out", Outcome.OK),
    ]
    assert len(await lab.kinds(TurnEnded)) == 1


async def test_a_usage_limit_leaves_the_turn_open_for_a_higher_one() -> None:
    lab = Lab(*STEPS)
    with pytest.raises(UsageLimitExceeded):
        await lab.run(usage_limits=UsageLimits(request_limit=2))
    assert (await lab.run()).output == "all done"
    assert (lab.asked, len(lab.ran)) == ([1, 2, 3], 4)


async def test_a_run_that_cancels_itself_ends_its_turn() -> None:
    lab = Lab([call("c1", "stop")], [TextPart("done")])
    agent = lab.agent()

    @agent.tool
    async def stop(ctx: RunContext[None], name: str) -> str:
        ctx.cancel()
        await asyncio.Event().wait()
        return name

    with pytest.raises(RunCancelled):
        await lab.run(agent)
    assert [record.status for record in await lab.kinds(TurnEnded)] == [TurnStatus.CANCELLED]
    assert [each.result.outcome for each in await lab.kinds(CallEnded)] == [Outcome.UNKNOWN]


# --- values ---------------------------------------------------------------------------------------------------


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("value", "comes_back"),
    [
        ("5", "5"),
        (5, 5),
        ({"a": [1, None]}, {"a": [1, None]}),
        (Point(3), {"x": 3}),
        (None, None),
        ("half an emoji \ud83d", "half an emoji \ud83d"),
        (
            BinaryContent(b"\x00\xff", media_type="image/png"),
            BinaryContent(b"\x00\xff", media_type="image/png"),
        ),
    ],
)
async def test_a_tools_return_value_is_restored(value: Any, comes_back: Any) -> None:
    lab = Lab([call("c1", "give")], [TextPart("done")])
    agent = lab.agent()

    @agent.tool_plain
    def give(name: str) -> Any:
        return value

    with contextlib.suppress(UnicodeError):
        await lab.run(agent, key="k")
    again = await lab.run(agent, key="k")
    found = answers(again.all_messages())["c1"]
    if isinstance(value, str) and "\ud83d" in value:
        # It has no JSON form: the loss is recorded, and the tool does not run again.
        assert "lost" in found
    else:
        assert getattr(found, "data", found) == getattr(comes_back, "data", comes_back)


async def test_extra_content_and_metadata_of_a_return_are_restored() -> None:
    lab = Lab([call("c1", "give")], [TextPart("done")])
    agent = lab.agent()

    @agent.tool_plain
    def give(name: str) -> ToolReturn:
        return ToolReturn("short", content=["a long story"], metadata={"rows": 3})

    first = await lab.run(agent, key="k")
    again = await lab.run(agent, key="k")
    found = [
        ModelMessagesTypeAdapter.dump_python([each], mode="json")[0]["parts"] for each in first.all_messages()
    ]
    retold = [
        ModelMessagesTypeAdapter.dump_python([each], mode="json")[0]["parts"] for each in again.all_messages()
    ]
    for parts in (*found, *retold):
        for part in parts:
            part.pop("timestamp", None)
    assert retold == found


async def test_a_failed_tool_stays_failed() -> None:
    lab = Lab([call("c1", "fail")], [TextPart("done")])
    agent = lab.agent()

    @agent.tool_plain
    def fail(name: str) -> str:
        lab.ran.append(name)
        raise ToolFailed("there is no such city")

    await lab.run(agent, key="k")
    assert answers((await lab.run(agent, key="k")).all_messages()) == {"c1": "there is no such city"}
    assert lab.ran == ["c1"]


async def test_a_response_is_restored_byte_for_byte() -> None:
    thought = ThinkingPart("hm", signature="sig==", provider_name="p", provider_details={"k": [1]})
    lab = Lab([thought, TextPart("so", id="t1"), call("c1")], [TextPart("done")])
    first = await lab.run(key="k")
    again = await lab.run(key="k")

    def responses(messages: Sequence[ModelMessage]) -> list[Any]:
        dumped = ModelMessagesTypeAdapter.dump_python(list(messages), mode="json")
        return [
            {**each, "run_id": "", "conversation_id": ""} for each in dumped if each["kind"] == "response"
        ]

    assert responses(again.all_messages()) == responses(first.all_messages())


async def test_calls_with_the_same_id_are_separate_calls() -> None:
    lab = Lab(
        [ToolCallPart("act", {"name": "a"}, "x"), ToolCallPart("act", {"name": "b"}, "x")], [TextPart("done")]
    )
    agent = lab.agent()
    with contextlib.suppress(Exception):  # releases send it different texts
        await lab.run(agent, key="k")
    assert sorted(lab.ran) in ([], ["a", "b"])


# --- streams --------------------------------------------------------------------------------------------------


async def test_text_is_yielded_and_journaled_while_the_model_still_streams() -> None:
    lab = Lab()
    may_continue = asyncio.Event()

    async def stream_text(messages: list[ModelMessage], _info: AgentInfo) -> AsyncIterator[str]:
        yield "one "
        await may_continue.wait()
        yield "two"

    agent: Agent[None, str] = Agent(
        FunctionModel(stream_function=stream_text), deps_type=type(None), capabilities=[lab.durable]
    )
    async with asyncio.timeout(60), lab.durable.turn(SESSION), agent.run_stream("go") as streamed:
        words = streamed.stream_text(delta=True, debounce_by=None)
        assert await anext(words) == "one "
        async for stored in lab.durable.follow(SESSION):
            if isinstance(record := decode(stored.body), Delta):
                assert record.text == "one "
                break
        may_continue.set()
        assert [word async for word in words] == ["two"]
    assert [record.body.text for record in await lab.kinds(ResponseCompleted)] == ["one two"]
    assert len(await lab.kinds(TurnEnded)) == 1


async def test_a_character_cut_between_two_pieces_is_journaled_whole() -> None:
    lab = Lab()

    async def stream_text(messages: list[ModelMessage], _info: AgentInfo) -> AsyncIterator[str]:
        for piece in ("a \ud83d", "\ude00", " b \ud83d"):
            yield piece

    agent: Agent[None, str] = Agent(
        FunctionModel(stream_function=stream_text), deps_type=type(None), capabilities=[lab.durable]
    )
    async with asyncio.timeout(60), lab.durable.turn(SESSION), agent.run_stream("go") as streamed:
        assert [word async for word in streamed.stream_text(delta=True, debounce_by=None)]
    words = [record.text for record in await lab.kinds(Delta)]
    assert "".join(words) == "a \U0001f600 b \ufffd"


async def test_a_stream_that_broke_off_is_requested_again_as_the_next_attempt() -> None:
    lab = Lab()
    faults = [ModelHTTPError(500, "model")]

    async def stream_text(messages: list[ModelMessage], _info: AgentInfo) -> AsyncIterator[str]:
        yield "one "
        if faults:
            raise faults.pop()
        yield "two"

    agent: Agent[None, str] = Agent(
        FunctionModel(stream_function=stream_text), deps_type=type(None), capabilities=[lab.durable]
    )

    async def listen() -> str:
        async with lab.durable.turn(SESSION), agent.run_stream("go") as streamed:
            return await streamed.get_output()

    with pytest.raises(ModelHTTPError):
        await listen()
    assert await listen() == "one two"
    assert [record.attempt for record in await lab.kinds(AttemptStarted)] == [1, 2]


async def test_an_event_handler_receives_recorded_responses_too() -> None:
    lab = Lab([TextPart("let me see"), call("c1")], [TextPart("all done")])
    received: list[str] = []

    async def handler(_ctx: RunContext[None], events: Any) -> None:
        event: AgentStreamEvent
        async for event in events:
            if isinstance(event, PartStartEvent) and isinstance(event.part, TextPart):
                received.append(event.part.content)
            elif isinstance(event, PartDeltaEvent) and isinstance(event.delta, TextPartDelta):
                received.append(event.delta.content_delta)

    await lab.run(key="k", event_stream_handler=handler)
    assert "".join(received).split() == ["let", "me", "see", "all", "done"]
    received.clear()
    await lab.run(key="k", event_stream_handler=handler)
    assert "".join(received).split() == ["let", "me", "see", "all", "done"]
    assert lab.asked == [1, 2]


# --- deferred tools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_from_hook", [False, True], ids=["declared", "raised"])
async def test_an_approved_tool_runs_once_in_another_process(is_from_hook: bool) -> None:  # noqa: FBT001 - pytest's parameter
    lab = Lab([call("c1"), call("c2", "book")], [TextPart("done")])

    def agent() -> Agent[None, Any]:
        made = lab.agent(output_type=[str, DeferredToolRequests])
        if is_from_hook:

            @made.tool
            def book(ctx: RunContext[None], name: str) -> str:
                if not ctx.tool_call_approved:
                    raise ApprovalRequired
                lab.ran.append(name)
                return "booked"
        else:

            @made.tool_plain(requires_approval=True)
            def book(name: str) -> str:
                lab.ran.append(name)
                return "booked"

        return made

    first = await lab.run(agent(), key="k")
    assert [each.tool_call_id for each in first.output.approvals] == ["c2"]
    assert await lab.kinds(TurnEnded) == []
    lab.start_process()
    results = DeferredToolResults(approvals={"c2": True})
    handed = {"message_history": first.all_messages(), "deferred_tool_results": results}
    for _ in range(2):  # the second time after its end, like a process that died before it stored the answer
        done = await lab.run(agent(), prompt=None, key="k", **handed)
        assert (done.output, lab.ran, lab.asked) == ("done", ["c1", "c2"], [1, 2])
    assert answers(done.all_messages()) == {"c1": "result of c1", "c2": "booked"}
    assert len(await lab.kinds(TurnEnded)) == 1


async def test_an_interrupted_run_with_approvals_does_not_repeat_the_tool() -> None:
    lab = Lab([call("c2", "book"), call("c3", "hang")], [TextPart("done")])

    def agent() -> Agent[None, Any]:
        made = lab.agent(output_type=[str, DeferredToolRequests])

        @made.tool_plain(requires_approval=True)
        def book(name: str) -> str:
            lab.ran.append(name)
            return "booked"

        @made.tool_plain(requires_approval=True)
        async def hang(name: str) -> str:
            async for stored in lab.durable.follow(SESSION):
                if isinstance(decode(stored.body), CallEnded):
                    break  # the other one ended first
            return await lab.act("hang")

        return made

    lab.hangs_in = "hang"
    first = await lab.run(agent())
    results = DeferredToolResults(approvals={"c2": True, "c3": True})
    handed = {"message_history": first.all_messages(), "deferred_tool_results": results}
    await lab.cut(agent(), prompt=None, **handed)
    assert lab.ran == ["c2", "hang"]
    done = await lab.run(agent(), prompt=None, **handed)
    assert done.output == "done"
    assert answers(done.all_messages())["c2"] == "booked"
    assert lab.ran.count("c2") == 1


@spec("DRIVEN-6")
async def test_an_interrupted_approved_call_is_in_doubt() -> None:
    lab = Lab([call("c2", "hang")], [TextPart("done")])

    def agent() -> Agent[None, Any]:
        made = lab.agent(output_type=[str, DeferredToolRequests])

        @made.tool_plain(requires_approval=True)
        async def hang(name: str) -> str:
            return await lab.act("hang")

        return made

    lab.hangs_in = "hang"
    first = await lab.run(agent())
    handed = {
        "message_history": first.all_messages(),
        "deferred_tool_results": DeferredToolResults(approvals={"c2": True}),
    }
    await lab.cut(agent(), prompt=None, **handed)
    done = await lab.run(agent(), prompt=None, **handed)
    assert (done.output, lab.ran) == ("done", ["hang"])
    assert answers(done.all_messages()) == {"c2": UNKNOWN_CONTENT}


async def test_external_results_are_stored_as_the_outcomes_of_their_calls() -> None:
    lab = Lab([call("c1"), call("c2", "outside")], [TextPart("done")])
    agent = lab.agent(output_type=[str, DeferredToolRequests])

    @agent.tool_plain
    def outside(name: str) -> str:
        from pydantic_ai.exceptions import CallDeferred

        raise CallDeferred

    first = await lab.run(agent)
    assert [each.tool_call_id for each in first.output.calls] == ["c2"]
    results = DeferredToolResults(calls={"c2": "from outside"})
    done = await lab.run(
        agent, prompt=None, message_history=first.all_messages(), deferred_tool_results=results
    )
    assert done.output == "done"
    outcomes = {each.result.call_id: each.result.content for each in await lab.kinds(CallEnded)}
    assert outcomes == {"c1": "result of c1", "c2": "from outside"}


async def test_results_for_calls_of_another_session_are_refused() -> None:
    lab = Lab([call("c2", "book")], [TextPart("done")])
    agent = lab.agent(output_type=[str, DeferredToolRequests])

    @agent.tool_plain(requires_approval=True)
    def book(name: str) -> str:
        raise AssertionError("nobody may run this")

    first = await lab.run(agent)
    async with lab.durable.turn("another"):
        with pytest.raises(UsageError, match="no turn of session 'another' is open"):
            await agent.run(
                message_history=first.all_messages(),
                deferred_tool_results=DeferredToolResults(approvals={"c2": True}),
            )


# --- ownership of a turn --------------------------------------------------------------------------------------


@spec("DRIVEN-3")
async def test_a_key_belongs_to_one_message() -> None:
    lab = Lab([TextPart("done")])
    await lab.run(key="k")
    with pytest.raises(SeqnoReusedError):
        await lab.run(key="k", prompt="something else")
    assert (await lab.run(key="k2", prompt="something else")).output == "done"


@spec("DRIVEN-3", "DRIVEN-9")
@pytest.mark.parametrize("first", ["", "k1"])
async def test_an_equal_prompt_under_a_new_key_runs_no_tool_twice(first: str) -> None:
    lab = Lab([call("c1")], [call("c2")], [TextPart("done")])
    lab.hangs_in = "c2"
    await lab.cut(key=first)
    for _ in range(3):  # the first message under this key, and its retries
        result = await lab.run(key="k2")
        assert (result.output, lab.ran, lab.asked) == ("done", ["c1", "c2"], [1, 2, 3])
        assert answers(result.all_messages()) == {"c1": "result of c1", "c2": UNKNOWN_CONTENT}
    assert [record.status for record in await lab.kinds(TurnEnded)] == [
        TurnStatus.CANCELLED,
        TurnStatus.COMPLETED,
    ]


@spec("DRIVEN-3")
async def test_results_of_deferred_calls_continue_their_turn_under_any_key() -> None:
    lab = Lab([call("c2", "book")], [TextPart("done")])
    agent = lab.agent(output_type=[str, DeferredToolRequests])

    @agent.tool_plain(requires_approval=True)
    def book(name: str) -> str:
        lab.ran.append(name)
        return "booked"

    history = (await lab.run(agent, key="k1")).all_messages()
    results = DeferredToolResults(approvals={"c2": True})
    handed = {"prompt": None, "message_history": history, "deferred_tool_results": results}
    assert (await lab.run(agent, key="k2", **handed)).output == "done"
    with pytest.raises(UsageError, match="no turn of session 's' is open"):
        await lab.run(agent, key="k2", **handed)
    assert lab.ran == ["c2"]


@spec("DRIVEN-3")
async def test_a_program_that_begins_to_use_keys_continues_its_open_turns() -> None:
    lab = Lab([call("c1")], [call("c2")], [TextPart("done")])
    lab.hangs_in = "c2"
    await lab.cut()
    (opened,) = [each async for each in lab.durable.open_turns()]
    assert (await lab.run(prompt=opened.text, key=opened.key)).output == "done"
    assert [record.status for record in await lab.kinds(TurnEnded)] == [TurnStatus.COMPLETED]


@spec("DRIVEN-3")
async def test_without_a_key_the_same_words_after_the_end_are_a_new_turn() -> None:
    lab = Lab([TextPart("done")])
    await lab.run()
    await lab.run()
    assert (lab.asked, len(await lab.kinds(TurnEnded))) == ([1, 1], 2)


@spec("DRIVEN-7")
async def test_an_open_turn_is_continued_or_abandoned() -> None:
    lab = Lab([call("c1")], [TextPart("done")])
    lab.hangs_in = "c1"
    await lab.cut(key="k")
    assert [(each.session, each.key, each.text) async for each in lab.durable.open_turns()] == [
        ("s", "k", "go")
    ]
    finished = await lab.durable.abandon(SESSION)
    assert [type(part).__name__ for message in finished for part in message.parts] == [
        *("UserPromptPart", "ToolCallPart", "ToolReturnPart"),
    ]
    assert answers(finished) == {"c1": UNKNOWN_CONTENT}
    assert await lab.durable.abandon(SESSION) == []
    assert [each async for each in lab.durable.open_turns()] == []
    assert (await lab.run(prompt="something else")).output == "done"
    with pytest.raises(UsageError, match="ended as interrupted"):
        await lab.run(key="k")


@spec("DRIVEN-7")
async def test_two_concurrent_runs_of_one_session_are_refused() -> None:
    lab = Lab([call("c1")], [TextPart("done")])
    lab.hangs_in = "c1"
    first = asyncio.create_task(lab.run())
    await lab.running.wait()
    with pytest.raises(SessionBusyError, match="running in this process"):
        await lab.run()
    with pytest.raises(SessionBusyError):
        await lab.durable.abandon(SESSION)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_an_agent_outside_a_turn_is_unchanged() -> None:
    lab = Lab(*STEPS)
    assert (await lab.agent().run("go")).output == "all done"
    assert lab.memory.sessions == {}
    await lab.durable.close()


async def test_an_agent_run_by_a_tool_is_part_of_its_call() -> None:
    lab = Lab([call("c1", "ask")], [TextPart("done")])
    agent = lab.agent()
    inner: Agent[None, str] = Agent(
        FunctionModel(lambda _messages, _info: ModelResponse(parts=[TextPart("inner words")])),
        deps_type=type(None),
        capabilities=[lab.durable],
    )

    @agent.tool_plain
    async def ask(name: str) -> str:
        return (await inner.run("you?")).output

    result = await lab.run(agent)
    assert answers(result.all_messages()) == {"c1": "inner words"}
    assert len(await lab.kinds(ResponseCompleted)) == 2


async def test_a_history_that_ends_with_a_user_message_needs_no_prompt() -> None:
    lab = Lab(*STEPS)

    history: list[ModelMessage] = [ModelRequest.user_text_prompt("from a form")]
    result = await lab.run(prompt=None, message_history=history)
    assert result.output == "all done"
    assert lab.memory.sessions[SESSION].mark.title == "from a form"
