from __future__ import annotations

from midstream.core.repair.edges import settle_edges
from midstream.core.repair.words import FIRST, GO_ON, NO_REPLY
from tests.core.repair.makers import codes, task_for, turns_for
from tests.core.repair.reported import reply, result, text, use, user


def test_a_reply_may_not_begin() -> None:
    task = task_for()
    turns = settle_edges(turns_for(task, [reply(text("hi"))]), task)
    assert [task.form.build(turn) for turn in turns[:1]] == [{"role": "user", "content": FIRST}]
    assert codes(task) == ["starts-with-reply"]


def test_neighbours_of_one_role_are_parted_and_neither_is_changed() -> None:
    task = task_for(profile="bedrock-claude")
    messages = [user("a"), user("b"), reply(text("c")), reply(text("d"))]
    turns = settle_edges(turns_for(task, messages), task)
    assert [turn.source if not turn.is_changed else turn.parts[0].body for turn in turns] == [
        messages[0],
        NO_REPLY,
        messages[1],
        messages[2],
        GO_ON,
        messages[3],
    ]


def test_results_and_words_are_parted_where_they_may_not_share_a_message() -> None:
    task = task_for(profile="minimax")
    messages = [user("q"), reply(use("a")), user([result("a"), text("b")])]
    turns = settle_edges(turns_for(task, messages), task)
    assert [task.form.build(turn) for turn in turns[2:]] == [user([result("a")]), user([text("b")])]
