"""The store contract: the promises of every store, in prose and as a protocol.

A session's journal is a line of records numbered from 1 without gap. The one durable operation is `append`: all records
or none, only at the expected position, only under the newest epoch. A record once read is never changed; `prune` may
replace a record and all before it by the state that they fold to, and no position ever changes.

* **Order.** Appends to one session take effect in the order in which they return; sessions are independent.
* **Durability.** `Sync.FULL`: the records, and all appended before them in this store, survive a power cut when
  `append` returns. `Sync.NORMAL`: they survive the death of the node. A record that a reader has received stays in the
  journal. The exception is a power cut under `NORMAL`, which a new epoch makes visible.
* **Leases.** `claim` gives a node the lease of a session and raises the session's epoch. From then on appends under
  an older epoch fail with `LeaseLostError`. A claim fails with `LeaseHeldError` while another living node has the
  lease.
* **Liveness.** An open store is one node, which lives until it is closed or dies. The leases of a dead node are free:
  the next claim succeeds. Each store defines how fast it notices a death, and after which silence a node counts as
  dead. A node that was wrongly taken for dead is fenced by the epoch.
* **Neighbours.** Several nodes may share a place. `watch` returns changes that concern this node; `forward` delivers a
  command to the node of a session. If that node dies before the decision, the next node gets the command. A command may
  be delivered and decided more than once, so decisions must be idempotent. A command of a dead sender is not delivered:
  its client sends the command to another node.
* **Cancellation.** A cancelled `append` may have happened or not; the caller reads the journal to find out. In a store
  on servers it may still be under way: then the next append replaces it, or fails with `JournalMovedError`.
* **Blobs** are large results that records name by their digest. They are appended with the record that names them,
  stored once for each session, never changed, and removed with it.
* **Key-value part.** Small values beside the journals, such as the records of a pool: `KeyValue`. An entry is replaced
  as a whole, and only by a caller that has read its current version.
* **Abilities** are declared, and None where a store lacks them: `transactional` (a tool's effect and its outcome in one
  transaction), `immediate` (a small append without waiting), `escrow` (clients have the keys of their sessions; reads
  of a closed session raise `SessionLockedError`). A class that inherits from `Store` declares its abilities.
* **Errors** are those of `midstream.errors`; after any of them, nothing was partly written.

`midstream.testing.store_contract` tests these promises; every store runs it.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from midstream.errors import EntryMovedError, JournalMovedError, StoreDamagedError, UnavailableError
from midstream.session.blobs import Blob
from midstream.session.records import Sync

T = TypeVar("T")

ESCROW = "escrow"
"""Namespace of the wrapped keys of sessions that only their clients can open, each under the session's name."""
PRINCIPAL_OF = "access-nodes"
"""Namespace of the owners of sessions, each under the session's name."""
GRAPHS = "langgraph-threads"
"""Namespace of the checkpoints of served LangGraph graphs, each under its session's name."""
STREAM_READS = "plain-stream-reads"
"""Namespace of the times at which streams with a sliding lifetime were last read, each under its journal's name."""
OF_SESSIONS = (ESCROW, PRINCIPAL_OF, GRAPHS, STREAM_READS)
"""Namespaces of entries that belong to the session of their name and are deleted with it."""


STORE_FAILURES = (UnavailableError, StoreDamagedError)
"""Errors of a store that does not work now. What only saves time, such as a pool's records, is left out then."""
PLAIN_MARK = "~"
"""Prefix of the journals of plain streams; no session name can contain it."""


def is_session(name: str) -> bool:
    """Whether a journal is a session's, with the records of `session.records`."""
    return PLAIN_MARK not in name


class StoredRecord(Struct, frozen=True, gc=False):
    """A record in the journal; `body` is its JSON, `link` is the value of `Batch.links` that was stored with it."""

    position: int
    epoch: int
    body: bytes
    link: bytes = b""


class SessionListing(Struct, frozen=True, gc=False, omit_defaults=True):
    """A session's line in listings, written in the transaction of the append that changes it.

    Args:
        is_live: A turn is open and does not wait only for people, so that a new node must resume it.
        at: Time of the change in seconds since 1970.
        title: First words of the first message; "" keeps the old one.
        turns: Turns opened so far.
        status: A `SessionStatus`; `LOCKED` is shown and never stored.
    """

    is_live: bool
    at: float
    title: str = ""
    turns: int = 0
    status: str = ""


