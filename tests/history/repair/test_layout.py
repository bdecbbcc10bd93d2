from __future__ import annotations

from typing import Any

from midstream.history.repair.layout import LayoutWriter
from midstream.history.repair.pairing import Pairing
from midstream.history.repair.placeholders import DENIED, NOT_STARTED, UNKNOWN
from midstream.history.repair.repair_task import Task
from tests.history.repair.makers import codes, task_for, turns_for
from tests.history.repair.reported import chat_call, chat_response, response, result, text, tool, use, user


def lay_out(task: Task, messages: list[Any]) -> list[Any]:
    pairing = Pairing(turns_for(task, messages), task)
    turns = LayoutWriter(pairing.run(), pairing.turns, task).run()
    return [task.form.build(turn) if turn.is_changed else turn.source for turn in turns]


def test_a_dangling_call_gets_the_content_of_its_known_outcome() -> None:
    task = task_for("openai-chat", outcomes={"a": "denied"})
    calls = chat_response(chat_call("a"), chat_call("b"))
    messages = lay_out(task, [user("q"), calls])
    assert [message["content"] for message in messages[2:]] == [DENIED, UNKNOWN]


def test_a_call_cut_within_its_arguments_counts_as_not_executed() -> None:
    task = task_for("openai-responses")
    item = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}", "status": "incomplete"}
    assert lay_out(task, [item])[1]["output"] == NOT_STARTED


def test_a_live_tail_is_left_unchanged() -> None:
    task = task_for(is_live=True)
    messages = [user("q"), response(use("a"), use("b")), user([result("a")])]
    assert lay_out(task, messages) == messages
    assert codes(task) == []


def test_a_late_result_moves_as_the_same_object() -> None:
    task = task_for("openai-chat")
    late = tool("a")
    done = lay_out(task, [user("q"), chat_response(chat_call("a")), user("w"), late])
    assert done[2] is late
    assert codes(task) == ["misplaced-result"]


def test_an_orphan_keeps_its_text_at_its_place() -> None:
    task = task_for()
    done = lay_out(task, [user([result("z", "found it"), text("and?")])])
    assert [block["text"] for block in done[0]["content"]] == [
        "[result of a tool call that is no longer in this history] found it",
        "and?",
    ]


def test_late_results_and_placeholders_are_in_the_order_of_their_calls() -> None:
    calls = chat_response(chat_call("a"), chat_call("b"), chat_call("c"))
    at_once = lay_out(task_for("openai-chat"), [calls, user("w"), tool("b", "late")])
    assert [message.get("tool_call_id") for message in at_once] == [None, "a", "b", "c", None]
    stored = lay_out(task_for("openai-chat"), [calls])
    assert lay_out(task_for("openai-chat"), [*stored, user("w"), tool("b", "late")]) == at_once


def test_a_placeholder_is_a_message_of_its_own_where_results_are() -> None:
    first = [response(use("a"), use("b")), user([result("a")]), user([result("b")])]
    second = [response(use("c"), use("d")), user([result("c")])]
    messages = lay_out(task_for(), [user("q"), *first, *second])
    assert messages[:-1] == [user("q"), *first, *second]
    assert messages[-1]["content"][0]["tool_use_id"] == "d"


def test_an_orphan_after_a_live_response_ends_it() -> None:
    task = task_for("openai-chat", is_live=True)
    messages = lay_out(task, [user("q"), chat_response(chat_call("a"), chat_call("b")), tool("x"), tool("y")])
    assert [message["role"] for message in messages[2:]] == ["tool", "tool", "user", "user"]


def test_a_moved_result_joins_the_others_so_that_a_continuation_has_the_same_layout() -> None:
    moved = [
        user("q"),
        response(use("a"), use("b")),
        user([result("a")]),
        response(text("so")),
        user([result("b")]),
    ]
    continuing = [
        response(text("on")),
        user("w"),
        response(use("c"), use("d")),
        user([result("c")]),
        response(text("end")),
    ]
    at_once = lay_out(task_for(), [*moved, *continuing])
    assert at_once == lay_out(task_for(), [*lay_out(task_for(), moved), *continuing])
