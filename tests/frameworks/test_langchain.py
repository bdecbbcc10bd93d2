"""Message lists of LangChain, and real graphs of LangGraph whose stored history is broken."""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any

import pytest

pytest.importorskip("langgraph")

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    messages_to_dict,
)
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.warnings import LangGraphDeprecatedSinceV10

from midstream.errors import HistoryRefusedError, InvalidHistoryError, UsageError
from midstream.frameworks.langchain import repair_messages
from midstream.history.operations import Repaired
from midstream.history.repair.placeholders import UNKNOWN

CALL = {"name": "deploy", "args": {"to": "prod"}, "id": "c1", "type": "tool_call"}


def broken_history() -> list[BaseMessage]:
    return [
        SystemMessage("Be brief.", id="s"),
        HumanMessage("deploy", id="h1"),
        AIMessage("", tool_calls=[CALL], id="a1"),
        HumanMessage("and now?", id="h2"),
    ]


def answering_agent(*responses: str) -> Any:  # noqa: ANN401 - a model that lets tools be bound to it
    fake: Any = GenericFakeChatModel
    model = type("Model", (fake,), {"bind_tools": lambda self, tools, **options: self})
    return model(messages=iter([AIMessage(response) for response in responses]))


@tool
def deploy(to: str) -> str:
    """Deploy."""
    return f"deployed to {to}"


def test_a_valid_list_is_returned_as_the_same_object() -> None:
    answer = ToolMessage("done", tool_call_id="c1", artifact=object())
    messages: list[BaseMessage] = [*broken_history()[:3], answer, AIMessage("ok")]
    assert repair_messages(messages) is messages
    assert repair_messages({"messages": messages}) == {"messages": []}
    assert repair_messages([]) == []


def test_a_call_without_result_gets_one_and_the_rest_are_the_same_objects() -> None:
    messages = broken_history()
    repairs: list[Repaired] = []
    repaired = repair_messages(messages, on_repair=repairs.append)
    assert [repaired[at] for at in (0, 1, 2, 4)] == messages
    assert all(repaired[at] is kept for at, kept in zip((0, 1, 2, 4), messages, strict=True))
    assert isinstance(repaired[3], ToolMessage)
    assert (repaired[3].content, repaired[3].tool_call_id, repaired[3].status) == (UNKNOWN, "c1", "error")
    assert [(edit.code, edit.at) for edit in repairs[0].edits] == [("dangling-call", 2)]
    assert repairs[0].messages is repaired
    assert repair_messages(repaired) is repaired
    assert len(messages) == 4


@pytest.mark.parametrize("profile", ["anthropic", "gemini", "bedrock-claude", "vertex"])
def test_the_system_prompt_stays_a_message_if_the_provider_requires_it_separately(profile: str) -> None:
    repairs: list[Repaired] = []
    repaired = repair_messages(broken_history(), profile=profile, on_repair=repairs.append)
    assert [message.type for message in repaired[:4]] == ["system", "human", "ai", "tool"]
    assert repairs[0].edits[0].at == 2
    assert repair_messages(repaired, profile=profile) is repaired


def test_a_changed_message_keeps_all_its_other_fields() -> None:
    marker = object()
    calls = [{"id": "c:1", "type": "function", "function": {"name": "deploy", "arguments": "{}"}}]
    messages = broken_history()
    messages[2] = AIMessage(
        [{"type": "text", "text": "so"}, {"type": "tool_use", "id": "c:1", "name": "deploy", "input": {}}],
        tool_calls=[{**CALL, "id": "c:1"}],
        id="a1",
        additional_kwargs={"tool_calls": calls, "kept": 1},
        response_metadata={"marker": marker},
    )
    changed = repair_messages(messages, profile="anthropic")[2]
    assert isinstance(changed, AIMessage)
    assert (changed.id, changed.additional_kwargs) == ("a1", {"kept": 1})
    assert changed.response_metadata["marker"] is marker
    mirrored: Any = changed.content[1]
    assert changed.tool_calls[0]["id"] == mirrored["id"] != "c:1"
    assert messages[2].additional_kwargs == {"tool_calls": calls, "kept": 1}


def test_ids_of_messages_stay_unique() -> None:
    odd: list[BaseMessage] = [
        HumanMessage("deploy", id="h"),
        AIMessage("", tool_calls=[CALL], id="a"),
        ToolMessage("one", tool_call_id="c1", id="t1"),
        ToolMessage("two", tool_call_id="c1", id="t2"),
        ToolMessage("lost", tool_call_id="c9", id="t3"),
        AIMessage("", id="a2"),
        HumanMessage("", id="h2"),
        HumanMessage("and?", id="h3"),
    ]
    repaired = repair_messages(odd, profile="strict-template")
    ids = [message.id for message in repaired if message.id]
    assert len(ids) == len(set(ids))
    folded: Any = add_messages([], list[Any](repaired))
    assert [message.content for message in folded] == [message.content for message in repaired]
    assert all(word in str(messages_to_dict(repaired)) for word in ("one", "two", "lost", "and?"))


