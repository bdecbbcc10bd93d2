"""A tools node whose calls midstream runs; elsewhere it is unchanged."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

from midstream.frameworks.langgraph_gate import can_repeat, text_of
from midstream.frameworks.langgraph_served import make_agent
from midstream.history.messages import Outcome
from tests.frameworks.graph_model import calling_model, tool_call
from tests.frameworks.test_langgraph_served import build_loop


@tool
async def look() -> str:
    """Look."""
    return "seen"


async def test_a_served_graph_runs_elsewhere_as_before() -> None:
    graph: Any = build_loop(calling_model(tool_call("look")), look).compile()
    make_agent(graph)
    make_agent(graph)
    state = await graph.ainvoke({"messages": [HumanMessage("go")]})
    assert state["messages"][-1].text == "Told: seen "


def test_repeatable_tools_are_recognized_by_their_metadata() -> None:
    known: list[dict[str, Any]] = [
        {},
        {"midstream": "rerun"},
        {"readOnlyHint": True},
        {"idempotentHint": True},
    ]
    assert [can_repeat(each) for each in known] == [False, True, True, True]
    assert not can_repeat({"midstream": "unknown", "readOnlyHint": True})


def test_a_tools_return_value_is_text_and_possibly_more() -> None:
    assert text_of(ToolMessage("a", tool_call_id="1"), "1") == ("a", Outcome.OK, False)
    assert text_of(ToolMessage("a", tool_call_id="1", status="error"), "1") == ("a", Outcome.ERROR, False)
    assert text_of(ToolMessage("a", tool_call_id="1", artifact=1), "1") == ("a", Outcome.OK, True)
    assert text_of([ToolMessage("a", tool_call_id="1")], "1") == ("a", Outcome.OK, True)
