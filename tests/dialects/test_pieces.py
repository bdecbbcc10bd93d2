"""Messages are read in pieces if their repair is independent, also in the shapes that client applications send back."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from midstream.dialects import dialect_registry
from midstream.dialects.client_histories import Transcript, answers, closes, piece_of, transcript_of
from midstream.dialects.dialect import Dialect
from midstream.history.messages import Entry, History
from tests.dialects.rewriting_applications import RewritingApplication, shape
from tests.spec import spec

Json = dict[str, Any]

FORMS = {
    dialect_registry.CHAT: "openai-chat",
    dialect_registry.RESPONSES: "openai-responses",
    dialect_registry.MESSAGES: "anthropic",
}
USER: Json = {"role": "user", "content": "hi"}
RESPONSE: Json = {"role": "assistant", "content": "yes"}
RESULT: Json = {"role": "tool", "tool_call_id": "c1", "content": "ok"}
ITEM: Json = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT: Json = {"type": "function_call_output", "call_id": "c1", "output": "ok"}
USE: Json = {"type": "tool_use", "id": "c1", "name": "f", "input": {}}
USED: Json = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "ok"}]}
THOUGHT: Json = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}


def calling(call: Json | None = None, function: Json | None = None, **fields: Any) -> list[Json]:  # noqa: ANN401 - JSON
    """Return a response with a call, and its result."""
    whole = {"type": "function", **(call or {}), "id": "c1", "function": {"name": "f", **(function or {})}}
    response = {"role": "assistant", "tool_calls": [whole], **fields}
    return [USER, response, RESULT]


def read_in_pieces(messages: list[Json], form: str, cut: int = 0) -> Transcript | None:
    if cut and (not closes(messages[cut - 1], form) or answers(messages[cut], form)):
        return None
    pieces = [piece_of(some, form) for some in (messages[:cut], messages[cut:]) if some]
    instructions: list[str] = []
    entries: list[Entry] = []
    ids: list[str] = []
    for piece in pieces:
        if piece is None:
            return None
        instructions.append(piece.transcript.instructions)
        entries += piece.transcript.history.entries
        ids += piece.ids
    if len(ids) != len(set(ids)):
        return None
    return Transcript("\n\n".join(filter(None, instructions)), History(tuple(entries)))


CHAT: dict[str, list[Json]] = {
    "a dump of openai": [
        USER,
        {**RESPONSE, "refusal": None, "annotations": [], "audio": None, "tool_calls": None},
    ],
    "a dump of litellm": [
        USER,
        {**RESPONSE, "function_call": None, "tool_calls": None, "thinking_blocks": None},
    ],
    "no calls": [USER, {**RESPONSE, "tool_calls": []}],
    "no calls of a user": [{**USER, "tool_calls": None}, RESPONSE],
    "calls without content": calling(function={"arguments": "{}"}),
    "calls with null": calling(function={"arguments": "{}"}, content=None, function_call=None),
    "calls with a blank (Continue)": calling(function={"arguments": "{}"}, content=" "),
    "calls with pieces of nothing": calling(
        function={"arguments": "{}"}, content=[{"type": "text", "text": ""}]
    ),
    "a call without arguments": calling(content=""),
    "a call with empty ones": calling(function={"arguments": ""}, content=None),
    "a gathered call": calling({"type": None, "index": 0}, {"arguments": None}, content=None),
    "a result of nothing": [*calling(function={"arguments": "{}"})[:2], {**RESULT, "content": None}],
    "a result of blanks": [*calling(function={"arguments": "{}"})[:2], {**RESULT, "content": " \n"}],
    "a stopped response": [USER, {"role": "assistant", "content": ""}, USER],
    "a stopped response as a dump": [USER, {"role": "assistant", "content": None, "tool_calls": []}, USER],
    "a refusal": [USER, {"role": "assistant", "content": None, "refusal": "no", "tool_calls": None}],
    "no system prompt": [{"role": "system", "content": ""}, USER, RESPONSE],
    "blank words": [{"role": "user", "content": " "}, {"role": "assistant", "content": "\n"}],
    "an image without words": [
        {
            "role": "user",
            "content": [{"type": "text", "text": ""}, {"type": "image_url", "image_url": {"url": "x"}}],
        }
    ],
}
MESSAGES: dict[str, list[Json]] = {
    "thinking that nobody signed": [
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": ""}, USE]},
        USED,
    ],
    "an empty text before a call": [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": ""}, USE]},
        USED,
    ],
    "a stopped response": [USER, {"role": "assistant", "content": []}, USER],
    "a response of an empty text": [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": ""}]},
        USER,
    ],
    "blank words": [{"role": "user", "content": [{"type": "text", "text": " "}]}, RESPONSE],
}
RESPONSES: dict[str, list[Json]] = {
    "ids that are null": [USER, {**RESPONSE, "id": None}, {**ITEM, "id": None}, {**OUTPUT, "id": None}],
    "no arguments": [USER, {**ITEM, "arguments": ""}, OUTPUT],
    "no output": [USER, ITEM, {**OUTPUT, "output": ""}],
    "reasoning without an id (Codex)": [
        USER,
        {**THOUGHT, "encrypted_content": "gAAAA"},
        ITEM,
        OUTPUT,
        RESPONSE,
    ],
    "reasoning whose id is null": [USER, {**THOUGHT, "id": None}, RESPONSE],
    "a message of nothing": [USER, {"type": "message", "role": "assistant", "content": []}, USER],
}
CASES = [
    pytest.param(FORMS[dialect], messages, id=name)
    for dialect, cases in (
        (dialect_registry.CHAT, CHAT),
        (dialect_registry.MESSAGES, MESSAGES),
        (dialect_registry.RESPONSES, RESPONSES),
    )
    for name, messages in cases.items()
]


@spec("REUSE-28")
@pytest.mark.parametrize(("form", "messages"), CASES)
def test_a_piecewise_reading_of_a_common_shape_equals_its_repair(form: str, messages: list[Json]) -> None:
    before = copy.deepcopy(messages)
    assert read_in_pieces(messages, form) == transcript_of(messages, form)
    assert messages == before


@spec("REUSE-27")
@pytest.mark.parametrize("dialect", dialect_registry.DIALECTS, ids=lambda dialect: dialect.name)
def test_piecewise_readings_of_all_shapes_equal_their_repair(dialect: Dialect) -> None:
    in_pieces = 0
    for seed in range(60):
        chance = random.Random(seed)
        host, form = RewritingApplication(chance, dialect, has_shapes=True), FORMS[dialect]
        for turn in range(8):
            host.body()
            host.take_answer(f"answer {turn}")
        messages = [
            each if chance.random() < 0.5 else _shaped(chance, dialect, each) for each in host.messages
        ]
        read = read_in_pieces(messages, form, chance.randrange(len(messages)))
        in_pieces += read is not None
        assert read in (None, transcript_of(messages, form)), f"seed {seed}: {messages!r}"
    assert in_pieces > 3


def _shaped(chance: random.Random, dialect: Dialect, message: Any) -> Any:  # noqa: ANN401 - anything
    try:
        return shape(chance, dialect, message)
    except (AttributeError, KeyError, TypeError):
        return message  # the input is none of its own messages