def test_it_can_be_a_step_of_a_chain() -> None:
    prompt = ChatPromptTemplate.from_messages([("placeholder", "{stored}"), ("human", "{said}")])
    chain = prompt | RunnableLambda(repair_messages) | answering_agent("on it")
    assert chain.invoke({"stored": broken_history(), "said": "go on"}).content == "on it"
    step = RunnableLambda(functools.partial(repair_messages, profile="openai-chat"))
    assert [message.type for message in step.invoke(broken_history())] == [
        "system",
        "human",
        "ai",
        "tool",
        "human",
    ]


def react_agent(hook: Any, *responses: str) -> Any:  # noqa: ANN401 - a compiled graph has four type parameters
    from langgraph.prebuilt import create_react_agent

    with pytest.warns(LangGraphDeprecatedSinceV10):
        return create_react_agent(
            answering_agent(*responses), [deploy], pre_model_hook=hook, checkpointer=InMemorySaver()
        )


async def test_a_graph_with_an_unanswered_call_continues_and_stores_the_repair() -> None:
    thread: Any = {"configurable": {"thread_id": "t"}}
    stuck = react_agent(None, "never")
    stuck.update_state(thread, {"messages": broken_history()[:3]}, as_node="agent")
    with pytest.raises(ValueError, match="do not have a corresponding ToolMessage"):
        stuck.invoke({"messages": [HumanMessage("and now?")]}, thread)

    repairs: list[Repaired] = []
    graph = react_agent(functools.partial(repair_messages, on_repair=repairs.append), "on it", "done")
    graph.update_state(thread, {"messages": broken_history()[:3]}, as_node="agent")
    state = await graph.ainvoke({"messages": [HumanMessage("and now?")]}, thread)
    assert [message.type for message in state["messages"]] == ["system", "human", "ai", "tool", "human", "ai"]
    graph.invoke({"messages": [HumanMessage("thanks")]}, thread)
    stored = graph.get_state(thread).values["messages"]
    assert [message.type for message in stored[3:]] == ["tool", "human", "ai", "human", "ai"]
    assert len(repairs) == 1


def test_langchain_agents_run_it_before_each_model_call() -> None:
    agents = pytest.importorskip("langchain.agents")
    from langchain.agents.middleware import before_model

    @before_model
    def repaired(state: Any, runtime: Any) -> Any:  # noqa: ANN401 - its parameters
        return repair_messages(state)

    agent = agents.create_agent(answering_agent("on it"), [deploy], middleware=[repaired])
    state = agent.invoke({"messages": broken_history()})
    assert [message.type for message in state["messages"]] == ["system", "human", "ai", "tool", "human", "ai"]


def test_the_state_may_be_an_object() -> None:
    class State:
        messages: Annotated[list[BaseMessage], operator.add] = broken_history()

    answer: Any = repair_messages(State())
    update = answer["messages"]
    assert update[0] == RemoveMessage(id=REMOVE_ALL_MESSAGES)
    assert len(update) == 6


def test_content_that_is_not_json_is_a_typed_error() -> None:
    messages: list[BaseMessage] = [AIMessage("", tool_calls=[{**CALL, "args": {"to": object()}}])]
    with pytest.raises(InvalidHistoryError, match="message 0 is not a JSON value"):
        repair_messages(messages)
    with pytest.raises(UsageError, match="unknown profile 'x'"):
        repair_messages(broken_history(), profile="x")


def test_the_other_modes_are_available() -> None:
    call = {"name": "deploy", "args": {}, "id": "c1", "type": "tool_call"}
    top, asked, then = SystemMessage("be brief"), HumanMessage("deploy"), HumanMessage("and now?")
    history = [top, asked, AIMessage("let me", tool_calls=[call]), then]
    assert repair_messages(history, mode="drop") == [top, asked, then]
    assert repair_messages(history, mode="rollback") == [top, asked, then]
    kept = repair_messages(history, mode="sanitize", profile="anthropic")
    assert [message.text for message in kept] == ["be brief", "deploy", "let me", "and now?"]
    with pytest.raises(HistoryRefusedError):
        repair_messages(history, mode="strict")


@pytest.mark.parametrize(
    "given", [[("user", "hi")], [{"role": "user", "content": "hi"}], {"messages": ["hi"]}]
)
def test_other_values_than_messages_are_refused_with_the_function_for_dicts(given: object) -> None:
    with pytest.raises(
        UsageError, match=r"message 0 is a `\w+`; .*`midstream.repair` repairs lists of dicts"
    ):
        repair_messages(given)  # type: ignore[call-overload]


@pytest.mark.parametrize("given", ["hi", None, {}, {"messages": "hi"}])
def test_a_value_without_messages_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match="without a list `messages`"):
        repair_messages(given)  # type: ignore[call-overload]
