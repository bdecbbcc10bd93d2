from __future__ import annotations

from midstream.core.repair.words import NO_REASONING, SENTINEL
from midstream.history import repair
from tests.core.repair.reported import (
    chat_call,
    chat_reply,
    fcall,
    fresponse,
    human,
    item,
    model,
    output,
    tool,
    user,
)

RS = {"type": "reasoning", "id": "rs_1", "summary": []}


def test_reasoning_goes_with_the_id_of_what_it_led_to() -> None:
    done = repair([user("q"), RS, user("w"), item("a", id="fc_1"), output("a")], format="openai-responses")
    assert done.messages == [user("q"), user("w"), item("a"), output("a")]


def test_reasoning_that_is_followed_stays() -> None:
    good = [user("q"), RS, item("a", id="fc_1"), output("a")]
    assert repair(good, format="openai-responses").messages is good


def test_a_reasoning_models_call_without_its_reasoning_goes_without_its_id() -> None:
    history = [user("q"), item("a", id="fc_1"), output("a")]
    assert repair(history, format="openai-responses").messages is history
    done = repair(history, format="openai-responses", model="gpt-5.1")
    assert done.messages[1] == item("a")


def test_only_the_first_call_of_a_step_in_progress_gets_the_stand_in() -> None:
    history = [human({"text": "q"}), model(fcall(), fcall("b")), human(fresponse(), fresponse("b"))]
    done = repair(history, format="gemini", profile="gemini-3")
    assert [part.get("thoughtSignature") for part in done.messages[1]["parts"]] == [SENTINEL, None]
    answered = [*history, model({"text": "done"})]
    assert repair(answered, format="gemini", profile="gemini-3").messages is answered


def test_deepseek_gets_a_placeholder_while_it_thinks() -> None:
    history = [user("q"), chat_reply(chat_call("a")), tool("a")]
    done = repair(history, format="openai-chat", profile="deepseek", thinking=True)
    assert done.messages[1]["reasoning_content"] == NO_REASONING
    assert repair(history, format="openai-chat", profile="deepseek").messages is history
