"""The words that a reader was shown of a response, beside those of the whole response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from midstream.history.messages import Response, Text, Thinking

Words = tuple[str, str]
"""Kind (text or thinking) and words of a part."""


def words_of(response: Response) -> list[Words]:
    """Return the words of a response, part by part."""
    parts = [part for part in response.parts if isinstance(part, Text | Thinking) and part.text]
    return [("thinking" if isinstance(part, Thinking) else "text", part.text) for part in parts]


def part_of(kind: str, words: str) -> Text | Thinking:
    """Return words as a part of a response."""
    return Thinking(words) if kind == "thinking" else Text(words)


def merged(parts: Iterable[Words]) -> list[Words]:
    """Return parts with neighbours of one kind joined."""
    joined: list[Words] = []
    for kind, words in parts:
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + words)
        elif words:
            joined.append((kind, words))
    return joined


def rest_of(whole: list[Words], shown: list[Words]) -> list[Words] | None:
    """Return what follows the shown parts in the whole; None where these are no beginning of it. Both are merged."""
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
    """Words that a client has of attempts that were cut, while the next attempt repeats them."""

    def __init__(self, shown: Sequence[Words]) -> None:
        self._expected = [*shown]
        self.passed: list[Words] = []
        """The words of the attempt so far."""

    @property
    def is_over(self) -> bool:
        """Whether all was repeated, or the attempt took another course."""
        return not self._expected

    def take(self, kind: str, words: str) -> tuple[list[Words], bool]:
        """Return the words to show, and whether they are a message of their own."""
        self.passed.append((kind, words))
        while words and self._expected:
            expected_kind, expected = self._expected[0]
            common = min(len(words), len(expected))
            if kind != expected_kind or words[:common] != expected[:common]:
                self._expected = []
                return merged(self.passed), True
            words = words[common:]
            self._expected[:1] = [(kind, expected[common:])] if expected[common:] else []
        return [(kind, words)] if words else [], False
