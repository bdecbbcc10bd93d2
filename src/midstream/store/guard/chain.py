"""The chain of a journal: each append has a link to the previous one, made with a key outside the store.

    link of an append = key id (4) | records (2) | MAC (16) of session, place, epoch, the link before, the stored bodies
    link of a fold    = link of the append it ends in | key id (4) | MAC (16) of the same and the new body
                        | MAC (16) of the records that are left of that append, where there are some

The link is stored with the last record of its append. Each record before that one has the mark `COVERED`, so that an
append that was cut is detected, also at the end of a journal. An append of more than `COVER_MAX` records has several
links.

A *fold* is the record with which pruning replaces the first records. It contains the link of the append of the last of
them, so that later links stay valid. The MAC is keyed BLAKE2b.

A store that had journals before it had a key is *mixed*: their records have no link, or one of a key that is lost. They
are accepted before the first record with a link of a known key, and refused after it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import struct
from collections.abc import Sequence

from msgspec import Struct

from midstream.errors import EventsLostError, StoreDamagedError
from midstream.store.contract import Batch, StoredRecord

SECRET_BYTES = 32
ID_BYTES = 4
MAC_BYTES = 16
SEAL_BYTES = ID_BYTES + MAC_BYTES
_COUNT = struct.Struct(">H")
LINK_BYTES = ID_BYTES + _COUNT.size + MAC_BYTES
FOLD_BYTES = LINK_BYTES + SEAL_BYTES
FOLD_WITH_REST_BYTES = FOLD_BYTES + MAC_BYTES
NO_LINK = b""
"""The link before the first one of a chain."""
COVERED = b"+"
"""Stored instead of a link: the next link covers the record."""
COVER_MAX = 1000
"""Records that share a link, and are read to check it."""
UNLINKED = bytes(LINK_BYTES)
"""The replacement for a missing link in the link of a fold."""


class ChainKey:
    """A secret that makes and checks links. Thread-safe."""

    def __init__(self, secret: bytes) -> None:
        self.id = hashlib.blake2b(secret, digest_size=ID_BYTES, person=b"midstream key id").digest()
        self._links = hashlib.blake2b(key=secret, digest_size=MAC_BYTES, person=b"midstream link")
        self._folds = hashlib.blake2b(key=secret, digest_size=MAC_BYTES, person=b"midstream fold")
        self._rests = hashlib.blake2b(key=secret, digest_size=MAC_BYTES, person=b"midstream rest")
        self._messages = hashlib.blake2b(key=secret, digest_size=MAC_BYTES, person=b"midstream inbox")

    def link(self, before: bytes, session: bytes, first: int, epoch: int, bodies: Sequence[bytes]) -> bytes:
        """Return the link of an append after the link `before`; its first record has the position `first`."""
        mac = _mac(self._links.copy(), before, session, first, epoch, bodies)
        return self.id + _COUNT.pack(len(bodies)) + mac

    def fold_link(
        self, kept: bytes, session: bytes, position: int, epoch: int, body: bytes, rest: Sequence[bytes] = ()
    ) -> bytes:
        """Return the link of a fold.

        Args:
            kept: The link of the append in which the replaced record was.
            position, epoch: Those of the replaced record.
            body: The body of the fold.
            rest: The later bodies of the same append.
        """
        kept = kept or UNLINKED
        link = kept + self.id + _mac(self._folds.copy(), kept, session, position, epoch, (body,))
        return link + self.rest_mac(kept, session, position + 1, epoch, rest) if rest else link

    def rest_mac(self, kept: bytes, session: bytes, first: int, epoch: int, bodies: Sequence[bytes]) -> bytes:
        """Return the MAC of the records that a fold left of an append with the link `kept`."""
        return _mac(self._rests.copy(), kept, session, first, epoch, bodies)

    def seal(self, message: bytes) -> bytes:
        """Return the key's id and a MAC of a message between nodes."""
        mac = self._messages.copy()
        mac.update(message)
        return self.id + mac.digest()


