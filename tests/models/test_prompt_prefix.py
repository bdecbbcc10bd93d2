"""Requests with a byte-for-byte stable prefix."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.history.codecs.codec_spec import Value
from midstream.history.messages import (
    Entry,
    File,
    Finish,
    History,
    Response,
    Step,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    UserMessage,
)
from midstream.history.profiles import PROFILES
from midstream.history.rendering import render
from midstream.models import openai_chat_tools
from midstream.models.prompt_prefix import (
    ANCHORS_MAX,
    LOOK_BACK_BLOCKS,
    anchor,
    anchor_chat,
    cache_key_of,
    canonical_tools,
    head_of,
    takes_cache_key,
)
from tests.history.histories import MODEL, histories
from tests.search import tried
from tests.spec import spec

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "at": {"type": "integer", "minimum": 0}},
}
READ = ToolSpec("read", "Read a file.", SCHEMA)
LIST = ToolSpec("list", "List a folder.", {})
EVERY_PROFILE = st.sampled_from(sorted(PROFILES))


def encoded(messages: object) -> bytes:
    """Return a list's JSON without its end, so that a longer list begins with it."""
    return msgspec.json.encode(messages)[:-1]


@pytest.mark.slow
@spec("REUSE-58")
@settings(max_examples=tried(120))
@given(histories(8), EVERY_PROFILE, st.data())
def test_the_messages_of_a_turn_start_with_those_of_the_turn_before(
    history: History, profile: str, data: st.DataObject
) -> None:
    """The request before the answer to a user's message, and every later one."""
    ends = [end for end in range(1, len(history.entries) + 1) if needs_response(history.entries[:end])]
    if len(ends) > 1:
        before = data.draw(st.sampled_from(ends[:-1]))
        now = data.draw(st.sampled_from([end for end in ends if end > before]))
        shorter = render(History(history.entries[:before]), "Be brief.", profile, model=MODEL).messages
        longer = render(History(history.entries[:now]), "Be brief.", profile, model=MODEL).messages
        assert encoded(longer).startswith(encoded(shorter))


def needs_response(entries: tuple[Entry, ...]) -> bool:
    """Return whether a model is called here: after a user message, or after the results of its calls."""
    last = entries[-1]
    return isinstance(last, UserMessage) or bool(last.results)


@spec("REUSE-59")
@given(st.permutations([READ, LIST, ToolSpec("write", "Write.", {"required": ["b", "a"], "type": "object"})]))
def test_the_same_tools_in_any_order_are_the_same_bytes(tools: list[ToolSpec]) -> None:
    shuffled = [
        ToolSpec(each.name, each.description, dict(reversed(each.parameters.items()))) for each in tools
    ]

    assert msgspec.json.encode(canonical_tools(shuffled)) == msgspec.json.encode(canonical_tools(tools))
    assert head_of("", shuffled) == head_of("", tools)


@spec("REUSE-59")
def test_properties_keep_their_order() -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"reason": {"type": "string", "description": "why"}, "answer": {}},
        "required": ["reason", "answer"],
    }
    (tool,) = canonical_tools([ToolSpec("t", "", schema)])

    assert list(tool.parameters) == ["properties", "required", "type"]
    assert list(tool.parameters["properties"]) == ["reason", "answer"]
    assert list(tool.parameters["properties"]["reason"]) == ["description", "type"]
    assert tool.parameters["required"] == ["reason", "answer"]


def test_another_prompt_or_tool_has_another_digest() -> None:
    head = head_of("Be brief.", [READ])

    assert head_of("Be brief!", [READ]).system != head.system
    assert head_of("Be brief!", [READ]).tools == head.tools
    assert head_of("Be brief.", [READ, LIST]).tools != head.tools


@spec("REUSE-60")
def test_a_cache_key_is_short_stable_and_reveals_nothing_of_the_session() -> None:
    key = cache_key_of("s-with-a-name" * 40)

    assert key == cache_key_of("s-with-a-name" * 40) != cache_key_of("another")
    assert len(key) <= 64
    assert "name" not in key


@spec("REUSE-60")
@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("api.openai.com", True),
        ("eu.api.openai.com", True),
        ("notapi.openai.com.example.org", False),
        ("127.0.0.1", False),
    ],
)
def test_the_key_is_sent_to_servers_known_to_accept_it(host: str, is_known: bool) -> None:  # noqa: FBT001 - a case
    assert takes_cache_key(host) is is_known


# --- Anthropic's marks ------------------------------------------------------------------------------------------


def user_entries(*words: str) -> list[Entry]:
    return [UserMessage.of(each) for each in words]


def call_step(calls: int) -> Step:
    made = tuple(ToolCall(f"c{number}", "read", "{}") for number in range(calls))
    return Step(
        Response((Text("I look."), *made), Finish.CALLS), tuple(ToolResult(c.id, "words") for c in made)
    )


def body_of(*entries: Entry) -> dict[str, Any]:
    sent = render(History(entries), "Be brief.", "anthropic")
    tools = [{"name": "read", "input_schema": {"type": "object"}}, {"name": "list", "input_schema": {}}]
    return {"model": "m", "max_tokens": 9, "tools": tools, "system": sent.system, "messages": sent.messages}


def marks(body: dict[str, Any]) -> list[str]:
    found = [f"tools[{place}]" for place, each in enumerate(body["tools"]) if "cache_control" in each]
    found += [f"system[{place}]" for place, each in enumerate(body["system"]) if "cache_control" in each]
    for number, message in enumerate(body["messages"]):
        if isinstance(message["content"], list):
            blocks = enumerate(message["content"])
            found += [f"messages[{number}][{place}]" for place, each in blocks if "cache_control" in each]
    return found


