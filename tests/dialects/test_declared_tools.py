"""Tools of a client application other than plain functions: there and back, through the gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest

from midstream.dialects.declared_tools import NAME_CHARS_MAX, function_name, read_input, write_input
from midstream.history.messages import Step, ToolSpec
from midstream.models.responses import Finished, ToolCallRequested
from midstream.testing.scripted_model import text
from tests.dialects.gateway_serving import ServedGateway, served
from tests.spec import spec

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "look_up", "description": "Look.", "parameters": SCHEMA}
NAMESPACE = {"type": "namespace", "name": "mcp__weather", "description": "Weather.", "tools": [WEATHER]}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: hunk+"},
}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Search tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
DIFF = '*** Begin Patch\n+a "b"\n*** End Patch'
CALLED = {
    "mcp__weather__look_up": '{"city": "Basel"}',
    "apply_patch": write_input(DIFF),
    "tool_search": '{"query": "weather"}',
}
ITEMS: list[dict[str, Any]] = [
    {
        "type": "function_call",
        "name": "look_up",
        "namespace": "mcp__weather",
        "arguments": '{"city": "Basel"}',
        "call_id": "c0",
        "status": "completed",
    },
    {
        "type": "custom_tool_call",
        "name": "apply_patch",
        "input": DIFF,
        "call_id": "c1",
        "status": "completed",
    },
    {
        "type": "tool_search_call",
        "execution": "client",
        "arguments": {"query": "weather"},
        "call_id": "c2",
        "status": "completed",
    },
]
OUTPUTS: list[dict[str, Any]] = [
    {"type": "function_call_output", "call_id": "c0", "output": "sunny"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    {
        "type": "tool_search_output",
        "call_id": "c2",
        "execution": "client",
        "status": "completed",
        "tools": [{**NAMESPACE, "name": "mcp__tides"}],
    },
]


def _calls() -> list[Any]:
    requested = [
        ToolCallRequested(f"c{at}", name, content) for at, (name, content) in enumerate(CALLED.items())
    ]
    return [*requested, Finished()]


async def _ask(gateway: ServedGateway, items: list[dict[str, Any]], *, is_stream: bool) -> dict[str, Any]:
    body = {"model": "m", "input": items, "tools": [NAMESPACE, PATCH, SEARCH], "stream": is_stream}
    answer = await gateway.http.post("/v1/responses", json={**body, "store": False})
    assert answer.status_code == 200, answer.text
    if not is_stream:
        whole: dict[str, Any] = answer.json()
        return whole
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data:")
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last: dict[str, Any] = events[-1]["response"]
    assert last["output"] == done
    inputs = [event["input"] for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert inputs in ([DIFF], [])
    return last


@spec("REUSE-66")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_tools_of_codex_are_functions_for_the_model_and_are_returned_in_their_own_form(
    *, is_stream: bool
) -> None:
    async with served([_calls(), text("done")]) as gateway:
        asked: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": "go"}]
        first = await _ask(gateway, asked, is_stream=is_stream)
        output = [{key: value for key, value in item.items() if key != "id"} for item in first["output"]]
        assert output == ITEMS
        assert gateway.model.requests[0].tools == (
            ToolSpec("mcp__weather__look_up", "Look.", SCHEMA),
            ToolSpec(
                "apply_patch",
                "Change files.\n\nIts input has this format:\nstart: hunk+",
                {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]},
            ),
            ToolSpec("tool_search", "Search tools.", SEARCH["parameters"]),  # type: ignore[arg-type]
        )
        await _ask(gateway, [*asked, *first["output"], *OUTPUTS], is_stream=is_stream)
        step = gateway.model.requests[1].history.entries[-1]
        assert isinstance(step, Step)
        assert {call.name: json.loads(call.arguments) for call in step.response.calls} == {
            name: json.loads(arguments) for name, arguments in CALLED.items()
        }
        assert [result.content for result in step.results] == [
            "sunny",
            "done",
            "Loaded: mcp__tides__look_up",
        ]
        names = [tool.name for tool in gateway.model.requests[1].tools]
        assert names == ["mcp__weather__look_up", "apply_patch", "tool_search", "mcp__tides__look_up"]
        assert gateway.model.requests[0].session == gateway.model.requests[1].session


def test_a_name_that_is_too_long_ends_with_its_digest() -> None:
    long, other = function_name("n" * 60, "one"), function_name("n" * 60, "two")
    assert long != other
    assert len(long) == len(other) == NAME_CHARS_MAX
    assert function_name("", "x" * 80) == "x" * 80


@pytest.mark.parametrize("text", ["*** Begin", '{"other": 1}', "[1]", '{"input": 1}', ""])
def test_arguments_of_another_form_are_the_input(text: str) -> None:
    assert read_input(text) == text
    assert read_input(write_input(text)) == text


CHAT_PATCH: Any = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Change files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: hunk+"}},
    },
}
CHAT_NOTE: Any = {"type": "custom", "custom": {"name": "note", "format": {"type": "text"}}}
CHAT_LOOK: Any = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@spec("REUSE-66")
@pytest.mark.parametrize("is_stream", [False, True])
async def test_custom_tools_of_chat_completions_pass_both_ways_through_openais_client(
    *, is_stream: bool
) -> None:
    calls: list[Any] = [
        ToolCallRequested("c0", "look_up", '{"city": "Basel"}'),
        ToolCallRequested("c1", "apply_patch", write_input(DIFF)),
        ToolCallRequested("c2", "note", "not in JSON"),
        Finished(),
    ]
    tools = [CHAT_LOOK, CHAT_PATCH, CHAT_NOTE]
    choice: Any = {"type": "custom", "custom": {"name": "apply_patch"}}
    async with served([calls, text("done")]) as gateway, gateway.openai(max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": "go"}]
        found = {"model": "m", "messages": messages, "tools": tools, "tool_choice": choice}
        if is_stream:
            raw = await _streamed_calls(await client.chat.completions.create(**found, stream=True))
        else:
            answer = await client.chat.completions.create(**found)
            raw = [call.model_dump(exclude_none=True) for call in answer.choices[0].message.tool_calls or ()]
            assert answer.choices[0].finish_reason == "tool_calls"
        expected = [
            {
                "id": "c0",
                "type": "function",
                "function": {"name": "look_up", "arguments": '{"city": "Basel"}'},
            },
            {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": DIFF}},
            {"id": "c2", "type": "custom", "custom": {"name": "note", "input": "not in JSON"}},
        ]
        assert raw == expected
        schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        assert gateway.model.requests[0].tools == (
            ToolSpec("look_up", "", SCHEMA),
            ToolSpec("apply_patch", "Change files.\n\nIts input has this format:\nstart: hunk+", schema),
            ToolSpec("note", "", schema),
        )
        results = [{"role": "tool", "tool_call_id": f"c{at}", "content": f"done {at}"} for at in range(3)]
        found["messages"] = [*messages, {"role": "assistant", "content": None, "tool_calls": raw}, *results]
        await client.chat.completions.create(**found)
        step = gateway.model.requests[-1].history.entries[-1]
        assert isinstance(step, Step)
        assert [call.name for call in step.response.calls] == ["look_up", "apply_patch", "note"]
        assert json.loads(step.response.calls[1].arguments) == {"input": DIFF}
        assert [result.content for result in step.results] == ["done 0", "done 1", "done 2"]


async def _streamed_calls(stream: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - of the SDK
    """Return the calls of a stream: their inputs are written piece by piece."""
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for delta in chunk.choices[0].delta.tool_calls or ():
            piece = delta.model_dump(exclude_none=True)
            call = calls.setdefault(piece.pop("index"), piece)
            if call is not piece:
                kind, written = ("custom", "input") if "custom" in piece else ("function", "arguments")
                call[kind][written] += piece[kind][written]
    return [*calls.values()]
