"""Data kept of the messages that requests began with, so that the next one costs only what is new in it.

No message is kept: what a conversation is known by are digests, and of words only the system prompts among the
messages and how the user's newest message begins. Whatever it was taken from is known again by one hash over its bytes
(`midstream.core.reuse.raw`), and only by the same API and the same key: nobody learns what somebody else has sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from msgspec import Struct

from midstream.core.dialects.conversations import Place, newest_words, place_of
from midstream.core.dialects.refusals import Dialect
from midstream.core.dialects.transcripts import Piece, Transcript
from midstream.core.messages import History
from midstream.core.reuse.fingerprint import Heard
from midstream.core.reuse.raw import Known

BEGINNINGS_MAX = 512
"""Beginnings kept, the last used ones: two for each of the last 256 turns. Looking through all of them costs 0.2 ms."""
BEGINNINGS_BYTES_MAX = 64 * 1024 * 1024
"""Of all of them: 800 conversations of 10,000 messages, whose links are most of it."""
BEGINNING_BYTES_MIN = 16 * 1024
"""Of messages worth knowing: fewer are parsed in less than a millisecond."""

_OBJECT_BYTES = 1024
"""About what an entry weighs beside what is counted."""


class Gist(Struct, frozen=True):
    """Facts that matter of a conversation's messages, for finding it and for judging a request.

    Args:
        place: Where it stands, by all that was said; in `scope`.
        scope: Where it is looked for; "" for one that has a name.
        instructions: The system prompts among its messages.
        newest: How the user's newest message begins (`newest_words`), or "".
        ids: The ids of its items (`Piece.ids`).
    """

    place: Place
    scope: str
    heard: Heard = Heard()
    instructions: str = ""
    newest: str = ""
    ids: frozenset[str] = frozenset()

    @classmethod
    def of_nothing(cls, scope: str) -> Gist:
        """Return that of a conversation in which nothing was said."""
        return cls(place_of(scope, History()), scope)

    def then(self, transcript: Transcript, ids: frozenset[str] = frozenset()) -> Gist:
        """Return it with what came behind."""
        entries = transcript.history.entries
        newest = newest_words(entries)
        return Gist(
            self.place.then(entries) if self.scope else self.place,
            self.scope,
            self.heard.then(entries),
            joined(self.instructions, transcript.instructions),
            self.newest if newest is None else newest,
            self.ids | ids if ids else self.ids,
        )

    def takes(self, pieces: Iterable[Piece]) -> bool:
        """Whether pieces can stand behind it."""
        return all(self.ids.isdisjoint(piece.ids) for piece in pieces)


class Beginning(Struct, frozen=True):
    """Messages that are known again by their bytes, and what matters of them."""

    known: Known
    gist: Gist

    @property
    def weight(self) -> int:
        """About how many bytes it takes."""
        gist = self.gist
        texts = (gist.instructions, gist.newest, *gist.heard.answered, *gist.ids)
        return _OBJECT_BYTES + len(gist.heard.users) + 4 * sum(map(len, texts))


class Beginnings:
    """The beginnings of a gateway, in memory; the limits are those above."""

    def __init__(
        self,
        limit: int = BEGINNINGS_MAX,
        *,
        bytes_max: int = BEGINNINGS_BYTES_MAX,
        bytes_min: int = BEGINNING_BYTES_MIN,
    ) -> None:
        self._limit = limit
        self._bytes_max = bytes_max
        self.bytes_min = bytes_min
        """Bytes of messages that are worth keeping."""
        self._bytes = 0
        self._kept: OrderedDict[tuple[Dialect, bytes, bytes, int], Beginning] = OrderedDict()
        """By the API, who shows the key, and what is known."""

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, dialect: Dialect, owner: bytes) -> Sequence[Beginning]:
        """Return those that somebody has sent by an API."""
        whose = (dialect, owner)
        return [beginning for key, beginning in self._kept.items() if key[:2] == whose]

    def keep(self, dialect: Dialect, owner: bytes, beginnings: Iterable[Beginning]) -> None:
        """Keep these as the ones used last; a short one is not worth it."""
        for beginning in beginnings:
            known = beginning.known
            if known.length < self.bytes_min:
                continue
            key = (dialect, owner, known.digest, known.length)
            self._forget(self._kept.pop(key, None))
            self._kept[key] = beginning
            self._bytes += beginning.weight
        while len(self._kept) > self._limit or self._bytes > self._bytes_max:
            self._forget(self._kept.popitem(last=False)[1])

    def _forget(self, beginning: Beginning | None) -> None:
        if beginning is not None:
            self._bytes -= beginning.weight


def joined(*instructions: str) -> str:
    """Return system prompts as one."""
    return "\n\n".join(words for words in instructions if words.strip())
