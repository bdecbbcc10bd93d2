"""LangGraph's own tools node behind the wrapper: replayed, refused, interrupted."""

from __future__ import annotations

import asyncio
import gc
import json
import operator
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import NodeCancelledError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

from midstream.engine.call_cache import OVERTAKEN_CONTENT
from midstream.errors import CallReusedError, LeaseHeldError, SessionBusyError, UsageError
from midstream.frameworks.langchain import repair_messages
from midstream.frameworks.langgraph import ToolGuard, at_most_once
from midstream.session.calls import UNKNOWN_CONTENT
from midstream.session.records import CallEnded, Record, decode
from midstream.store.memory import Memory, MemoryStore
from midstream.tools.function_tools import current_call
from tests.spec import spec

CONFIG: Any = {"configurable": {"thread_id": "t"}}
SYNC: Any = {"configurable": {"thread_id": "t", "__pregel_durability": "sync"}}
ALL = "__remove_all__"


class Graph:
    """A model node that requests `calls` once, and the tools node."""

    def __init__(self, *tools: Any, calls: list[dict[str, Any]], memory: Memory | None = None) -> None:
        self.memory = memory or Memory()
        self.saver = InMemorySaver()
        self.tools = tools
        self.calls = calls
        self.asked = 0
        self.appended = asyncio.Event()
        self.start_process()

    def start_process(self) -> None:
        """Simulate a process with only the memory and the checkpoints; the previous one is dead."""
        for owner in list(self.memory.living):
            self.memory.kill(owner)
        self.guard = self.other_process()

    def other_process(self) -> ToolGuard:
        """Return the guard of a concurrent process."""
        return at_most_once(MemoryStore(self.memory), on_doubt={"again": "rerun"}, observers=[self])

    def on_append(self, session: str, records: Sequence[Record]) -> None:
        self.appended.set()

    def build(self, guard: ToolGuard | None = None) -> Any:
        async def model(state: MessagesState) -> dict[str, Any]:
            self.asked += 1
            known: list[BaseMessage] = [*state["messages"]]
            repaired = repair_messages(known)
            is_first = not isinstance(repaired[-1], ToolMessage)
            answer = AIMessage("", tool_calls=self.calls) if is_first else AIMessage("done")
            return {"messages": [answer] if repaired is known else [RemoveMessage(ALL), *repaired, answer]}

        graph: Any = StateGraph(MessagesState)
        graph.add_node("model", model)
        node = (guard or self.guard).tool_node(list(self.tools), handle_tool_errors=False)
        graph.add_node("tools", node)
        graph.add_edge(START, "model")
        graph.add_conditional_edges(
            "model", lambda state: "tools" if state["messages"][-1].tool_calls else END
        )
        graph.add_edge("tools", "model")
        return graph.compile(checkpointer=self.saver)

    async def run(self, given: Any = None) -> list[Any]:
        async with self.guard.run("t"):
            ended = await self.build().ainvoke(given, CONFIG, durability="sync")
        messages: list[Any] = ended["messages"]
        return messages

    @property
    def records(self) -> list[Record]:
        return [decode(each.body) for each in self.memory.sessions["langgraph:t"].records]

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(record, kind) for record in self.records)

    @property
    def status(self) -> str:
        return self.memory.sessions["langgraph:t"].mark.status


GO = {"messages": [HumanMessage("go")]}


def new_tool_call(tool_name: str, call_id: str, /, **args: Any) -> dict[str, Any]:
    return {"name": tool_name, "id": call_id, "args": args}


async def test_a_repeated_step_keeps_finished_results_and_marks_unknown_ones() -> None:
    ran: list[str] = []

    @tool
    async def act(name: str) -> str:
        """Act."""
        ran.append(name)
        if name == "b" and ran.count("b") == 1:
            raise asyncio.CancelledError  # the state after the death of a process: no outcome
        return f"result of {name}"

    graph = Graph(act, calls=[new_tool_call("act", "1", name="a"), new_tool_call("act", "2", name="b")])
    with pytest.raises(NodeCancelledError):
        await graph.run(GO)
    graph.start_process()
    messages = await graph.run()
    contents = {each.tool_call_id: each.content for each in messages if isinstance(each, ToolMessage)}
    assert contents == {"1": "result of a", "2": UNKNOWN_CONTENT}
    assert (sorted(ran), messages[-1].content) == (["a", "b"], "done")


