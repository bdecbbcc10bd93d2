"""Sessions of any length: judged stretch by stretch with the result of the whole, and repaired line by line."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from midstream.doctor.conversations import Threads
from midstream.doctor.examination import examine
from midstream.doctor.findings import HistoryReport, Status
from tests.doctor.files import (
    Json,
    call_response,
    line,
    prompt,
    put,
    read_lines,
    results_message,
    text_response,
    uuid,
    write_lines,
)
from tests.search import tried


def _fixed(path: Path) -> list[Json]:
    remedy = examine(path).remedy
    assert remedy is not None
    return read_lines(remedy.beside().path)


def _chain(lines: list[Json], leaf: str) -> list[Json]:
    """Return the lines that a reader gets along one chain of parents."""
    by_id = {each["uuid"]: each for each in lines if "uuid" in each}
    chain = []
    at: str | None = leaf
    while at is not None:
        chain.append(by_id[at])
        at = by_id[at]["parentUuid"]
    return chain[::-1]


def test_parallel_results_on_separate_branches_are_results(tmp_path: Path) -> None:
    session = [
        line(1, 0, prompt("Read both.")),
        line(2, 1, call_response("m1", "a")),
        line(3, 2, call_response("m1", "b")),
        line(4, 2, results_message("a")),
        line(5, 3, results_message("b")),
        line(6, 5, text_response("m2", "Read.")),
    ]
    report = examine(write_lines(tmp_path / "s.jsonl", session)).report
    assert (report.status, report.conversations, report.messages) == (Status.CLEAN, 1, 6)


def test_results_that_arrived_during_the_response_are_results(tmp_path: Path) -> None:
    session = [
        line(1, 0, prompt("Read both.")),
        line(2, 1, call_response("m1", "a")),
        line(3, 2, results_message("a")),
        line(4, 2, call_response("m1", "b")),
        line(5, 4, results_message("b")),
    ]
    assert examine(write_lines(tmp_path / "s.jsonl", session)).report.status is Status.CLEAN


def test_every_branch_is_judged_and_each_finding_reported_once(tmp_path: Path) -> None:
    session = [
        line(1, 0, prompt("Read.")),
        line(2, 1, call_response("m1", "a")),
        line(3, 2, results_message("a")),
        line(4, 3, call_response("m2", "gone")),
        line(5, 3, prompt("No, write.")),
        line(6, 5, call_response("m3", "lost")),
        line(7, 3, prompt("No, sing.")),
        line(8, 7, text_response("m4", "La.")),
    ]
    report = examine(write_lines(tmp_path / "s.jsonl", session)).report
    assert report.conversations == 3
    assert [(found.line, found.code) for found in report.findings] == [
        (4, "dangling-call"),
        (6, "dangling-call"),
    ]


def test_a_branch_from_the_middle_of_a_turn_lacks_later_results(tmp_path: Path) -> None:
    session = [
        line(1, 0, prompt("Read both.")),
        line(2, 1, call_response("m1", "a")),
        line(3, 2, results_message("a")),
        line(4, 3, call_response("m2", "b")),
        line(5, 4, results_message("b")),
        line(6, 5, text_response("m3", "Both.")),
        line(7, 4, prompt("Stop.")),
        line(8, 7, text_response("m4", "Stopped.")),
    ]
    path = write_lines(tmp_path / "s.jsonl", session)
    report = examine(path).report
    assert (report.status, report.conversations) == (Status.CLEAN, 2), "its result is in the file"


def test_side_conversations_of_agents_are_separate(tmp_path: Path) -> None:
    session = [
        line(1, 0, prompt("Ask the agent.")),
        line(2, 1, call_response("m1", "task")),
        line(3, 0, prompt("You are the agent."), isSidechain=True),
        line(4, 3, call_response("s1", "x"), isSidechain=True),
        line(5, 2, results_message("task")),
        line(6, 5, text_response("m2", "It said.")),
    ]
    report = examine(write_lines(tmp_path / "s.jsonl", session)).report
    assert report.conversations == 2
    assert [found.line for found in report.findings] == [4]


def test_snapshots_are_folded_and_copies_read_once(tmp_path: Path) -> None:
    growing = [text_response("m1", "He"), text_response("m1", "Hello"), text_response("m1", "Hello.")]
    session = [line(1, 0, prompt("Hi.")), *(line(2 + at, 1 + at, each) for at, each in enumerate(growing))]
    report = examine(write_lines(tmp_path / "s.jsonl", [*session, session[1], session[3]])).report
    assert report.status is Status.CLEAN
    assert report.notes == (
        "earlier states of parts, folded into the last one: 2",
        "copies of lines, read once: 2",
    )


def test_added_lines_are_on_the_chain_that_readers_follow(tmp_path: Path) -> None:
    session = [
        line(1, 0, prompt("Read three.")),
        line(2, 1, call_response("m1", "a")),
        line(3, 2, call_response("m1", "b")),
        line(4, 3, call_response("m1", "c")),
        line(5, 2, results_message("a")),
        line(6, 4, results_message("c")),
        line(7, 6, prompt("And?")),
        line(8, 7, text_response("m2", "Two.")),
    ]
    lines = _fixed(write_lines(tmp_path / "s.jsonl", session))
    text = json.dumps([each["message"] for each in _chain(lines, uuid(8))])
    assert [text.count(f'"tool_use_id": "{each}"') for each in "abc"] == [1, 1, 1]
    assert [text.count(f'"id": "{each}"') for each in "abc"] == [1, 1, 1]
    new = [each for each in lines if each["uuid"] not in {old["uuid"] for old in session}]
    assert [(each["type"], each["sessionId"]) for each in new] == [("user", "5e55")]


def test_lines_after_a_repaired_end_follow_the_added_ones(tmp_path: Path) -> None:
    session = [
        line(1, 0, prompt("Read.")),
        line(2, 1, call_response("m1", "a")),
        {"type": "system", "uuid": uuid(3), "parentUuid": uuid(2), "sessionId": "5e55"},
        line(4, 3, prompt("Well?")),
        line(5, 4, text_response("m2", "Cut.")),
    ]
    lines = _fixed(write_lines(tmp_path / "s.jsonl", session))
    chain = _chain(lines, uuid(5))
    roles = [each["message"]["role"] for each in chain if "message" in each]
    assert roles == ["user", "assistant", "user", "user", "assistant"]


def test_a_late_result_moves_with_its_line(tmp_path: Path) -> None:
    session = [
        line(1, 0, prompt("Read.")),
        line(2, 1, call_response("m1", "a")),
        line(3, 2, prompt("Hurry.")),
        line(4, 3, results_message("a"), toolUseResult={"kept": True}),
        line(5, 4, text_response("m2", "Done.")),
    ]
    lines = _fixed(write_lines(tmp_path / "s.jsonl", session))
    order = [int(each["uuid"][:8]) for each in lines]
    assert order == [1, 2, 4, 3, 5]
    assert lines[2]["toolUseResult"] == {"kept": True}
    assert [int(each["uuid"][:8]) for each in _chain(lines, uuid(5))] == order


def test_messages_before_a_compaction_are_not_sent_any_more(tmp_path: Path) -> None:
    path = put(tmp_path, "codex-compacted.broken.jsonl")
    report = examine(path).report
    assert (report.conversations, [found.line for found in report.findings]) == (2, [11])


def test_a_broken_summary_of_a_compaction_is_repaired_in_its_line(tmp_path: Path) -> None:
    kept = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Summary."}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"cut": '},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    lines: list[Any] = [
        {"type": "session_meta", "payload": {"id": "1"}},
        {"type": "compacted", "payload": {"message": "m", "replacement_history": kept}},
    ]
    fixed = _fixed(write_lines(tmp_path / "r.jsonl", lines))
    assert len(fixed) == 2
    history = fixed[1]["payload"]["replacement_history"]
    assert [item["type"] for item in history] == ["message", "function_call", "function_call_output"]
    assert json.loads(history[1]["arguments"]) == {"_raw": '{"cut": '}


def test_an_open_shell_call_of_codex_gets_an_output_that_codex_can_read(tmp_path: Path) -> None:
    action = {"type": "exec", "command": ["ls"]}
    call = {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": action}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List."}]}
    lines = [{"type": "session_meta", "payload": {"id": "1"}}]
    lines += [{"type": "response_item", "payload": item} for item in (asked, call)]
    path = write_lines(tmp_path / "r.jsonl", lines)
    fixed = _fixed(path)
    assert (fixed[3]["payload"]["type"], fixed[3]["payload"]["call_id"]) == ("function_call_output", "c")
    assert examine(tmp_path / "r.repaired.jsonl").report.status is Status.CLEAN


def test_a_line_beyond_the_limit_is_reported_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.doctor.file_reading.LINE_BYTES_MAX", 400)
    session = [
        line(1, 0, prompt("Hi.")),
        line(2, 1, text_response("m1", "x" * 500)),
        line(3, 2, text_response("m2", "Yes.")),
    ]
    done = examine(write_lines(tmp_path / "s.jsonl", session))
    reported = [(found.code, found.line) for found in done.report.findings]
    assert reported == [("long-line", 2), ("broken-chain", 3)]
    assert done.remedy is not None
    assert len(_chain(read_lines(done.remedy.beside().path), uuid(3))) == 2


@st.composite
def sessions(draw: st.DrawFn) -> list[Json]:
    """Generate sessions with parallel calls, lost, late and repeated results, rewinds and interrupted responses."""
    lines: list[Json] = []
    tips = [0]
    late: list[str] = []

    def add(parent: int, message: Json) -> int:
        lines.append(line(len(lines) + 1, parent, message))
        return len(lines)

    for turn in range(draw(st.integers(1, 6))):
        tip = tips[-1]
        if draw(st.integers(0, 5)) == 0:
            tip = draw(st.sampled_from(tips))
            late.clear()  # a late result is on the branch of its call
        tip = add(tip, prompt(f"prompt number {turn}"))
        for step in range(draw(st.integers(0, 3))):
            names = [f"call-{turn}-{step}-{at}" for at in range(draw(st.integers(1, 3)))]
            asked = []
            for name in names:
                tip = add(tip, call_response(f"m{turn}-{step}", name))
                asked.append(tip)
            for name, parent in zip(names, asked, strict=True):
                fate = draw(st.sampled_from(["kept", "kept", "kept", "kept", "lost", "late", "twice"]))
                if fate in ("kept", "twice"):
                    tip = add(parent, results_message(name))
                if fate == "twice":
                    tip = add(tip, results_message(name))
                if fate == "late":
                    late.append(name)
        if draw(st.booleans()) and late:
            tip = add(tip, results_message(late.pop()))
        if draw(st.integers(0, 4)):
            tip = add(tip, text_response(f"m{turn}-end", f"that was turn {turn}"))
        tips.append(tip)
    return lines


@given(sessions())
@settings(max_examples=tried(150))
def test_a_repaired_copy_is_clean_and_keeps_all_text(session: list[Json]) -> None:
    _is_repaired(session)


def _is_repaired(session: list[Json]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_lines(Path(folder) / "s.jsonl", session)
        done = examine(path)
        if done.remedy is None:
            assert done.report.status is Status.CLEAN
            return
        copy = done.remedy.beside().path
        assert examine(copy).report.findings == ()
        lines = read_lines(copy)
        ids = [each["uuid"] for each in lines]
        assert len(set(ids)) == len(ids)
        assert {each["parentUuid"] for each in lines} <= {*ids, None}
        new = json.dumps(lines)
        for each in session:
            words = each["message"]["content"]
            assert isinstance(words, list) or words in new


@given(sessions())
@settings(max_examples=tried(150))
def test_judging_by_stretches_finds_the_same_as_judging_the_whole(session: list[Json]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_lines(Path(folder) / "s.jsonl", session)
        by_stretches = examine(path).report
        whole = _examine_whole(path)
    assert _findings_of(by_stretches) == _findings_of(whole)


@st.composite
def tangles(draw: st.DrawFn) -> list[Json]:
    """Generate lines below any earlier line: results on other branches than their calls, nested branches, roots."""
    lines: list[Json] = []
    calls: list[str] = []

    def add(parent: int, message: Json) -> None:
        lines.append(line(len(lines) + 1, parent, message))

    add(0, prompt("the first prompt"))
    for number in range(draw(st.integers(2, 9))):
        parent = draw(st.sampled_from([len(lines)] * 3 + list(range(len(lines) + 1))))
        match draw(st.integers(0, 4)):
            case 0:
                add(parent, prompt(f"prompt number {number}"))
            case 1 | 2:
                calls.append(f"call-{number}")
                add(parent, call_response(f"m{number}", calls[-1]))
            case 3 if calls:
                add(parent, results_message(draw(st.sampled_from(calls))))
            case _:
                add(parent, text_response(f"m{number}", f"that was response {number}"))
    return lines


@given(tangles())
@example(
    [
        line(1, 0, prompt("the first prompt")),
        line(2, 1, prompt("the second one")),
        line(3, 0, call_response("m1", "a")),
        line(4, 3, prompt("the third one")),
        line(5, 1, results_message("a")),
        line(6, 3, prompt("the fourth one")),
    ]
)
@example(
    [
        line(1, 0, call_response("m1", "a")),
        line(2, 0, call_response("m2", "b")),
        line(3, 2, results_message("a")),
        line(4, 3, prompt("go on")),
        line(5, 2, call_response("m3", "c")),
    ]
)
@settings(max_examples=tried(150))
def test_the_copy_is_clean_however_branches_share_their_lines(session: list[Json]) -> None:
    _is_repaired(session)


def _examine_whole(path: Path) -> HistoryReport:
    made: Callable[..., Any] = Threads
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "midstream.doctor.line_files.Threads",
            lambda last, **rest: made(last, **{**rest, "may_cut": False}),
        )
        return examine(path).report


def _findings_of(report: HistoryReport) -> set[tuple[str, int, str | None]]:
    return {(found.code, found.line, found.call_id) for found in report.findings}
