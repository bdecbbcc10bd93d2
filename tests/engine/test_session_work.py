"""Tasks of a session's pending work: started, cancelled, and waited for."""

from __future__ import annotations

import asyncio

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.runner import Runner, StopMode
from midstream.history.messages import UserMessage
from midstream.models.responses import ModelRequest, TextDelta
from midstream.session.records import CallEnded, Record, ResponseCompleted, TurnEnded, decode
from midstream.session.turn.commands import SendMessage
from midstream.store.memory import MemoryStore
from midstream.testing import Gate, ScriptedModel, calls, text
from midstream.testing.scripted_model import Response
from midstream.tools.function_tools import tool

WAIT_S = 60.0


async def records_of(runner: Runner) -> list[Record]:
    return [decode(each.body) for each in await runner.read(after=0, limit=1000)]


@pytest.mark.parametrize("mode", [StopMode.FINISH_RESPONSE, StopMode.FINISH_TOOLS])
async def test_finishing_starts_nothing_new_and_cuts_a_model_call_only_in_its_mode(mode: StopMode) -> None:
    reached, opened = asyncio.Event(), asyncio.Event()

    def respond(_request: ModelRequest) -> Response:
        reached.set()
        return [TextDelta("Half "), Gate(opened), *text("the answer")]

    async with Host(Agent(ScriptedModel(respond)), MemoryStore()) as host:
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        async with asyncio.timeout(WAIT_S):
            await reached.wait()
            stopping = asyncio.create_task(runner.stop(mode))
            await asyncio.sleep(0)
            opened.set()
            await stopping
        completed = [r for r in await records_of(runner) if isinstance(r, ResponseCompleted)]
        assert len(completed) == (mode is StopMode.FINISH_RESPONSE)


async def test_a_running_tool_is_waited_for_and_the_next_model_call_is_not_started() -> None:
    entered, may_continue = asyncio.Event(), asyncio.Event()

    @tool(has_effects=True)
    async def work() -> str:
        """Work."""
        entered.set()
        await may_continue.wait()
        return "worked"

    agent = Agent(ScriptedModel([calls(("work", "{}")), text("done")]), tools=[work])
    async with Host(agent, MemoryStore()) as host:
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        async with asyncio.timeout(WAIT_S):
            await entered.wait()
            stopping = asyncio.create_task(runner.stop(StopMode.FINISH_TOOLS))
            await asyncio.sleep(0)
            may_continue.set()
            await stopping
        records = await records_of(runner)
        assert [r.result.content for r in records if isinstance(r, CallEnded)] == ["worked"]
        assert not any(isinstance(r, TurnEnded) for r in records)
