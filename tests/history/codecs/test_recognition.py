from __future__ import annotations

from random import Random

import pytest

from midstream import check, repair
from midstream.errors import UnreadableHistoryError
from midstream.history.codecs.recognition import candidates_for
from tests.history.repair.format_histories import FORMATS, HistoryScript
from tests.history.repair.reported import chat_call, chat_response, response, result, text, tool, use, user

CHAT = [
    user("q"),
    chat_response(chat_call("c1")),
    tool("c1", "m1x"),
    {"role": "assistant", "content": "done"},
]


@pytest.mark.parametrize("form", FORMATS)
def test_a_valid_list_is_unchanged_without_a_format(form: str) -> None:
    for seed in range(40):
        given = HistoryScript(form, Random(seed)).messages
        assert repair(given).messages is given, (form, seed)
        assert check(given) == []


def test_a_broken_list_is_repaired_in_its_own_format() -> None:
    done = repair([*CHAT[:2], user("and now?")])
    assert done.messages[2]["role"] == "tool"
    assert [finding.code for finding in check([*CHAT[:2], user("and now?")])] == ["dangling-call"]
    assert (
        repair([user("q"), response(use("a")), user("more")]).messages[2]["content"][0]["type"]
        == "tool_result"
    )
    assert repair(CHAT, profile="anthropic").messages[1] == CHAT[1]


def test_an_ambiguous_list_with_a_fault_is_refused_with_the_candidate_formats() -> None:
    greeting = [{"role": "assistant", "content": "hi"}, user("q")]
    for asked in (repair, check):
        with pytest.raises(UnreadableHistoryError, match="openai-chat, anthropic") as refused:
            asked(greeting)
        assert refused.value.reason == "mixed-formats"
    assert repair(greeting, format="openai-chat").messages is greeting
    assert repair(greeting, profile="anthropic").messages[1:] == greeting
    assert repair(greeting, system="be brief").messages[1:] == greeting


def test_a_list_of_several_formats_is_refused_with_the_candidates() -> None:
    mixed = [*CHAT, user("more"), response(use("a")), user([result("a")]), response(text("done"))]
    with pytest.raises(
        UnreadableHistoryError, match=r"\((openai-chat, anthropic|anthropic, openai-chat)\); choose"
    ):
        repair(mixed)
    assert repair(mixed, format="openai-chat").edits


@pytest.mark.parametrize(
    ("messages", "names"),
    [
        (CHAT, ("openai-chat",)),
        ([user("q"), response(use("a"))], ("anthropic",)),
        ([user("q")], ("openai-chat", "anthropic", "openai-responses", "mistral")),
        ([{"role": "system", "content": "s"}, user("q")], ("openai-chat", "openai-responses", "mistral")),
        ([user("q"), response(use("a")), tool("b")], ("anthropic", "openai-chat")),
    ],
)
def test_marker_keys_of_messages_identify_their_format(
    messages: list[object], names: tuple[str, ...]
) -> None:
    assert candidates_for(messages) == names
