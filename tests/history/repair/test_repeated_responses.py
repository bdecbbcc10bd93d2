from __future__ import annotations

import copy

from midstream.history.operations import check, repair
from tests.history.repair.reported import (
    chat_call,
    chat_response,
    item,
    output,
    response,
    result,
    text,
    tool,
    use,
    user,
)


def test_an_exact_copy_of_a_call_with_its_result_is_dropped() -> None:
    once = [user("q"), response(text("m0x"), use("a"), use("b")), user([result("a"), result("b", "m2x")])]
    done = repair([*once, *copy.deepcopy(once[1:]), *copy.deepcopy(once[1:]), response(text("done"))])
    assert done.messages == [*once, response(text("done"))]
    assert all(kept is given for kept, given in zip(done.messages, once, strict=False))
    assert [(edit.code, edit.at) for edit in done.edits] == [
        ("repeated-step", 3),
        ("repeated-step", 5),
    ]
    assert not done.is_lossy


def test_a_copy_with_another_result_stays_under_a_new_id() -> None:
    once = [user("q"), response(use("a")), user([result("a")])]
    done = repair([*once, response(use("a")), user([result("a", "m2x")])])
    assert len(done.messages) == 5
    assert [edit.code for edit in done.edits] == ["repeated-id"]


def test_a_copy_is_valid_where_ids_may_repeat() -> None:
    once = [chat_response(chat_call("a")), tool("a")]
    history = [user("q"), *once, *copy.deepcopy(once), user("and now?")]
    assert repair(history, format="openai-chat").messages is history
    assert repair(history, format="openai-chat", profile="deepseek").messages == [*history[:3], history[5]]


def test_items_of_a_retried_response_are_dropped_together() -> None:
    once = [item("a", id="fc_1"), item("b", id="fc_2"), output("a"), output("b", "m2x")]
    done = repair([user("q"), *once, *copy.deepcopy(once)], format="openai-responses")
    assert done.messages == [user("q"), *once]
    assert [finding.code for finding in check([user("q"), *once, *once])] == ["repeated-step"]
