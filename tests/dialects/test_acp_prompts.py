"""Prompts as messages, questions as requests for permission, and decisions as answers."""

from __future__ import annotations

from typing import Any

import pytest

from midstream.dialects.acp_prompts import choice_in, message_of, permission_request, stream_of, text_of
from midstream.errors import MalformedFrameError
from midstream.history.messages import File, Text
from midstream.session.calls import CHOICES, Choice, QuestionKind
from midstream.session.questions import Question

Json = dict[str, Any]


def question(kind: QuestionKind = QuestionKind.APPROVAL, text: str = "") -> Question:
    return Question("s", 1, 1, "c", kind, "dig", "burn", '{"what": "tree"}', CHOICES[kind], 1.0, text)


def test_the_blocks_of_a_prompt_become_parts_of_a_message() -> None:
    blocks: list[Json] = [
        {"type": "text", "text": "See"},
        {"type": "audio", "data": "aGk=", "mimeType": "audio/wav"},
        {"type": "resource", "resource": {"uri": "file:///a", "blob": "aGk="}},
        {"type": "resource_link", "uri": "file:///b", "name": "b", "title": "The b"},
        {"type": "resource_link", "uri": "https://example.com/c", "name": "c"},
    ]
    message = message_of(blocks)
    assert message.parts == (
        Text("See"),
        File("audio/wav", data="aGk="),
        File("application/octet-stream", data="aGk=", name="file:///a"),
        Text("[The b](file:///b)"),
        Text("[c](https://example.com/c)"),
    )
    assert text_of(message) == "See\n[The b](file:///b)\n[c](https://example.com/c)"


@pytest.mark.parametrize("blocks", [[], [{"type": "video"}], [{"type": "text"}], [{"type": "resource"}]])
def test_an_invalid_prompt_is_refused(blocks: list[Json]) -> None:
    with pytest.raises(MalformedFrameError):
        message_of(blocks)


def test_a_key_names_one_stream() -> None:
    assert stream_of("a") == stream_of("a") != stream_of("b")
    assert stream_of("a").startswith("acp-")


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        (QuestionKind.APPROVAL, {"allow": "allow_once", "deny": "reject_once"}),
        (QuestionKind.DOUBT, {"happened": "reject_once", "rerun": "allow_once", "skip": "reject_once"}),
    ],
)
def test_a_question_is_a_request_with_an_option_for_each_decision(
    kind: QuestionKind, kinds: dict[str, str]
) -> None:
    schema = pytest.importorskip("acp.schema")
    asked = permission_request("s", question(kind), "call-1")
    schema.RequestPermissionRequest.model_validate(asked)
    assert {each["optionId"]: each["kind"] for each in asked["options"]} == kinds
    assert asked["toolCall"]["rawInput"] == {"what": "tree"}
    assert "burn" in asked["toolCall"]["content"][0]["content"]["text"]


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        ({"outcome": {"outcome": "selected", "optionId": "allow"}}, Choice.ALLOW),
        ({"outcome": {"outcome": "selected", "optionId": "rerun"}}, None),
        ({"outcome": {"outcome": "selected", "optionId": "what"}}, None),
        ({"outcome": {"outcome": "cancelled"}}, None),
        ({"outcome": "allow"}, None),
        (None, None),
    ],
)
def test_only_an_offered_decision_is_accepted(answer: object, choice: Choice | None) -> None:
    assert choice_in(question(), answer) is choice
