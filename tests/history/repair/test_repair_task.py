from __future__ import annotations

from midstream.history.codecs.codec_spec import Role
from midstream.history.repair.placeholders import UNKNOWN
from midstream.history.repair.repair_task import is_silent, is_text, stands_in
from tests.history.repair.makers import task_for, turns_for
from tests.history.repair.reported import response, result, text, use, user


def test_calls_and_results_have_no_text() -> None:
    task = task_for()
    turns = turns_for(task, [user("q"), response(use("a")), user([result("a")]), response(text("b"))])
    assert [is_silent(turn) for turn in turns] == [False, True, True, False]


def test_only_constant_texts_are_placeholders() -> None:
    task = task_for()
    made = turns_for(task, [user([result("a", UNKNOWN), result("b", "42")])])[0]
    assert [stands_in(part) for part in made.parts] == [True, False]


def test_white_space_is_no_text() -> None:
    assert [is_text(value) for value in ("a", " ", "", None, 1)] == [True, False, False, False, False]


def test_a_new_turn_is_changed() -> None:
    turn = task_for().turn_of(Role.USER, "hi")
    assert (turn.is_changed, turn.at) == (True, -1)
