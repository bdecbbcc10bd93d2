from __future__ import annotations

from midstream.core.repair.systems import with_words, words_of_system
from midstream.history import repair
from tests.core.repair.reported import reply, text, user


def system(words: str) -> dict[str, str]:
    return {"role": "system", "content": words}


def test_the_first_ones_go_into_the_parameter() -> None:
    done = repair([system("a"), system("b"), user("q")], system="z")
    assert (done.messages, done.system) == ([user("q")], "z\n\na\n\nb")


def test_a_later_one_stays_in_its_place_as_marked_words() -> None:
    done = repair([user("q"), reply(text("a")), system("be brief"), user("w")])
    assert done.messages[2] == user("[system message] be brief")
    assert done.system is None


def test_one_that_was_said_before_is_dropped() -> None:
    done = repair([user("q"), system("be kind")], system="be kind")
    assert (done.messages, done.system) == ([user("q")], "be kind")


def test_a_system_parameter_keeps_its_shape() -> None:
    assert with_words([{"type": "text", "text": "a"}], "b") == [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
    ]
    assert with_words({"parts": [{"text": "a"}]}, "b") == {"parts": [{"text": "a"}, {"text": "b"}]}
    assert with_words(None, "b", "bedrock") == [{"text": "b"}]
    assert with_words(None, "b", "gemini") == {"parts": [{"text": "b"}]}
    assert words_of_system([{"text": "a"}, {"text": "b"}]) == "a\nb"


def test_chat_takes_system_prompts_anywhere_and_mistral_not_after_a_reply() -> None:
    history = [user("q"), {"role": "assistant", "content": "a"}, system("b"), user("w")]
    assert repair(history, format="openai-chat").messages is history
    assert repair(history, format="mistral").messages[2] == user("[system message] b")


def test_a_model_that_takes_one_in_mid_list_gets_it_there() -> None:
    history = [user("q"), reply(text("a")), user("w"), system("be brief"), reply(text("b"))]
    assert repair(history, model="claude-opus-4-8").messages is history
    assert repair(history, model="claude-opus-4-5").messages[3] == user("[system message] be brief")
    assert repair(history, profile="vertex", model="claude-opus-4-8").messages is not history


def test_not_behind_a_reply_and_not_at_the_end_where_a_prompt_follows() -> None:
    for history in (
        [user("q"), reply(text("a")), system("be brief"), reply(text("b"))],
        [user("q"), system("be brief")],
        [user("q"), system("be brief"), system("be kind"), reply(text("b"))],
    ):
        done = repair(history, model="claude-opus-5")
        assert "system" not in [message["role"] for message in done.messages]
        assert repair(done.messages, model="claude-opus-5").messages is done.messages


def test_a_prompt_that_an_agent_put_in_again_is_dropped() -> None:
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
