from __future__ import annotations

from random import Random

import pytest

from midstream.errors import InvalidHistoryError
from midstream.history.operations import convert_by_name as convert
from tests.history.repair.histories import FORMATS, markers, valid
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


def test_signed_thinking_stays_with_its_provider_and_says_so() -> None:
    history = [user("q"), response(thought("hm", "sig"), text("a"))]
    bedrock = convert(history, source="anthropic", target="bedrock")
    assert bedrock.messages[1]["content"][0] == {
        "reasoningContent": {"reasoningText": {"text": "hm", "signature": "sig"}}
    }
    assert bedrock.findings == ()
    items = convert(history, source="anthropic", target="openai-responses")
    assert [finding.code for finding in items.findings] == ["thinking-left-out"]


def test_images_cross() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    history = [user([{"type": "image", "source": source}])]
    chat = convert(history, source="anthropic", target="openai-chat")
    url = "data:image/png;base64,aGk="
    assert chat.messages == [user([{"type": "image_url", "image_url": {"url": url}}])]
    assert convert(chat.messages, source="openai-chat", target="anthropic").messages == history


def test_system_prompts_go_where_the_target_has_them() -> None:
    chat = convert([user("q")], source="anthropic", target="openai-chat", system="be kind")
    assert chat.messages == [{"role": "system", "content": "be kind"}, user("q")]
    assert convert(chat.messages, source="openai-chat", target="anthropic").system == "be kind"


def test_its_own_format_comes_back_as_it_is() -> None:
    history = [user("q")]
    assert convert(history, source="anthropic", target="claude").messages is history


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(InvalidHistoryError, match="message 0"):
        convert(["hi"], source="anthropic", target="gemini")
