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


def test_one_that_an_earlier_repair_kept_as_words_was_said_before() -> None:
    history = [user("q"), reply(text("a")), system("be brief"), user("w")]
    stored = repair(history).messages
    assert repair([*stored, system("be brief")]).messages == stored


def test_what_says_nothing_is_not_before_the_first_one() -> None:
    history = [{"role": "assistant", "content": []}, system("be brief"), user("q")]
    assert repair(history, format="openai-chat", profile="strict-template").messages == history[1:]
