"""Entries that this process replaced or deleted, so that a restored old one is detected.

Each encrypted entry is unique, so its digest identifies one write. Replacements by other processes, or before a
restart, are not in memory: see `docs/spec/security.md`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from midstream.errors import StoreDamagedError
from midstream.store.contract import KeyValueEntry

ENTRIES_MAX = 65_536
"""Entries in memory, some 200 bytes each; the oldest is dropped."""


class SpentEntries:
    """Entries that one process has read and replaced."""

    def __init__(self) -> None:
        self._current: OrderedDict[tuple[str, str], tuple[int, bytes]] = OrderedDict()
        """Version and digest of each entry at the last read or write."""
        self._spent: OrderedDict[bytes, int] = OrderedDict()
        """Digests of old entries, each with the `count` after its replacement."""
        self.count = 0
        """Number of replaced and deleted entries."""

    def check(self, namespace: str, found: KeyValueEntry, *, since: int) -> None:
        """Check an entry that was read.

        Args:
            since: `count` before the read began. The read may have found an entry that was replaced after that.

        Raises:
            StoreDamagedError: This process had replaced or deleted it before the read, so another program restored it.
        """
        digest = _digest_of(namespace, found.key, found.body)
        if (spent_as := self._spent.get(digest)) is not None:
            if spent_as > since:
                return
            raise StoreDamagedError(
                f"entry {found.key!r} of {namespace!r} is an old value that another program put back"
            )
        self._note((namespace, found.key), (found.version, digest))

    def replace(self, namespace: str, key: str, *, expected: int, version: int, body: bytes) -> None:
        """Record that an entry was written; the one of version `expected` is spent."""
        self.spend(namespace, key, version=expected)
        self._note((namespace, key), (version, _digest_of(namespace, key, body)))

    def spend(self, namespace: str, key: str, *, version: int | None = None) -> None:
        """Record that an entry of this version was replaced or deleted; None: of any version."""
        known = self._current.get((namespace, key))
        if known is not None and version in (None, known[0]):
            del self._current[namespace, key]
            self.count += 1
            self._spent[known[1]] = self.count
            if len(self._spent) > ENTRIES_MAX:
                self._spent.popitem(last=False)

    def spend_session(self, namespaces: Sequence[str], session: str) -> None:
        """Record that the entries of a session were deleted with it."""
        for namespace in namespaces:
            self.spend(namespace, session)

    def _note(self, place: tuple[str, str], known: tuple[int, bytes]) -> None:
        self._current[place] = known
        self._current.move_to_end(place)
        if len(self._current) > ENTRIES_MAX:
            self._current.popitem(last=False)


def _digest_of(namespace: str, key: str, body: bytes) -> bytes:
    place = b"%d %d %b%b" % (len(namespace), len(key), namespace.encode(), key.encode())
    return hashlib.blake2b(place + body, digest_size=16, person=b"midstream entry").digest()
