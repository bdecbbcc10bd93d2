"""Agents of pydantic-ai that change, are cancelled, or run elsewhere between two runs of one turn."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from pydantic_ai import Agent
from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from midstream.errors import LeaseHeldError
from midstream.frameworks.pydantic_ai_durable import DurableTurns
from midstream.session.calls import UNKNOWN_CONTENT, OnDoubtName
from midstream.session.records import CallEnded, CallStarted, TurnEnded
from midstream.store.memory import MemoryStore
from tests.frameworks.pydantic_ai_lab import SESSION, STEPS, Lab, answers, call
from tests.search import tried
from tests.spec import spec

ROUNDS = tried(40)
SEED = 21


async def cut_before(lab: Lab, agent: Agent[None, Any]) -> None:
    """Run until the model is called for the second response, and let the process die there."""
    lab.responses = lab.responses[:1]
    with pytest.raises(IndexError):
        await lab.run(agent, key="k")
    lab.start_process()


# --- tools that change ----------------------------------------------------------------------------------------------


@spec("DRIVEN-1")
@pytest.mark.parametrize("change", ["other parameters", "removed", "same"])
async def test_a_finished_call_keeps_its_result_after_any_change_of_its_tool(change: str) -> None:
    steps = ([call("c1", "pay", amount=3)], [TextPart("done")])
    lab, paid = Lab(*steps), list[Any]()

    def agent(*, is_first: bool) -> Agent[None, Any]:
        made = lab.agent()
        if is_first or change == "same":

            @made.tool_plain
            def pay(amount: int) -> str:
                paid.append(amount)
                return f"paid {amount}"
        elif change == "other parameters":

            @made.tool_plain(name="pay")
            def pay_with_currency(amount_cents: int, currency: str) -> str:
                paid.append((amount_cents, currency))
                return f"paid {amount_cents} {currency}"

        return made

    await cut_before(lab, agent(is_first=True))
    lab.responses = steps
    done = await lab.run(agent(is_first=False), key="k")
    assert answers(done.all_messages()) == {"c1": "paid 3"}
    assert (paid, done.output) == ([3], "done")
    again = await lab.run(agent(is_first=False), key="k")
    assert (answers(again.all_messages()), paid) == ({"c1": "paid 3"}, [3])


@spec("DRIVEN-6")
@pytest.mark.parametrize("is_removed", [True, False])
@pytest.mark.parametrize("policy", ["unknown", "rerun"])
async def test_a_call_in_doubt_stays_in_doubt_after_any_change_of_its_tool(
    is_removed: bool,  # noqa: FBT001 - pytest's parameter
    policy: OnDoubtName,
) -> None:
    lab = Lab([call("c1", "pay", amount=3)], [TextPart("done")], on_doubt={"pay": policy})
    agent = lab.agent()

    @agent.tool_plain
    async def pay(amount: int) -> str:
        return await lab.act("pay")

    lab.hangs_in = "pay"
    await lab.cut(agent, key="k")
    changed = lab.agent()
    if not is_removed:

        @changed.tool_plain(name="pay")
        def pay_with_currency(amount_cents: int) -> str:
            raise AssertionError("nothing may run this")

    done = await lab.run(changed, key="k")
    (content,) = answers(done.all_messages()).values()
    assert "may or may not have taken effect" in content
    assert (lab.ran, done.output) == (["pay"], "done")
    assert len(await lab.kinds(CallEnded)) == 1


async def test_the_model_is_not_offered_a_removed_tool() -> None:
    seen: list[list[str]] = []
    lab = Lab()

    def model(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        seen.append([tool.name for tool in info.function_tools])
        number = sum(isinstance(each, ModelResponse) for each in messages)
        if number == 1 and len(seen) == 2:
            raise ConnectionError("gone")
        return ModelResponse(parts=[TextPart("done")] if number else [call("c1", "pay", amount=3)])

    def agent(*tools: Any) -> Agent[None, str]:
        return Agent(
            FunctionModel(model), deps_type=type(None), capabilities=[lab.durable], tools=[lab.act, *tools]
        )

    def pay(amount: int) -> str:
        return f"paid {amount}"

    with pytest.raises(ConnectionError):
        await lab.run(agent(pay), key="k")
    done = await lab.run(agent(), key="k")
    assert answers(done.all_messages()) == {"c1": "paid 3"}
    assert seen == [["act", "pay"], ["act", "pay"], ["act"]]


async def test_an_agent_run_by_a_validator_is_part_of_the_run() -> None:
    lab = Lab([call("c1")], [TextPart("done")])
    judge: Agent[None, str] = Agent(
        FunctionModel(lambda _messages, _info: ModelResponse(parts=[TextPart("harmless")])),
        deps_type=type(None),
        capabilities=[lab.durable],
    )
    agent, judged = lab.agent(), list[str]()

    @agent.output_validator
    async def check(text: str) -> str:
        judged.append((await judge.run(f"is this harmless: {text}")).output)
        return text

    for _ in range(2):
        assert (await lab.run(agent, key="k")).output == "done"
    assert (judged, lab.asked, lab.ran) == (["harmless", "harmless"], [1, 2], ["c1"])
    assert len(await lab.kinds(TurnEnded)) == 1


# --- cancelled, and run again ---------------------------------------------------------------------------------------


@spec("DRIVEN-7")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "events"])
async def test_a_run_cancelled_at_any_point_can_be_repeated_at_once(kind: str) -> None:
    chance = random.Random(SEED)
    for number in range(ROUNDS):
        lab = Lab(*STEPS)
        steps = chance.randrange(1, 60)

        async def run(lab: Lab = lab) -> Any:
            agent = lab.agent()
            async with lab.durable.turn(SESSION, key="k"):
                if kind == "run":
                    return (await agent.run("go")).output
                async with agent.run_stream_events("go") as events:
                    last: Any = [each async for each in events][-1]
                    return last.result.output

        first = asyncio.create_task(run())
        for _ in range(steps):
            await asyncio.sleep(0)
        first.cancel()
        async with asyncio.timeout(60):
            assert (await run()).strip() == "all done", (
                f"seed {SEED}, round {number}: cancelled after {steps} steps"
            )
        await asyncio.wait([first])
        assert sorted(set(lab.ran)) == sorted(lab.ran), f"seed {SEED}, round {number}: {lab.ran}"
        assert len(await lab.kinds(TurnEnded)) == 1
        started = {(each.response, each.call_id) for each in await lab.kinds(CallStarted)}
        ended = [(each.response, each.result.call_id) for each in await lab.kinds(CallEnded)]
        assert sorted(started) == sorted(ended)


async def test_a_run_waits_for_a_cancelled_one_whose_tool_continues() -> None:
    lab = Lab([call("c1", "stubborn")], [TextPart("done")])
    agent, running, ends = lab.agent(), asyncio.Event(), asyncio.Event()

    @agent.tool_plain
    async def stubborn(name: str) -> str:
        running.set()
        while not ends.is_set():
            try:
                await ends.wait()
            except asyncio.CancelledError:
                continue
        return "at last"

    first = asyncio.create_task(lab.run(agent, key="k"))
    await running.wait()
    first.cancel()
    second = asyncio.create_task(lab.run(agent, key="k"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not second.done()
    ends.set()
    done = await second
    await asyncio.wait([first])
    assert (done.output, len(await lab.kinds(CallStarted))) == ("done", 1)
    assert answers(done.all_messages())["c1"] in ("at last", UNKNOWN_CONTENT)


@spec("DRIVEN-7")
async def test_another_process_is_refused_before_its_model_is_called() -> None:
    lab = Lab(*STEPS)
    lab.hangs_in = "p2"
    first = asyncio.create_task(lab.run(key="k"))
    await lab.running.wait()
    asked = [*lab.asked]
    other: DurableTurns[None] = DurableTurns(MemoryStore(lab.memory))
    theirs: Agent[None, str] = Agent(FunctionModel(lab._answer), deps_type=type(None), capabilities=[other])
    for prompt, key in (("go", "k"), ("something else", "k2")):
        with pytest.raises(LeaseHeldError):
            async with other.turn(SESSION, key=key):
                await theirs.run(prompt)
    assert lab.asked == asked
    first.cancel()
    await asyncio.wait([first])
