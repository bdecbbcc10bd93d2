"""JSON of a provider's stream, with characters that were cut between two events."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from midstream.errors import ModelUnavailableError
from midstream.history.messages import Response, Text, Thinking, ToolCall
from midstream.models.anthropic_stream import MessageReader
from midstream.models.openai_responses_stream import ResponsesReader
from midstream.models.openai_stream import ChatStreamReader
from midstream.models.responses import ResponseBuilder
from midstream.models.stream_json import decode_event, encode_json
from midstream.session.call_references import AttemptRef

HIGH, LOW, EMOJI = "\ud83d", "\ude00", "\U0001f600"
Event = dict[str, Any]


def chat(**delta: object) -> Event:
    return {"choices": [{"delta": delta}]}


def called(name: str | None, arguments: str) -> Event:
    return chat(tool_calls=[{"index": 0, "id": "c", "function": {"name": name, "arguments": arguments}}])


def block(index: int, **delta: object) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": delta}


CHAT = [
    chat(reasoning_content="a" + HIGH),
    chat(reasoning_content=LOW),
    chat(content="b" + HIGH),
    chat(content=LOW),
    called("look", '{"q":"' + HIGH),
    called(None, LOW + '"}'),
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
]
MESSAGES = [
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    block(0, type="thinking_delta", thinking="a" + HIGH),
    block(0, type="thinking_delta", thinking=LOW),
    {"type": "content_block_stop", "index": 0},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    block(1, type="text_delta", text="b" + HIGH),
    block(1, type="text_delta", text=LOW),
    {"type": "content_block_stop", "index": 1},
    {
        "type": "content_block_start",
        "index": 2,
        "content_block": {"type": "tool_use", "id": "c", "name": "look", "input": {}},
    },
    block(2, type="input_json_delta", partial_json='{"q":"' + HIGH),
    block(2, type="input_json_delta", partial_json=LOW + '"}'),
    {"type": "content_block_stop", "index": 2},
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    {"type": "message_stop"},
]
RESPONSES = [
    {"type": "response.reasoning_text.delta", "delta": "a" + HIGH},
    {"type": "response.reasoning_text.delta", "delta": LOW},
    {"type": "response.output_text.delta", "delta": "b" + HIGH},
    {"type": "response.output_text.delta", "delta": LOW},
    {
        "type": "response.completed",
        "response": {
            "output": [
                {
                    "type": "function_call",
                    "call_id": "c",
                    "name": "look",
                    "arguments": '{"q":"' + HIGH + LOW + '"}',
                }
            ]
        },
    },
]


@pytest.mark.parametrize(
    ("reader", "events"),
    [(ChatStreamReader(), CHAT), (MessageReader(), MESSAGES), (ResponsesReader(), RESPONSES)],
    ids=["chat", "messages", "responses"],
)
def test_a_character_cut_between_two_events_arrives_whole(
    reader: ChatStreamReader | MessageReader | ResponsesReader, events: list[Event]
) -> None:
    builder = ResponseBuilder(AttemptRef(1, 1, 1))
    shown = ""
    for event in events:
        body = json.dumps(event).encode()  # `\ud83d`, as JavaScript writes half a character
        for each in reader.read_json(body):
            shown += "".join(delta.text for delta in builder.add(each))
    for each in () if isinstance(reader, ResponsesReader) else reader.end():
        builder.add(each)
    response = builder.response()
    assert shown == f"a{EMOJI}b{EMOJI}"
    assert isinstance(response, Response)
    assert response.parts == (
        Thinking("a" + EMOJI),
        Text("b" + EMOJI),
        ToolCall("c", "look", f'{{"q":"{EMOJI}"}}'),
    )


@pytest.mark.parametrize("start", [b'{"x":"\\ud83d"', b'{"x":"\\uD83D","y":', b'{"x":"\\ud83d","y":\xff}'])
def test_a_broken_event_is_refused(start: bytes) -> None:
    with pytest.raises(ModelUnavailableError, match="not an event of a test"):
        decode_event(start, msgspec.json.Decoder(dict[str, str]), "an event of a test")


def test_an_event_of_another_type_is_refused() -> None:
    with pytest.raises(ModelUnavailableError, match="not an event of a test"):
        decode_event(b'{"x":["\\ud83d"]}', msgspec.json.Decoder(dict[str, str]), "an event of a test")


def test_a_value_with_half_a_character_becomes_json() -> None:
    assert encode_json({"a": [HIGH, 1]}) == '{"a":["\ufffd",1]}'
    assert encode_json({"a": 1}) == '{"a":1}'
