from __future__ import annotations

from typing import Any

import pytest

from midstream.errors import InvalidHistoryError
from midstream.history.operations import repair_by_name as repair
from midstream.history.repair.parsing import has_surrogates
from tests.history.repair.format_histories import FORMATS
from tests.history.repair.reported import response, text, thought, user
from tests.spec import spec


def test_changed_signed_thinking_is_removed() -> None:
    done = repair([user("q"), response(thought("hm \ud83d"), text("a"))])
    assert done.messages[1]["content"] == [text("a")]
    assert not has_surrogates(done.messages)


@pytest.mark.parametrize("profile", ["bedrock-mistral", "strict-template"])
def test_changed_thinking_loses_its_signature_where_none_is_required(profile: str) -> None:
    thought = {"reasoningContent": {"reasoningText": {"text": "hm \ud83d", "signature": "s"}}}
    messages = [
        {"role": "user", "content": [{"text": "q"}]},
        {"role": "assistant", "content": [thought, {"text": "a"}]},
    ]
    done = repair(messages, format="bedrock", profile=profile)
    kept = {"reasoningContent": {"reasoningText": {"text": "hm \ufffd"}}}
    assert done.messages[1]["content"] == [kept, {"text": "a"}]


def test_a_cycle_is_refused_with_its_position() -> None:
    knot: dict[str, Any] = {"role": "user"}
    knot["content"] = [knot]
    with pytest.raises(InvalidHistoryError, match="message 1"):
        repair([user("q"), knot])


@pytest.mark.slow
def test_ten_thousand_levels_are_refused_with_their_position() -> None:
    deep: Any = "x"
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(InvalidHistoryError, match="message 0"):
        repair([user(deep)])


@spec("SEC-75")
def test_more_levels_than_the_limit_are_refused_with_their_position() -> None:
    def nested(levels: int) -> object:
        deep: object = "x"
        for _ in range(levels):
            deep = {"a": deep}
        return deep

    repair([user("q"), {**user("q"), "other": nested(60)}])
    with pytest.raises(InvalidHistoryError, match="message 1 is nested more than 64 levels deep"):
        repair([user("q"), {**user("q"), "other": nested(100)}])


def test_an_object_that_is_no_json_is_refused() -> None:
    with pytest.raises(InvalidHistoryError):
        repair([user(object())])


def test_a_result_with_text_under_another_key_keeps_it() -> None:
    done = repair([{"role": "tool", "text": "by the way"}], format="mistral")
    assert done.messages[-1]["content"].endswith(" by the way")


CALL = {"name": "read_log", "args": {}, "id": "lc_1", "type": "tool_call"}
PATH = ["langchain", "schema", "messages", "AIMessage"]
STRANGE: list[dict[str, Any]] = [
    {"lc": 1, "type": True, "id": PATH, "kwargs": {"content": "", "type": "ai", "tool_calls": [CALL]}},
    {"lc": 1, "type": "constructor", "id": [[]], "kwargs": {"x": "y"}},
    {"kwargs": {"content": "hi", "type": "ai"}},
    {"data": {"content": "", "x": "y"}},
    {"role": "critic", "x": "y"},
    {"content": "", "x": "y"},
    {"parts": [], "x": "y"},
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("key", ["role", "kind", "type"])
@pytest.mark.parametrize("odd", [True, None, 7, [], {"x": 1}, "", "other", "critic", "chat", "remove"])
def test_any_role_value_is_repaired_and_stays_stable(form: str, key: str, odd: object) -> None:
    for message in STRANGE:
        done = repair([user("q"), {**message, key: odd}], format=form)
        again = repair(done.messages, format=form, system=done.system)
        assert again.edits == (), message
        assert "other" not in {each.get("role") for each in done.messages if each.get("role") != odd}, message


def test_text_under_its_own_key_belongs_to_the_user_where_the_role_is_unknown() -> None:
    done = repair([{"type": "chat", "data": {"content": "", "remark": "by the way"}}], format="langchain")
    assert done.messages == [{"type": "human", "data": {"type": "human", "content": "by the way"}}]
