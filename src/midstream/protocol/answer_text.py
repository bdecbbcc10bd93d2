"""The text of a turn's answer, folded from its records: each word once, in spite of cut attempts.

This module implements the rule for readers (`attempt_started` in docs/spec/stream.md): when an attempt begins, the text
of the earlier attempt at the same response is void. Text of a new attempt that repeats the void text adds nothing to a
reader's text; the first difference replaces it.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from midstream.history.messages import Entry, Response, Step, Text, UpstreamCall
from midstream.protocol.frames import Gone, SnapshotFrame
from midstream.session.records import (
    AttemptStarted,
    Delta,
    MessageAccepted,
    Record,
    ResponseCompleted,
    TranscriptAccepted,
    TurnEnded,
)
from midstream.session.session import GO_ON

PARAGRAPH = "\n\n"
"""Separator of the texts of two responses, if the first does not end in white space."""


class AnswerSoFar(Struct, frozen=True, gc=False):
    """The answer of a turn after one record. Successive answers share their pieces, so an event costs no copy.

    Args:
        added: The text that the record adds; with `replaces` all text of its attempt.
        replaces: Whether a reader must replace its text of this answer by `transcript`.
    """

    pieces: list[str]
    count: int
    added: str = ""
    replaces: bool = False

    @property
    def transcript(self) -> str:
        """The whole text so far."""
        return "".join(self.pieces[: self.count])


class AnswerText:
    """The answer of the current turn, record by record."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pieces: list[str] = []
        """A reader's text, with void text; replaced by a new list when text is replaced."""
        self._whole = 0
        """Number of pieces that belong to complete responses."""
        self._void = ""
        """The text of a void attempt, which a reader keeps until different text comes."""
        self._repeated: int | None = None
        """Number of its characters that the new attempt has repeated; None without void text."""
        self._is_after_call = False

    @property
    def now(self) -> AnswerSoFar:
        """The answer after the last record."""
        return AnswerSoFar(self._pieces, len(self._pieces))

    def take(self, record: Record | Gone | SnapshotFrame) -> AnswerSoFar:
        """Fold one record, or a notice of the stream."""
        match record:
            case MessageAccepted() | TranscriptAccepted():
                self._begin()
            case AttemptStarted():
                self._void_attempt()
            case Delta(call=None, kind="text") if record.text:
                return self._add(self._lead(record.text) + record.text)
            case Delta() if record.call is not None:
                self._is_after_call = True
            case ResponseCompleted():
                return self._complete(record.body)
            case TurnEnded() if self._repeated is not None:
                return self._replace(self._void[: self._repeated])
            case Gone():
                self._whole = 0
                return self._replace("")
            case SnapshotFrame():
                return self.restart(record.session, record.turn)
            case _:
                pass
        return self.now

    def restart(self, session: msgspec.Raw, turn: int | None = None) -> AnswerSoFar:
        """Restart with a session in a snapshot.

        Args:
            turn: The turn whose answer is read; text of others is not part of it (STREAM-35). None for any turn.
        """
        try:
            now = msgspec.json.decode(session, type=_SessionNow)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self.now  # a later version: the next complete response replaces it
        self._begin()
        if turn not in (None, now.turns):
            return AnswerSoFar(self._pieces, 0, replaces=True)
        for entry in now.history:
            if isinstance(entry, Step):
                self._complete(entry.response)
            elif entry != GO_ON:
                self._begin()
        if now.running is not None and now.running.output is not None:
            text = text_of(now.running.output, self._last(self._whole))
            self._pieces += [text] if text else []
        return AnswerSoFar(self._pieces, len(self._pieces), "".join(self._pieces), replaces=True)

    def _void_attempt(self) -> None:
        self._is_after_call = False
        if len(self._pieces) > self._whole:
            self._void, self._repeated = "".join(self._pieces[self._whole :]), 0

    def _add(self, text: str) -> AnswerSoFar:
        self._is_after_call = False
        if self._repeated is None:
            self._pieces.append(text)
            return AnswerSoFar(self._pieces, len(self._pieces), text)
        left = len(self._void) - self._repeated
        if not self._void.startswith(text[:left], self._repeated):
            return self._replace(self._void[: self._repeated] + text)
        self._repeated += min(left, len(text))
        if len(text) < left:
            return self.now
        self._void, self._repeated = "", None
        return self._add(text[left:]) if text[left:] else self.now

    def _replace(self, text: str) -> AnswerSoFar:
        """Replace the text of the current response."""
        self._pieces = [*self._pieces[: self._whole], *([text] if text else [])]
        self._void, self._repeated = "", None
        return AnswerSoFar(self._pieces, len(self._pieces), text, replaces=True)

    def _complete(self, response: Response) -> AnswerSoFar:
        """Replace the text of a response by that of the complete response, if they differ."""
        whole, begun = text_of(response, self._last(self._whole)), "".join(self._pieces[self._whole :])
        self._void, self._repeated = "", None
        if whole == begun:
            settled = self.now
        elif whole.startswith(begun):
            settled = self._add(whole[len(begun) :])
        else:
            settled = self._replace(whole)
        self._whole = len(self._pieces)
        self._is_after_call = False
        return settled

    def _lead(self, text: str) -> str:
        """Return the separator between the text so far and this text."""
        is_first = len(self._pieces) == self._whole if self._repeated is None else self._repeated == 0
        if is_first:
            return _between(self._last(self._whole), text)
        if not self._is_after_call:
            return ""
        previous = self._last(len(self._pieces)) if self._repeated is None else self._void[self._repeated - 1]
        return _between(previous, text)

    def _last(self, count: int) -> str:
        return self._pieces[count - 1] if count else ""


def text_of(response: Response, before: str = "") -> str:
    """Return the text of a complete response after other text: with a new paragraph, also after a call inside it."""
    text, is_apart = before, True
    for part in response.parts:
        if isinstance(part, UpstreamCall):
            is_apart = True
        elif isinstance(part, Text) and part.text:
            text += (_between(text, part.text) if is_apart else "") + part.text
            is_apart = False
    return text[len(before) :]


class _Running(Struct):
    output: Response | None = None


class _SessionNow(Struct):
    turns: int = 0
    history: tuple[Entry, ...] = ()
    running: _Running | None = None


def _between(before: str, after: str) -> str:
    is_apart = not before or before[-1].isspace() or after[0].isspace()
    return "" if is_apart else PARAGRAPH
