"""LangGraph with its checkpointer for SQLite or PostgreSQL, alone and with midstream around its tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from bench.durable.play import ANSWER, STEP_ARGUMENT, Contestant, Play, Turn


def contestant_with(guard_of: Any) -> Contestant:
    @asynccontextmanager
    async def contestant(play: Play) -> AsyncIterator[Turn]:
        @tool
        async def act(name: str, text: str) -> str:  # noqa: ARG001 - it has the size of a real argument
            """Act."""
            return await play.work(name)

        async def model(state: MessagesState) -> dict[str, Any]:
            requested = sum(len(each.tool_calls) for each in state["messages"] if isinstance(each, AIMessage))
            results = [str(each.content) for each in state["messages"] if isinstance(each, ToolMessage)]
            calls = [
                {"name": "act", "id": name, "args": {"name": name, "text": STEP_ARGUMENT}}
                for name in play.calls(requested, results)
            ]
            return {"messages": [AIMessage("" if calls else ANSWER, tool_calls=calls)]}

        graph: Any = StateGraph(MessagesState)
        graph.add_node("model", model)
        guard = guard_of(play) if guard_of else None
        graph.add_node("tools", guard.tool_node([act]) if guard else ToolNode([act]))
        graph.add_edge(START, "model")
        graph.add_conditional_edges(
            "model", lambda state: "tools" if state["messages"][-1].tool_calls else END
        )
        graph.add_edge("tools", "model")
        async with _saver(play) as saver:
            compiled = graph.compile(checkpointer=saver)

            async def turn(session: str) -> str:
                config = {"configurable": {"thread_id": session}, "recursion_limit": 1000}
                input_given = None if play.is_resumed else {"messages": [HumanMessage("go")]}
                async with guard.run(session) if guard else nullcontext():
                    ended = await compiled.ainvoke(input_given, config, durability="sync")
                return str(ended["messages"][-1].content)

            yield turn

    return contestant


@asynccontextmanager
async def _saver(play: Play) -> AsyncIterator[Any]:
    """Open the checkpointer as its documentation does."""
    if not play.database:
        async with AsyncSqliteSaver.from_conn_string(str(play.folder / "graph.db")) as saver:
            yield saver
        return
    from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver  # noqa: PLC0415 - only for the measurement

    async with AsyncPostgresSaver.from_conn_string(play.database) as saver:
        await saver.setup()
        yield saver


def _guard(play: Play) -> Any:
    from midstream.frameworks.langgraph import at_most_once  # noqa: PLC0415 - only for the measurement

    return at_most_once(play.store("calls.db"))


CONTESTANTS: dict[str, Contestant] = {
    "LangGraph, durability=sync": contestant_with(None),
    "LangGraph + midstream's tools": contestant_with(_guard),
}
