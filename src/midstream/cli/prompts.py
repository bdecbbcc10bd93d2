"""Asking a person: what they are shown of a question, and what the line they type means."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from midstream.cli.terminal import Ink, clean, indent_lines
from midstream.cli.transcript import INDENT, time_of
from midstream.session.calls import Choice, QuestionKind
from midstream.session.questions import Question

ARGUMENT_LINES_MAX = 20
"""Lines of a call's arguments that are shown; `sessions questions --json` has all of them."""
OPTIONS_MAX = 20

_HEADS = {
    QuestionKind.APPROVAL: "may this run?",
    QuestionKind.QUESTION: "asks:",
    QuestionKind.DOUBT: "did this happen? Its process died before the outcome was recorded.",
}
_PROMPTS = {
    QuestionKind.APPROVAL: "[y]es, [n]o (and why), [e]dit the arguments > ",
    QuestionKind.QUESTION: "your answer > ",
    QuestionKind.DOUBT: "it [h]appened (and what came of it), run it [a]gain, [s]kip it > ",
}
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
"""Choices after which a person may write more."""


class Decision(Struct, frozen=True):
    """A person's decision; see `Client.answer`."""

    choice: Choice
    text: str = ""
    arguments: str | None = None


class QuestionPrompt:
    """One question put to a person at a terminal: show `lines`, then `prompt`, and `take` what is typed."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._options = options_of(question)
        self._is_editing = False

    @property
    def prompt(self) -> str:
        """Text in front of the person's input."""
        if self._is_editing:
            return INDENT + _EDIT_PROMPT
        return INDENT + (_FIXED_PROMPT if self.question.is_fixed else _PROMPTS[self.question.kind])

    def take(self, line: str) -> Decision | None:
        """Return what the person decided with this line, or None where they are to be asked again."""
        words = line.strip()
        if self._is_editing:
            return self._edit(words)
        if self.question.kind is QuestionKind.QUESTION:
            return Decision(Choice.RESPOND, self._chosen(words)) if words else None
        first, _, more = words.partition(" ")
        is_editable = self.question.kind is QuestionKind.APPROVAL and not self.question.is_fixed
        if is_editable and first.lower() in ("e", "edit"):
            self._is_editing = True
            return None
        choice = _SHORT[self.question.kind].get(first.lower())
        if choice is None or (more and choice not in _WITH_WORDS):
            return None
        return Decision(choice, more.strip())

    def _chosen(self, words: str) -> str:
        """Return the option whose number was typed, or the words themselves."""
        number = int(words) if words.isascii() and words.isdecimal() and len(words) < 4 else 0  # noqa: PLR2004 - no option has it
        return self._options[number - 1] if 1 <= number <= len(self._options) else words

    def _edit(self, words: str) -> Decision | None:
        if not words:
            self._is_editing = False
            return None
        try:
            msgspec.json.decode(words, type=dict[str, object])
        except msgspec.DecodeError:
            return None
        self._is_editing = False
        return Decision(Choice.ALLOW, arguments=words)


def how_to_answer(question: Question, url: str | None = None) -> str:
    """Return the command that answers a question from elsewhere; it decides nothing as it stands."""
    # A model chooses the ids of its calls: they are quoted, and a pasted command must decide nothing.
    place = (question.session, "CHOICE", "--call", question.call_id)
    words = " ".join(shlex.quote(clean(word, is_one_line=True)) for word in place)
    where = f" --url {shlex.quote(url)}" if url else ""
    return f"{' or '.join(question.choices)}: midstream sessions answer {words}{where}"


def options_of(question: Question) -> list[str]:
    """Return what a question offers to choose from, if it does."""
    if question.kind is not QuestionKind.QUESTION:
        return []
    try:
        options = msgspec.json.decode(question.arguments or "{}", type=_Options).options
    except msgspec.DecodeError:
        return []
    return options[:OPTIONS_MAX]


class _Options(Struct):
    options: list[str] = []


def question_lines(question: Question, ink: Ink, width: int) -> Iterator[str]:
    """Set a question for a terminal of `width` columns. Everything foreign is cleaned."""
    who = " > ".join(clean(agent, is_one_line=True) for agent in question.agents)
    name = clean(question.name, is_one_line=True)
    head = f"{f'{who}: ' if who else ''}{name}"
    yield f"{INDENT}{ink.yellow('?')} {ink.bold(head)}  {_HEADS[question.kind]}"
    inner = INDENT + "  "
    if question.kind is not QuestionKind.QUESTION:
        shown = indent_lines(clean(_pretty(question.arguments)), inner, width)
        yield from shown[:ARGUMENT_LINES_MAX]
        if len(shown) > ARGUMENT_LINES_MAX:
            more = len(shown) - ARGUMENT_LINES_MAX
            yield f"{inner}… {more} more lines: see `midstream sessions questions --json`"
    if question.text:
        yield from indent_lines(clean(question.text), inner, width)
    for number, option in enumerate(options_of(question), start=1):
        yield f"{inner}{number}  {clean(option, is_one_line=True)}"
    if question.expires_at:
        yield ink.dim(f"{inner}until {time_of(question.expires_at)}")


def _pretty(arguments: str) -> str:
    try:
        return msgspec.json.format(arguments, indent=2)
    except msgspec.DecodeError:
        return arguments
