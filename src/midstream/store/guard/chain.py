"""The chain of a journal: each record has a link that binds it to the one before it, under a key outside the store.

    link of a record   = key id (4) | MAC (16) of session, position, epoch, the link before, and the stored body
    link of a fold     = link of the record it replaced | key id (4) | MAC (16) of the same and the new body

A *fold* is what pruning puts in the place of the first records. It keeps the link of the last one, so that the records
behind it fit as before. The MAC is keyed BLAKE2b: without the key no link can be made; with it, no second journal has
the same link.

A store that had journals before it had a key is *mixed*: their records have no link, or one of a key that is lost. They
are accepted up to the first record with a link of a known key, and not behind it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from msgspec import Struct

from midstream.errors import EventsLostError, StoreDamagedError
from midstream.store.contract import Batch, StoredRecord

SECRET_BYTES = 32
ID_BYTES = 4
MAC_BYTES = 16
LINK_BYTES = ID_BYTES + MAC_BYTES
FOLD_BYTES = 2 * LINK_BYTES
NO_LINK = b""
"""The link before the first one of a chain."""
UNLINKED = bytes(LINK_BYTES)
"""Stands for the link of a record that had none, in the link of the fold that replaced it."""


class ChainKey:
    """A secret that makes and checks links. Safe to use from several threads."""

    def __init__(self, secret: bytes) -> None:
        self.id = hashlib.blake2b(secret, digest_size=ID_BYTES, person=b"midstream key id").digest()
        self._links = hashlib.blake2b(key=secret, digest_size=MAC_BYTES, person=b"midstream link")
        self._folds = hashlib.blake2b(key=secret, digest_size=MAC_BYTES, person=b"midstream fold")
        self._messages = hashlib.blake2b(key=secret, digest_size=MAC_BYTES, person=b"midstream inbox")

    def link(self, before: bytes, session: bytes, position: int, epoch: int, body: bytes) -> bytes:
        """Return the link of a record behind the link `before`."""
        mac = self._links.copy()
        mac.update(_place(before, session, position, epoch))
        mac.update(body)
        return self.id + mac.digest()

    def fold_link(self, replaced: bytes, session: bytes, position: int, epoch: int, body: bytes) -> bytes:
        """Return the link of a fold that takes the place of a record with the link `replaced`."""
        kept = replaced or UNLINKED
        mac = self._folds.copy()
        mac.update(_place(kept, session, position, epoch))
        mac.update(body)
        return kept + self.id + mac.digest()

    def seal(self, message: bytes) -> bytes:
        """Return the key's id and a MAC of a message between nodes."""
        mac = self._messages.copy()
        mac.update(message)
        return self.id + mac.digest()


class ChainKeys:
    """The keys of a store: the first one makes links, all of them check links.

    Args:
        keys: In this order; none where nothing can be checked.
        is_mixed: See the module.
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
        assert self._newest is not None, "a store that is written has a key"
        return self._newest

    @property
    def has_any(self) -> bool:
        """Whether a key is here."""
        return self._newest is not None

    def find(self, link: bytes) -> ChainKey | None:
        """Return the key that made a link or a seal, where it is known."""
        return self._by_id.get(link[:ID_BYTES])

    def has_sealed(self, seal: bytes, message: bytes) -> bool:
        """Whether one of these keys made this seal for this message."""
        key = self.find(seal)
        return key is not None and hmac.compare_digest(seal, key.seal(message))


class Head(Struct, frozen=True):
    """The last record of a journal that was checked or written: its position, its epoch, and its link."""

    position: int
    epoch: int
    link: bytes


def links_of(keys: ChainKeys, before: bytes, session: str, batch: Batch) -> tuple[bytes, ...]:
    """Return the links of the records of an append behind the link `before`."""
    make, name, epoch = keys.newest.link, session.encode(), batch.epoch
    links: list[bytes] = []
    link = before
    for position, body in enumerate(batch.bodies, start=batch.expected + 1):
        link = make(link, name, position, epoch, body)
        links.append(link)
    return tuple(links)


def link_behind(stored: StoredRecord | None) -> bytes:
    """Return the link that the record behind this one was made from."""
    link = NO_LINK if stored is None else stored.link[:LINK_BYTES]
    return NO_LINK if link == UNLINKED else link


class NoKeySource:
    """Finds no key: nothing is checked, and everything is read."""

    async def find(self, _reader: object) -> ChainKeys:
        """See `guarded_store.ReaderKeySource`."""
        return ChainKeys((), is_mixed=True, place="no file")


class LinkCheck:
    """A check of one journal, record by record.

    Args:
        before: The link behind which the first record stands; None where it is the first record of the journal.
        position: The position before the first record; it may be pruned where `before` is None.
    """

    def __init__(self, keys: ChainKeys, session: str, before: bytes | None, position: int) -> None:
        self.begins_at = 0
        """Position of the first record that a known key linked; 0 before there is one."""
        self.head = Head(position, 0, before or NO_LINK)
        self._keys = keys
        self._session = session
        self._name = session.encode()
        self._is_beginning = before is None
        self._is_linked = bool(before) and keys.find(before or NO_LINK) is not None

    def take(self, stored: StoredRecord) -> None:
        """Check the next record.

        Raises:
            EventsLostError: A record before it is missing.
            StoreDamagedError: It was changed, moved, or is not of this journal.
        """
        is_fold = len(stored.link) == FOLD_BYTES
        is_first, self._is_beginning = self._is_beginning, False
        if is_first and (is_fold or self._keys.is_mixed):
            pass  # a fold, or what an older version wrote, may begin anywhere
        elif stored.position != self.head.position + 1:
            missing = self.head.position + 1
            raise EventsLostError(f"session {self._session!r} has no record {missing}: it was cut out")
        if is_fold and not is_first:
            raise self._damage(stored, "a fold stands behind other records")
        if not stored.link:
            self._require_mixed(stored, "has no link")
        elif (key := self._keys.find(stored.link[-LINK_BYTES:])) is None:
            self._require_mixed(stored, f"was linked by another key than those in {self._keys.place}")
        else:
            self._require_link(stored, key, is_fold=is_fold)
            # A fold of records from before the chain may have others of them behind it.
            if self._keys.find(link_behind(stored)) is not None:
                self.begins_at = self.begins_at or stored.position
                self._is_linked = True
        self.head = Head(stored.position, stored.epoch, link_behind(stored))

    def _require_mixed(self, stored: StoredRecord, what: str) -> None:
        if not self._keys.is_mixed or self._is_linked:
            raise self._damage(stored, what)

    def _require_link(self, stored: StoredRecord, key: ChainKey, *, is_fold: bool) -> None:
        place = (self._name, stored.position, stored.epoch, stored.body)
        if is_fold:
            expected = key.fold_link(stored.link[:LINK_BYTES], *place)
        else:
            expected = key.link(self.head.link, *place)
        if not hmac.compare_digest(expected, stored.link):
            raise self._damage(stored, "was changed, moved or inserted by another program")

    def _damage(self, stored: StoredRecord, what: str) -> StoreDamagedError:
        where = f"record {stored.position} of session {self._session!r}"
        return StoreDamagedError(f"{where} {what}; `midstream verify` examines the whole store")


def _place(before: bytes, session: bytes, position: int, epoch: int) -> bytes:
    return b"%d %d %d %d %b%b" % (position, epoch, len(before), len(session), before, session)
