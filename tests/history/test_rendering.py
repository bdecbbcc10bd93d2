"""The messages sent to a provider, for any turns of a session."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.errors import UsageError
from midstream.history.codecs.codec_spec import Json
from midstream.history.codecs.format_registry import FORMATS
from midstream.history.messages import (
    File,
    History,
    Outcome,
    Response,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    UpstreamCall,
    UserMessage,
)
from midstream.history.operations import check_by_name as check
from midstream.history.profiles import PROFILES
from midstream.history.rendering import Rendered, arguments_of, render
from midstream.history.repair.placeholders import NO_REASONING, NO_RESPONSE, NO_WORDS, SENTINEL
from tests.history.histories import MODEL, SIGNATURES, histories
from tests.search import tried
from tests.session.session_lives import SessionLife, lives
from tests.spec import spec

HI = UserMessage.of("hi")
EVERY_PROFILE = st.sampled_from(sorted(PROFILES))


def findings(rendered: Rendered, profile: str, form: str | None = None) -> list[object]:
    named = form or PROFILES[profile].format
    return [*check(rendered.messages, profile, format=named, system=rendered.system or None)]


def chat(history: History, profile: str = "openai-chat") -> list[Json]:
    return render(history, "", profile).messages


@spec("HISTORY-90")
@settings(max_examples=tried(120))
@given(histories(), EVERY_PROFILE)
def test_every_rendered_history_is_accepted(history: History, profile: str) -> None:
    assert findings(render(history, "Be brief.", profile, model=MODEL), profile) == []


@spec("HISTORY-90")
@settings(max_examples=tried(100))
@given(histories(), EVERY_PROFILE, st.sampled_from(sorted(FORMATS)))
def test_any_format_can_be_rendered_for_any_profile(history: History, profile: str, form: str) -> None:
    assert findings(render(history, "", profile, form=form, model=MODEL), profile, form) == []


@spec("HISTORY-91")
@settings(max_examples=tried(120))
@given(histories(8), EVERY_PROFILE, st.integers(0, 8))
def test_more_entries_change_no_message(history: History, profile: str, kept: int) -> None:
    shorter = render(History(history.entries[:kept]), "Be brief.", profile, model=MODEL)
    longer = render(history, "Be brief.", profile, model=MODEL)
    assert longer.messages[: len(shorter.messages)] == shorter.messages
    assert longer.system == shorter.system


@spec("HISTORY-90")
@settings(max_examples=tried(100))
@given(lives(), EVERY_PROFILE)
def test_the_next_prompt_of_any_session_is_accepted(life: SessionLife, profile: str) -> None:
    history = life.session.history.then(UserMessage.of("and now?"))
    assert findings(render(history, "Be brief.", profile), profile) == []


@spec("HISTORY-90")
@settings(max_examples=tried(100))
@given(histories(), EVERY_PROFILE)
def test_rendered_messages_can_be_encoded_and_contain_all_content(history: History, profile: str) -> None:
    sent = msgspec.json.encode(render(history, "", profile, model=MODEL).messages).decode()
    words = [part.text for entry in history.entries for part in _parts_of(entry) if isinstance(part, Text)]
    words += [r.content for e in history.entries if isinstance(e, Step) for r in e.results]
    for value in words:
        if value.strip() and value.isprintable():
            assert value in sent


def _parts_of(entry: UserMessage | Step) -> tuple[object, ...]:
    return entry.parts if isinstance(entry, UserMessage) else entry.response.parts


def test_instructions_come_first_and_only_where_there_are_any() -> None:
    message = {"role": "user", "content": "hi"}
    assert render(History((HI,)), "Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        message,
    ]
    assert render(History((HI,)), " ").messages == [message]


@pytest.mark.parametrize("profile", ["anthropic", "bedrock-claude", "gemini", "pydantic-ai"])
def test_instructions_are_outside_the_messages_where_the_format_requires_it(profile: str) -> None:
    rendered = render(History((HI,)), "Be brief.", profile)
    assert (rendered.system, len(rendered.messages)) == ("Be brief.", 1)


def test_a_step_is_a_response_and_its_results_in_order() -> None:
    calls = (ToolCall("a", "read", '{"path":  "x"}'), ToolCall("b", "list", ""))
    results = (ToolResult("a", "one"), ToolResult("b", "no such folder", Outcome.ERROR))
    history = History((HI, Step(Response((Text("I will look."), *calls)), results)))
    assert chat(history)[1:] == [
        {
            "role": "assistant",
            "content": "I will look.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "read", "arguments": '{"path":  "x"}'}},
                {"id": "b", "type": "function", "function": {"name": "list", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "no such folder"},
    ]


def test_a_response_of_calls_alone_has_null_content() -> None:
    step = Step(Response((ToolCall("a", "list"),)), (ToolResult("a", ""),))
    _, asked, answered = chat(History((HI, step)))
    assert (asked["content"], answered["content"]) == (None, "(no output)")


def test_a_response_of_thoughts_alone_is_left_out() -> None:
    thought = Step(Response((Thinking("hm", SIGNATURES[0]),), model=MODEL))
    for profile in PROFILES:
        assert len(render(History((HI, thought)), "", profile, model=MODEL).messages) == 1


def test_consecutive_user_messages_are_separated_where_roles_alternate() -> None:
    history = History((HI, UserMessage.of("are you there?")))
    assert [message["content"] for message in chat(history)] == ["hi", "are you there?"]
    assert [message["content"] for message in chat(history, "strict-template")] == [
        "hi",
        NO_RESPONSE,
        "are you there?",
    ]


def test_an_empty_user_message_is_marked_as_such() -> None:
    assert chat(History((UserMessage(()),)))[0]["content"] == NO_WORDS
    assert chat(History((UserMessage.of(" \n"),)))[0]["content"] == NO_WORDS


def test_signed_thinking_is_sent_only_to_the_model_that_signed_it() -> None:
    responded = Response((Thinking("hm", SIGNATURES[0]), Text("yes")), model=MODEL)
    history = History((HI, Step(responded)))
    (_, own) = render(history, "", "anthropic", model=MODEL).messages
    assert own["content"][0] == {"type": "thinking", "thinking": "hm", "signature": SIGNATURES[0]}
    (_, other) = render(history, "", "anthropic", model="another").messages
    assert other["content"] == "yes"
    assert chat(history)[1] == {"role": "assistant", "content": "yes"}


def test_redacted_thinking_is_sent_only_to_the_model_that_created_it() -> None:
    sealed = Thinking("", SIGNATURES[0], is_redacted=True)
    history = History((HI, Step(Response((sealed, Text("yes")), model=MODEL))))
    (_, own) = render(history, "", "anthropic", model=MODEL).messages
    assert own["content"][0] == {"type": "redacted_thinking", "data": SIGNATURES[0]}
    (_, other) = render(history, "", "anthropic", model="another").messages
    assert other["content"] == "yes"
    for profile in set(PROFILES) - {"anthropic", "vertex", "pydantic-ai"}:
        assert SIGNATURES[0] not in str(render(history, "", profile, model=MODEL).messages)


@pytest.mark.parametrize("name", ["claude-sonnet-4-20250514", "claude-sonnet-4", "claude-sonnet-4-0"])
def test_a_model_requested_by_its_short_name_receives_its_own_thinking(name: str) -> None:
    responded = Response((Thinking("hm", SIGNATURES[0]), Text("yes")), model="claude-sonnet-4-20250514")
    (_, own) = render(History((HI, Step(responded))), "", "anthropic", model=name).messages
    assert own["content"][0]["signature"] == SIGNATURES[0]


def test_reasoning_is_sent_to_models_that_need_it_and_replaced_where_it_was_lost() -> None:
    called = Step(Response((ToolCall("a", "list"),)), (ToolResult("a", "x"),))
    thought = Step(Response((Thinking("hm"), ToolCall("b", "list"))), (ToolResult("b", "x"),))
    sent = chat(History((HI, called, thought)), "deepseek")
    assert [m.get("reasoning_content") for m in sent if m["role"] == "assistant"] == [NO_REASONING, "hm"]
    assert "reasoning_content" not in chat(History((HI, called)), "kimi")[1]


def test_the_first_call_of_a_response_has_the_placeholder_signature_where_calls_are_signed() -> None:
    step = Step(
        Response((ToolCall("a", "x"), ToolCall("b", "x"))), (ToolResult("a", ""), ToolResult("b", ""))
    )
    (_, asked, _) = render(History((HI, step)), "", "gemini-3").messages
    assert [part.get("thoughtSignature") for part in asked["parts"]] == [SENTINEL, None]


def test_lost_thinking_in_a_running_loop_turns_thinking_off() -> None:
    history = History((HI, Step(Response((ToolCall("a", "x"),)), (ToolResult("a", "1"),))))
    assert render(history, "", "anthropic", thinking=True).advice.thinking is False
    assert render(history, "", "anthropic").advice.thinking is None


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_repeated_or_invalid_ids_are_replaced_in_call_and_result(profile: str) -> None:
    step = Step(Response((ToolCall("functions.read:0", "x"),)), (ToolResult("functions.read:0", "1"),))
    rendered = render(History((HI, step, step, step)), "", profile)
    assert findings(rendered, profile) == []


def test_a_later_id_never_changes_an_earlier_one() -> None:
    def used(*ids: str) -> list[str]:
        made = [Step(Response((ToolCall(each, "x"),)), (ToolResult(each, "1"),)) for each in ids]
        sent = render(History((HI, *made)), "", "anthropic").messages
        return [message["content"][0]["id"] for message in sent if message["role"] == "assistant"]

    assert used("a b", "a_b") == ["a_b", "a_b_2"]
    assert used("null") == ["null"]


@pytest.mark.parametrize("name", ["fs.read", "", "n" * 80, "lies\n"])
def test_an_invalid_tool_name_is_replaced(name: str) -> None:
    step = Step(Response((ToolCall("a", name),)), (ToolResult("a", "no such tool", Outcome.ERROR),))
    sent = chat(History((HI, step)))[1]["tool_calls"][0]["function"]["name"]
    assert 0 < len(sent) <= 64
    assert sent.replace("_", "").isalnum()


@pytest.mark.parametrize("broken", ['{"path": "x', "[1]", '{"a":' * 300, '{"x": NaN}', '{"x": "\\ud800"}'])
def test_broken_arguments_are_sent_complete_inside_an_object(broken: str) -> None:
    found, text = arguments_of(ToolCall("a", "read", broken))
    assert found == {"_raw": broken} == msgspec.json.decode(text)


def test_an_unsupported_file_is_described_in_text() -> None:
    message = UserMessage((Text("look"), File("image/png", data="!"), File("image/png", url="file:///a.png")))
    for profile in PROFILES:
        rendered = render(History((message,)), "", profile)
        assert findings(rendered, profile) == []
        assert "file:///a.png]" in str(rendered.messages)
    seen = chat(History((UserMessage((File("image/png", data="AAAA"),)),)), "deepseek")
    assert seen[0]["content"] == "[attached file: image/png, which you cannot be shown]"


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(UsageError):
        render(History(), "", "nobody")


@pytest.mark.parametrize(
    ("profile", "form", "path"),
    [
        ("gemini-3", None, ("parts", "thoughtSignature")),
        ("gemini", None, ("parts", "thoughtSignature")),
        ("gemini-3", "pydantic-ai", ("parts", "provider_details", "thought_signature")),
        ("openai-chat", None, ("tool_calls", "extra_content", "google", "thought_signature")),
    ],
)
def test_a_signed_call_keeps_its_signature_for_its_own_model(
    profile: str, form: str | None, path: list[str]
) -> None:
    signed = Step(Response((ToolCall("a", "x", signature="c2ln"),), model="m"), (ToolResult("a", "1"),))

    def sent(model: str) -> object:
        found: Any = render(History((HI, signed)), "", profile, form=form, model=model).messages[1]
        found = found[path[0]][0]
        for key in path[1:]:
            found = found.get(key, {})
        return found

    assert sent("m") == "c2ln"
    assert sent("another") == (SENTINEL if (profile, form) == ("gemini-3", None) else {})


@spec("REUSE-56")
@pytest.mark.parametrize("profile", ["openai-chat", "anthropic", "gemini"])
def test_an_upstream_call_is_described_in_text_for_another_model(profile: str) -> None:
    ran = UpstreamCall("u", "grep", '{"for":"x"}', "line 1", Outcome.OK)
    response = Response((Text("I look."), ran, Text("Found.")))
    rendered = render(History((HI, Step(response), HI)), "", profile)

    text = msgspec.json.encode(rendered.messages).decode()
    assert "ran elsewhere: grep" in text
    assert text.index("I look.") < text.index("line 1") < text.index("Found.")
    assert "tool_use" not in text
    assert findings(rendered, profile) == []


@spec("REUSE-56")
def test_a_response_of_upstream_calls_alone_is_described() -> None:
    ran = UpstreamCall("u", "grep", "{}", "", Outcome.ERROR)
    assert chat(History((HI, Step(Response((ran,)))))) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "[ran elsewhere: grep {}; it failed]"},
    ]