async def test_an_artifact_is_restored_and_the_model_receives_an_error() -> None:
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

    graph = Graph(act, fail, calls=[new_tool_call("act", "1", name="a"), new_tool_call("fail", "2")])
    with pytest.raises(RuntimeError, match="no paper"):
        await graph.run(GO)
    first, second = [each for each in await graph.run() if isinstance(each, ToolMessage)]
    assert (first.content, first.artifact) == ("seen", {"rows": 3})
    assert (second.content, second.status) == ("RuntimeError: no paper", "error")
    assert sorted(ran) == ["a", "fail"]


async def test_an_interrupted_tool_restarts_and_ends_once() -> None:
    ran: list[str] = []

    @tool
    async def book(city: str) -> str:
        """Book."""
        answer = interrupt("really?")
        ran.append(city)
        return f"{city}: {answer}"

    graph = Graph(book, calls=[new_tool_call("book", "1", city="Oslo")])
    await graph.run(GO)
    messages = await graph.run(Command(resume="yes"))
    assert [each.content for each in messages if isinstance(each, ToolMessage)] == ["Oslo: yes"]
    assert ran == ["Oslo"]


@spec("DRIVEN-8")
async def test_a_thread_at_an_interrupt_is_listed_as_waiting_and_running_again_when_it_is_resumed() -> None:
    statuses: list[str] = []

    @tool
    async def look(city: str) -> str:
        """Look."""
        return city

    @tool
    async def book(city: str) -> str:
        """Book."""
        answer = interrupt("really?")
        statuses.append(graph.status)
        return f"{city}: {answer}"

    calls = [
        new_tool_call("book", "1", city="Oslo"),
        new_tool_call("look", "2", city="Oslo"),
        new_tool_call("book", "3", city="Bergen"),
    ]
    graph = Graph(book, look, calls=calls)
    await graph.run(GO)
    assert graph.status == "waiting"
    graph.start_process()
    config: Any = CONFIG
    state = await graph.build().aget_state(config)
    await graph.run(Command(resume={state.interrupts[0].id: "yes"}))
    assert (graph.status, statuses) == ("waiting", ["running"])
    state = await graph.build().aget_state(config)
    await graph.run(Command(resume={state.interrupts[0].id: "yes"}))
    assert graph.status == "completed"


async def test_an_id_in_a_later_response_is_another_call_and_the_effect_has_a_key() -> None:
    keys: list[str] = []

    @tool
    async def act(name: str) -> str:
        """Act."""
        keys.append(current_call().effect_key)
        return name

    graph = Graph(act, calls=[new_tool_call("act", "1", name="a")])
    await graph.run(GO)
    await graph.run(GO)
    assert len(set(keys)) == 2
    assert len([record for record in graph.records if isinstance(record, CallEnded)]) == 2


class Chat(TypedDict):
    """A state whose messages have another key and no reducer that assigns ids."""

    chat: Annotated[list[Any], operator.add]


@pytest.mark.parametrize("has_ids", [True, False])
async def test_an_id_in_a_later_response_is_another_call_under_another_key_of_the_messages(
    *, has_ids: bool
) -> None:
    ran: list[str] = []

    @tool
    async def act(name: str) -> str:
        """Act."""
        ran.append(name)
        return name

    async def model(state: Chat) -> dict[str, Any]:
        number = len(state["chat"])
        calls = [new_tool_call("act", "1", name="a")] if number < 4 else []
        return {"chat": [AIMessage("", tool_calls=calls, id=f"m-{number}" if has_ids else None)]}

    guard = at_most_once(MemoryStore())
    graph: Any = StateGraph(Chat)
    graph.add_node("model", model)
    graph.add_node("tools", guard.tool_node([act], messages_key="chat", handle_tool_errors=False))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", lambda state: "tools" if state["chat"][-1].tool_calls else END)
    graph.add_edge("tools", "model")
    async with guard.run("t"):
        running = graph.compile(checkpointer=InMemorySaver()).ainvoke(
            {"chat": [HumanMessage("go")]}, CONFIG, durability="sync"
        )
        if has_ids:
            await running
        else:
            with pytest.raises(UsageError, match="has no id"):
                await running
    assert ran == (["a", "a"] if has_ids else [])


async def test_a_result_that_is_not_a_message_is_not_stored_and_reported() -> None:
    @tool
    async def jump() -> Any:
        """Jump."""
        return Command(update={"messages": [ToolMessage("jumped", tool_call_id="1")]})

    graph = Graph(jump, calls=[new_tool_call("jump", "1")])
    await graph.run(GO)
    (ended,) = [record for record in graph.records if isinstance(record, CallEnded)]
    assert "is not a message" in ended.result.content


