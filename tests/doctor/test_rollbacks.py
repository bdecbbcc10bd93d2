"""Turns that a user undid stay in the file and are not judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from midstream.doctor.examination import examine
from midstream.doctor.findings import Status
from midstream.doctor.jsonl_formats import CodexRollout
from midstream.doctor.rollbacks import Rollbacks
from tests.doctor.files import Json, read_lines, write_lines

ORDER = '{"author": "main", "recipient": "main/a", "content": "go"}'


def _item(**item: object) -> Json:
    return {"timestamp": "t", "type": "response_item", "payload": item}


def _event(**event: object) -> Json:
    return {"timestamp": "t", "type": "event_msg", "payload": event}


def _user(words: str) -> Json:
    return _item(type="message", role="user", content=[{"type": "input_text", "text": words}])


def _agent(words: str) -> Json:
    return _item(type="message", role="assistant", content=[{"type": "output_text", "text": words}])


def _call(name: str) -> Json:
    return _item(type="function_call", call_id=name, name="f", arguments="{}")


def _undo(turns: object) -> Json:
    return _event(type="thread_rolled_back", num_turns=turns)


META: Json = {"type": "session_meta", "payload": {"id": "1"}}


@pytest.mark.parametrize(
    ("lines", "taken_back"),
    [
        ([_user("a"), _agent("x"), _undo(1)], [1, 2, 3]),
        ([_user("a"), _user("b"), _agent("x"), _undo(1), _user("c")], [2, 3, 4]),
        ([_user("a"), _user("b"), _undo(1), _undo(1), _user("c")], [1, 2, 3, 4]),
        ([_user("a"), _undo(1), _user("b"), _user("c"), _undo(1)], [1, 2, 4, 5]),
        ([_agent("before"), _user("a"), _undo(99)], [2, 3]),
        (
            [_user("a"), _user("<environment_context>x</environment_context>"), _agent("x"), _undo(1)],
            [1, 2, 3, 4],
        ),
        ([_user("a"), _user("# AGENTS.md instructions for /x"), _undo(1)], [1, 2, 3]),
        ([_user("a"), _agent(ORDER), _agent("x"), _undo(1)], [2, 3, 4]),
        ([_user("a"), _agent("{no order"), _agent('{"recipient": 1}'), _undo(1)], [1, 2, 3, 4]),
        ([_undo(3), _user("a")], []),
        ([_user("a"), _undo(0), _undo(-1), _undo("2"), _undo(None), _event(type="other", num_turns=1)], []),
        (
            [
                {"type": "event_msg"},
                {"type": "response_item", "payload": 3},
                _item(type="message", role="user"),
            ],
            [],
        ),
        ([_item(type="message", role="user", content="odd"), _undo(1)], [1, 2]),
    ],
)
def test_the_remaining_turns_are_those_of_codex(lines: list[Json], taken_back: list[int]) -> None:
    rollbacks = Rollbacks(CodexRollout())
    for number, line in enumerate(lines, 1):
        rollbacks.note(number, line)
    assert [number for number in range(1, len(lines) + 1) if rollbacks.has(number)] == taken_back
    assert rollbacks.lines == len(taken_back)


def test_a_broken_turn_that_was_undone_is_not_a_defect_and_stays_in_the_copy(tmp_path: Path) -> None:
    lines: list[Any] = [
        META,
        _user("Read."),
        _call("kept"),
        _user("No, write."),
        _call("undone"),
        {"type": "compacted", "payload": {"message": "m", "replacement_history": []}},
        _undo(1),
        _user("Sing."),
        _agent("La."),
    ]
    done = examine(write_lines(tmp_path / "r.jsonl", lines))
    assert [(found.code, found.call_id) for found in done.report.findings] == [("dangling-call", "kept")]
    assert done.report.conversations == 1, "what was withdrawn began no new one"
    assert done.report.notes == ("lines of withdrawn turns, kept and not judged: 4",)
    assert done.remedy is not None
    copy = done.remedy.beside().path
    kept = read_lines(copy)
    assert [line for line in kept if line in lines] == lines
    assert kept[3]["payload"]["type"] == "function_call_output"
    assert examine(copy).report.status is Status.CLEAN
