"""Chunks and whole answers, read back by our own reader of them."""

from __future__ import annotations

import msgspec

from midstream.dialects.api_errors import ApiError
from midstream.dialects.openai_chat import DONE, ChatWriter, read_chat
from midstream.dialects.request_fields import fields_of
from midstream.history.messages import Finish, Usage
from midstream.models.openai_stream import ChatStreamReader
from midstream.models.responses import (
    Finished,
    KeepAlive,
    ModelEvent,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    Working,
)
from tests.spec import spec

NAMED = ("chatcmpl-1", "m", 7)
EVENTS: list[ModelEvent] = [
    ThinkingDelta("hm"),
    TextDelta('Hello "you"\n'),
    ToolCallRequested("c1", "look", '{"at": 1}', "signed"),
    ToolCallRequested("c2", "look", "{}"),
    Finished(Finish.CALLS, "", Usage(10, 5, 3)),
]


def writer(**fields: object) -> ChatWriter:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return ChatWriter(read_chat(fields_of(msgspec.json.encode(body))).form(*NAMED))


def test_a_written_answer_is_read_back_unchanged() -> None:
    writing = writer(stream=True, stream_options={"include_usage": True})
    pieces = [*writing.begin(), *(piece for event in EVENTS for piece in writing.write(event))]
    reader = ChatStreamReader()
    read: list[ModelEvent] = []
    for piece in pieces:
        assert piece.startswith(b"data: ")
        assert piece.endswith(b"\n\n")
        read += reader.read_json(piece[6:-2])
    read += reader.end()
    assert pieces[-1] == DONE
    events = [event for event in read if not isinstance(event, Working) and event != TextDelta("")]
    assert events == [*EVENTS[:-1], Finished(Finish.CALLS, "m", Usage(10, 5, 3))]


def test_tokens_are_in_a_stream_only_on_request() -> None:
    writing = writer(stream=True)
    pieces = [piece for event in EVENTS for piece in writing.write(event)]
    assert not any(b"usage" in piece for piece in pieces)


def test_an_answer_without_text_has_an_empty_one() -> None:
    writing = writer()
    assert writing.write(KeepAlive()) == []
    writing.write(Finished(Finish.LENGTH))
    whole = msgspec.json.decode(writing.whole())
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert whole["choices"][0]["finish_reason"] == "length"


@spec("REUSE-68")
def test_a_failing_stream_has_no_end() -> None:
    (piece,) = writer(stream=True).fail(ApiError(503, "gone", "it is gone"))
    assert msgspec.json.decode(piece[6:])["error"]["message"] == "it is gone"
