"""Events of a response, read back by our own reader of them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from midstream.dialects.api_errors import CANCELLED, ApiError
from midstream.dialects.dialect import Asked
from midstream.dialects.openai_responses_api import ResponsesWriter, list_items, read_responses
from midstream.dialects.request_fields import fields_of
from midstream.history.messages import Finish, Usage
from midstream.models.openai_responses_stream import ResponsesReader
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    Working,
)

NAMED = ("resp_1", "m", 7)


def read_request(**fields: object) -> Asked:
    return read_responses(fields_of(msgspec.json.encode({"model": "m", "input": "hi", **fields})))


def read(pieces: list[bytes]) -> tuple[list[ModelEvent], list[Any]]:
    reader = ResponsesReader()
    events: list[ModelEvent] = []
    bodies = []
    for piece in pieces:
        data = piece.partition(b"\ndata: ")[2]
        bodies.append(msgspec.json.decode(data))
        events += reader.read_json(data)
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    return [event for event in events if not isinstance(event, Working | KeepAlive)], bodies


def test_a_written_answer_is_read_back_unchanged() -> None:
    sent: list[ModelEvent] = [
        ThinkingDelta("hm"),
        TextDelta("Hello "),
        TextDelta("you"),
        ToolCallRequested("c1", "look", '{"at": 1}'),
        Finished(Finish.CALLS, "m", Usage(10, 5, 3)),
    ]
    writer = ResponsesWriter(read_request(metadata={"a": "b"}, temperature=0.5).form(*NAMED))
    pieces = [*writer.begin(), *(piece for event in sent for piece in writer.write(event))]
    events, bodies = read(pieces)
    assert events == sent
    assert bodies[-1]["response"] == msgspec.json.decode(writer.whole())
    assert (writer.response["metadata"], writer.response["temperature"]) == ({"a": "b"}, 0.5)
    done = [body["item"] for body in bodies if body["type"] == "response.output_item.done"]
    assert done == writer.response["output"]


@pytest.mark.parametrize(
    ("finish", "reason"), [(Finish.LENGTH, "max_output_tokens"), (Finish.FILTER, "content_filter")]
)
def test_a_truncated_answer_is_incomplete_with_its_reason(finish: Finish, reason: str) -> None:
    writer = ResponsesWriter(read_request().form(*NAMED))
    _, bodies = read([*writer.begin(), *writer.write(TextDelta("a")), *writer.write(Finished(finish))])
    response = bodies[-1]["response"]
    assert (bodies[-1]["type"], response["incomplete_details"]) == ("response.incomplete", {"reason": reason})
    assert response["output"][0]["status"] == "incomplete"


def test_a_failure_and_a_cancel_close_the_open_item_first() -> None:
    for ending, status in (("fail", "failed"), ("cancel", "cancelled")):
        writer = ResponsesWriter(read_request().form(*NAMED))
        pieces = [*writer.begin(), *writer.write(TextDelta("a"))]
        pieces += writer.fail(ApiError(429, "x", "slow")) if ending == "fail" else writer.cancel(CANCELLED)
        _, bodies = read(pieces)
        assert bodies[-1]["response"]["status"] == status
        assert bodies[-2]["type"] == "response.output_item.done"
        assert writer.response["output"][0]["content"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("code", "shown"), [("x", b"rate_limit_exceeded"), ("insufficient_quota", b"insufficient_quota")]
)
def test_a_request_to_wait_has_one_code_in_a_stream_and_an_empty_account_another(
    code: str, shown: bytes
) -> None:
    pieces = ResponsesWriter(read_request().form(*NAMED)).fail(ApiError(429, code, "slow"))
    assert pieces[-1].count(shown) == 1


def test_a_text_is_one_message() -> None:
    (item,) = list_items(read_request().messages, "resp_1")
    assert item["content"] == [{"type": "input_text", "text": "hi"}]
    listed = list_items([{"role": "assistant", "content": "a"}, 7], "resp_1")
    assert [each["id"] for each in listed] == ["in_1_0", "in_1_1"]
    assert listed[0]["content"][0]["type"] == "output_text"


def test_a_response_has_the_granted_settings_and_the_defaults_of_all_others() -> None:
    wished = read_request(
        temperature=0.5,
        presence_penalty=1,
        text={"verbosity": "low"},
        reasoning={"effort": "low"},
        top_p=0.5,
        service_tier="flex",
        max_tool_calls=3,
        safety_identifier="s",
        tools=[{"type": "function", "name": "look"}],
    )
    not_granted = msgspec.structs.replace(wished, ignored=(*wished.ignored, "top_p"))
    response = ResponsesWriter(not_granted.form(*NAMED)).response
    names = (
        "temperature",
        "presence_penalty",
        "frequency_penalty",
        "top_p",
        "service_tier",
        "max_tool_calls",
    )
    assert [response[name] for name in names] == [0.5, 1, 0, 1, "default", None]
    names = ("completed_at", "top_logprobs", "safety_identifier", "prompt_cache_key", "text", "reasoning")
    assert [response[name] for name in names] == [
        *(None, 0, "s", None),
        {"format": {"type": "text"}, "verbosity": "low"},
        {"effort": "low", "summary": None},
    ]
    assert response["tools"] == [
        {"type": "function", "name": "look", "description": None, "parameters": None, "strict": None}
    ]
    assert {"service_tier", "max_tool_calls"} <= {*wished.ignored}