@pytest.mark.parametrize("is_cut", [False, True])
async def test_calls_of_one_message_with_one_id_and_other_arguments_run_once_each(is_cut: bool) -> None:  # noqa: FBT001 - a parameter of pytest
    ran: list[str] = []

    @tool
    async def act(name: str) -> str:
        """Act."""
        ran.append(name)
        if name == "b" and is_cut:
            raise asyncio.CancelledError  # the state after the death of a process: no outcome
        return f"result of {name}"

    graph = Graph(act, calls=[new_tool_call("act", "1", name=name) for name in ("a", "b", "c", "a")])
    if is_cut:
        with pytest.raises(NodeCancelledError):
            await graph.run(GO)
        graph.start_process()
    messages = await graph.run(None if is_cut else GO)
    assert messages[-1].content == "done"
    assert len({*ran}) == len(ran)
    assert is_cut or sorted(ran) == ["a", "b", "c"]


async def test_other_arguments_and_a_missing_thread_are_refused() -> None:
    notes: list[str] = []

    class Noting:
        def on_append(self, session: str, records: Sequence[Record]) -> None:
            notes.extend(f"{session} {type(record).__name__}" for record in records)

    guard = at_most_once(MemoryStore(), observers=[Noting()])

    class Runtime:
        config: Any = SYNC

    class Request:
        tool_call = new_tool_call("act", "1", name="a")
        state: Any = ()
        runtime: Any = Runtime

    async def execute(request: Any) -> ToolMessage:
        return ToolMessage(json.dumps(request.tool_call["args"]), tool_call_id="1")

    request = Request()
    async with guard.run("t"):
        assert (await guard(request, execute)).content == '{"name": "a"}'
        assert {"langgraph:t CallStarted", "langgraph:t CallEnded"} <= {*notes}
        request.tool_call = new_tool_call("act", "1", name="b")
        with pytest.raises(CallReusedError):
            await guard(request, execute)
        request.runtime = None
        with pytest.raises(UsageError, match="thread id"):
            await guard(request, execute)


# --- configurations that could run a call twice are refused ---------------------------------------------------------


class Acting:
    """A graph with one tool that counts, and hangs in a given call."""

    def __init__(self, *names: str) -> None:
        self.ran: list[str] = []
        self.hangs = asyncio.Event()
        self.hangs_in = ""

        @tool
        async def act(name: str) -> str:
            """Act."""
            self.ran.append(name)
            if name == self.hangs_in:
                self.hangs.set()
                await asyncio.Event().wait()
            return f"result of {name}"

        self.graph = Graph(act, calls=[new_tool_call("act", name, name=name) for name in names])

    async def cut(self, name: str) -> None:
        """Run until the tool hangs in this call, and cancel the run there."""
        self.hangs_in = name
        running = asyncio.create_task(self.graph.run(GO))
        await self.hangs.wait()
        while self.graph.count(CallEnded) < len(self.graph.calls) - 1:  # its siblings end first
            await asyncio.wait_for(self.graph.appended.wait(), 60)
            self.graph.appended.clear()
        running.cancel()
        await asyncio.wait([running])
        self.hangs_in = ""


@spec("DRIVEN-12")
@pytest.mark.parametrize("durability", [None, "async", "exit"])
async def test_a_durability_that_loses_a_response_is_refused(durability: str | None) -> None:
    acting = Acting("a")
    options = {"durability": durability} if durability else {}
    async with acting.graph.guard.run("t"):
        with pytest.raises(UsageError, match='durability="sync"'):
            await acting.graph.build().ainvoke(GO, CONFIG, **options)
    assert acting.ran == []
    assert (await acting.graph.run())[-1].content == "done"


@spec("DRIVEN-12")
async def test_a_run_without_its_thread_is_refused() -> None:
    acting = Acting("a")
    with pytest.raises(UsageError, match=r"guard\.run"):
        await acting.graph.build().ainvoke(GO, CONFIG, durability="sync")
    async with acting.graph.guard.run("another"):
        with pytest.raises(UsageError, match=r"guard\.run"):
            await acting.graph.build().ainvoke(None, CONFIG, durability="sync")
    assert acting.ran == []


