"""The division of lines into conversations, and the places where one may be cut."""

from __future__ import annotations

from midstream.doctor.conversations import Threads
from midstream.doctor.index import Index
from midstream.doctor.jsonl_formats import ClaudeCode, Facts, MessageLine, facts_of
from tests.doctor.files import Json, call_response, line, prompt, results_message, text_response, uuid


def _stretches(lines: list[Json], *, may_cut: bool = True) -> tuple[list[list[int]], Threads]:
    ledger, facts = ClaudeCode(), facts_of("anthropic")
    entries = [
        MessageLine(at, each, [each["message"]], ledger.node(each), ledger.group(each))
        for at, each in enumerate(lines, 1)
    ]
    last = Index()
    for entry in entries:
        for name in facts(entry.messages).ids:
            last[name] = entry.number

    def read(number: int, _: int) -> tuple[MessageLine, Facts]:
        again = lines[number - 1]
        entry = MessageLine(number, again, [again["message"]], ledger.node(again), ledger.group(again))
        return entry, facts(entry.messages)

    threads = Threads(last, may_cut=may_cut, read=read)
    found = [
        [each.number for each in stretch]
        for entry in entries
        for stretch in threads.take(entry, facts(entry.messages), entry.number)
    ]
    found += [[each.number for each in stretch] for stretch in threads.finish()]
    return found, threads


def test_a_stretch_ends_before_a_prompt_when_all_calls_are_answered() -> None:
    lines = [
        line(1, 0, prompt("a")),
        line(2, 1, text_response("m1", "b")),
        line(3, 2, prompt("c")),
        line(4, 3, text_response("m2", "d")),
    ]
    assert _stretches(lines)[0] == [[1, 2], [3, 4]]
    assert _stretches(lines, may_cut=False)[0] == [[1, 2, 3, 4]]


def test_a_stretch_continues_while_an_id_recurs() -> None:
    lines = [
        line(1, 0, prompt("a")),
        line(2, 1, call_response("m1", "x")),
        line(3, 2, prompt("b")),
        line(4, 3, text_response("m2", "c")),
        line(5, 4, prompt("d")),
        line(6, 5, results_message("x")),
        line(7, 6, text_response("m3", "e")),
        line(8, 7, prompt("f")),
    ]
    assert _stretches(lines)[0] == [[1, 2, 3, 4, 5, 6, 7], [8]]


def test_a_rewind_includes_the_turn_that_it_left_and_is_judged_after_it() -> None:
    lines = [
        line(1, 0, prompt("a")),
        line(2, 1, call_response("m1", "x")),
        line(3, 2, results_message("x")),
        line(4, 3, text_response("m2", "b")),
        line(5, 2, prompt("c")),
        line(6, 5, text_response("m3", "d")),
        line(7, 6, prompt("e")),
    ]
    found, threads = _stretches(lines)
    assert (found, threads.count) == ([[1, 2, 3, 4], [7], [1, 2, 3, 5, 6]], 2)


def test_a_turn_that_was_complete_when_it_was_left_is_not_judged_again() -> None:
    lines = [
        line(1, 0, prompt("a")),
        line(2, 1, text_response("m1", "b")),
        line(3, 2, prompt("c")),
        line(4, 2, prompt("d")),
        line(5, 4, text_response("m2", "e")),
    ]
    found, threads = _stretches(lines)
    assert (found, threads.count) == ([[1, 2], [3], [4, 5]], 2)


def test_a_repeated_line_is_omitted() -> None:
    lines = [line(1, 0, prompt("a")), line(1, 0, prompt("a"))]
    found, threads = _stretches(lines)
    assert (found, threads.copies) == ([[1]], 1)


def test_a_line_with_a_missing_parent_follows_the_last_one() -> None:
    lines = [line(1, 0, prompt("a")), line(3, 2, text_response("m1", "b"))]
    found, threads = _stretches(lines)
    assert found == [[1, 2]]
    assert threads.loose == [(2, uuid(2), uuid(1))]


def test_lines_without_messages_continue_the_chain() -> None:
    threads = Threads(Index(), may_cut=True, read=lambda *_: None)
    threads.pass_by("root", None, 1)
    facts = facts_of("anthropic")
    first = {**line(2, 0, prompt("a")), "parentUuid": "root"}
    entry = MessageLine(2, first, [first["message"]], ClaudeCode().node(first))
    assert list(threads.take(entry, facts(entry.messages), 0)) == []
    assert (threads.count, threads.loose) == (1, [])
