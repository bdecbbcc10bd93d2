from __future__ import annotations

from random import Random

import pytest

from midstream.errors import InvalidHistoryError
from midstream.history.operations import convert_by_name as convert
from tests.history.repair.format_histories import FORMATS, markers, valid
from tests.history.repair.reported import response, text, thought, user
from tests.history.repair.rules import refusals
from tests.search import tried


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
def test_a_valid_history_is_valid_in_every_other_format_and_back(source: str, target: str) -> None:
    for seed in range(tried(12)):
        messages = valid(source, Random(seed))
        there = convert(messages, source=source, target=target)
        assert refusals(target, there.messages) == []
        assert markers(there.messages) == markers(messages)
        back = convert(there.messages, source=target, target=source)
        assert markers(back.messages) == markers(messages)


def test_signed_thinking_is_left_out_for_another_provider_with_a_finding() -> None:
    history = [user("q"), response(thought("hm", "sig"), text("a"))]
    bedrock = convert(history, source="anthropic", target="bedrock")
    assert bedrock.messages[1]["content"][0] == {
        "reasoningContent": {"reasoningText": {"text": "hm", "signature": "sig"}}
    }
    assert bedrock.findings == ()
    items = convert(history, source="anthropic", target="openai-responses")
    assert [finding.code for finding in items.findings] == ["thinking-left-out"]


def test_images_are_converted() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    history = [user([{"type": "image", "source": source}])]
    chat = convert(history, source="anthropic", target="openai-chat")
    url = "data:image/png;base64,aGk="
    assert chat.messages == [user([{"type": "image_url", "image_url": {"url": url}}])]
    assert convert(chat.messages, source="openai-chat", target="anthropic").messages == history


def test_system_prompts_are_converted_to_the_place_of_the_target() -> None:
    chat = convert([user("q")], source="anthropic", target="openai-chat", system="be kind")
    assert chat.messages == [{"role": "system", "content": "be kind"}, user("q")]
    assert convert(chat.messages, source="openai-chat", target="anthropic").system == "be kind"


def test_conversion_to_the_same_format_changes_nothing() -> None:
    history = [user("q")]
    assert convert(history, source="anthropic", target="claude").messages is history


def test_a_value_that_is_no_message_is_refused() -> None:
    with pytest.raises(InvalidHistoryError, match="message 0"):
        convert(["hi"], source="anthropic", target="gemini")
