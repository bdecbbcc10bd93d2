from __future__ import annotations

from typing import Any

import pytest

from midstream.history.codecs.format_registry import find_format
from midstream.history.operations import repair_by_name as repair
from midstream.history.repair.system_prompts import with_words, words_of_system
from tests.history.repair.reported import response, text, user
from tests.spec import spec


def system(words: str) -> dict[str, str]:
    return {"role": "system", "content": words}


def test_the_first_system_prompts_move_into_the_parameter() -> None:
    done = repair([system("a"), system("b"), user("q")], system="z")
    assert (done.messages, done.system) == ([user("q")], "z\n\na\n\nb")


def test_a_later_system_prompt_stays_in_its_place_as_marked_text() -> None:
    done = repair([user("q"), response(text("a")), system("be brief"), user("w")], format="anthropic")
    assert done.messages[2] == user("[system message] be brief")
    assert done.system is None


def test_a_repeated_system_prompt_is_dropped() -> None:
    done = repair([user("q"), system("be kind")], system="be kind")
    assert (done.messages, done.system) == ([user("q")], "be kind")


def test_a_system_parameter_keeps_its_shape() -> None:
    assert with_words([{"type": "text", "text": "a"}], "b") == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    assert with_words({"parts": [{"text": "a"}]}, "b") == {"parts": [{"text": "a"}, {"text": "b"}]}
    assert with_words(None, "b", find_format("bedrock").spec.write_system) == [{"text": "b"}]
    assert with_words(None, "b", find_format("gemini").spec.write_system) == {"parts": [{"text": "b"}]}
    assert words_of_system([{"text": "a"}, {"text": "b"}]) == "a\nb"


def test_chat_accepts_system_prompts_anywhere_and_mistral_not_after_a_response() -> None:
    history = [user("q"), {"role": "assistant", "content": "a"}, system("b"), user("w")]
    assert repair(history, format="openai-chat").messages is history
    assert repair(history, format="mistral").messages[2] == user("[system message] b")


def prompt(*parts: tuple[str, str]) -> dict[str, Any]:
    return {"kind": "request", "parts": [{"part_kind": kind, "content": words} for kind, words in parts]}


ANSWER = {"kind": "response", "parts": [{"part_kind": "text", "content": "a"}]}


@spec("HISTORY-43")
@pytest.mark.parametrize("profile", ["mistral", "mistral-v3"])
def test_pydantic_ai_keeps_system_prompts_in_requests_and_marks_later_ones(profile: str) -> None:
    history = [prompt(("system-prompt", "s"), ("user-prompt", "q")), ANSWER, prompt(("system-prompt", "t"))]
    done = repair(history, format="pydantic-ai", profile=profile)
    assert done.messages == [*history[:2], prompt(("user-prompt", "[system message] t"))]
    assert [(edit.code, edit.at, edit.part) for edit in done.edits] == [("system-in-list", 2, 0)]


def test_mistral_accepts_a_system_prompt_after_a_prompt_and_a_template_does_not() -> None:
    history = [prompt(("user-prompt", "q")), ANSWER, prompt(("user-prompt", "w"), ("system-prompt", "t"))]
    assert repair(history, format="pydantic-ai", profile="mistral").messages is history
    done = repair(history, format="pydantic-ai", profile="strict-template")
    assert [part["content"] for message in done.messages[2:] for part in message["parts"]] == [
        "w",
        "(no reply was recorded)",
        "[system message] t",
    ]


def test_a_request_of_system_prompts_alone_does_not_count_as_the_users_first() -> None:
    done = repair([prompt(("system-prompt", "s")), ANSWER], format="pydantic-ai")
    assert [edit.code for edit in done.edits] == ["starts-with-response"]
    assert done.messages[0] == prompt(("system-prompt", "s"))
    assert done.messages[1]["parts"][0]["part_kind"] == "user-prompt"


def test_a_template_receives_the_same_prompt_once() -> None:
    history = [prompt(("system-prompt", "s"), ("user-prompt", "q")), ANSWER, prompt(("system-prompt", "s"))]
    done = repair(history, format="pydantic-ai", profile="strict-template")
    assert (done.messages, [edit.code for edit in done.edits]) == (
        history[:2],
        ["repeated-system", "empty-message"],
    )


def test_a_system_prompt_that_an_earlier_repair_kept_as_text_is_dropped_as_repeated() -> None:
    history = [user("q"), response(text("a")), system("be brief"), user("w")]
    stored = repair(history, format="anthropic").messages
    assert repair([*stored, system("be brief")], format="anthropic").messages == stored


def test_an_empty_message_does_not_count_before_the_first_system_prompt() -> None:
    history = [{"role": "assistant", "content": []}, system("be brief"), user("q")]
    assert repair(history, format="openai-chat", profile="strict-template").messages == history[1:]


def test_a_model_that_supports_a_system_prompt_in_mid_list_receives_it_there() -> None:
    history = [user("q"), response(text("a")), user("w"), system("be brief"), response(text("b"))]
    assert repair(history, format="anthropic", model="claude-opus-4-8").messages is history
    assert repair(history, format="anthropic", model="claude-opus-4-5").messages[3] == user(
        "[system message] be brief"
    )
    assert repair(history, profile="vertex", model="claude-opus-4-8").messages is not history


def test_a_mid_list_system_prompt_stays_neither_after_a_response_nor_at_the_end_before_a_prompt() -> None:
    for history in (
        [user("q"), response(text("a")), system("be brief"), response(text("b"))],
        [user("q"), system("be brief")],
        [user("q"), system("be brief"), system("be kind"), response(text("b"))],
    ):
        done = repair(history, format="anthropic", model="claude-opus-5")
        assert "system" not in [message["role"] for message in done.messages]
        assert repair(done.messages, format="anthropic", model="claude-opus-5").messages is done.messages


def test_a_prompt_that_an_agent_repeated_is_dropped() -> None:
    part = {"part_kind": "system-prompt", "content": "be kind"}
    asked = {"part_kind": "user-prompt", "content": "q"}
    answer = {"kind": "response", "parts": [{"part_kind": "text", "content": "a"}]}
    history = [
        {"kind": "request", "parts": [part, asked]},
        answer,
        {"kind": "request", "parts": [part, asked]},
    ]
    done = repair(history, format="pydantic-ai")
    assert done.messages == [history[0], answer, {"kind": "request", "parts": [asked]}]
    assert [edit.code for edit in done.edits] == ["repeated-system"]


@pytest.mark.parametrize("profile", ["portable", "strict-template", "neutral"])
def test_a_system_prompt_kept_as_text_counts_as_a_copy_in_a_later_repair(profile: str) -> None:
    def request_with(*parts: tuple[str, str]) -> dict[str, Any]:
        return {"kind": "request", "parts": [{"part_kind": kind, "content": words} for kind, words in parts]}

    answer = {"kind": "response", "parts": [{"part_kind": "text", "content": "a"}]}
    reported = ("system-prompt", "Be brief.")
    start = [request_with(("user-prompt", "q")), answer, request_with(reported, ("user-prompt", "r")), answer]
    more = [request_with(("user-prompt", "s")), answer, request_with(reported, ("user-prompt", "t")), answer]
    stored = repair(start, format="pydantic-ai", profile=profile)
    later = repair([*stored.messages, *more], format="pydantic-ai", profile=profile)
    assert later.messages == repair([*start, *more], format="pydantic-ai", profile=profile).messages
