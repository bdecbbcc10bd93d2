from __future__ import annotations

import copy
from random import Random

import pytest

from midstream.errors import UsageError
from midstream.history.operations import Mode
from midstream.history.operations import check_by_name as check
from midstream.history.operations import repair_by_name as repair
from tests.history.repair.format_histories import FORMATS, HistoryScript, broken, markers, prompt
from tests.history.repair.reported import (
    PROMPT,
    TOOL_CALL,
    TOOL_RETURN,
    chat_call,
    chat_response,
    item,
    model_response,
    output,
    request,
    response,
    result,
    text,
    tool,
    use,
    user,
)


def test_rollback_ends_with_the_last_complete_step() -> None:
    whole = [user("q"), response(use("a")), user([result("a")]), response(text("done"))]
    done = repair([*whole, user("more"), response(use("b")), user("hello?")], mode="rollback")
    assert done.messages == [*whole, user("more")]
    assert done.is_lossy


def test_rollback_of_a_valid_history_is_that_history() -> None:
    good = [user("q")]
    assert repair(good, mode="rollback").messages is good


def test_rollback_names_the_lost_content() -> None:
    done = repair([user("q"), response(text("let me"), use("b")), user("hello?")], mode="rollback")
    assert [edit.lost for edit in done.edits] == ["let me\nrun({})", "hello?"]


def test_drop_keeps_every_user_text_and_every_complete_step() -> None:
    asked, more = user("q"), user("more")
    whole = [asked, response(use("a")), user([result("a")]), response(text("done")), more]
    broken = [
        *whole[:4],
        more,
        response(text("let me"), use("b"), use("c")),
        user([result("b", "half"), text("stop")]),
    ]
    done = repair(broken, mode="drop")
    assert done.messages == [*whole, {"role": "user", "content": [text("stop")]}]
    assert all(kept is given for kept, given in zip(done.messages[:5], broken, strict=False))
    assert [(edit.code, edit.at, edit.lost) for edit in done.edits] == [
        ("dropped", 5, "let me\nrun({})\nrun({})"),
        ("dropped", 6, "half"),
    ]


def test_drop_of_an_open_call_leaves_its_question() -> None:
    assert repair([user("q"), response(use("a"))], mode="drop").messages == [user("q")]
    assert repair([user("q"), response(use("a"))], mode="drop", live_tail=True).messages[1:] == [
        response(use("a"))
    ]


def test_drop_ignores_a_misplaced_result() -> None:
    late = [user("q"), chat_response(chat_call("a")), user("hello?"), tool("a", "m1x"), user("next")]
    done = repair(late, mode="drop")
    assert done.messages == [user("q"), user("hello?"), user("next")]
    assert [edit.lost for edit in done.edits] == ["run({})", "m1x"]


def test_drop_leaves_a_valid_list_unchanged_in_every_format() -> None:
    for form in FORMATS:
        for seed in range(20):
            script = HistoryScript(form, Random(seed))
            script.user("m0x")
            given = script.messages
            for mode in ("drop", "rollback", "strict"):
                assert repair(given, format=form, mode=mode).messages is given, (form, seed, mode)


def test_drop_treats_the_items_of_one_response_together() -> None:
    message = {"type": "message", "role": "assistant", "content": "m1x"}
    whole = [user("q"), item("a"), item("b"), output("a"), output("b"), message, user("next")]
    assert repair(whole, mode="drop").messages is whole
    assert repair([*whole[:4], *whole[5:]], mode="drop").messages == [user("q"), message, user("next")]


def test_sanitize_does_the_same_as_the_passes_of_tunacode() -> None:
    system = {"part_kind": "system-prompt", "content": "be brief"}
    message = {"part_kind": "text", "content": "done"}
    history = [
        request(system, PROMPT) | {"run_id": "r1"},
        model_response(TOOL_CALL),
        request(TOOL_RETURN),
        model_response(message),
        request(PROMPT),
        model_response(),
        request({**PROMPT, "content": "again"}),
        model_response({**message, "content": "half a"}, TOOL_CALL | {"tool_call_id": "other"}),
        prompt("pydantic-ai"),
    ]
    done = repair(history, mode="sanitize")
    assert done.messages == [
        request(PROMPT),
        *history[1:4],
        request({**PROMPT, "content": "again"}),
        model_response({**message, "content": "half a"}),
        history[8],
    ]
    assert {edit.code for edit in done.edits} == {"sanitized"}
    lost = {edit.at: edit.lost for edit in done.edits if edit.lost != "r1"}
    assert lost[0] == "be brief"
    assert lost[4] == PROMPT["content"]
    assert "r1" in {edit.lost for edit in done.edits}
    assert repair(done.messages, mode="sanitize").messages is done.messages


def test_sanitize_keeps_results_without_a_following_response() -> None:
    finished = [user("q"), response(use("a")), user([result("a")]), user("and now?")]
    assert repair(finished, mode="sanitize").messages is finished


def test_sanitize_removes_system_messages_and_open_calls_of_a_chat() -> None:
    history = [
        {"role": "system", "content": "be brief"},
        user("first"),
        user("second"),
        chat_response(chat_call("a"), content="let me"),
        user("third"),
    ]
    done = repair(history, mode="sanitize")
    assert done.messages == [user("second"), {"role": "assistant", "content": "let me"}, user("third")]
    assert sorted(edit.lost for edit in done.edits) == ["be brief", "first", "run({})"]


def test_positions_in_edits_refer_to_the_input_list() -> None:
    history = [
        user("q"),
        response(use("a")),
        response(text("")),
        user("more"),
        response(text("ok"), text(" ")),
    ]
    done = repair(history, mode="drop", format="anthropic")
    assert [(edit.code, edit.at) for edit in done.edits if edit.at == 4] == [("blank-text", 4)]


@pytest.mark.parametrize("mode", ["drop", "sanitize", "rollback"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_output_of_a_mode_is_valid_and_stable_and_its_losses_are_named(form: str, mode: Mode) -> None:
    for seed in range(60):
        given = broken(form, Random(seed))
        before = copy.deepcopy(given)
        done = repair(given, format=form, mode=mode)
        assert given == before, seed
        assert check(done.messages, format=form) == [], seed
        assert repair(done.messages, format=form, mode=mode).messages is done.messages, seed
        assert markers(given) <= markers(done.messages) | markers([edit.lost for edit in done.edits]), seed
        assert all(edit.at <= max(len(given) - 1, 0) for edit in done.edits), seed


def test_an_unknown_mode_is_refused_with_the_valid_names() -> None:
    with pytest.raises(UsageError, match="sanitize"):
        repair([user("q")], mode="clean")  # A plausible wrong name.
