"""An agent of another framework that may kill itself: `python -m tests.fault.driven_process KIND FOLDER`.

Every kind runs the same turn: a call `c1`, then `p1`, `p2` and `p3` concurrently, then an answer. The tools'
effects are written to a ledger; the results that the model received go to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from midstream.environment import Fault
from midstream.session.calls import OnDoubt
from midstream.testing.fake_worlds import KillingWorld

ANSWER = "all done"
SESSION = "s"
DB = "agent.db"
ASKED = (("c1",), ("p1", "p2", "p3"))
"""The calls that the model requests in each response."""


class DrivenPlay:
    """The tools' effects, and the model's next output."""

    def __init__(self, folder: Path, *, dies_in: str) -> None:
        self._ledger = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._dies_in = dies_in

    async def work(self, name: str) -> str:
        """Have an effect, and perhaps die after it."""
        await asyncio.sleep(0)  # the others start
        self._note(f"effect {name}")
        if self._dies_in == name:
            os.kill(os.getpid(), signal.SIGKILL)
        return f"result of {name}"

    def calls_after(self, responses: int) -> Sequence[str]:
        """Return the calls of the next response; none if the answer is due."""
        self._note(f"model {responses + 1}")
        return ASKED[responses] if responses < len(ASKED) else ()

    def _note(self, line: str) -> None:
        os.write(self._ledger, f"{line}\n".encode())


async def pydantic_ai(folder: Path, play: DrivenPlay, world: KillingWorld, policy: OnDoubt) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.messages import (
        ModelMessage,
        ModelResponse,
        RetryPromptPart,
        TextPart,
        ToolCallPart,
        ToolReturnPart,
    )
    from pydantic_ai.models.function import AgentInfo, FunctionModel

    from midstream.frameworks.pydantic_ai_durable import DurableTurns

    def model(messages: list[ModelMessage], _info: AgentInfo) -> ModelResponse:
        names = play.calls_after(sum(isinstance(each, ModelResponse) for each in messages))
        calls: list[Any] = [ToolCallPart("act", {"name": name}, name) for name in names]
        return ModelResponse(parts=calls or [TextPart(ANSWER)])

    durable = DurableTurns[object](folder / DB, on_doubt={"act": policy}, world=world)
    agent = Agent(FunctionModel(model), capabilities=[durable])

    @agent.tool_plain
    async def act(name: str) -> str:
        return await play.work(name)

    async with durable.turn(SESSION, key="k"):
        result = await agent.run("go")
    parts = [part for message in result.all_messages() for part in message.parts]
    answers = [part for part in parts if isinstance(part, ToolReturnPart | RetryPromptPart)]
    return result.output, {part.tool_call_id: str(part.content) for part in answers}


async def langgraph(folder: Path, play: DrivenPlay, world: KillingWorld, policy: OnDoubt) -> Any:
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_core.tools import tool
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
    from langgraph.graph import END, START, MessagesState, StateGraph

    from midstream.frameworks.langgraph import at_most_once

    @tool
    async def act(name: str) -> str:
        """Act."""
        return await play.work(name)

    async def model(state: MessagesState) -> dict[str, Any]:
        names = play.calls_after(sum(isinstance(each, AIMessage) for each in state["messages"]))
        calls = [{"name": "act", "id": name, "args": {"name": name}} for name in names]
        return {"messages": [AIMessage("" if names else ANSWER, tool_calls=calls)]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", model)
    guard = at_most_once(folder / DB, on_doubt={"act": policy}, world=world)
    graph.add_node("tools", guard.tool_node([act]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "model")
    config: Any = {"configurable": {"thread_id": SESSION}}
    async with AsyncSqliteSaver.from_conn_string(str(folder / "graph.db")) as saver, guard.run(SESSION):
        compiled: Any = graph.compile(checkpointer=saver)
        known = await compiled.aget_state(config)
        start = None if known.values else {"messages": [HumanMessage("go")]}
        ended = await compiled.ainvoke(start, config, durability="sync")
    answers = {each.tool_call_id: each.content for each in ended["messages"] if each.type == "tool"}
    return ended["messages"][-1].content, answers


async def openai_agents(folder: Path, play: DrivenPlay, world: KillingWorld, policy: OnDoubt) -> Any:
    from agents import Agent, ModelResponse, Runner, Usage, function_tool, set_tracing_disabled
    from agents.models.interface import Model
    from agents.testing import assistant_message, function_call

    from midstream.frameworks.openai_agents import DurableAgents

    class Scripted(Model):
        async def get_response(self, system: Any, input: Any, *args: Any, **keywords: Any) -> ModelResponse:
            items = [each for each in input if isinstance(each, dict)] if isinstance(input, list) else []
            asked = sum(each.get("type") == "function_call" for each in items)
            names = play.calls_after({0: 0, 1: 1, 4: 2}[asked])
            calls = [function_call("act", {"name": name}, call_id=name) for name in names]
            return ModelResponse(calls or [assistant_message(ANSWER)], Usage(), None)

        def stream_response(self, *args: Any, **keywords: Any) -> Any:
            raise NotImplementedError

    @function_tool
    async def act(name: str) -> str:
        """Act."""
        return await play.work(name)

    set_tracing_disabled(True)
    durable = DurableAgents(folder / DB, on_doubt={"act": policy}, world=world)
    agent = Agent(name="agent", model=durable.model(Scripted()), tools=durable.tools([act]))
    async with durable.turn(SESSION, "go", key="k"):
        result = await Runner.run(agent, "go")
    items = [each for each in result.to_input_list() if isinstance(each, dict)]
    outputs = [each for each in items if each.get("type") == "function_call_output"]
    return result.final_output, {str(each["call_id"]): str(each["output"]) for each in outputs}


KINDS = {"pydantic_ai": pydantic_ai, "langgraph": langgraph, "openai_agents": openai_agents}


async def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.driven_process")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-at", type=Fault)
    parser.add_argument("--kill-time", type=int, default=1)
    parser.add_argument("--dies-in", default="", help="the call after whose effect it dies")
    parser.add_argument("--policy", type=OnDoubt, default=OnDoubt.UNKNOWN)
    given = parser.parse_args()
    world = KillingWorld(given.kill_at, given.kill_time)
    play = DrivenPlay(given.folder, dies_in=given.dies_in)
    answer, answers = await KINDS[given.kind](given.folder, play, world, given.policy)
    reached = {point.value: count for point, count in world.reached.items()}
    print(json.dumps({"answer": answer, "answers": answers, "reached": reached}), flush=True)  # noqa: T201 - for the test


if __name__ == "__main__":
    asyncio.run(main())
