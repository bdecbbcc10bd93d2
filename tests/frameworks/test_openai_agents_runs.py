"""The run of the OpenAI Agents SDK that a turn has, and its completion; run by `make contract`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("agents.testing", reason="the SDK is in its own environment: `make contract`")

from agents import (
    Agent,
    GuardrailFunctionOutput,
    ModelResponse,
    Runner,
    RunState,
    Usage,
    function_tool,
    input_guardrail,
    set_tracing_disabled,
)
from agents.models.interface import Model
from agents.testing import assistant_message, function_call
from openai.types.responses import ResponseTextDeltaEvent

from midstream.errors import LeaseHeldError, UsageError
from midstream.frameworks.openai_agents import DurableAgents, _completed_event
from midstream.session.calls import UNKNOWN_CONTENT
from midstream.session.records import CallEnded, ResponseCompleted, TurnEnded, TurnStatus, decode
from midstream.store.memory import Memory, MemoryStore
from tests.spec import spec

set_tracing_disabled(True)

Output = list[Any]


class Played(Model):
    """Returns a function's output for the number of items that are not the user's."""

    def __init__(self, output: Callable[[list[dict[str, Any]]], Output]) -> None:
        self._output = output
        self.asked = 0

    async def get_response(self, system: Any, input: Any, *args: Any, **keywords: Any) -> ModelResponse:
        self.asked += 1
        return ModelResponse(self._output(_items(input)), Usage(), "resp")

    async def stream_response(
        self, system: Any, input: Any, *args: Any, **keywords: Any
    ) -> AsyncIterator[Any]:
        self.asked += 1
        output = self._output(_items(input))
        for word in output[0].content[0].text.split() if output[0].type == "message" else ():
            yield ResponseTextDeltaEvent(
                content_index=0,
                delta=f"{word} ",
                item_id="i",
                logprobs=[],
                output_index=0,
                sequence_number=0,
                type="response.output_text.delta",
            )
            await asyncio.sleep(0)
        yield _completed_event(ModelResponse(output, Usage(), "resp"))


def _items(input: Any) -> list[dict[str, Any]]:
    return [each for each in input if isinstance(each, dict)] if isinstance(input, list) else []


def calling_model(*names: str, tool: str = "act", answer: str = "outer words") -> Played:
    """Return a model that requests a call of each name at once, and then answers."""

    def output(items: list[dict[str, Any]]) -> Output:
        if any(each.get("type") == "function_call_output" for each in items):
            return [assistant_message(answer)]
        return [function_call(tool, {"name": name, "input": name}, call_id=name) for name in names]

    return Played(output)


def text_model(words: str) -> Played:
    return Played(lambda _items: [assistant_message(words)])


class Lab:
    """A memory that survives processes, and tools that count."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.ran: list[str] = []
        self.hangs = asyncio.Event()
        self.hangs_in = ""
        self.start_process()

    def start_process(self) -> None:
        """Simulate a process with only the memory; the previous one is dead."""
        for owner in list(self.memory.living):
            self.memory.kill(owner)
        self.durable = DurableAgents(MemoryStore(self.memory))

    def tool(self, **options: Any) -> Any:
        @function_tool(**options)
        async def act(name: str) -> str:
            """Act."""
            self.ran.append(name)
            if name == self.hangs_in:
                self.hangs.set()
                await asyncio.Event().wait()
            return f"result of {name}"

        return act

    def agent(self, model: Model, *tools: Any, **options: Any) -> Any:
        durable = self.durable
        return Agent(
            name="agent", model=durable.model(model), tools=durable.tools(tools or [self.tool()]), **options
        )

    async def run(self, agent: Any, given: Any = "go", **options: Any) -> Any:
        async with self.durable.turn("s", "go", key="k"):
            return await Runner.run(agent, given, **options)

    def records(self, kind: type[Any]) -> list[Any]:
        stored = self.memory.sessions["s"].records
        return [record for each in stored if isinstance(record := decode(each.body), kind)]

    @property
    def statuses(self) -> list[TurnStatus]:
        return [record.status for record in self.records(TurnEnded)]


# --- runs inside the run --------------------------------------------------------------------------------------------


