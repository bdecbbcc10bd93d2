"""LangGraph's own tools node behind the wrapper: told again, refused, interrupted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import NodeCancelledError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt

from midstream.errors import CallReusedError, UsageError
from midstream.frameworks.langgraph import at_most_once
from midstream.session.calls import UNKNOWN_CONTENT
from midstream.session.records import CallEnded, Record, decode
from midstream.store.memory import Memory, MemoryStore
from midstream.tools.function_tools import current_call

CONFIG: Any = {"configurable": {"thread_id": "t"}}


class Graph:
    """A model node that asks for `calls` once, and the tools node."""

    def __init__(self, *tools: Any, calls: list[dict[str, Any]], memory: Memory | None = None) -> None:
        self.memory = memory or Memory()
        self.saver = InMemorySaver()
        self.tools = tools
        self.calls = calls

    def compiled(self) -> Any:
        """Compile it as a new process would: only the memory and the checkpoints are old."""
        self.memory.living.clear()
        guard = at_most_once(MemoryStore(self.memory), on_doubt={"again": "rerun"})

        async def model(state: MessagesState) -> dict[str, Any]:
            is_first = not isinstance(state["messages"][-1], ToolMessage)
            return {"messages": [AIMessage("", tool_calls=self.calls) if is_first else AIMessage("done")]}

        graph: Any = StateGraph(MessagesState)
        graph.add_node("model", model)
        graph.add_node("tools", ToolNode(list(self.tools), awrap_tool_call=guard, handle_tool_errors=False))
        graph.add_edge(START, "model")
        graph.add_conditional_edges(
            "model", lambda state: "tools" if state["messages"][-1].tool_calls else END
        )
        graph.add_edge("tools", "model")
        return graph.compile(checkpointer=self.saver)

    async def run(self, given: Any = None) -> list[Any]:
        messages: list[Any] = (await self.compiled().ainvoke(given, CONFIG))["messages"]
        return messages


GO = {"messages": [HumanMessage("go")]}


def asked(tool_name: str, call_id: str, /, **args: Any) -> dict[str, Any]:
    return {"name": tool_name, "id": call_id, "args": args}


async def test_a_step_that_runs_again_keeps_what_ended_and_says_what_is_unknown() -> None:
    ran: list[str] = []

    @tool
    async def act(name: str) -> str:
        """Act."""
        ran.append(name)
        if name == "b" and ran.count("b") == 1:
            raise asyncio.CancelledError  # what a dying process leaves: no outcome
        return f"result of {name}"

    graph = Graph(act, calls=[asked("act", "1", name="a"), asked("act", "2", name="b")])
    with pytest.raises(NodeCancelledError):
        await graph.run(GO)
    messages = await graph.run()
    contents = {each.tool_call_id: each.content for each in messages if isinstance(each, ToolMessage)}
    assert contents == {"1": "result of a", "2": UNKNOWN_CONTENT}
    assert (sorted(ran), messages[-1].content) == (["a", "b"], "done")


async def test_an_artifact_comes_back_and_an_error_is_told_to_the_model() -> None:
    ran: list[str] = []

    @tool(response_format="content_and_artifact")
    async def act(name: str) -> tuple[str, dict[str, int]]:
        """Act."""
        ran.append(name)
        return "seen", {"rows": 3}

    @tool
    async def fail() -> str:
        """Fail."""
        ran.append("fail")
        raise RuntimeError("no paper")

    graph = Graph(act, fail, calls=[asked("act", "1", name="a"), asked("fail", "2")])
    with pytest.raises(RuntimeError, match="no paper"):
        await graph.run(GO)
    first, second = [each for each in await graph.run() if isinstance(each, ToolMessage)]
    assert (first.content, first.artifact) == ("seen", {"rows": 3})
    assert (second.content, second.status) == ("RuntimeError: no paper", "error")
    assert sorted(ran) == ["a", "fail"]


async def test_an_interrupted_tool_begins_anew_and_ends_once() -> None:
    ran: list[str] = []

    @tool
    async def book(city: str) -> str:
        """Book."""
        answer = interrupt("really?")
        ran.append(city)
        return f"{city}: {answer}"

    graph = Graph(book, calls=[asked("book", "1", city="Oslo")])
    await graph.run(GO)
    messages = await graph.run(Command(resume="yes"))
    assert [each.content for each in messages if isinstance(each, ToolMessage)] == ["Oslo: yes"]
    assert ran == ["Oslo"]


async def test_an_id_of_a_later_response_is_another_call_and_the_effect_has_a_key() -> None:
    keys: list[str] = []

    @tool
    async def act(name: str) -> str:
        """Act."""
        keys.append(current_call().effect_key)
        return name

    graph = Graph(act, calls=[asked("act", "1", name="a")])
    await graph.run(GO)
    await graph.run(GO)
    assert len(set(keys)) == 2
    ended = [decode(each.body) for each in graph.memory.sessions["langgraph:t"].records]
    assert len([record for record in ended if isinstance(record, CallEnded)]) == 2


async def test_what_is_no_message_is_not_kept_and_said_so() -> None:
    @tool
    async def jump() -> Any:
        """Jump."""
        return Command(update={"messages": [ToolMessage("jumped", tool_call_id="1")]})

    graph = Graph(jump, calls=[asked("jump", "1")])
    await graph.run(GO)
    (ended,) = [
        record
        for each in graph.memory.sessions["langgraph:t"].records
        if isinstance(record := decode(each.body), CallEnded)
    ]
    assert "is no message" in ended.result.content


async def test_other_arguments_and_no_thread_are_refused() -> None:
    told: list[str] = []

    class Noting:
        def on_append(self, session: str, records: Sequence[Record]) -> None:
            told.extend(f"{session} {type(record).__name__}" for record in records)

    guard = at_most_once(MemoryStore(), observers=[Noting()])

    class Runtime:
        config = CONFIG

    class Request:
        tool_call = asked("act", "1", name="a")
        state: Any = ()
        runtime: Any = Runtime

    async def execute(request: Any) -> ToolMessage:
        return ToolMessage(json.dumps(request.tool_call["args"]), tool_call_id="1")

    request = Request()
    assert (await guard(request, execute)).content == '{"name": "a"}'
    assert {"langgraph:t CallStarted", "langgraph:t CallEnded"} <= {*told}
    request.tool_call = asked("act", "1", name="b")
    with pytest.raises(CallReusedError):
        await guard(request, execute)
    request.runtime = None
    with pytest.raises(UsageError, match="thread id"):
        await guard(request, execute)
