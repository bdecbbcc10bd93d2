"""Comparison of the text that a reader has of a response with the text of the complete response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from midstream.history.messages import Response, Text, Thinking

Words = tuple[str, str]
"""Kind (text or thinking) and text of a part."""


def words_of(response: Response) -> list[Words]:
    """Return the text of a response by part."""
    parts = [part for part in response.parts if isinstance(part, Text | Thinking) and part.text]
    return [("thinking" if isinstance(part, Thinking) else "text", part.text) for part in parts]


def part_of(kind: str, words: str) -> Text | Thinking:
    """Return text as a part of a response."""
    return Thinking(words) if kind == "thinking" else Text(words)


def merge(parts: Iterable[Words]) -> list[Words]:
    """Join neighbouring parts of one kind."""
    joined: list[Words] = []
    for kind, words in parts:
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + words)
        elif words:
            joined.append((kind, words))
    return joined


def rest_of(whole: list[Words], shown: list[Words]) -> list[Words] | None:
    """Return the rest of `whole` after `shown`; None if `shown` is not its beginning. Both must be merged."""
    if not shown:
        return whole
    last = len(shown) - 1
    if len(whole) < len(shown) or whole[:last] != shown[:last]:
        return None
    (kind, words), (shown_kind, begun) = whole[last], shown[last]
    if kind != shown_kind or not words.startswith(begun):
        return None
    more = words[len(begun) :]
    return [*([(kind, more)] if more else []), *whole[last + 1 :]]


class RepeatedWords:
    """Text of interrupted attempts at a client, while the next attempt repeats it."""

    def __init__(self, shown: Sequence[Words]) -> None:
        self._expected = [*shown]
        self.passed: list[Words] = []
        """Text of the attempt so far."""

    @property
    def is_over(self) -> bool:
        """Whether the attempt has repeated all text, or differs."""
        return not self._expected

    def take(self, kind: str, words: str) -> tuple[list[Words], bool]:
        """Return the text to send, and whether it is a separate message."""
        self.passed.append((kind, words))
        while words and self._expected:
            expected_kind, expected = self._expected[0]
            common = min(len(words), len(expected))
            if kind != expected_kind or words[:common] != expected[:common]:
                self._expected = []
                return merge(self.passed), True
            words = words[common:]
            self._expected[:1] = [(kind, expected[common:])] if expected[common:] else []
        return [(kind, words)] if words else [], False