@spec("DRIVEN-11")
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_agent_as_a_tool_is_part_of_its_call(is_streamed: bool) -> None:  # noqa: FBT001 - pytest's parameter
    lab = Lab()
    inner = Agent(name="inner", model=lab.durable.model(text_model("inner words")))
    received: list[Any] = []
    options = {"on_stream": received.append} if is_streamed else {}
    outer_model = calling_model("q", tool="ask")
    agent = lab.agent(outer_model, inner.as_tool("ask", "Ask.", **options))
    first, again = await lab.run(agent), await lab.run(agent)
    assert (first.final_output, again.final_output) == ("outer words", "outer words")
    assert [record.result.content for record in lab.records(CallEnded)] == ["inner words"]
    assert (len(lab.records(ResponseCompleted)), outer_model.asked) == (2, 2)
    assert lab.statuses == [TurnStatus.COMPLETED]
    assert bool(received) is is_streamed


@spec("DRIVEN-11")
async def test_a_tool_of_an_agent_as_a_tool_runs_once_with_it() -> None:
    lab = Lab()
    inner = Agent(
        name="inner", model=lab.durable.model(calling_model("i")), tools=lab.durable.tools([lab.tool()])
    )
    agent = lab.agent(calling_model("q", tool="ask"), inner.as_tool("ask", "Ask."))
    await lab.run(agent)
    await lab.run(agent)
    assert lab.ran == ["i"]


@spec("DRIVEN-11")
async def test_an_agent_in_a_guardrail_is_not_part_of_the_answer() -> None:
    lab = Lab()
    judge = Agent(name="judge", model=lab.durable.model(text_model("harmless")))

    @input_guardrail
    async def check(context: Any, agent: Any, input: Any) -> GuardrailFunctionOutput:
        judged = await Runner.run(judge, "is this harmless?")
        return GuardrailFunctionOutput(judged.final_output, tripwire_triggered=False)

    agent = lab.agent(calling_model("a"), input_guardrails=[check])
    for _ in range(2):
        result = await lab.run(agent)
        assert result.final_output == "outer words"
        assert [each.output.output_info for each in result.input_guardrail_results] == ["harmless"]
    texts = [record.body.text for record in lab.records(ResponseCompleted)]
    assert (texts, lab.ran, lab.statuses) == (["", "outer words"], ["a"], [TurnStatus.COMPLETED])


async def test_a_handoff_stays_in_the_run() -> None:
    lab = Lab()
    second = Agent(name="second", model=lab.durable.model(text_model("from the second")))

    def output(_items: list[dict[str, Any]]) -> Output:
        return [function_call("transfer_to_second", {}, call_id="h")]

    agent = lab.agent(Played(output), handoffs=[second])
    for _ in range(2):
        result = await lab.run(agent)
        assert (result.final_output, result.last_agent.name) == ("from the second", "second")
    assert (len(lab.records(ResponseCompleted)), lab.statuses) == (2, [TurnStatus.COMPLETED])


async def test_an_approval_inside_a_tool_is_refused() -> None:
    lab = Lab()
    inner_tool = lab.tool(needs_approval=True)
    inner = Agent(
        name="inner", model=lab.durable.model(calling_model("i")), tools=lab.durable.tools([inner_tool])
    )
    agent = lab.agent(calling_model("q", tool="ask"), inner.as_tool("ask", "Ask."))
    with pytest.raises(Exception, match="set `needs_approval` on the tool 'ask' itself"):
        await lab.run(agent)
    assert (lab.ran, lab.statuses) == ([], [])


# --- approvals ------------------------------------------------------------------------------------------------------


@spec("DRIVEN-4")
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_turn_that_waits_for_an_approval_is_open(is_streamed: bool) -> None:  # noqa: FBT001 - pytest's parameter
    lab = Lab()
    agent = lab.agent(calling_model("a"), lab.tool(needs_approval=True))
    async with lab.durable.turn("s", "go", key="k"):
        if is_streamed:
            result: Any = Runner.run_streamed(agent, "go")
            _ = [event async for event in result.stream_events()]
        else:
            result = await Runner.run(agent, "go")
    assert [item.name for item in result.interruptions] == ["act"]
    assert (lab.ran, lab.statuses, len(lab.records(CallEnded))) == ([], [], 0)
    assert [each.session async for each in lab.durable.open_turns()] == ["s"]


@spec("DRIVEN-4", "DRIVEN-6")
@pytest.mark.parametrize("is_approved", [True, False])
async def test_an_approved_call_runs_once_even_in_another_process(is_approved: bool) -> None:  # noqa: FBT001 - pytest's parameter
    lab = Lab()

    def agent() -> Any:
        return lab.agent(calling_model("a"), lab.tool(needs_approval=True))

    asked = await lab.run(agent())
    stored = asked.to_state().to_string()
    for _ in range(2):  # the second time as after a kill: with the state that the first one received
        lab.start_process()
        continued = agent()
        state = await RunState.from_string(continued, stored)
        (item,) = state.get_interruptions()
        state.approve(item) if is_approved else state.reject(item)
        done = await lab.run(continued, state)
        assert done.final_output == "outer words"
    assert (lab.ran, lab.statuses) == (["a"] if is_approved else [], [TurnStatus.COMPLETED])
    assert len(lab.records(ResponseCompleted)) == 2


