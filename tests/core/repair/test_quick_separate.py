from __future__ import annotations

from typing import Any

import pytest

from midstream.core.formats.named import format_named
from midstream.core.profiles import profile_for
from midstream.core.repair.quick import Marks
from midstream.history import repair
from tests.core.repair.reported import CHAT, LANGCHAIN, RESPONSES, Case


@pytest.mark.parametrize("case", [*CHAT, *LANGCHAIN, *RESPONSES], ids=lambda case: case.name)
def test_a_broken_history_is_never_all_fine(case: Case) -> None:
    profile = profile_for(format_named(case.form), case.profile)
    assert not Marks(case.messages, case.form, profile).are_all_fine()


def test_calls_with_reasoning_between_are_one_reply_however_often_it_is_looked_at() -> None:
    def item(kind: str, **more: str) -> dict[str, str]:
        return {"type": kind, **more}

    calls = [item("function_call", call_id=each, name="f", arguments="{}") for each in "ab"]
    reasoning: dict[str, Any] = {"type": "reasoning", "id": "rs_1", "summary": []}
    answer = item("function_call_output", call_id="b", output="x")
    history = [{"role": "user", "content": "q"}, calls[0], reasoning, calls[1], answer]
    done = repair(history, format="openai-responses")
    assert [edit.code for edit in done.edits] == ["dangling-call"]
    assert repair(done.messages, format="openai-responses").messages is done.messages


def test_what_a_hosted_tool_did_is_no_reply_between_two_prompts() -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    reply = {"type": "message", "role": "assistant", "content": "a"}
    history = [{"role": "user", "content": "q"}, search, reply]
    profile = profile_for(format_named("openai-responses"), "strict-template")
    assert Marks(history, "openai-responses", profile).are_all_fine()
    assert not Marks([*history, reply], "openai-responses", profile).are_all_fine()