async def test_a_graph_that_runs_without_async_is_refused() -> None:
    ran: list[str] = []

    @tool
    def act(name: str) -> str:
        """Act."""
        ran.append(name)
        return name

    guard = at_most_once(MemoryStore())
    graph: Any = StateGraph(MessagesState)
    graph.add_node("tools", guard.tool_node([act]))
    graph.add_edge(START, "tools")
    calls = AIMessage("", tool_calls=[new_tool_call("act", "1", name="a")])
    with pytest.raises(UsageError, match="ainvoke"):
        graph.compile(checkpointer=InMemorySaver()).invoke({"messages": [calls]}, CONFIG, durability="sync")
    assert ran == []


@spec("DRIVEN-12")
async def test_two_processes_do_not_run_one_thread_at_once() -> None:
    acting = Acting("a")
    acting.hangs_in = "a"
    graph = acting.graph
    running = asyncio.create_task(graph.run(GO))
    await acting.hangs.wait()
    asked_before = graph.asked
    other = graph.other_process()
    with pytest.raises(LeaseHeldError):
        async with other.run("t"):
            await graph.build(other).ainvoke(GO, CONFIG, durability="sync")
    with pytest.raises(SessionBusyError):
        await graph.run(GO)
    assert (graph.asked, acting.ran) == (asked_before, ["a"])
    running.cancel()
    await asyncio.wait([running])
    acting.hangs_in = ""
    assert (await graph.run())[-1].content == "done"
    async with other.run("t"):
        pass


# --- a cancelled run ------------------------------------------------------------------------------------------------


@spec("DRIVEN-8")
async def test_results_of_a_cancelled_step_take_precedence_over_the_text_of_a_repair() -> None:
    acting = Acting("a", "b", "c")
    await acting.cut("b")
    assert acting.graph.status == "running"
    messages = await acting.graph.run({"messages": [HumanMessage("never mind")]})
    contents = {each.tool_call_id: each.content for each in messages[:5] if isinstance(each, ToolMessage)}
    assert contents == {"a": "result of a", "b": UNKNOWN_CONTENT, "c": "result of c"}
    assert [each.type for each in messages[:6]] == ["human", "ai", "tool", "tool", "tool", "human"]
    assert acting.graph.status == "completed"


@spec("DRIVEN-8")
async def test_a_call_in_doubt_that_is_not_requested_again_ends_as_unknown() -> None:
    acting = Acting("a")
    await acting.cut("a")
    acting.graph.calls = []
    async with acting.graph.guard.run("t"):
        pass  # the application continued without the graph
    (ended,) = [record for record in acting.graph.records if isinstance(record, CallEnded)]
    assert (ended.result.content, acting.graph.status) == (UNKNOWN_CONTENT, "completed")


async def test_an_interrupt_ends_when_the_conversation_continues_without_an_answer() -> None:
    @tool
    async def book(city: str) -> str:
        """Book."""
        return f"{city}: {interrupt('really?')}"

    graph = Graph(book, calls=[new_tool_call("book", "1", city="Oslo")])
    await graph.run(GO)
    assert graph.status == "waiting"
    graph.calls = []
    graph.start_process()
    messages = await graph.run({"messages": [HumanMessage("never mind")]})
    assert [each.content for each in messages if isinstance(each, ToolMessage)] == [OVERTAKEN_CONTENT]
    assert graph.status == "completed"


@spec("DRIVEN-7")
async def test_a_cancelled_run_can_be_repeated_at_once() -> None:
    acting = Acting("a")
    acting.hangs_in = "a"
    first = asyncio.create_task(acting.graph.run(GO))
    await acting.hangs.wait()
    first.cancel()
    acting.hangs_in = ""
    messages = await acting.graph.run()
    assert [each.content for each in messages if isinstance(each, ToolMessage)] == [UNKNOWN_CONTENT]
    assert acting.ran == ["a"]


async def test_a_run_ends_whose_generator_is_dropped_before_its_end() -> None:
    guard = at_most_once(MemoryStore(Memory()))
    is_closed = asyncio.Event()

    async def body() -> AsyncIterator[int]:  # such as the body of a response, whose client leaves
        try:
            async with guard.run("t"):
                yield 1
        finally:
            is_closed.set()

    async def request() -> None:
        assert await anext(body()) == 1

    await asyncio.create_task(request())
    gc.collect()
    async with asyncio.timeout(60):
        await is_closed.wait()
    async with guard.run("t"):
        pass
    await guard.close()