async def test_an_approval_may_be_given_inside_the_same_turn() -> None:
    lab = Lab()
    agent = lab.agent(calling_model("a", "b"), lab.tool(needs_approval=True))
    async with lab.durable.turn("s", "go", key="k"):
        result = await Runner.run(agent, "go")
        while result.interruptions:
            state = result.to_state()
            state.approve(result.interruptions[0])
            result = await Runner.run(agent, state)
    assert (result.final_output, sorted(lab.ran)) == ("outer words", ["a", "b"])
    assert lab.statuses == [TurnStatus.COMPLETED]


async def test_a_state_of_another_turn_is_refused() -> None:
    lab = Lab()
    agent = lab.agent(calling_model("a"), lab.tool(needs_approval=True))
    state = (await lab.run(agent)).to_state()
    async with lab.durable.turn("other", "go"):
        with pytest.raises(UsageError, match="no response of turn 1"):
            await Runner.run(agent, state)


# --- a turn is complete when its run has finished -------------------------------------------------------------------


@spec("DRIVEN-4")
@pytest.mark.parametrize("how", ["break", "cancel", "cancel after the turn", "read later", "not read"])
async def test_a_partly_read_stream_leaves_the_turn_open(how: str) -> None:
    lab = Lab()
    agent = lab.agent(calling_model("a"))
    async with lab.durable.turn("s", "go", key="k"):
        streamed = Runner.run_streamed(agent, "go")
        if how == "break":
            async for _ in streamed.stream_events():
                break
        elif how == "cancel":
            async for _ in streamed.stream_events():
                streamed.cancel()
        elif how == "cancel after the turn":
            streamed.cancel(mode="after_turn")
            _ = [event async for event in streamed.stream_events()]
    assert lab.statuses == []
    if how in ("read later", "not read"):
        with pytest.raises(UsageError, match="scope of turn 1 was left"):
            _ = [event async for event in streamed.stream_events()]
    assert (await lab.run(agent)).final_output == "outer words"
    assert (lab.ran.count("a"), lab.statuses) == (1, [TurnStatus.COMPLETED])


async def test_a_completely_read_stream_completes_the_turn_whatever_follows() -> None:
    lab = Lab()
    agent = lab.agent(calling_model("a"))

    async def run() -> None:
        async with lab.durable.turn("s", "go", key="k"):
            streamed = Runner.run_streamed(agent, "go")
            _ = [event async for event in streamed.stream_events()]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run()
    assert lab.statuses == [TurnStatus.COMPLETED]


@spec("DRIVEN-4")
async def test_a_scope_without_a_run_leaves_the_turn_open() -> None:
    lab = Lab()
    async with lab.durable.turn("s", "go", key="k"):
        pass
    assert lab.statuses == []
    assert (await lab.run(lab.agent(text_model("done")))).final_output == "done"


@spec("DRIVEN-11")
async def test_a_turn_has_one_run() -> None:
    lab = Lab()
    agent = lab.agent(calling_model("a"))
    lab.hangs_in = "a"
    async with lab.durable.turn("s", "go", key="k"):
        first = asyncio.create_task(Runner.run(agent, "go"))
        await lab.hangs.wait()
        with pytest.raises(UsageError, match="has one run, which is running"):
            await Runner.run(agent, "go")
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(UsageError, match="has one run, which has failed"):
            await Runner.run(agent, "go")
    assert lab.statuses == []
    async with lab.durable.turn("s", "go", key="k"):
        with pytest.raises(UsageError, match="has no run"):
            await agent.model.get_response(None, "go", None, [], None, [], None)


async def test_a_run_outside_a_turn_is_unchanged() -> None:
    lab = Lab()
    async with lab.durable.turn("s", "go", key="k"):
        pass  # the runner is installed
    agent = lab.agent(calling_model("a"))
    assert (await Runner.run(agent, "go")).final_output == "outer words"
    assert lab.records(ResponseCompleted) == []


# --- ownership of a turn --------------------------------------------------------------------------------------------


