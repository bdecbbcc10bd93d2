"""Messages in the streams.

Each message of a journal has the whole state of its session beside its records, so that a claim, an append and a
listing read only the last one. A body larger than `PART_BYTES` is split into parts, which are in the same batch as
their head.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from midstream.errors import StoreDamagedError
from midstream.store.contract import KeyValueEntry, SessionInfo, SessionListing, StoredRecord

T = TypeVar("T")

FORMAT = 1
"""Version of the messages."""
PART_BYTES = 256 * 1024
"""Content of one message; a server accepts 1 MiB, and answers some requests in base64."""
PART = b"P"
"""First byte of a part of an append; a head begins with another one."""


class JournalHead(Struct, frozen=True, array_like=True):
    """A message of a journal: an append, a claim, a release or a deletion.

    Args:
        op: Unique id of this write.
        birth: The first epoch of the session, different from that of every earlier session of this name.
        epoch: Its newest epoch, which its records have.
        end: Position of its last record.
        node: The node that has it; "" if it was released.
        created_at: Time of the first claim, in seconds since 1970.
        parts: Messages before this one that have the records; 0: this one has them.
        is_gone: The session was deleted.
        bodies, links: The records, the last one at `end`.
    """

    session: str
    op: str
    birth: int
    epoch: int
    end: int
    node: str
    created_at: float
    mark: SessionListing
    seal: bytes = b""
    parts: int = 0
    is_gone: bool = False
    bodies: tuple[bytes, ...] = ()
    links: tuple[bytes, ...] = ()

    @property
    def first(self) -> int:
        """Position of its first record, if it has one."""
        return self.end - len(self.bodies) + 1

    def records(self, *, after: int) -> list[StoredRecord]:
        """Return its records after a position."""
        links = self.links or itertools.repeat(b"", len(self.bodies))
        return [
            StoredRecord(position, self.epoch, body, link)
            for position, body, link in zip(itertools.count(self.first), self.bodies, links, strict=False)
            if position > after
        ]

    def info(self, *, oldest: int, has_seal: bool) -> SessionInfo:
        """Return the session's line."""
        return SessionInfo(
            self.session,
            self.end,
            self.epoch,
            self.created_at,
            self.mark,
            not self.node,
            oldest,
            self.seal if has_seal else b"",
        )


class Line(Struct, frozen=True, array_like=True):
    """A session's data for listings and the search for orphans."""

    session: str
    epoch: int
    node: str
    is_live: bool
    at: float
    is_gone: bool = False


class Fold(Struct, frozen=True, array_like=True):
    """The record that replaces a pruned beginning; ignored if the session has another birth."""

    birth: int
    position: int
    epoch: int
    link: bytes
    op: str
    seq: int
    """Sequence number of the first message of the journal that is still needed."""
    parts: int = 0
    body: bytes = b""


class Entry(Struct, frozen=True, array_like=True):
    """A key-value entry, or the remains of a deleted one."""

    namespace: str
    key: str
    version: int
    at: float
    op: str
    is_gone: bool = False
    parts: int = 0
    body: bytes = b""

    def value(self, body: bytes) -> KeyValueEntry:
        """Return the entry with its complete body."""
        return KeyValueEntry(self.key, self.version, body, self.at)


class BlobHead(Struct, frozen=True, array_like=True):
    """A large result, whose body is in parts."""

    digest: str
    birth: int
    op: str
    parts: int
    body: bytes = b""


class SpentLedger(Struct, frozen=True, array_like=True):
    """Highest epoch and version of the deleted sessions and entries of a stream: new ones start above them."""

    epochs: int = 0
    versions: int = 0


class NodeEntry(Struct, frozen=True, array_like=True):
    """A node, with a unique `number`."""

    node: str
    address: str


class ValuePart(Struct, frozen=True, array_like=True):
    """A part of a body, with the `op` of its head."""

    op: str
    data: bytes


def encode(message: Struct) -> bytes:
    """Encode a message for storage."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a stored message.

    Raises:
        StoreDamagedError: It has another kind.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise StoreDamagedError(
            f"a message in the store is no {kind.__name__} of this version: {error}"
        ) from error


def split_head(head: JournalHead) -> list[bytes]:
    """Return the messages of an append, the head last."""
    data = encode(head)
    if len(data) <= PART_BYTES:
        return [data]
    records = msgspec.msgpack.encode((head.bodies, head.links))
    parts = [PART + part for part in split_body(records)]
    return [*parts, encode(msgspec.structs.replace(head, bodies=(), links=(), parts=len(parts)))]


def join_head(head: JournalHead, parts: Sequence[bytes]) -> JournalHead:
    """Return a head with the records of its parts."""
    if not head.parts:
        return head
    if len(parts) != head.parts:
        raise StoreDamagedError(f"session {head.session!r} lacks a part of the append up to {head.end}")
    bodies, links = msgspec.msgpack.decode(
        b"".join(part[1:] for part in parts), type=tuple[tuple[bytes, ...], tuple[bytes, ...]]
    )
    return msgspec.structs.replace(head, bodies=bodies, links=links, parts=0)


def split_body(body: bytes) -> list[bytes]:
    """Return the parts of a body; none if it fits into its head."""
    return [body[start : start + PART_BYTES] for start in range(0, len(body), PART_BYTES)]
