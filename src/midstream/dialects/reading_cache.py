"""Cache of read messages, so that a request costs only its new messages.

Beginnings of requests are recognized by a hash of their bytes, only for the same API, key and conversation name. So
callers learn nothing about each other. The cache has digests of a conversation. Its only text are the system prompts in
the messages, and the beginning of the newest user message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256

import msgspec
from msgspec import Struct

from midstream.dialects.client_histories import Transcript
from midstream.dialects.conversation_index import ConversationPlace, newest_words, place_of
from midstream.history.messages import History
from midstream.session.applications import Beginning

READINGS_MAX = 512
"""Most recently used readings that are kept: two for each of the last 256 turns."""
READINGS_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of all readings: 800 conversations with 10,000 messages, mostly for their digests."""
BODY_BYTES_MIN = 16 * 1024
"""Smallest body that is cached: a smaller one is read within a millisecond."""

_OBJECT_BYTES = 1024
"""Estimated overhead of an entry."""


class Gist(Struct, frozen=True):
    """Summary of a conversation's messages, for its recognition and for comparison with a session.

    Args:
        place: Place of all messages in `scope`.
        scope: Scope of the search; "" for a conversation with a name.
        beginning: Digests of its entries, for comparison with a session.
        instructions: The system prompts among its messages.
        newest: Beginning of the newest user message (`newest_words`), or "".
        ids: Ids of its items, if the API has some.
    """

    place: ConversationPlace
    scope: str
    beginning: Beginning = Beginning()
    instructions: str = ""
    newest: str = ""
    ids: frozenset[str] = frozenset()

    @classmethod
    def empty(cls, scope: str) -> Gist:
        """Return the summary of an empty conversation."""
        return cls(place_of(scope, History()), scope)

    def then(self, transcript: Transcript, ids: frozenset[str] = frozenset()) -> Gist:
        """Return the summary after a further transcript."""
        entries = transcript.history.entries
        newest = newest_words(entries)
        return Gist(
            self.place.then(entries) if self.scope else self.place,
            self.scope,
            self.beginning.then(entries),
            join_instructions(self.instructions, transcript.instructions),
            self.newest if newest is None else newest,
            self.ids | ids if ids else self.ids,
        )

    @property
    def weight(self) -> int:
        """Estimated size in bytes."""
        texts = (self.instructions, self.newest, *self.ids)
        return _OBJECT_BYTES + 4 * sum(map(len, texts))


class ReadingCache:
    """Cache of one gateway's readings, in memory."""

    def __init__(
        self,
        limit: int = READINGS_MAX,
        *,
        bytes_max: int = READINGS_BYTES_MAX,
        bytes_min: int = BODY_BYTES_MIN,
    ) -> None:
        self.bytes_min = bytes_min
        """Smallest body that is cached, in bytes."""
        self._limit = limit
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[tuple[bytes, int, bytes], Gist] = OrderedDict()
        """Readings by owner, number of messages, and digest of the messages."""

    def counts(self, whose: bytes) -> set[int]:
        """Return the numbers of messages of an owner's readings."""
        return {count for owner, count, _ in self._kept if owner == whose}

    def find(self, whose: bytes, ends: Mapping[int, bytes]) -> list[tuple[int, Gist]]:
        """Return the readings of beginnings of these messages, with their numbers of messages, longest first.

        Args:
            ends: Digests of the first messages by their number, see `digests`.
        """
        found = ((count, self._kept.get((whose, count, digest))) for count, digest in ends.items())
        return sorted(((count, gist) for count, gist in found if gist is not None), key=_count, reverse=True)

    def keep(self, whose: bytes, ends: Mapping[int, bytes], gists: Iterable[tuple[int, Gist]]) -> None:
        """Store readings, with their numbers of messages, as the most recently used ones."""
        for count, gist in gists:
            key = (whose, count, ends[count])
            self._evict(self._kept.pop(key, None))
            self._kept[key] = gist
            self._bytes += gist.weight
        while len(self._kept) > self._limit or self._bytes > self._bytes_max:
            self._evict(self._kept.popitem(last=False)[1])

    def _evict(self, gist: Gist | None) -> None:
        if gist is not None:
            self._bytes -= gist.weight


def digests(messages: Sequence[msgspec.Raw], counts: Collection[int]) -> dict[int, bytes]:
    """Return the digests of the first messages for each count, in one pass; too high counts are left out."""
    hasher = sha256()
    found, done = {}, 0
    for count in sorted(each for each in counts if each <= len(messages)):
        hasher.update(b",".join([*messages[done:count], b""]))  # commas separate JSON values
        found[count] = hasher.digest()
        done = count
    return found


def _count(reading: tuple[int, Gist]) -> int:
    return reading[0]


def join_instructions(*instructions: str) -> str:
    """Join system prompts."""
    return "\n\n".join(words for words in instructions if words.strip())