class ChainKeys:
    """The keys of a store: the first one makes links, all of them check links.

    Args:
        keys: The keys in this order; empty if nothing can be checked.
        is_mixed: See the module's docstring.
        place: Where the keys are stored, for messages.
    """

    def __init__(self, keys: Sequence[ChainKey], *, is_mixed: bool, place: str) -> None:
        self.is_mixed = is_mixed
        self.place = place
        self._newest = keys[0] if keys else None
        self._by_id = {key.id: key for key in keys}

    @property
    def newest(self) -> ChainKey:
        """The key that makes links."""
        assert self._newest is not None, "a store needs a key for writes"
        return self._newest

    @property
    def has_any(self) -> bool:
        """Whether there is a key."""
        return self._newest is not None

    def find(self, link: bytes) -> ChainKey | None:
        """Return the key that made a link or a seal, or None if it is unknown."""
        return self._by_id.get(link[:ID_BYTES])

    def has_sealed(self, seal: bytes, message: bytes) -> bool:
        """Whether one of these keys made this seal for this message."""
        key = self.find(seal)
        return key is not None and hmac.compare_digest(seal, key.seal(message))


class Head(Struct, frozen=True, gc=False):
    """The last record of a journal that was checked or written: its position, its epoch, and the link after it."""

    position: int
    epoch: int
    link: bytes


def links_of(key: ChainKey, before: bytes, session: str, batch: Batch) -> tuple[bytes, ...]:
    """Return the values to store as links with the records of an append after the link `before`."""
    name, first, bodies = session.encode(), batch.expected + 1, batch.bodies
    count = len(bodies)
    if 0 < count <= COVER_MAX:
        return (COVERED,) * (count - 1) + (key.link(before, name, first, batch.epoch, bodies),)
    links: list[bytes] = []
    for start in range(0, count, COVER_MAX):
        part = bodies[start : start + COVER_MAX]
        before = key.link(before, name, first + start, batch.epoch, part)
        links += [COVERED] * (len(part) - 1)
        links.append(before)
    return tuple(links)


def may_end_journal(link: bytes) -> bool:
    """Whether a journal may end with a record of this link: it is not in the middle of an append."""
    return link != COVERED


def is_open(link: bytes) -> bool:
    """Whether more records of the append follow a record of this link."""
    return link == COVERED or len(link) == FOLD_WITH_REST_BYTES


def whole_appends(page: Sequence[StoredRecord]) -> int:
    """Return the number of records at the beginning of a page that are whole appends."""
    return next((count for count in range(len(page), 0, -1) if not is_open(page[count - 1].link)), 0)


def is_fold(link: bytes) -> bool:
    """Whether this is the link of a fold."""
    return len(link) in (FOLD_BYTES, FOLD_WITH_REST_BYTES)


def link_behind(stored: StoredRecord | None) -> bytes:
    """Return the link that the append after this record refers to."""
    link = NO_LINK if stored is None else stored.link[:LINK_BYTES]
    return NO_LINK if link == UNLINKED else link


def first_of_append(stored: StoredRecord) -> int:
    """Return the first position of the append, as it was made, that ends with a record with a link."""
    if len(stored.link) != LINK_BYTES:
        return stored.position
    count: int = _COUNT.unpack_from(stored.link, ID_BYTES)[0]
    return max(1, stored.position + 1 - min(count, COVER_MAX))


class NoKeySource:
    """A source without keys: nothing is checked, and everything is read."""

    async def find(self, _reader: object) -> ChainKeys:
        """See `guarded_store.ReaderKeySource`."""
        return ChainKeys((), is_mixed=True, place="no file")