class Batch(Struct, frozen=True):
    """One append: all of it, or nothing.

    Args:
        bodies: The records, in order.
        expected: Position of the last record the caller has folded; 0 for an empty journal.
        epoch: The caller's epoch, from `Store.claim`.
        sync: The required durability when the append returns.
        mark: The session's new line in listings, if it changed.
        blobs: Large results that the records name; an existing one is not replaced.
        seal: Stored beside the end in the same transaction, for a store in front of this one; b"" keeps the old one.
        links: Stored with the records, one for each, for a store in front of this one; () stores empty ones.
    """

    bodies: Sequence[bytes]
    expected: int
    epoch: int
    sync: Sync
    mark: SessionListing | None = None
    blobs: Sequence[Blob] = ()
    seal: bytes = b""
    links: Sequence[bytes] = ()

    @property
    def end(self) -> int:
        """Position of its last record."""
        return self.expected + len(self.bodies)


class SessionInfo(Struct, frozen=True, gc=False):
    """One line of a listing."""

    session: str
    end: int
    epoch: int
    created_at: float
    mark: SessionListing
    is_free: bool = False
    """Whether its last node released it, and no node has claimed it since. False for a session of a dead node."""
    oldest: int = 0
    """Position of the first record: 1; higher if the journal was pruned; 0 if it is empty."""
    seal: bytes = b""
    """The last seal (see `Batch`), consistent with `end`; empty in a listing."""


class ForwardedCommand(Struct, frozen=True, gc=False):
    """A command that another node forwarded, for a session of this node or of no living node.

    `sender` is the node that waits for the answer, as the store has it.
    """

    number: int
    session: str
    body: bytes
    sender: str = ""


class ListPlace(Struct, frozen=True):
    """A place in a listing: after the session of this name that was changed at this time, in seconds since 1970."""

    at: float
    session: str


class News(Struct, frozen=True):
    """Changes by other nodes that a node must act on.

    Args:
        moved: Followed sessions whose end has changed, or that were deleted.
        forwarded_commands: Commands to decide, oldest first; each is returned once under each epoch of its session.
        orphans: Sessions with an open turn that no living node has; each is returned once under each epoch.
        peers: How many other living nodes there are.
    """

    moved: frozenset[str] = frozenset()
    forwarded_commands: tuple[ForwardedCommand, ...] = ()
    orphans: tuple[str, ...] = ()
    peers: int = 0


class KeyValueEntry(Struct, frozen=True, gc=False):
    """A small value. `version` counts its writes from 1; `at` is the time of the last, in seconds since 1970."""

    key: str
    version: int
    body: bytes
    at: float


class KeyValueReader(Protocol):
    """Small values by name, in namespaces."""

    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        """Return an entry, or None if there is none."""

    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        """Return all entries of a namespace, last written first."""


class KeyValue(KeyValueReader, Protocol):
    """Small versioned values for several concurrent nodes. Each method is one transaction."""

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        """Write an entry and return its new version. The entry survives the death of the node when this returns.

        Args:
            expected: The version that this replaces, 0 for a new entry. A new entry of a deleted key starts above all
                earlier versions, so that no reader of the old entry replaces it.
            at: The time of the write.

        Raises:
            EntryMovedError: The entry has another version. Nothing was written.
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was written.
        """

    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        """Remove an entry if it has this version; return whether it was removed."""


