"""Readings of the messages that earlier requests began with, so that the next one costs only what is new in it.

Messages are recognized by one hash over their bytes, and only for the same API, key and place: no caller learns what
another has sent. No message is kept: of a conversation there are digests, and of words only the system prompts among
the messages and how the user's newest message begins.
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
"""Readings kept, the last used ones: two for each of the last 256 turns."""
READINGS_BYTES_MAX = 64 * 1024 * 1024
"""Of all of them: 800 conversations of 10,000 messages, whose links are most of it."""
BODY_BYTES_MIN = 16 * 1024
"""Of bodies worth knowing: less is read in a millisecond."""

_OBJECT_BYTES = 1024
"""About what an entry weighs beside what is counted."""


class Gist(Struct, frozen=True):
    """Facts that matter of a conversation's messages, for finding it and for judging a request.

    Args:
        place: Its place, by all messages; in `scope`.
        scope: Where it is looked for; "" for one that has a name.
        beginning: Its entries, as far as a session is compared with them.
        instructions: The system prompts among its messages.
        newest: How the user's newest message begins (`newest_words`), or "".
        ids: The ids of its items, where the API gives them some.
    """

    place: ConversationPlace
    scope: str
    beginning: Beginning = Beginning()
    instructions: str = ""
    newest: str = ""
    ids: frozenset[str] = frozenset()

    @classmethod
    def of_nothing(cls, scope: str) -> Gist:
        """Return that of an empty conversation."""
        return cls(place_of(scope, History()), scope)

    def then(self, transcript: Transcript, ids: frozenset[str] = frozenset()) -> Gist:
        """Return it with what came behind."""
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
        """About how many bytes it takes."""
        texts = (self.instructions, self.newest, *self.ids)
        return _OBJECT_BYTES + 4 * sum(map(len, texts))


class Memo:
    """Readings of one gateway, in memory; the limits are those above."""

    def __init__(
        self,
        limit: int = READINGS_MAX,
        *,
        bytes_max: int = READINGS_BYTES_MAX,
        bytes_min: int = BODY_BYTES_MIN,
    ) -> None:
        self.bytes_min = bytes_min
        """Bytes of bodies that are worth knowing."""
        self._limit = limit
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[tuple[bytes, int, bytes], Gist] = OrderedDict()
        """By whose they are, how many messages were read, and the digest of these."""

    def counts(self, whose: bytes) -> set[int]:
        """Return how many messages each reading of a caller has."""
        return {count for owner, count, _ in self._kept if owner == whose}

    def find(self, whose: bytes, ends: Mapping[int, bytes]) -> list[tuple[int, Gist]]:
        """Return what is known of the beginnings of these messages, with how many they are; the longest first.

        Args:
            ends: The digests of the first messages by their count, see `digests`.
        """
        found = ((count, self._kept.get((whose, count, digest))) for count, digest in ends.items())
        return sorted(((count, gist) for count, gist in found if gist is not None), key=_count, reverse=True)

    def keep(self, whose: bytes, ends: Mapping[int, bytes], gists: Iterable[tuple[int, Gist]]) -> None:
        """Keep what was read of the first messages, with how many they are, as the readings used last."""
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
    """Return the digests of the first messages by how many these are, in one pass; counts too high are left out."""
    hasher = sha256()
    found, done = {}, 0
    for count in sorted(each for each in counts if each <= len(messages)):
        hasher.update(b",".join([*messages[done:count], b""]))  # JSON values stay apart behind commas
        found[count] = hasher.digest()
        done = count
    return found


def _count(reading: tuple[int, Gist]) -> int:
    return reading[0]


def join_instructions(*instructions: str) -> str:
    """Return system prompts as one."""
    return "\n\n".join(words for words in instructions if words.strip())