class LinkCheck:
    """A check of one journal, record by record. Call `finish` after the last one.

    Args:
        before: The link before the first record; None for the first record of the journal.
        position: The position before the first record. If `before` is None, it may be pruned.
    """

    def __init__(self, keys: ChainKeys, session: str, before: bytes | None, position: int) -> None:
        self.begins_at = 0
        """Position of the first record that a known key linked; 0 before there is one."""
        self.head = Head(position, 0, before or NO_LINK)
        """The last record that a link covers."""
        self._keys = keys
        self._session = session
        self._name = session.encode()
        self._is_beginning = before is None
        self._is_linked = bool(before) and keys.find(before or NO_LINK) is not None
        self._open: list[StoredRecord] = []
        """Records of an append whose link comes later."""
        self._position = position
        """The last record taken."""
        self._fold: StoredRecord | None = None
        """The last fold; records of its append may follow."""

    def take(self, stored: StoredRecord) -> None:
        """Take the next record, and check it together with the others of its append.

        Raises:
            EventsLostError: A record before it is missing.
            StoreDamagedError: The record was changed or moved, or is not of this journal.
        """
        self._require_place(stored)
        link, self._position = stored.link, stored.position
        if is_fold(link):
            self._take_fold(stored)
        elif link == COVERED:
            self._open.append(stored)
            if len(self._open) >= COVER_MAX:
                raise self._damage(self._open, "has no link")
        elif len(link) == LINK_BYTES:
            append, self._open = [*self._open, stored], []
            self._take_append(append, link)
        elif link or self._open:
            raise self._damage([*self._open, stored], "was cut, or inserted by another program")
        else:
            self._require_mixed([stored], "has no link")
            self._advance(stored, NO_LINK)

    def finish(self) -> None:
        """Check that the last append is complete.

        Raises:
            StoreDamagedError: It was cut.
        """
        if self._open:
            self._require_mixed(self._open, "has no link: an append was cut")

    def _require_place(self, stored: StoredRecord) -> None:
        is_first, self._is_beginning = self._is_beginning, False
        is_folded = is_fold(stored.link)
        if is_first and (is_folded or self._keys.is_mixed):
            return  # a fold, or a record of an older version, may begin anywhere
        if stored.position != self._position + 1:
            missing = self._position + 1
            raise EventsLostError(f"session {self._session!r} has no record {missing}: it was removed")
        if is_folded and not is_first:
            raise self._damage([stored], "is a fold, and follows other records")

    def _take_fold(self, stored: StoredRecord) -> None:
        kept, own = stored.link[:LINK_BYTES], stored.link[LINK_BYTES:FOLD_BYTES]
        key = self._keys.find(own)
        if key is None:
            self._require_mixed([stored], f"was linked by another key than those in {self._keys.place}")
        else:
            expected = key.fold_link(kept, self._name, stored.position, stored.epoch, stored.body)
            if not hmac.compare_digest(expected, stored.link[:FOLD_BYTES]):
                raise self._damage([stored], "was changed, moved or inserted by another program")
            # Unlinked records may follow a fold of unlinked records.
            if self._keys.find(link_behind(stored)) is not None:
                self._begin(stored.position)
        self._fold = stored
        self._advance(stored, link_behind(stored))

    def _take_append(self, append: Sequence[StoredRecord], link: bytes) -> None:
        fold, self._fold = self._fold, None
        is_rest = fold is not None and link == fold.link[:LINK_BYTES]
        key = self._keys.find(fold.link[LINK_BYTES:] if fold is not None and is_rest else link)
        if key is None:
            self._require_mixed(append, f"was linked by another key than those in {self._keys.place}")
        else:
            first, epoch, bodies = append[0].position, append[-1].epoch, [each.body for each in append]
            if fold is not None and is_rest:
                expected, found = key.rest_mac(link, self._name, first, epoch, bodies), fold.link[FOLD_BYTES:]
            else:
                expected, found = key.link(self.head.link, self._name, first, epoch, bodies), link
            is_one = all(each.epoch == epoch for each in append)
            if not (is_one and hmac.compare_digest(expected, found)):
                raise self._damage(append, "was changed, moved or inserted by another program")
            self._begin(first)
        self._advance(append[-1], link)

    def _begin(self, position: int) -> None:
        self.begins_at = self.begins_at or position
        self._is_linked = True

    def _advance(self, stored: StoredRecord, link: bytes) -> None:
        self.head = Head(stored.position, stored.epoch, link)

    def _require_mixed(self, records: Sequence[StoredRecord], what: str) -> None:
        if not self._keys.is_mixed or self._is_linked:
            raise self._damage(records, what)

    def _damage(self, records: Sequence[StoredRecord], what: str) -> StoreDamagedError:
        first, last = records[0].position, records[-1].position
        which = f"record {first}" if first == last else f"the append of records {first} to {last}"
        where = f"{which} of session {self._session!r}"
        return StoreDamagedError(f"{where} {what}; `midstream verify` examines the whole store")


def _mac(
    mac: hashlib.blake2b, before: bytes, session: bytes, first: int, epoch: int, bodies: Sequence[bytes]
) -> bytes:
    # The lengths come first, so that no two appends have the same bytes.
    count = len(bodies)
    place = _place_format(count).pack(first, epoch, len(before), len(session), count, *map(len, bodies))
    mac.update(b"%b%b%b" % (place, before, session))
    for body in bodies:
        mac.update(body)
    return mac.digest()


@functools.cache
def _place_format(count: int) -> struct.Struct:
    return struct.Struct(f">QQ{3 + count}I")
