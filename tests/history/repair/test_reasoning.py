from __future__ import annotations

from midstream.history.operations import repair
from midstream.history.repair.placeholders import NO_REASONING, SENTINEL
from tests.history.repair.reported import (
    chat_call,
    chat_response,
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


def test_reasoning_is_removed_with_the_id_of_its_lost_item() -> None:
    done = repair([user("q"), RS, user("w"), item("a", id="fc_1"), output("a")], format="openai-responses")
    assert done.messages == [user("q"), user("w"), item("a"), output("a")]


def test_reasoning_with_its_item_stays() -> None:
    good = [user("q"), RS, item("a", id="fc_1"), output("a")]
    assert repair(good, format="openai-responses").messages is good


def test_a_call_without_its_reasoning_loses_its_id_at_a_reasoning_model() -> None:
    history = [user("q"), item("a", id="fc_1"), output("a")]
    assert repair(history, format="openai-responses").messages is history
    done = repair(history, format="openai-responses", model="gpt-5.1")
    assert done.messages[1] == item("a")


def test_only_the_first_call_of_a_step_in_progress_gets_the_placeholder_signature() -> None:
    history = [human({"text": "q"}), model(fcall(), fcall("b")), human(fresponse(), fresponse("b"))]
    done = repair(history, format="gemini", profile="gemini-3")
    assert [part.get("thoughtSignature") for part in done.messages[1]["parts"]] == [SENTINEL, None]
    answered = [*history, model({"text": "done"})]
    assert repair(answered, format="gemini", profile="gemini-3").messages is answered


def test_deepseek_gets_a_placeholder_during_thinking() -> None:
    history = [user("q"), chat_response(chat_call("a")), tool("a")]
    done = repair(history, format="openai-chat", profile="deepseek", thinking=True)
    assert done.messages[1]["reasoning_content"] == NO_REASONING
    assert repair(history, format="openai-chat", profile="deepseek").messages is history


def test_reasoning_before_a_message_without_its_id_is_removed() -> None:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "m1x"}]}
    led = {**RS, "summary": [{"type": "summary_text", "text": "hm"}]}
    done = repair([user("q"), led, message, user("w")], format="openai-responses")
    assert done.messages == [user("q"), message, user("w")]
    assert [(edit.code, edit.at, edit.lost) for edit in done.edits] == [("nameless-follower", 1, "hm")]
    named = [user("q"), led, {**message, "id": "msg_1"}, user("w")]
    assert repair(named, format="openai-responses").messages is named


def test_reasoning_is_removed_where_a_repair_removes_the_id_of_its_message() -> None:
    newest = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "m1x"}]}
    done = repair([user("q"), RS, {**newest, "id": "item_1"}, user("w")], format="openai-responses")
    assert [message.get("type") for message in done.messages] == [None, "message", None]
    assert repair(done.messages, format="openai-responses").messages is done.messages


def test_a_provider_that_requires_reasoning_on_every_response_gets_it() -> None:
    thoughtful = {"role": "assistant", "content": "m1x", "reasoning_content": "hm"}
    history = [
        user("q"),
        chat_response(chat_call("a")),
        tool("a"),
        {"role": "assistant", "content": "m2x"},
        user("w"),
    ]
    for profile in (None, "deepseek", "kimi"):
        done = repair(history, format="openai-chat", profile=profile, thinking="every")
        responses = [message for message in done.messages if message["role"] == "assistant"]
        assert [message.get("reasoning_content") for message in responses] == [NO_REASONING] * 2
        assert {edit.code for edit in done.edits} == {"missing-reasoning"}
        again = repair(done.messages, format="openai-chat", profile=profile, thinking="every")
        assert again.messages is done.messages
    signed = repair(history, format="openai-chat", profile="portable", thinking="every")
    again = repair(signed.messages, format="openai-chat", profile="portable", thinking="every")
    assert again.messages is signed.messages, "the profile removes unsigned thinking, but not its placeholder"
    whole = [user("q"), thoughtful, user("w")]
    assert repair(whole, format="openai-chat", thinking="every").messages is whole
    assert repair(history, format="openai-chat", thinking=True).messages is history
