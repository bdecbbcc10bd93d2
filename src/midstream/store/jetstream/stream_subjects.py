"""Subjects of a store's messages. Names of sessions and keys are hashed: any name is possible, and none is visible.

    NAME.K.ROOT.PART.j             the journal of a session: one message for each append, claim and release
    NAME.K.ROOT.PART.m             its line in listings, the last one only
    NAME.K.ROOT.PART.f             the record that stands for a pruned beginning
    NAME.K.ROOT.PART.b.DIGEST      a large result
    NAME.K.ROOT.PART.e.NAMESPACE   a key-value entry that belongs to the session
    NAME.K.ledger                  what deleted sessions have spent: the highest epoch and version
    NAME.kv.NAMESPACE.KEY.e        any other key-value entry
    NAME.kv.ledger, NAME.kv.meta, NAME.kv.node.NODE

A body that is too large for one message is in `….p.N` of the same subject. `K` is the number of the stream of a session
and of its parts, so that one atomic batch reaches all of them.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NamedTuple

from midstream.session.child_names import root_of
from midstream.store.contract import OF_SESSIONS

ITSELF = "0"
"""Token of a root session."""


class SessionPlace(NamedTuple):
    """Stream of a session, and the prefix of its subjects."""

    stream: str
    subject: str

    @property
    def journal(self) -> str:
        """Subject of its appends, claims and releases."""
        return f"{self.subject}.j"

    @property
    def line(self) -> str:
        """Subject of its line in listings."""
        return f"{self.subject}.m"

    @property
    def fold(self) -> str:
        """Subject of the record that stands for a pruned beginning."""
        return f"{self.subject}.f"

    @property
    def everything(self) -> str:
        """Pattern of all its subjects."""
        return f"{self.subject}.>"

    @property
    def entries(self) -> str:
        """Pattern of its key-value entries."""
        return f"{self.subject}.e.*"

    def blob(self, digest: str) -> str:
        """Return the subject of a large result."""
        return f"{self.subject}.b.{token_of(digest)}"

    @property
    def family(self) -> str:
        """Pattern of the journals of its root and all parts of that."""
        return f"{self.subject.rpartition('.')[0]}.*.j"


class StreamSubjects:
    """Streams and subjects of one store.

    Args:
        name: Prefix of all of them.
        streams: Number of streams over which sessions are spread.
    """

    def __init__(self, name: str, streams: int) -> None:
        self.name = name
        self.shards = tuple(f"{name}-{number}" for number in range(streams))
        self.kv_stream = f"{name}-kv"
        self.meta = f"{name}.kv.meta"
        self.nodes = f"{name}.kv.node.*"
        self.signals = f"{name}-signal"
        """Prefix of the subjects of signals, which no stream stores."""

    def session(self, session: str) -> SessionPlace:
        """Return the place of a session."""
        return _place(self.name, len(self.shards), session)

    def patterns(self) -> dict[str, str]:
        """Return the subjects that each stream stores."""
        return {stream: f"{stream.replace('-', '.')}.>" for stream in (*self.shards, self.kv_stream)}

    def node(self, node: str) -> str:
        """Return the subject of a node's entry."""
        return f"{self.name}.kv.node.{node}"

    def ledger(self, stream: str) -> str:
        """Return the subject of a stream's ledger."""
        return f"{stream.replace('-', '.')}.ledger"

    def lines(self, stream: str) -> str:
        """Return the pattern of the lines of a stream's sessions."""
        return f"{stream.replace('-', '.')}.*.*.m"

    def entry(self, namespace: str, key: str) -> tuple[str, str]:
        """Return the stream and the subject of a key-value entry."""
        if namespace in OF_SESSIONS:
            place = self.session(key)
            return place.stream, f"{place.subject}.e.{token_of(namespace)}"
        return self.kv_stream, f"{self.name}.kv.{token_of(namespace)}.{token_of(key)}.e"

    def entries(self, namespace: str | None) -> list[tuple[str, str]]:
        """Return the streams and the patterns of a namespace's entries, or of all entries."""
        of_sessions = [(stream, stream.replace("-", ".")) for stream in self.shards]
        if namespace is None:
            return [
                *((stream, f"{start}.*.*.e.*") for stream, start in of_sessions),
                (self.kv_stream, f"{self.name}.kv.*.*.e"),
            ]
        if namespace in OF_SESSIONS:
            return [(stream, f"{start}.*.*.e.{token_of(namespace)}") for stream, start in of_sessions]
        return [(self.kv_stream, f"{self.name}.kv.{token_of(namespace)}.*.e")]

    def moved(self, session: str) -> str:
        """Return the subject of signals that a session's journal has moved."""
        return f"{self.signals}.moved.{'.'.join(self.session(session).subject.split('.')[-2:])}"

    def inbox(self, node: str, kind: str) -> str:
        """Return the subject of messages to one node."""
        return f"{self.signals}.node.{node}.{kind}"

    def all_nodes(self, kind: str) -> str:
        """Return the subject of messages to all nodes."""
        return f"{self.signals}.all.{kind}"


def token_of(name: str) -> str:
    """Return the token of a name: 160 bits of its digest."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:40]


@lru_cache(maxsize=10_000)
def _place(name: str, streams: int, session: str) -> SessionPlace:
    root = root_of(session)
    token = token_of(root)
    number = int(token[:8], 16) % streams
    part = ITSELF if root == session else token_of(session)
    return SessionPlace(f"{name}-{number}", f"{name}.{number}.{token}.{part}")
