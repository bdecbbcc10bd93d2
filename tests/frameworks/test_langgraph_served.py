"""LangGraph graphs as agents: supported and refused parts, and continuation after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode, ToolRuntime, tools_condition
from langgraph.types import Command, interrupt

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.errors import ModelRejectedError, TurnFailedError, UsageError
from midstream.frameworks.langgraph_events import INTERRUPT
from midstream.frameworks.langgraph_served import make_agent
from midstream.history.messages import History, Step, Usage, UserMessage
from midstream.models.responses import ModelRequest
from midstream.session.call_references import CallRef
from midstream.session.calls import Choice, OnDoubt
from midstream.session.questions import questions_of
from midstream.session.records import QuestionAsked
from midstream.session.turn.commands import Answer
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import ScriptedModel, calls, text
from midstream.tools.function_tools import current_call
from midstream.tools.function_tools import tool as midstream_tool
from tests.frameworks.graph_model import ScriptedChat, calling_model, text_model, tool_call

WAIT_S = 60.0


def build_loop(model: ScriptedChat, *tools: Any, **options: Any) -> Any:
    """Build the usual loop of a model and its tools."""

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState, **options)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([*tools]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    return graph


def nodes(*functions: Callable[..., Any]) -> Any:
    graph: Any = StateGraph(MessagesState)
    graph.add_sequence([*functions])
    graph.add_edge(START, functions[0].__name__)
    return graph


async def answers_of(agent: Agent, *text: str, memory: Memory | None = None) -> list[str]:
    async with asyncio.timeout(WAIT_S):
        async with Host(agent, MemoryStore(memory or Memory())) as host:
            return [await host.ask("s", words) for words in text]


async def answer_of(agent: Agent, *, memory: Memory | None = None) -> str:
    (answer,) = await answers_of(agent, "go", memory=memory)
    return answer


def text_lines(messages: Sequence[BaseMessage]) -> str:
    return " | ".join(str(each.text).strip() for each in messages)


# --- supported parts --------------------------------------------------------------------------------------------


@dataclass
class Hotels:
    city: str


async def test_a_tool_receives_state_runtime_and_its_call_and_the_graph_its_context() -> None:
    @tool
    async def book(
        nights: int,
        state: Annotated[dict[str, Any], InjectedState],
        runtime: ToolRuntime[Hotels, dict[str, Any]],
    ) -> str:
        """Book."""
        return f"{nights} in {runtime.context.city}, {len(state['messages'])}, {current_call().effect_key}"

    graph = build_loop(calling_model(tool_call("book", nights=2)), book, context_schema=Hotels)
    agent = make_agent(graph, context=Hotels("Oslo"), name="porter")
    (spec,) = [each.spec for each in agent.tools.values() if each.name == "book"]
    assert ([*spec.parameters["properties"]], spec.description) == (["nights"], "Book.")
    assert agent.name == "porter"
    assert (await answer_of(agent)).startswith("Told: 2 in Oslo, 2, s/1/1/c1-")


async def test_artifacts_and_commands_of_tools_reach_the_graph() -> None:
    seen: list[Any] = []

    class State(MessagesState):
        city: str

    @tool(response_format="content_and_artifact")
    async def look() -> tuple[str, dict[str, int]]:
        """Look."""
        return "seen", {"rows": 3}

    @tool
    async def move(runtime: ToolRuntime) -> Any:
        """Move."""
        message = ToolMessage("moved", tool_call_id=runtime.tool_call_id)
        return Command(update={"city": "Oslo", "messages": [message]})

    async def think(state: State) -> dict[str, Any]:
        model = calling_model(tool_call("look", "1"), tool_call("move", "2"))
        seen.append((state.get("city"), [getattr(each, "artifact", None) for each in state["messages"]]))
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph: Any = StateGraph(State)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([look, move]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    assert await answer_of(make_agent(graph)) == "Told: seen, moved "
    assert seen == [(None, [None]), ("Oslo", [None, None, {"rows": 3}, None])]


async def test_the_model_receives_the_errors_of_failing_and_unknown_tools() -> None:
    @tool
    async def fail() -> str:
        """Fail."""
        raise ValueError("no such city")

    assert "ValueError: no such city" in await answer_of(
        make_agent(build_loop(calling_model(tool_call("fail")), fail))
    )
    answer = await answer_of(make_agent(build_loop(calling_model(tool_call("other")), fail)))
    assert answer == "Told: There is no tool named 'other'. Known tools: fail. "


async def test_a_subgraph_keeps_its_calls_and_text_is_shown_once() -> None:
    @tool
    async def look() -> str:
        """Look."""
        return "seen"

    async def before(_: MessagesState) -> dict[str, Any]:
        return {"messages": [await text_model("I start.").ainvoke("x")]}

    async def after(_: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage("It is over.")]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("before", before)
    graph.add_node("worker", build_loop(calling_model(tool_call("look")), look).compile())
    graph.add_node("after", after)
    for one, other in ((START, "before"), ("before", "worker"), ("worker", "after"), ("after", END)):
        graph.add_edge(one, other)
    assert await answer_of(make_agent(graph)) == "I start. Told: seen \n\nIt is over."


async def test_the_texts_of_parallel_nodes_are_shown_one_after_the_other() -> None:
    first_streamed, second_done = asyncio.Event(), asyncio.Event()

    async def first(_: MessagesState) -> dict[str, Any]:
        async def stream_answer(model: ScriptedChat) -> AIMessage:
            whole: Any = None
            async for piece in model.astream("x"):
                whole = piece if whole is None else whole + piece
                first_streamed.set()
                await second_done.wait()
            return AIMessage(whole.content, id=whole.id)

        return {"messages": [await stream_answer(text_model("one two three"))]}

    async def second(_: MessagesState) -> dict[str, Any]:
        await first_streamed.wait()
        answer = await text_model("four five").ainvoke("x")
        second_done.set()
        return {"messages": [answer]}

    graph: Any = StateGraph(MessagesState)
    for node in (first, second):
        graph.add_node(node.__name__, node)
        graph.add_edge(START, node.__name__)
    assert await answer_of(make_agent(graph)) == "one two three \n\nfour five "


async def test_the_next_turn_has_the_previous_one_and_tokens_are_counted() -> None:
    memory = Memory()
    chat = ScriptedChat(response=text_lines)
    assert await answers_of(make_agent(build_loop(chat)), "one", "two", memory=memory) == [
        "one ",
        "one | one | two ",
    ]
    async with Host(make_agent(build_loop(chat)), MemoryStore(memory)) as host:
        assert await host.ask("s", "three") == "one | one | two | one | one | two | three "
        usages = [
            each.response.usage for each in (await host.glance("s")).history.entries if isinstance(each, Step)
        ]
        assert usages == [Usage(10, 2)] * 3


async def test_a_sessions_history_with_another_agent_is_passed_to_the_graph() -> None:
    memory = Memory()
    other = Agent(
        ScriptedModel([calls(("look", '{"city": "Oslo"}')), text("There are rooms.")]), tools=[look_up]
    )
    await answers_of(other, "one", memory=memory)
    chat = ScriptedChat(response=text_lines)
    assert await answers_of(make_agent(build_loop(chat)), "two", memory=memory) == [
        "one |  | rooms in Oslo | There are rooms. | two "
    ]


@midstream_tool(name="look")
def look_up(city: str) -> str:
    return f"rooms in {city}"


# --- crashes and failures ---------------------------------------------------------------------------------------


async def test_an_unavailable_model_is_retried_and_no_node_before_it() -> None:
    ran: list[str] = []

    class OverloadedError(Exception):
        status_code = 529

    async def plan(_: MessagesState) -> dict[str, Any]:
        ran.append("plan")
        return {"messages": [await text_model("A plan.").ainvoke("x")]}

    async def write(_: MessagesState) -> dict[str, Any]:
        ran.append("write")
        if ran.count("write") == 1:
            raise OverloadedError("overloaded")
        return {"messages": [await text_model("A text.").ainvoke("x")]}

    assert await answer_of(make_agent(nodes(plan, write))) == "A plan. \n\nA text. "
    assert ran == ["plan", "write", "write"]


async def test_an_endless_graph_fails_its_turn() -> None:
    async def again(_: MessagesState) -> None: ...

    graph: Any = StateGraph(MessagesState)
    graph.add_node("again", again)
    graph.add_edge(START, "again")
    graph.add_edge("again", "again")
    bounded = graph.compile().with_config(recursion_limit=50)
    with pytest.raises(TurnFailedError, match=r"[Rr]ecursion limit"):
        await answer_of(make_agent(bounded))


async def test_a_node_that_runs_a_tool_itself_is_refused_before_the_tool_runs() -> None:
    ran: list[str] = []

    @tool
    async def pay() -> str:
        """Pay."""
        ran.append("pay")
        return "paid"

    async def act(_: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(await pay.ainvoke({}))]}

    with pytest.raises(TurnFailedError, match=r"node 'act' runs the tool 'pay' itself.*ToolNode"):
        await answer_of(make_agent(nodes(act)))
    assert ran == []
    pay.metadata = {"midstream": "rerun"}
    assert (await answer_of(make_agent(nodes(act))), ran) == ("paid", ["pay"])


async def test_a_tool_may_run_an_agent_but_its_interrupt_cannot_be_answered() -> None:
    @tool
    async def ask() -> str:
        """Ask."""
        return str(interrupt("Really?"))

    @tool
    async def look() -> str:
        """Look."""
        return "seen"

    helpers = {
        "look": build_loop(calling_model(tool_call("look")), look),
        "ask": build_loop(calling_model(tool_call("ask")), ask),
    }

    @tool
    async def delegate(to: str) -> str:
        """Delegate."""
        state = await helpers[to].compile().ainvoke({"messages": [HumanMessage("go")]})
        return str(state["messages"][-1].text)

    assert (
        await answer_of(make_agent(build_loop(calling_model(tool_call("delegate", to="look")), delegate)))
        == "Told: Told: seen  "
    )
    answer = await answer_of(make_agent(build_loop(calling_model(tool_call("delegate", to="ask")), delegate)))
    assert "This tool runs a graph that called `interrupt`" in answer


async def test_questions_of_concurrent_calls_get_their_own_answers() -> None:
    @tool
    async def ask(what: str) -> str:
        """Ask."""
        return f"{what}={interrupt(what)}"

    agent = make_agent(
        build_loop(calling_model(tool_call("ask", "1", what="a"), tool_call("ask", "2", what="b")), ask)
    )
    async with asyncio.timeout(WAIT_S), Host(agent, MemoryStore()) as host:
        answer = ""
        async for event in host.send("s", "go"):
            if isinstance(event.record, QuestionAsked):
                runner = await host.session("s")
                for each in questions_of("s", runner.state):
                    if each.call_id == event.record.call_id:
                        ref = CallRef(each.turn, each.response, each.call_id)
                        await runner.submit(Answer(ref, each.digest, Choice.RESPOND, f"for-{each.text}"))
            answer = event.transcript
    assert answer == "Told: a=for-a, b=for-b "


async def test_a_session_that_only_its_client_can_decrypt_is_refused() -> None:
    class Locked(MemoryStore):
        @property
        def escrow(self) -> Any:
            return self

        async def holds(self, session: str) -> bool:
            return session == "s"

    model: Any = make_agent(nodes(text_node("hi"))).model
    model.begin_use(Locked())
    with pytest.raises(ModelRejectedError, match="only its client can decrypt"):
        await anext(
            model.stream(ModelRequest("", History((UserMessage.of("go"),)), key="s/1/1", session="s"))
        )
    with pytest.raises(ModelRejectedError, match="only in a session"):
        await anext(model.stream(ModelRequest("", History((UserMessage.of("go"),)))))


def text_node(words: str) -> Callable[[MessagesState], Awaitable[dict[str, Any]]]:
    async def node(_: MessagesState) -> dict[str, Any]:
        return {"messages": [AIMessage(words)]}

    return node


# --- refused parts ----------------------------------------------------------------------------------------------


async def be_odd() -> str:
    """Be odd."""
    return ""


odd = tool("odd")(be_odd)


@tool(INTERRUPT)
async def reserved() -> str:
    """Be reserved."""
    return ""


odd.metadata = {"midstream": "probe"}


class NoMessages(TypedDict):
    text: str


def refused_graphs() -> dict[str, Any]:
    """Return graphs with one unsupported part each, by the text of the error."""
    plain = nodes(text_node("hi"))
    silent: Any = StateGraph(NoMessages)
    silent.add_node("node", lambda state: state)
    silent.add_edge(START, "node")
    nested: Any = StateGraph(MessagesState)
    nested.add_node("inner", plain.compile(checkpointer=InMemorySaver()))
    nested.add_edge(START, "inner")
    return {
        "no channel `messages`": silent,
        "has the checkpointer a `tests.OtherSaver`": plain.compile(checkpointer=OtherSaver()),
        "it has `interrupt_before`": plain.compile(interrupt_before=["node"]),
        "its subgraph 'inner' has the checkpointer a `langgraph.InMemorySaver`": nested,
        "'midstream' of tool 'odd' is 'probe'; expected one of 'unknown'": build_loop(text_model("x"), odd),
        "a tool is named 'interrupt'": build_loop(text_model("x"), reserved),
        "`graph` is 7; expected a `StateGraph`": 7,
    }


class OtherSaver(BaseCheckpointSaver[str]):
    pass


@pytest.mark.parametrize("expected", refused_graphs())
def test_unsupported_parts_are_refused_by_name(expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_agent(refused_graphs()[expected])
    assert expected in raised.value.message


def test_all_unsupported_parts_are_named_at_once_and_a_saver_in_memory_is_replaced() -> None:
    with pytest.raises(UsageError, match=r"interrupt_before.*'midstream' of tool 'odd'"):
        make_agent(build_loop(text_model("x"), odd).compile(interrupt_before=["think"]))
    agent = make_agent(build_loop(text_model("x")).compile(checkpointer=InMemorySaver(), name="porter"))
    assert (agent.name, agent.model.name) == ("porter", "langgraph:porter")


def test_policies_come_from_metadata_and_hints() -> None:
    tools = []
    policies: dict[str, dict[str, Any]] = {
        "nothing": {},
        "again": {"midstream": "rerun"},
        "held": {"midstream": "hold", "idempotentHint": True},
        "reads": {"readOnlyHint": True},
        "same": {"idempotentHint": True},
    }
    for name, metadata in policies.items():
        made = tool(name)(be_odd)
        made.metadata = metadata
        tools.append(made)
    agent = make_agent(build_loop(text_model("x"), *tools), tool_timeout_s=7.0)
    assert {name: (agent.tools[name].on_doubt, agent.tools[name].has_effects) for name in policies} == {
        "nothing": (OnDoubt.UNKNOWN, True),
        "again": (OnDoubt.RERUN, True),
        "held": (OnDoubt.HOLD, True),
        "reads": (OnDoubt.RERUN, False),
        "same": (OnDoubt.RERUN, True),
    }
    assert agent.tools["held"].timeout_s == 7.0