def unmarked(value: Value) -> Value:
    if isinstance(value, list):
        return [unmarked(each) for each in value]
    if isinstance(value, dict):
        return {key: unmarked(each) for key, each in value.items() if key != "cache_control"}
    return value


@spec("REUSE-61")
def test_tools_system_and_the_last_message_are_marked_at_their_end() -> None:
    body = anchor(body_of(*user_entries("hi")))

    assert marks(body) == ["tools[1]", "system[0]", "messages[0][0]"]
    assert body["tools"][1]["cache_control"] == {"type": "ephemeral"}
    assert anchor(body_of(*user_entries("hi")), ttl="1h")["system"][0]["cache_control"] == {
        "type": "ephemeral",
        "ttl": "1h",
    }


@spec("REUSE-61")
def test_the_second_anchor_is_at_the_end_of_the_previous_request() -> None:
    """One response may add any number of blocks: a look back of 20 would not reach over 25 calls and their results."""
    calls = LOOK_BACK_BLOCKS + 5
    first, second = user_entries("read it all"), [*user_entries("read it all"), call_step(calls)]
    third = [*second, Step(Response((Text("Done."),))), *user_entries("again")]

    bodies = [anchor(body_of(*entries)) for entries in (first, second, third)]
    tails = [marks(body)[-1] for body in bodies]
    assert tails == ["messages[0][0]", f"messages[2][{calls - 1}]", "messages[4][0]"]
    assert [marks(body)[-2] for body in bodies[1:]] == tails[:-1]


@spec("REUSE-61")
@settings(max_examples=tried(80))
@given(histories(8))
def test_the_number_of_marks_is_limited_and_each_is_on_a_permitted_block(history: History) -> None:
    body = anchor(body_of(*history.entries))
    for message in body["messages"]:
        for block in message["content"] if isinstance(message["content"], list) else ():
            if "cache_control" in block:
                assert block["type"] not in ("thinking", "redacted_thinking")
                assert block["type"] != "text" or block["text"].strip()

    assert len(marks(body)) <= ANCHORS_MAX


@spec("REUSE-61")
@settings(max_examples=tried(80))
@given(histories(8), st.data())
def test_but_for_the_marks_a_longer_conversation_starts_with_the_shorter_one(
    history: History, data: st.DataObject
) -> None:
    ends = [end for end in range(1, len(history.entries) + 1) if needs_response(history.entries[:end])]
    if len(ends) > 1:
        end = data.draw(st.sampled_from(ends[:-1]))
        shorter, longer = (unmarked(anchor(body_of(*history.entries[:to]))) for to in (end, ends[-1]))
        assert encoded(longer["messages"]).startswith(encoded(shorter["messages"]))


@spec("REUSE-61")
def test_a_body_with_its_own_marks_is_unchanged() -> None:
    body = body_of(*user_entries("hi"))
    body["messages"] = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    ]

    assert anchor(body) == body
    assert anchor({**body_of(*user_entries("hi")), "cache_control": {}}) == {
        **body_of(*user_entries("hi")),
        "cache_control": {},
    }


def chat_of(*entries: Entry) -> dict[str, Any]:
    sent = render(History(entries), "Be brief.", "openai-chat")
    return {"model": "m", "tools": openai_chat_tools.render_tools([LIST, READ]), "messages": sent.messages}


@spec("REUSE-61")
def test_chat_completions_are_marked_within_the_texts_of_messages() -> None:
    """A mark beside the content of a result reportedly makes one such server hang."""
    entries = [*user_entries("read it"), call_step(2)]
    before, now = (anchor_chat(chat_of(*each), ttl="1h") for each in (entries[:1], entries))
    mark = {"type": "ephemeral", "ttl": "1h"}
    system, user, response, first, last = now["messages"]

    assert [tool.get("cache_control") for tool in now["tools"]] == [None, mark]
    assert system["content"] == [{"type": "text", "text": "Be brief.", "cache_control": mark}]
    assert user == before["messages"][1]
    assert user["content"] == [{"type": "text", "text": "read it", "cache_control": mark}]
    assert response == chat_of(*entries)["messages"][2]
    assert first["content"] == [{"type": "text", "text": "words"}]
    assert last == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "words", "cache_control": mark}],
    }


@spec("REUSE-61")
def test_the_text_of_a_message_with_an_image_is_marked() -> None:
    picture = UserMessage((Text("What is it?"), File("image/png", data="AAAA")))
    (_, user) = anchor_chat(chat_of(picture))["messages"]

    assert ["cache_control" in part for part in user["content"]] == [True, False]


@spec("REUSE-61")
@settings(max_examples=tried(80))
@given(histories(8), st.data())
def test_but_for_the_marks_longer_chat_completions_start_with_the_shorter_ones(
    history: History, data: st.DataObject
) -> None:
    ends = [end for end in range(1, len(history.entries) + 1) if needs_response(history.entries[:end])]
    if ends:
        end = data.draw(st.sampled_from(ends))
        shorter, longer = (anchor_chat(chat_of(*history.entries[:to])) for to in (end, ends[-1]))
        assert str(longer).count("cache_control") <= ANCHORS_MAX
        assert encoded(unmarked(longer["messages"])).startswith(encoded(unmarked(shorter["messages"])))
        assert anchor_chat(longer) == longer


def test_the_input_body_is_not_changed() -> None:
    body = body_of(*user_entries("hi"), call_step(2))
    before = msgspec.json.encode(body)
    anchor(body)
    assert msgspec.json.encode(body) == before


def test_a_body_without_anything_to_mark_is_accepted() -> None:
    assert anchor({"messages": []}) == {"messages": []}
    assert anchor({"messages": [{"role": "user", "content": " "}]})["messages"][0]["content"] == [
        {"type": "text", "text": " "}
    ]
