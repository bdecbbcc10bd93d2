"""Programs of the guide of LangGraph."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.types import Command, interrupt

from tests.frameworks.kill_programs import (
    SESSION,
    FinalState,
    GuidePlay,
    Program,
    cancel_and_repeat,
    run_guide,
    store,
    until_free,
)

PAGE = "langgraph.md"


def _names(play: GuidePlay, *blocks: int, is_asking: bool = False) -> dict[str, Any]:
    names = run_guide(PAGE, 0, *blocks)

    @tool
    async def act(name: str) -> str:
        """Act."""
        if is_asking:
            interrupt(f"may {name}?")
        return await play.act(name)

    async def model(state: Any) -> dict[str, Any]:
        messages: list[BaseMessage] = state["messages"]
        place = max(place for place, each in enumerate(messages) if isinstance(each, HumanMessage))
        text = str(messages[place].content)
        responses = sum(isinstance(each, AIMessage) for each in messages[place:])
        calls = [
            {"name": "act", "args": {"name": name}, "id": name}
            for name in await play.next_calls(text, responses)
        ]
        return {"messages": [AIMessage("" if calls else f"done {text}", tool_calls=calls)]}

    names["model"] = model
    builder = names["StateGraph"](names["MessagesState"])
    builder.add_node("model", names.get("careful_model", model))
    builder.add_node("tools", names["guard"].tool_node([act]))
    builder.add_edge(names["START"], "model")
    end = names["END"]
    builder.add_conditional_edges("model", lambda state: "tools" if state["messages"][-1].tool_calls else end)
    builder.add_edge("tools", "model")
    names["builder"] = builder
    return names


async def _report(names: dict[str, Any]) -> FinalState:
    async with names["AsyncSqliteSaver"].from_conn_string("graph.db") as saver:
        graph = names["builder"].compile(checkpointer=saver)
        state = await graph.aget_state({"configurable": {"thread_id": SESSION}})
    messages: list[BaseMessage] = state.values["messages"]
    results = [each for each in messages if isinstance(each, ToolMessage)]
    assert len({each.tool_call_id for each in results}) == len(results), "a result stands twice in the thread"
    answers = [str(each.content) for each in messages if isinstance(each, AIMessage) and not each.tool_calls]
    return FinalState({each.tool_call_id: str(each.content) for each in results}, answers)


async def conversation(play: GuidePlay) -> FinalState:
    """Two messages on one thread."""
    names = _names(play, 1)
    for message in ("m1", "m2"):
        answer = await until_free(functools.partial(names["answer"], SESSION, message, message), play)
        assert answer == f"done {message}", answer
    return await _report(names)


async def cancelled(play: GuidePlay) -> FinalState:
    """Two messages; each is cancelled at random and repeated at once."""
    names = _names(play, 1)
    for message in ("m1", "m2"):
        answer = functools.partial(names["answer"], SESSION, message, message)
        response = await cancel_and_repeat(answer, play)
        assert response == f"done {message}", response
    return await _report(names)


async def overtaken(play: GuidePlay) -> FinalState:
    """A message that is cancelled at random, then another one, in a graph that repairs its messages."""
    names = _names(play, 1, 2)
    config: Any = {"configurable": {"thread_id": SESSION}}

    async def send_message(message: str) -> None:
        async with (
            names["guard"].run(SESSION),
            names["AsyncSqliteSaver"].from_conn_string("graph.db") as saver,
        ):
            graph = names["builder"].compile(checkpointer=saver)
            state = await graph.aget_state(config)
            is_known = message in [each.id for each in state.values.get("messages", [])]
            if state.tasks or not is_known:
                given = None if is_known else {"messages": [HumanMessage(message, id=message)]}
                await graph.ainvoke(given, config, durability="sync")

    if not (play.folder / "began").exists():
        store(play.folder / "began", "")
        first = asyncio.ensure_future(send_message("m1"))
        await asyncio.wait([first], timeout=play.chance.random() * 0.06)
        first.cancel()
        await asyncio.wait([first])
    await send_message("m2")
    return await _report(names)


async def approvals(play: GuidePlay) -> FinalState:
    """Tools that ask a person, one resume for each."""
    names = _names(play, 1, is_asking=True)
    config: Any = {"configurable": {"thread_id": SESSION}}
    async with (
        names["guard"].run(SESSION),
        names["AsyncSqliteSaver"].from_conn_string("graph.db") as saver,
    ):
        graph = names["builder"].compile(checkpointer=saver)
        state = await graph.aget_state(config)
        if not state.values:
            given = {"messages": [HumanMessage("m1", id="m1")]}
            await graph.ainvoke(given, config, durability="sync")
        while (state := await graph.aget_state(config)).tasks:
            waiting = {each.id: "yes" for each in state.interrupts}
            await graph.ainvoke(Command(resume=waiting) if waiting else None, config, durability="sync")
    return await _report(names)


PROGRAMS: dict[str, Program] = {
    "conversation": conversation,
    "cancelled, then repeated": cancelled,
    "cancelled, then another message": overtaken,
    "approvals": approvals,
    "two processes": conversation,
}
