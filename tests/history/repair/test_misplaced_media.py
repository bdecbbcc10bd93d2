from __future__ import annotations

from typing import Any

from midstream.history.operations import repair_by_name as repair
from midstream.history.repair.placeholders import ATTACHED, ATTACHED_BELOW
from tests.history.repair.reported import chat_call, chat_response, response, result, text, tool, use, user

PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
LINK = {"type": "image_url", "image_url": {"url": "https://x.test/a.png"}}


def repair_twice(messages: list[Any], form: str = "anthropic", profile: str | None = None) -> list[Any]:
    done = repair(messages, format=form, profile=profile)
    assert repair(done.messages, format=form, profile=profile).messages is done.messages
    return done.messages


def test_a_failed_result_contains_only_text_and_its_image_follows_it() -> None:
    failed = result("a", [text("no"), PIXEL], is_error=True)
    messages = [user("q"), response(use("a")), user([failed, text("so?")])]
    answer = repair_twice(messages)[2]["content"]
    assert answer == [result("a", "no", is_error=True), text(ATTACHED), PIXEL, text("so?")]
    only = [user("q"), response(use("a")), user([result("a", [PIXEL], is_error=True)])]
    assert repair_twice(only)[2]["content"][0]["content"] == ATTACHED_BELOW


def test_a_successful_result_keeps_its_image() -> None:
    messages = [user("q"), response(use("a")), user([result("a", [text("w"), PIXEL])])]
    assert repair(messages).messages is messages


def test_an_image_in_a_response_moves_to_the_user() -> None:
    messages = [user("q"), response(text("here"), PIXEL), user("thanks")]
    assert repair_twice(messages) == [
        user("q"),
        response(text("here")),
        user([text(ATTACHED), PIXEL]),
        user("thanks"),
    ]


def test_the_results_of_a_response_precede_its_moved_media() -> None:
    messages = [user("q"), response(text("here"), PIXEL, use("a")), user([result("a")])]
    assert repair_twice(messages) == [
        user("q"),
        response(text("here"), use("a")),
        user([result("a")]),
        user([text(ATTACHED), PIXEL]),
    ]


def test_a_tool_message_is_text_and_all_images_follow_the_last() -> None:
    asked = chat_response(chat_call("a"), chat_call("b"))
    messages = [user("q"), asked, tool("a", [LINK]), tool("b", [text("w"), LINK])]
    shown = {"role": "user", "content": [text(ATTACHED), LINK, text(ATTACHED), LINK]}
    assert repair_twice(messages, "openai-chat") == [
        user("q"),
        asked,
        tool("a", ATTACHED_BELOW),
        tool("b", "w"),
        shown,
    ]


def test_images_in_tool_messages_stay_where_the_profile_supports_them() -> None:
    messages = [user("q"), chat_response(chat_call("a")), tool("a", [LINK])]
    assert repair(messages, format="openai-chat", profile="kimi").messages is messages


def test_an_orphan_in_a_response_leaves_its_image_to_the_user() -> None:
    image = {"image": {"format": "png", "source": {"bytes": "AA=="}}}
    orphan = {"toolResult": {"toolUseId": "x", "content": [{"text": "w"}, image]}}
    messages = [{"role": "user", "content": [{"text": "q"}]}, {"role": "assistant", "content": [orphan]}]
    assert repair_twice(messages, "bedrock")[2]["content"] == [{"text": ATTACHED}, image]


def test_a_chunk_of_unknown_type_in_a_result_becomes_text_at_once() -> None:
    answer = {"role": "tool", "tool_call_id": "a", "content": [{"type": " ", "text": "w"}]}
    done = repair([user("q"), chat_response(chat_call("a")), answer], format="openai-chat")
    assert isinstance(done.messages[2]["content"], str)
    assert repair(done.messages, format="openai-chat").messages is done.messages
