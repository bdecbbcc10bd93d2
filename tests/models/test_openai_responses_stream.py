"""The events of a streamed Responses response, valid and invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import ModelError, ModelUnavailableError
from midstream.history.messages import Finish, ToolSpec, Usage
from midstream.models.openai_responses_stream import ResponsesReader, render_tools
from midstream.models.responses import Finished, KeepAlive, ModelEvent, TextDelta, Working


def decoded(reader: ResponsesReader, *events: dict[str, Any]) -> list[ModelEvent]:
    return [found for each in events for found in reader.read_json(json.dumps(each).encode())]


def delta(number: int, text: str) -> dict[str, Any]:
    return {"type": "response.output_text.delta", "sequence_number": number, "delta": text}


def test_a_repeated_event_is_ignored() -> None:
    reader = ResponsesReader()
    assert decoded(reader, delta(0, "a"), delta(1, "b"), delta(1, "b"), delta(0, "a"), delta(2, "c")) == [
        TextDelta("a"),
        TextDelta("b"),
        TextDelta("c"),
    ]
    assert reader.sequence == 2


def test_states_are_no_progress_and_hidden_work_is() -> None:
    reader = ResponsesReader()
    assert decoded(reader, {"type": "response.queued", "response": {"id": "resp_1"}}) == [KeepAlive()]
    assert decoded(reader, {"type": "response.web_search_call.searching"}) == [Working()]
    assert reader.response_id == "resp_1"


def test_a_response_without_deltas_is_decoded_from_its_end() -> None:
    content = [{"type": "output_text", "text": "Hello"}, {"type": "refusal", "refusal": "!"}]
    output = [{"type": "reasoning"}, {"type": "message", "content": content}]
    reader = ResponsesReader()
    assert decoded(reader, {"type": "response.completed", "response": {"output": output}}) == [
        TextDelta("Hello!"),
        Finished(Finish.STOP),
    ]
    assert decoded(reader, delta(5, "late")) == []


def test_usage_without_details_counts() -> None:
    done = {"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": 1}}}
    assert decoded(ResponsesReader(), done) == [Finished(Finish.STOP, usage=Usage(3, 1))]


def test_cached_and_cache_writing_tokens_are_counted() -> None:
    details = {"cached_tokens": 20, "cache_write_tokens": 5}
    usage = {"input_tokens": 30, "input_tokens_details": details, "output_tokens": 1}
    done = {"type": "response.completed", "response": {"usage": usage}}
    assert decoded(ResponsesReader(), done) == [Finished(Finish.STOP, usage=Usage(30, 1, 20, 5))]


def test_tools_have_a_flat_form() -> None:
    assert render_tools([ToolSpec("read", "Read a file.", {})]) == [
        {
            "type": "function",
            "name": "read",
            "description": "Read a file.",
            "parameters": {"type": "object", "properties": {}},
            "strict": False,
        }
    ]


@pytest.mark.parametrize("data", [b"", b"[1]", b"<html>", b'{"type": 5}'])
def test_bytes_that_are_no_event_are_a_retryable_error(data: bytes) -> None:
    with pytest.raises(ModelUnavailableError):
        ResponsesReader().read_json(data)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["id", "output", "type", "content", "usage", "reason", "error"]), inner
        )
    ),
    max_leaves=6,
)
_events = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            [
                "response.created",
                "response.output_text.delta",
                "response.output_item.done",
                "response.completed",
                "response.incomplete",
                "response.failed",
                "response.unheard_of",
                "error",
            ]
        )
    },
    optional=dict.fromkeys(("response", "item", "delta", "error", "code", "message", "summary_index"), _json),
)


@given(st.lists(_events, max_size=4))
def test_any_input_gives_events_or_a_typed_error(events: list[dict[str, Any]]) -> None:
    reader = ResponsesReader()
    try:
        decoded(reader, *events)
    except ModelError:
        return
    assert reader.failure is None or reader.is_ended
