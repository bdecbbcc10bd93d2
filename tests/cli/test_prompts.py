"""Questions on the terminal: their text, and the decision of a typed line."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from midstream.cli.prompts import (
    PAGE_LINES,
    Decision,
    QuestionPrompt,
    answer_command,
    options_of,
    question_lines,
)
from midstream.cli.terminal import PLAIN
from midstream.session.calls import CHOICES, Choice, QuestionKind
from midstream.session.questions import Question
from tests.spec import spec


def question(kind: QuestionKind, arguments: str = '{"sum":3}', text: str = "") -> Question:
    return Question("s1", 1, 1, "c1", kind, "d", "pay", arguments, CHOICES[kind], 5.0, text)


APPROVAL, QUESTION, DOUBT = (
    question(kind) for kind in (QuestionKind.APPROVAL, QuestionKind.QUESTION, QuestionKind.DOUBT)
)
WHICH = question(QuestionKind.QUESTION, '{"question":"Which?","options":["red","dark blue"]}', "Which?")


@pytest.mark.parametrize(
    ("question", "line", "decision"),
    [
        (APPROVAL, "y", Decision(Choice.ALLOW)),
        (APPROVAL, " YES \n", Decision(Choice.ALLOW)),
        (APPROVAL, "n", Decision(Choice.DENY)),
        (APPROVAL, "no, too much", None),
        (APPROVAL, "no it is too much", Decision(Choice.DENY, "it is too much")),
        (APPROVAL, "yes please", None),
        (APPROVAL, "", None),
        (APPROVAL, "h", None),
        (QUESTION, "the red one", Decision(Choice.RESPOND, "the red one")),
        (QUESTION, " ", None),
        (QUESTION, "2", Decision(Choice.RESPOND, "2")),
        (WHICH, "2", Decision(Choice.RESPOND, "dark blue")),
        (WHICH, "3", Decision(Choice.RESPOND, "3")),
        (DOUBT, "h it was paid", Decision(Choice.HAPPENED, "it was paid")),
        (DOUBT, "happened", Decision(Choice.HAPPENED)),
        (DOUBT, "a", Decision(Choice.RERUN)),
        (DOUBT, "skip", Decision(Choice.SKIP)),
        (DOUBT, "y", None),
    ],
)
def test_a_line_is_a_decision_or_the_question_is_repeated(
    question: Question, line: str, decision: Decision | None
) -> None:
    asking = QuestionPrompt(question)
    before = asking.prompt
    assert asking.take(line) == decision
    assert asking.prompt == before


def test_arguments_are_edited_as_json_only() -> None:
    asking = QuestionPrompt(APPROVAL)
    assert asking.take("e") is None
    assert "as JSON" in asking.prompt
    for line in ("no json", "[3]"):
        assert asking.take(line) is None
        assert "as JSON" in asking.prompt
    assert asking.take('{"sum":2}') == Decision(Choice.ALLOW, arguments='{"sum":2}')


def test_an_empty_edit_repeats_the_question() -> None:
    asking = QuestionPrompt(APPROVAL)
    asking.take("edit")
    assert asking.take("") is None
    assert asking.take("n") == Decision(Choice.DENY)


def test_an_approval_shows_the_call_its_reason_and_its_deadline() -> None:
    question = replace(APPROVAL, text="It is a lot.", expires_at=60.0, agents=("boss", "clerk"))
    shown = [*question_lines(question, PLAIN, 60)]
    assert shown[:5] == [
        "       ? boss > clerk: pay  may this run?",
        "         {",
        '           "sum": 3',
        "         }",
        "         It is a lot.",
    ]
    assert shown[5].startswith("         until ")


def test_a_question_shows_its_options_and_not_its_arguments() -> None:
    shown = [*question_lines(WHICH, PLAIN, 60)]
    assert shown == [
        "       ? pay  asks:",
        "         Which?",
        "         1  red",
        "         2  dark blue",
    ]
    assert options_of(question(QuestionKind.QUESTION, "no json")) == []


def test_the_suggested_answer_command_decides_nothing_by_itself() -> None:
    hostile = replace(APPROVAL, call_id="c1; rm -rf ~\x1b[2J")
    assert answer_command(hostile, "http://x") == (
        "allow or deny: midstream sessions answer s1 CHOICE --call 'c1; rm -rf ~⟨U+001B⟩[2J' --url http://x"
    )
    assert "|" not in answer_command(DOUBT)


def test_a_question_contains_no_control_characters() -> None:
    hostile = question(QuestionKind.APPROVAL, '{"a":"\x1b[2J\u202e"}'.ljust(10), "\x1b]0;owned\x07 text")
    lines = [*question_lines(replace(hostile, name="p\x1bay\ny"), PLAIN, 60)]
    assert not any("\x1b" in line or "\u202e" in line or "\n" in line for line in lines)
    assert "⟨U+001B⟩[2J⟨U+202E⟩" in "".join(lines)


@spec("SEC-71")
def test_every_character_of_an_argument_is_visible() -> None:
    command = "ls" + " " * 300 + "; rm -rf /\U000e0041\u2028\u00ad"
    lines = [*question_lines(question(QuestionKind.APPROVAL, '{"a":"' + command + '"}'), PLAIN, 60)]
    shown = "".join(line.removeprefix(" " * 9) for line in lines)
    assert "ls" + " " * 300 + "; rm -rf /⟨U+E0041⟩⟨U+2028⟩⟨U+00AD⟩" in shown


def test_too_deeply_nested_arguments_are_shown_unformatted() -> None:
    deep = question(QuestionKind.APPROVAL, "[" * 3000 + "]" * 3000)
    shown = "".join(line.strip() for line in question_lines(deep, PLAIN, 60))
    assert "[" * 3000 + "]" * 3000 in shown


LONG = question(QuestionKind.APPROVAL, '{"a":"' + "x " * 1500 + '"}')


@spec("SEC-71")
@pytest.mark.parametrize("kind", [QuestionKind.APPROVAL, QuestionKind.DOUBT])
def test_a_call_is_allowed_only_after_its_last_line_was_shown(kind: QuestionKind) -> None:
    question = replace(LONG, kind=kind)
    lines = [*question_lines(question, PLAIN, 60)]
    runs = {QuestionKind.APPROVAL: "y", QuestionKind.DOUBT: "a"}[kind]
    asking = QuestionPrompt(question, lines)
    shown = [*asking.new_lines()]
    assert len(shown) == PAGE_LINES
    while not asking.is_whole:
        for early in (runs, "yes", "again", "e", "h"):
            assert asking.take(early) is None
            assert "Enter shows more" in asking.prompt
        assert asking.new_lines() == []
        assert asking.take("") is None
        shown += asking.new_lines()
    assert shown == lines
    assert asking.take(runs) is not None


@spec("SEC-71")
def test_a_call_can_be_denied_before_its_last_line_was_shown() -> None:
    asking = QuestionPrompt(LONG, [*question_lines(LONG, PLAIN, 60)])
    asking.new_lines()
    assert asking.take("n too long") == Decision(Choice.DENY, "too long")


def test_the_edit_of_fixed_arguments_is_not_offered() -> None:
    fixed = QuestionPrompt(replace(APPROVAL, is_fixed=True))
    assert "[e]dit" in QuestionPrompt(APPROVAL).prompt
    assert fixed.prompt.strip() == "[y]es, [n]o (and why) >"
    assert fixed.take("e") is None
    assert fixed.prompt.strip() == "[y]es, [n]o (and why) >"
    assert fixed.take("y") == Decision(Choice.ALLOW)