class StoreReader(KeyValueReader, Protocol):
    """The methods of a store that only read."""

    async def read(self, session: str, *, after: int, limit: int) -> list[StoredRecord]:
        """Return up to `limit` records that follow position `after`, in order; empty at the end.

        A session that was never claimed reads as empty.
        """

    async def blob(self, session: str, digest: str) -> bytes | None:
        """Return a large result of a session, or None if it has none with this digest."""

    async def blob_digests(self, session: str) -> Sequence[str]:
        """Return the digests of all large results of a session, in any order."""

    async def kv_namespaces(self) -> Sequence[str]:
        """Return the namespaces that have entries, in any order."""

    async def find(self, session: str) -> SessionInfo | None:
        """Return the session's line, or None if there is no such session."""

    def list(
        self,
        *,
        live: bool | None = None,
        of: Collection[str] | None = None,
        after: ListPlace | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[SessionInfo]:
        """Iterate over the sessions, last changed first; those of one instant by name, the greatest first.

        Args:
            live: Only those with (or without) an open turn.
            of: Only these sessions and their parts. The cost depends only on their number.
            after: Only those after this place, even if its session was deleted. Those before it cost nothing.
            limit: The greatest number; None for all.
        """


class Store(StoreReader, KeyValue, Protocol):
    """Contract of a store: journals, leases, inboxes and key-value pairs. The module's docstring has the rules."""

    async def open(self) -> None:
        """Create missing tables or files, and become a node. A second call has no effect.

        Raises:
            StoreBusyError, StoreFullError, StoreDamagedError: Nothing was changed.
        """

    async def close(self) -> None:
        """Finish the requested writes, and release all leases and resources. A second call has no effect.

        Afterwards everything except `open` raises `UsageError`.
        """

    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        """Claim a session, new or not, for this store's node, and return its new epoch, one above the last.

        Args:
            is_free: The value in its line, as `find` returned it: claim only if it has not changed. None: claim always.

        Raises:
            LeaseHeldError: Another living node has the session. Nothing was changed.
            JournalMovedError: The session was released, claimed or deleted since `find`. Nothing was changed.
        """

    async def release(self, session: str, *, epoch: int) -> None:
        """Release the lease of a session, so that any node can claim it. Without effect under an older epoch."""

    async def append(self, session: str, batch: Batch) -> int:
        """Append records, all or none, and return the new end.

        Raises:
            JournalMovedError: The end is not the expected one. Nothing was written.
            LeaseLostError: A newer epoch exists. Nothing was written.
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was written.
            UsageError: The batch has a seal or links, and this store makes its own. Nothing was written.
        """

    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        """Remove the records before `position`, replace the one there by `body`, and return whether this was done.

        Later records, the end and the epoch stay, so the session's node is not disturbed. The result survives the death
        of the node when this returns; a power cut may undo it.

        Args:
            body: The state that the records up to and including `position` fold to.
            position, epoch: Those of the record. Nothing is done if it does not exist (deleted or pruned).
            link: Replaces the link of the record; None keeps it.

        Raises:
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was changed.
        """

    async def delete(self, session: str) -> bool:
        """Delete a session with all its records, blobs and forwarded commands; return whether there was one.

        Its parts are deleted in the same transaction: the sessions whose names begin with its own and `PART_MARK`, and
        the entries of its name in the namespaces `OF_SESSIONS`. A later session of the same name starts above all its
        epochs, so that old nodes and old event ids do not match it.

        Raises:
            LeaseHeldError: Another living node has it, or the part that the error names. Nothing was changed.
        """

    async def watch(self, followed: Mapping[str, int]) -> News:
        """Wait for changes, or return existing ones at once. A cancelled call consumes none.

        Only one call at a time is permitted.

        Args:
            followed: Sessions that are followed here without their lease, and the last position that was read here.
        """

    async def is_held_elsewhere(self, session: str) -> bool:  # noqa: ARG002 - for stores that can tell
        """Whether another living node has the lease of a session, according to the data of this node.

        This hint costs less than a claim, and may be outdated. A command for such a session is forwarded without a
        claim. A store that always returns False is correct: then the claim fails.
        """
        return False

    async def forward(self, session: str, body: bytes) -> bytes:
        """Deliver a command to the session's node, and return its answer.

        After a cancellation, the command may or may not be decided.
        """

    async def answer(self, forwarded: int, body: bytes) -> None:
        """Answer a forwarded command, so that it is not delivered again.

        Without effect if another living node now has the session, or the sender no longer waits.
        """

    node: str = ""
    """Unique name of this store's node while it is open; "" before and after."""

    @property
    def key_file(self) -> Path | None:
        """Path of the file for the store's own key, outside what is stored.

        None if only this process can write to the store. See `store.guard`.
        """
        return None

    @property
    def refuses_encrypted(self) -> bool:
        """Whether `open` refuses a store that is encrypted under keys that this object lacks; only wrappers do."""
        return False

    @property
    def appends_waiting(self) -> int:
        """Number of writes that wait in this process for the store; 0 for a store without a queue."""
        return 0

    @property
    def death_noticed_s(self) -> float:
        """Seconds within which a killed process counts as dead, so that its sessions can be claimed; 0: at once."""
        return 0.0

    @property
    def joined_at(self) -> float:
        """Time, as in `World.monotonic`, at which this process became a node for the last time.

        Other nodes may have claimed its sessions before. Infinity while it has lost its connection or is closed, minus
        infinity for a store without connections.
        """
        return -math.inf

    @property
    def transactional(self) -> Transactional | None:
        """The store's ability to run a tool in the transaction of its outcome, or None."""
        return None

    @property
    def immediate(self) -> Immediate | None:
        """The store's ability to append without waiting, or None."""
        return None

    @property
    def escrow(self) -> Escrow | None:
        """The store's ability to open sessions with keys of clients, or None."""
        return None


class Transaction(Protocol):
    """The transaction in which a tool's outcome is recorded; `transaction()` returns it to a running tool.

    The tables of midstream are not accessible, and statements that end or leave the transaction are refused (`COMMIT`,
    `ROLLBACK`, `ATTACH`, most pragmas). Give your own tables a prefix such as `app_`. Foreign keys are not enforced.
    """

    def execute(
        self, statement: str, bindings: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Run SQL and return its rows, all of them.

        Raises:
            TransactionError: The statement failed, or the time limit was reached. The message states if data changed.
            UsageError: The tool has returned, or its transaction was ended by a statement that failed.
        """


class Attempt(Protocol):
    """Runs the effect of a tool, for `work` of `Transactional.append_within`."""

    def __call__(self, effect: Callable[[Transaction], T], *, within_s: float) -> T:
        """Run `effect`, and return its result. If it raises, its writes are undone.

        Args:
            effect: Called at once, in this thread. The transaction is void when it has returned.
            within_s: Time limit; a running statement is then interrupted, and later ones are refused.
        """


class Immediate(Protocol):
    """Appends small batches on the event loop, which costs less than a thread."""

    @property
    def is_ready(self) -> bool:
        """Whether `append_now` may append; while False, it returns None."""

    def append_now(self, session: str, batch: Batch) -> int | None:
        """Append in this call, and return the new end; None: call `Store.append` instead.

        The durability is that of `Sync.NORMAL`. After None nothing was written: the store is busy, a recent append here
        was slow, or there is an error, which `append` raises.
        """


class Transactional(Protocol):
    """Commits a tool's effect together with the records of its outcome."""

    async def append_within(
        self, session: str, work: Callable[[Attempt], Batch], *, expected: int, epoch: int
    ) -> Batch:
        """Run `work`, append the batch that it returns, commit its writes and the batch together, and return the batch.

        Durable (`Sync.FULL`) when it returns. All other appends to this store wait meanwhile.

        Args:
            work: Called once, in another thread, after `expected` and `epoch` were checked. Its batch must have the
                same values.
            expected, epoch: See `Batch`.

        Raises:
            MidstreamError: As `Store.append`. Nothing was written, and the writes of `work` were undone.
        """


class OpenedSession(Struct, frozen=True):
    """Result of opening a session with a secret.

    Args:
        session: The root session of the opened one.
        is_client: Whether the secret was the client's own; a viewer's secret permits only reading.
        stream_digest: Replaces the digest of the secret in the stream records, so that the secret can change.
        viewer: Id of the viewer; b"" for the client's own secret.
        expires_at: End of a viewer's access, in seconds since 1970.
    """

    session: str
    is_client: bool
    stream_digest: str
    viewer: bytes = b""
    expires_at: float = 0.0


class Escrow(Protocol):
    """Opens encrypted sessions with a secret, in this process; each one with the sessions of its sub-agents."""

    async def open(
        self, session: str, secret: str, old_secret: str = "", *, begins: bool = False
    ) -> OpenedSession | None:
        """Open a session until it is locked; None for one that is older than the escrow.

        If the old secret opens it, and is the client's own, the new secret replaces the old one in one write.

        Args:
            begins: Whether an unused session may be begun with this secret.

        Raises:
            WrongSecretError: The secret does not open the session, or there is no such session.
            MidstreamError: The operator's keys or the store are unavailable.
        """

    async def holds(self, session: str) -> bool:
        """Whether a session can be opened only with a secret."""

    def lock(self, session: str) -> None:
        """Delete the keys of a session from memory. No task may use the session any more."""

    async def share(self, session: str, *, for_s: float) -> str:
        """Return a new secret that permits reading an open session, for so many seconds.

        Raises:
            WrongSecretError: The session has no record yet.
            SessionLockedError: The session was not opened with its client's own secret.
            LimitReachedError: The session has the greatest number of valid secrets of viewers. Nothing was changed.
        """

    async def revoke_viewer_tokens(self, session: str) -> None:
        """Make all viewers' secrets of a session invalid."""

    async def drop_deleted_keys(self) -> None:
        """Delete the keys of deleted sessions, in case the node that deleted a session died before it did this."""

    async def is_good(self, opened: OpenedSession) -> bool:
        """Whether the viewer's access to an opened session is still valid."""


def require_as_found(session: str, *, is_free: bool | None, now: bool | None) -> None:
    """Raise `JournalMovedError` if a session has changed since a claim's `find`; see `Store.claim`.

    Args:
        now: Whether the session is free now; None if there is no such session.
    """
    if is_free is not None and now is not is_free:
        raise JournalMovedError(f"session {session!r} was released, claimed or deleted meanwhile")


def require_version(key: str, found: int, expected: int) -> None:
    """Raise `EntryMovedError` if an entry has another version than the expected one; 0 is no entry."""
    if found != expected:
        raise EntryMovedError(f"entry {key!r} has version {found}, not {expected}")
