"""The chunks of a streamed chat completion, as many servers send them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import ModelError, ModelFilteredError, ModelRejectedError, ModelUnavailableError
from midstream.history.messages import Finish, Usage
from midstream.models.openai_stream import CALLS_MAX, ChatStreamReader
from midstream.models.responses import (
    Finished,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    Working,
)


def chunk(finish: str | None = None, **delta: object) -> dict[str, Any]:
    return {"model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call_piece(index: int | None, arguments: object, **more: object) -> dict[str, Any]:
    name = more.pop("name", None)
    return {"index": index, "function": {"name": name, "arguments": arguments}, **more}


def decoded(*chunks: dict[str, Any]) -> list[ModelEvent]:
    reader = ChatStreamReader()
    events = [event for each in chunks for event in reader.read_json(json.dumps(each).encode())]
    return [*events, *reader.end()]


def test_text_arrives_at_once_and_the_end_with_its_usage() -> None:
    usage = {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 1},
    }
    assert decoded(
        chunk(role="assistant", content=""),
        chunk(content="Hel"),
        chunk(content="lo"),
        chunk("stop"),
        {"choices": [], "usage": usage},
    ) == [TextDelta("Hel"), TextDelta("lo"), Finished(Finish.STOP, "m", Usage(7, 2, 4, 1))]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thinking_has_two_field_names(field: str) -> None:
    assert decoded(chunk(**{field: "hm"}), chunk("stop", content="yes")) == [
        ThinkingDelta("hm"),
        TextDelta("yes"),
        Finished(Finish.STOP, "m"),
    ]


def test_parallel_calls_are_joined_by_their_index() -> None:
    assert decoded(
        chunk(tool_calls=[call_piece(0, "", id="a", name="read")]),
        chunk(tool_calls=[call_piece(1, "{", id="b", name="list"), call_piece(0, '{"path"')]),
        chunk(tool_calls=[call_piece(0, ': "x"}'), call_piece(1, "}")]),
        chunk("tool_calls"),
    ) == [
        *(Working(name) for name in ("read", "list", "", "", "")),
        ToolCallRequested("a", "read", '{"path": "x"}'),
        ToolCallRequested("b", "list", "{}"),
        Finished(Finish.CALLS, "m"),
    ]


def test_calls_without_an_index_start_with_their_id() -> None:
    assert decoded(
        chunk(tool_calls=[call_piece(None, '{"a"', id="a", name="read")]),
        chunk(tool_calls=[call_piece(None, ": 1}")]),
        chunk("stop", tool_calls=[call_piece(None, {"b": 2}, id="b", name="read")]),
    ) == [
        *(Working(name) for name in ("read", "", "read")),
        ToolCallRequested("a", "read", '{"a": 1}'),
        ToolCallRequested("b", "read", '{"b":2}'),
        Finished(Finish.CALLS, "m"),
    ]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", Finish.STOP),
        ("length", Finish.LENGTH),
        ("content_filter", Finish.FILTER),
        ("new", Finish.STOP),
    ],
)
def test_each_finish_reason_maps_to_a_finish(reason: str, finish: Finish) -> None:
    assert decoded(chunk(reason, content="a"))[-1] == Finished(finish, "m")


def test_the_end_marker_alone_ends_a_response() -> None:
    reader = ChatStreamReader()
    assert reader.read_json(json.dumps(chunk(content="a")).encode()) == [TextDelta("a")]
    assert reader.read_json(b"[DONE]") == []
    assert reader.end() == [Finished(Finish.STOP, "m")]


def test_a_response_without_its_end_is_cut() -> None:
    with pytest.raises(ModelUnavailableError, match="broke off"):
        decoded(chunk(content="Hel"))


def test_a_filtered_response_is_not_retryable() -> None:
    with pytest.raises(ModelFilteredError, match="content filter"):
        decoded(chunk("content_filter"))


def test_too_many_calls_are_an_error() -> None:
    with pytest.raises(ModelUnavailableError, match="limit"):
        decoded(chunk(tool_calls=[call_piece(CALLS_MAX, "{}", id="a", name="read")]))


@given(
    st.binary(max_size=40)
    | st.builds(
        lambda value: json.dumps(value).encode(),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["choices", "delta", "content", "error", "tool_calls", "index", "usage"]),
                    inner,
                    max_size=4,
                )
            ),
        ),
    )
)
def test_any_input_gives_events_or_a_typed_error(data: bytes) -> None:
    reader = ChatStreamReader()
    try:
        reader.read_json(data)
        reader.end()
    except ModelError:
        pass


def test_an_error_in_the_middle_of_a_stream_is_typed() -> None:
    with pytest.raises(ModelUnavailableError, match="overloaded"):
        decoded(chunk(content="Hel"), {"error": {"message": "overloaded", "type": "server_error"}})
    with pytest.raises(ModelRejectedError, match="bad tool"):
        decoded({"error": {"message": "bad tool", "type": "invalid_request_error", "code": None}})


def test_googles_thought_signature_arrives_with_its_call() -> None:
    extra = {"google": {"thought_signature": "c2ln"}}
    signed = call_piece(0, "{}", name="run", id="a", extra_content=extra)
    found = decoded(
        chunk(tool_calls=[signed]), chunk(tool_calls=[call_piece(1, "{}", name="run", id="b")]), chunk("stop")
    )
    asked = [event for event in found if isinstance(event, ToolCallRequested)]
    assert asked == [ToolCallRequested("a", "run", "{}", "c2ln"), ToolCallRequested("b", "run", "{}")]
