from __future__ import annotations

from typing import Any

import msgspec

from midstream.dialects.anthropic import MessagesWriter, estimate_tokens, read_messages
from midstream.dialects.dialect import Asked
from midstream.dialects.request_fields import fields_of
from midstream.history.messages import Finish, Usage
from midstream.models.responses import Finished, ModelEvent, TextDelta, ThinkingDelta, ToolCallRequested

NAMED = ("msg_1", "m", 7)
THINKING = {"type": "enabled", "budget_tokens": 1024}


def read_request(**fields: object) -> Asked:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return read_messages(fields_of(msgspec.json.encode(body)))


def write(*events: ModelEvent, **fields: object) -> tuple[list[tuple[str, Any]], Any]:
    """Return the events of a stream, each with its name, and the whole answer."""
    writing = MessagesWriter(read_request(**fields).form(*NAMED))
    pieces = [*writing.begin(), *(piece for event in events for piece in writing.write(event))]
    read = []
    for piece in pieces:
        name, _, data = piece.decode().removeprefix("event: ").partition("\ndata: ")
        body = msgspec.json.decode(data)
        assert body["type"] == name
        read.append((name, body))
    return read, msgspec.json.decode(writing.whole())


def test_blocks_open_and_close_in_turn_and_add_up_to_the_whole() -> None:
    events, whole = write(
        ThinkingDelta("hm"),
        ThinkingDelta("", "signed"),
        TextDelta("a"),
        TextDelta("b"),
        ToolCallRequested("t1", "look", '{"at": 1}'),
        TextDelta("c"),
        Finished(Finish.CALLS, "", Usage(10, 5, 3)),
        thinking=THINKING,
    )
    blocks: list[Any] = []
    is_open = False
    for name, body in events:
        if name == "content_block_start":
            assert (body["index"], is_open) == (len(blocks), False)
            blocks.append(body["content_block"])
            is_open = True
        elif name == "content_block_stop":
            assert (body["index"], is_open) == (len(blocks) - 1, True)
            is_open = False
        elif name == "content_block_delta":
            assert is_open
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "text"]
    assert whole["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "signed"},
        {"type": "text", "text": "ab"},
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
        {"type": "text", "text": "c"},
    ]
    assert (whole["stop_reason"], whole["usage"]["input_tokens"]) == ("tool_use", 7)


def test_arguments_that_are_not_an_object_are_wrapped_in_one() -> None:
    _, whole = write(
        ToolCallRequested("t1", "look", "at it"), ToolCallRequested("t2", "look", "NaN"), Finished()
    )
    assert [block["input"] for block in whole["content"]] == [{"_raw": "at it"}, {"_raw": "NaN"}]


def test_the_counting_block_of_claude_code_is_not_part_of_the_instructions() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "Be brief."},
    ]
    assert read_request(system=system).instructions == "Be brief."
    assert read_request(system="Be brief.").instructions == "Be brief."


def test_tokens_are_estimated_by_length() -> None:
    fields = fields_of(msgspec.json.encode({"messages": ["x" * 400], "model": "m"}))
    assert estimate_tokens(fields) == 101
    assert estimate_tokens({}) == 1