@spec("DRIVEN-7")
async def test_another_process_is_refused_before_its_model_is_called() -> None:
    lab = Lab()
    agent = lab.agent(calling_model("a"))
    lab.hangs_in = "a"
    first = asyncio.create_task(lab.run(agent))
    await lab.hangs.wait()
    other, model = DurableAgents(MemoryStore(lab.memory)), text_model("me too")
    theirs = Agent(name="agent", model=other.model(model))
    for message in ("go", "something else"):
        with pytest.raises(LeaseHeldError):
            async with other.turn("s", message, key=message[0]):
                await Runner.run(theirs, message)
    assert model.asked == 0
    first.cancel()
    await asyncio.wait([first])


@spec("DRIVEN-7")
async def test_a_cancelled_turn_can_be_run_again_at_once() -> None:
    lab = Lab()
    agent = lab.agent(calling_model("a"))
    lab.hangs_in = "a"
    first = asyncio.create_task(lab.run(agent))
    await lab.hangs.wait()
    first.cancel()
    lab.hangs_in = ""
    assert (await lab.run(agent)).final_output == "outer words"
    assert first.cancelled()
    assert (lab.ran, [record.result.content for record in lab.records(CallEnded)]) == (
        ["a"],
        [UNKNOWN_CONTENT],
    )


async def cut(lab: Lab, agent: Any) -> None:
    """Run until the tool hangs in `b`, and cancel the run there."""
    lab.hangs_in = "b"
    first = asyncio.create_task(lab.run(agent))
    await lab.hangs.wait()
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])


FINISHED = [
    ("user", "go"),
    ("function_call", "a"),
    ("function_call", "b"),
    ("function_call_output", "a"),
    ("function_call_output", "b"),
]


def keys(items: list[Any]) -> list[tuple[str, str]]:
    return [(each.get("type") or each["role"], each.get("call_id") or str(each["content"])) for each in items]


@spec("DRIVEN-9")
@pytest.mark.parametrize("is_abandoned", [True, False])
async def test_the_finished_items_of_a_turn_are_in_the_input_of_the_next_one(is_abandoned: bool) -> None:  # noqa: FBT001 - pytest's parameter
    lab = Lab()
    agent = lab.agent(calling_model("a", "b"))
    await cut(lab, agent)
    history: list[Any] = []
    if is_abandoned:
        history = await lab.durable.abandon("s")
        assert keys(history) == FINISHED
        assert [each["output"] for each in history[3:]] == ["result of a", UNKNOWN_CONTENT]
        assert await lab.durable.abandon("s") == []
    for _ in range(2):  # the second time as after a crash: with the input of the first one
        async with lab.durable.turn("s", "and now?", key="k2"):
            result = await Runner.run(agent, [*history, {"role": "user", "content": "and now?"}])
        items = result.to_input_list()
        assert keys(items[:6]) == [*FINISHED, ("user", "and now?")]
        assert result.final_output == "outer words"
    assert lab.ran == ["a", "b"]
    ended = TurnStatus.INTERRUPTED if is_abandoned else TurnStatus.CANCELLED
    assert lab.statuses == [ended, TurnStatus.COMPLETED]
    async with lab.durable.turn("s", "once more", key="k3"):
        result = await Runner.run(agent, [*items, {"role": "user", "content": "once more"}])
    assert keys(result.to_input_list())[: len(items) + 1] == [*keys(items), ("user", "once more")]


@spec("DRIVEN-3", "DRIVEN-9")
async def test_an_equal_message_under_a_new_key_runs_no_tool_twice() -> None:
    lab = Lab()
    agent = lab.agent(calling_model("a", "b"))
    await cut(lab, agent)
    for _ in range(3):  # the first message under this key, and its retries
        async with lab.durable.turn("s", "go", key="k2"):
            result = await Runner.run(agent, [{"role": "user", "content": "go"}])
        assert keys(result.to_input_list())[:6] == [*FINISHED, ("user", "go")]
        assert lab.ran == ["a", "b"]
    assert lab.statuses == [TurnStatus.CANCELLED, TurnStatus.COMPLETED]


@spec("DRIVEN-9")
async def test_an_input_with_the_finished_items_receives_them_once() -> None:
    lab = Lab()
    agent = lab.agent(calling_model("a", "b"))
    await cut(lab, agent)
    async with lab.durable.turn("s", "and now?", key="k2"):
        first = await Runner.run(agent, "and now?")
    history = first.to_input_list()[:5]
    async with lab.durable.turn("s", "and now?", key="k2"):
        again = await Runner.run(agent, [*history, {"role": "user", "content": "and now?"}])
    assert keys(again.to_input_list()[:6]) == [*FINISHED, ("user", "and now?")]
