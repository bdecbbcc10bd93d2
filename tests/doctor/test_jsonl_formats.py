"""The kinds of lines in a file, and the meaning of each line."""

from __future__ import annotations

import pytest

from midstream.doctor.jsonl_formats import (
    ClaudeCode,
    CodexRollout,
    MessageLine,
    Messages,
    facts_of,
    identity_of,
    ledger_for,
)
from midstream.errors import UnreadableHistoryError
from tests.doctor.files import call_response, line, prompt, results_message, text_response, uuid


def test_lines_are_recognized_by_their_content() -> None:
    kinds = {
        "claude-code": [{"type": "summary"}, line(1, 0, prompt("hi"))],
        "codex": [{"type": "session_meta", "payload": {}}],
        "openai-chat": [{"role": "user", "content": "hi"}],
        "gemini": [{"role": "user", "parts": []}],
    }
    found = {kind: ledger_for(lines, None) for kind, lines in kinds.items()}
    assert {kind: ledger and ledger.kind for kind, ledger in found.items()} == {kind: kind for kind in kinds}
    assert ledger_for([{"level": "info", "msg": "no history"}], None) is None
    with pytest.raises(UnreadableHistoryError, match="this is codex, not gemini"):
        ledger_for(kinds["codex"], "gemini")


def test_lines_that_claude_code_shows_and_never_sends_have_no_message() -> None:
    ledger = ClaudeCode()
    shown = [
        line(1, 0, prompt("hi"), isVisibleInTranscriptOnly=True),
        line(1, 0, text_response("m", "API Error"), isApiErrorMessage=True),
        {"type": "summary", "summary": "s"},
        {"type": "user", "message": "no object"},
    ]
    assert [ledger.messages(each) for each in shown] == [[], [], [], []]


def test_a_new_line_of_claude_code_has_its_own_id_and_no_message_data_of_its_neighbour() -> None:
    ledger = ClaudeCode()
    like = line(4, 3, results_message("a"), toolUseResult={"x": 1}, version="2.1")
    entry = MessageLine(4, like, [like["message"]], ledger.node(like))
    new = ledger.new_line(entry, results_message("b"), 0)
    assert (new["version"], "toolUseResult" in new, new["uuid"] == uuid(4)) == ("2.1", False, False)
    assert ledger.new_line(entry, results_message("b"), 1)["uuid"] == new["uuid"], (
        "the same result for the same call"
    )
    words = [ledger.new_line(entry, prompt("x"), number)["uuid"] for number in (0, 1)]
    assert len(set(words)) == 2


def test_codex_items_are_read_with_and_without_an_envelope() -> None:
    ledger = CodexRollout()
    item = {"type": "function_call", "call_id": "a"}
    kept = {"type": "compacted", "payload": {"replacement_history": [item]}}
    assert [
        ledger.messages(each) for each in ({"type": "response_item", "payload": item}, item, kept)
    ] == 3 * [[item]]
    assert ledger.messages({"type": "event_msg", "payload": {"type": "token_count"}}) == []
    assert [ledger.is_break(each) for each in (item, kept)] == [False, True]


def test_prompts_responses_and_results_are_distinguished() -> None:
    facts = facts_of("anthropic")
    found = [facts([each]) for each in (prompt("hi"), call_response("m", "a"), results_message("a"))]
    assert [(each.is_prompt, each.is_response, each.ids) for each in found] == [
        (True, False, frozenset()),
        (False, True, frozenset({"a"})),
        (False, False, frozenset({"a"})),
    ]
    assert facts([]).is_prompt is False


def test_shared_values_have_no_identity() -> None:
    assert [identity_of(each) for each in (None, True, 3, "short")] == [None] * 4
    words = "a longer text"
    assert identity_of(words) == id(words)


def test_a_message_a_line_is_the_message_itself() -> None:
    message = {"role": "user", "content": "hi"}
    ledger = Messages("openai-chat")
    assert (ledger.messages(message), ledger.node(message), ledger.group(message)) == ([message], None, "")
