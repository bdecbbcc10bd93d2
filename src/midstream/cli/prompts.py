"""Questions at a terminal: their text, and the meaning of typed answers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from midstream.cli.terminal import Ink, fold_lines
from midstream.cli.times import time_of
from midstream.cli.transcript import INDENT
from midstream.cli.visible_text import reveal, reveal_line
from midstream.session.calls import Choice, QuestionKind
from midstream.session.questions import Question

PAGE_LINES = 20
"""Lines of a question on one page: a screen has 24 lines, and none may scroll away unseen."""
OPTIONS_MAX = 20

_HEADS = {
    QuestionKind.APPROVAL: "may this run?",
    QuestionKind.QUESTION: "asks:",
    QuestionKind.DOUBT: "did this happen? Its process died before the outcome was recorded.",
}
_PROMPTS = {
    QuestionKind.APPROVAL: "[y]es, [n]o (and why), [e]dit the arguments > ",
    QuestionKind.QUESTION: "your answer > ",
    QuestionKind.DOUBT: "it [h]appened (and its result), run it [a]gain, [s]kip it > ",
}
_UNSEEN_PROMPTS = {
    QuestionKind.APPROVAL: ", [n]o (and why)",
    QuestionKind.QUESTION: "",
    QuestionKind.DOUBT: ", [s]kip it",
}
"""Prompts after an incomplete page: the answers that do not run the call."""
_FIXED_PROMPT = "[y]es, [n]o (and why) > "
_EDIT_PROMPT = "arguments as JSON, or Enter to keep them > "
_SHORT = {
    QuestionKind.APPROVAL: {"y": Choice.ALLOW, "yes": Choice.ALLOW, "n": Choice.DENY, "no": Choice.DENY},
    QuestionKind.DOUBT: {
        "h": Choice.HAPPENED,
        "happened": Choice.HAPPENED,
        "a": Choice.RERUN,
        "again": Choice.RERUN,
        "s": Choice.SKIP,
        "skip": Choice.SKIP,
    },
}
_WITH_WORDS = (Choice.DENY, Choice.HAPPENED)
"""Choices that may be followed by text."""
_RUNS_NOTHING = (Choice.DENY, Choice.SKIP)
"""Choices that are possible before the whole question was shown."""


class Decision(Struct, frozen=True):
    """A person's decision; see `Client.answer`."""

    choice: Choice
    text: str = ""
    arguments: str | None = None


class QuestionPrompt:
    """One question at a terminal: show `new_lines`, then `prompt`, and `take` the input.

    Args:
        lines: The question formatted for this terminal; it can be answered when all lines were shown.
    """

    def __init__(self, question: Question, lines: Sequence[str] = ()) -> None:
        self.question = question
        self._options = options_of(question)
        self._lines = lines
        self._shown = 0
        self._page_end = PAGE_LINES
        self._is_editing = False

    def new_lines(self) -> Sequence[str]:
        """Return the lines of the current page that were not returned before."""
        first, self._shown = self._shown, min(self._page_end, len(self._lines))
        return self._lines[first : self._shown]

    @property
    def is_whole(self) -> bool:
        """Whether all lines were shown."""
        return self._shown >= len(self._lines)

    @property
    def prompt(self) -> str:
        """Text before the input."""
        if not self.is_whole:
            others = _UNSEEN_PROMPTS[self.question.kind]
            return f"{INDENT}Enter shows more ({self._shown} of {len(self._lines)} lines){others} > "
        if self._is_editing:
            return INDENT + _EDIT_PROMPT
        return INDENT + (_FIXED_PROMPT if self.question.is_fixed else _PROMPTS[self.question.kind])

    def take(self, line: str) -> Decision | None:
        """Return the decision in a line of input, or None to prompt again."""
        words = line.strip()
        if not (self.is_whole or words):
            self._page_end = self._shown + PAGE_LINES
            return None
        if self._is_editing:
            return self._edit(words)
        decision = self._decision_in(words)
        is_early = not self.is_whole and decision is not None and decision.choice not in _RUNS_NOTHING
        return None if is_early else decision

    def _decision_in(self, words: str) -> Decision | None:
        if self.question.kind is QuestionKind.QUESTION:
            return Decision(Choice.RESPOND, self._chosen(words)) if words else None
        first, _, more = words.partition(" ")
        is_editable = self.question.kind is QuestionKind.APPROVAL and not self.question.is_fixed
        if is_editable and self.is_whole and first.lower() in ("e", "edit"):
            self._is_editing = True
            return None
        choice = _SHORT[self.question.kind].get(first.lower())
        if choice is None or (more and choice not in _WITH_WORDS):
            return None
        return Decision(choice, more.strip())

    def _chosen(self, words: str) -> str:
        """Return the option whose number was typed, or the text itself."""
        number = int(words) if words.isascii() and words.isdecimal() and len(words) < 4 else 0  # noqa: PLR2004 - no option has it
        return self._options[number - 1] if 1 <= number <= len(self._options) else words

    def _edit(self, words: str) -> Decision | None:
        if not words:
            self._is_editing = False
            return None
        try:
            msgspec.json.decode(words, type=dict[str, object])
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        self._is_editing = False
        return Decision(Choice.ALLOW, arguments=words)


def answer_command(question: Question, url: str | None = None) -> str:
    """Return the command that answers a question from elsewhere, with a placeholder for the choice."""
    # A model chooses the ids of calls, so they are quoted. The placeholder makes a pasted command harmless.
    place = (question.session, "CHOICE", "--call", question.call_id)
    words = " ".join(shlex.quote(reveal_line(word)) for word in place)
    where = f" --url {shlex.quote(url)}" if url else ""
    return f"{' or '.join(question.choices)}: midstream sessions answer {words}{where}"


def options_of(question: Question) -> list[str]:
    """Return the options of a question, if any."""
    if question.kind is not QuestionKind.QUESTION:
        return []
    try:
        options = msgspec.json.decode(question.arguments or "{}", type=_Options).options
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return []
    return options[:OPTIONS_MAX]


class _Options(Struct):
    options: list[str] = []


def question_lines(question: Question, ink: Ink, width: int) -> Iterator[str]:
    """Format a whole question for `width` columns, with invisible characters shown as codes."""
    who = " > ".join(reveal_line(agent) for agent in question.agents)
    head = f"{f'{who}: ' if who else ''}{reveal_line(question.name)}"
    yield f"{INDENT}{ink.yellow('?')} {ink.bold(head)}  {_HEADS[question.kind]}"
    inner = INDENT + "  "
    if question.kind is not QuestionKind.QUESTION:
        yield from fold_lines(reveal(_pretty(question.arguments)), inner, width)
    if question.text:
        yield from fold_lines(reveal(question.text), inner, width)
    for number, option in enumerate(options_of(question), start=1):
        yield f"{inner}{number}  {reveal_line(option)}"
    if question.expires_at:
        yield ink.dim(f"{inner}until {time_of(question.expires_at)}")


def _pretty(arguments: str) -> str:
    try:
        return msgspec.json.format(arguments, indent=2)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
