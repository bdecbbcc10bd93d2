"""The store contract: the promises of every store, in prose and as a protocol.

A session's journal is a line of records numbered from 1 without gap. The one durable operation is `append`: all
records or none, only at the expected position, only under the newest epoch. A record once read is never changed;
`prune` may replace a record and all before it by what they fold to, and no position ever changes.

* **Order.** Appends to one session take effect in the order in which they return; sessions are independent.
* **Durability.** `Sync.FULL`: the records, and all appended before them in this store, survive a power cut when
  `append` returns. `Sync.NORMAL`: they survive the death of the node. A reader never sees a record of an append that
  later turns out not to have happened, except after a power cut under `NORMAL`, which a new epoch makes visible.
* **Leases.** `claim` gives a node the lease of a session and raises the session's epoch. From then on appends under
  an older epoch fail with `LeaseLostError`. A claim fails with `LeaseHeldError` while another living node has the
  lease.
* **Liveness.** An open store is one node, which lives until it is closed or dies. The leases of a dead node are free:
  the next claim succeeds. How fast a death is noticed, and after which time a node that shows no sign of life counts
  as dead, is up to the store, which names both. A node that was taken for dead and goes on is refused by the epoch.
* **Neighbours.** Several nodes may share a place. `watch` returns what the others left for one of them; `forward`
  brings a command to the node of a session, for as long as it takes: a node that dies with a command undecided
  leaves it to the next one. A command may be delivered, and decided, more than once; deciding it twice must be
  harmless. A command whose sender is dead is not delivered any more: its client sends the command to another node.
* **Cancellation.** A cancelled `append` may have happened or not; the caller reads the journal to find out. In a store
  on servers it may still be on its way: the next append takes its place, or fails with `JournalMovedError`.
* **Blobs** are large results that records name by their digest. They are appended with the record that names them,
  kept once for each session, never changed, and removed with it.
* **Key-value part.** Small values beside the journals, such as the records of a pool: `KeyValue`. An entry is replaced
  whole, and only by a caller that has read what it replaces.
* **Abilities** are declared, and None where a store lacks them: `transactional` (a tool's effect and its outcome in one
  transaction), `immediate` (a small append without waiting), `escrow` (clients hold the keys of their sessions; reads
  of a session that is not open raise `SessionLockedError`). A class that inherits from `Store` declares those it has.
* **Errors** are those of `midstream.errors`; whichever is raised, nothing was half-written.

`midstream.testing.store_contract` is this page as a test suite; every store runs it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from midstream.errors import EntryMovedError, JournalMovedError
from midstream.session.blobs import Blob
from midstream.session.records import Sync

T = TypeVar("T")

ESCROW = "escrow"
"""Namespace of the wrapped keys of sessions that only their clients can open, each under the session's name."""
PRINCIPAL_OF = "access-nodes"
"""Namespace of the nodes of sessions, each under the session's name."""
GRAPHS = "langgraph-threads"
"""Namespace of the checkpoints of served LangGraph graphs, each under its session's name."""
STREAM_READS = "plain-stream-reads"
"""Namespace of the times at which streams with a sliding lifetime were last read, each under its journal's name."""
OF_SESSIONS = (ESCROW, PRINCIPAL_OF, GRAPHS, STREAM_READS)
"""Namespaces whose entries belong to the sessions of their names, and go with them."""


PLAIN_MARK = "~"
"""Stands in the names of journals that are plain streams, before the stream's own; no session can have it."""


def is_session(name: str) -> bool:
    """Whether a journal of this name is a session, whose records are those of `session.records`."""
    return PLAIN_MARK not in name


class StoredRecord(Struct, frozen=True, gc=False):
    """A record as it lies in the journal; `body` is its JSON, `link` was stored with it (see `Batch.links`)."""

    position: int
    epoch: int
    body: bytes
    link: bytes = b""


class SessionListing(Struct, frozen=True, gc=False, omit_defaults=True):
    """Line of a session in listings; written in the transaction of the append that changed it.

    Args:
        is_live: A turn is open that waits for more than people, so that a new node must look at it.
        at: Time of the change in seconds since 1970.
        title: First words of the first message; "" leaves the old one.
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
        sync: How durable it must be when the append returns.
        mark: The session's new line in listings, if it changed.
        blobs: Large results that the records name; one that is there already is left as it is.
        seal: Kept beside the end in the same step, for a store in front of this one; b"" leaves what is there.
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
    """Its last node gave it up, and it was not claimed since. (That of a dead node was not given up.)"""
    oldest: int = 0
    """Position of the first record: 1, above that where the journal was pruned, 0 where it is empty."""
    seal: bytes = b""
    """What was last kept beside the end (see `Batch`), of the same moment as `end`; a listing leaves it out."""


class ForwardedCommand(Struct, frozen=True, gc=False):
    """A command that another node forwarded, for a session of this node or of no living node.

    `sender` is the node that waits for the answer, as the store has it.
    """

    number: int
    session: str
    body: bytes
    sender: str = ""


class ListPlace(Struct, frozen=True):
    """A place in a listing: behind the session of this name that was changed at this time, in seconds since 1970."""

    at: float
    session: str


class News(Struct, frozen=True):
    """Changes by other nodes that a node must act on.

    Args:
        moved: Followed sessions whose end has changed, or that are gone.
        forwarded_commands: Commands to decide, oldest first; each is returned once under each epoch of its session.
        orphans: Sessions with an open turn that no living node holds; each is returned once under each epoch.
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
        """Return an entry, or None where there is none."""

    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        """Return all entries of a namespace, last written first."""


class KeyValue(KeyValueReader, Protocol):
    """Small versioned values for several nodes at once. Each method is one transaction."""

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        """Write an entry and return its new version. Survives the death of the node when it returns.

        Args:
            expected: The version this replaces, 0 where there is no entry. A deleted key starts again above all its
                versions, so that no reader of the old entry replaces the new one.
            at: When it is written.

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
        """Return a large result of a session, or None where it has none of this digest."""

    async def blob_digests(self, session: str) -> Sequence[str]:
        """Return the digests of all large results of a session, in any order."""

    async def kv_namespaces(self) -> Sequence[str]:
        """Return the namespaces that have entries, in any order."""

    async def find(self, session: str) -> SessionInfo | None:
        """Return the session's line, or None where there is no such session."""

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
            of: Only these sessions and their parts. What it costs depends on how many they are, and on no others.
            after: Only those behind this place, whether or not its session still exists. The cost does not depend on
                how many are before it.
            limit: How many at most; None for all.
        """


class Store(StoreReader, KeyValue, Protocol):
    """Contract of a store: journals, leases, inboxes and key-value pairs. The module's docstring has the rules."""

    async def open(self) -> None:
        """Make ready: create what is missing, become a node. Calling it twice is harmless.

        Raises:
            StoreBusyError, StoreFullError, StoreDamagedError: Nothing was changed.
        """

    async def close(self) -> None:
        """Finish what was asked for, give up all leases and resources. Calling it twice is harmless.

        From then on everything but `open` raises `UsageError`.
        """

    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        """Take a session (new or not) for this store's node and return its new epoch, one above the last.

        Args:
            is_free: That of its line, as `find` returned it: claim it only while that holds. None: in any case.

        Raises:
            LeaseHeldError: Another living node holds it. Nothing was changed.
            JournalMovedError: It was given up, claimed or deleted since `find`. Nothing was changed.
        """

    async def release(self, session: str, *, epoch: int) -> None:
        """Give up the lease of a session, so that any node may claim it. Without effect under an older epoch."""

    async def append(self, session: str, batch: Batch) -> int:
        """Append records, all or none, and return the new end.

        Raises:
            JournalMovedError: The end is not the expected one. Nothing was written.
            LeaseLostError: A newer epoch exists. Nothing was written.
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was written.
            UsageError: This store keeps a seal or links of its own, and was given some. Nothing was written.
        """

    async def prune(
        self, session: str, body: bytes, *, position: int, epoch: int, link: bytes | None = None
    ) -> bool:
        """Remove the records before `position`, put `body` in the place of that one, and return whether it was done.

        Its node is not disturbed: what follows, the end and the epoch stay. Survives the death of the
        node when it returns; after a power cut it has happened, or not.

        Args:
            body: What the records up to and with `position` fold to, which nothing but they decide.
            position, epoch: Of the record. Where there is no such one (the session was deleted, or pruned further),
                nothing is done.
            link: Stored with the record in the place of its link; None leaves that.

        Raises:
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was changed.
        """

    async def delete(self, session: str) -> bool:
        """Remove a session with all its records, blobs and forwarded commands for good; return whether there was one.

        Its parts go with it, all or none: the sessions whose names begin with its own and `core.parts.PART_MARK`, and
        the entries of its name in the namespaces `OF_SESSIONS`. A session made later under the same name starts above
        all its epochs, so that no old node and no old event id fits it.

        Raises:
            LeaseHeldError: Another living node holds it, or the part that the error names. Nothing was changed.
        """

    async def watch(self, followed: Mapping[str, int]) -> News:
        """Wait for changes; return at once where there are some. A cancelled call consumes none.

        Not to be called again before it has returned or was cancelled.

        Args:
            followed: Sessions whose journals are followed here without their lease, and the end that was read here.
        """

    async def is_held_elsewhere(self, session: str) -> bool:  # noqa: ARG002 - for stores that can tell
        """Whether another node has the lease of a session and lives, as far as this one has noticed.

        It is a hint, which costs less than a claim: a command for such a session is forwarded at once. It may be out
        of date when it is used. A store that always returns False is correct: then a claim finds out.
        """
        return False

    async def forward(self, session: str, body: bytes) -> bytes:
        """Hand a command to the session's node, and return its answer once there is one.

        Cancelled, it may still be decided, or not.
        """

    async def answer(self, forwarded: int, body: bytes) -> None:
        """Answer a forwarded command, so that it is not delivered again.

        Without effect where another living node holds its session by now, or the sender does not wait any more.
        """

    node: str = ""
    """Name of this store's node while it is open, which no other node ever has; "" before and after."""

    @property
    def key_file(self) -> Path | None:
        """Path of the file for the store's own key, outside what is stored.

        None where only this process can write to the store. See `store.guard`.
        """
        return None

    @property
    def appends_waiting(self) -> int:
        """How many writes wait in this process for the store; 0 where a store has no queue."""
        return 0

    @property
    def death_noticed_s(self) -> float:
        """Seconds within which a killed process counts as dead, so that its sessions can be claimed; 0: at once."""
        return 0.0

    @property
    def transactional(self) -> Transactional | None:
        """The store as one that runs a tool in the transaction of its outcome; None where it cannot."""
        return None

    @property
    def immediate(self) -> Immediate | None:
        """The store as one that appends without waiting; None where it cannot."""
        return None

    @property
    def escrow(self) -> Escrow | None:
        """Opens sessions whose keys their clients hold; None where no client holds one."""
        return None


class Transaction(Protocol):
    """The transaction in which a tool's outcome is recorded; see `midstream.tools.function_tools.transaction`.

    The tables of midstream are out of reach, and so is what would end the transaction or leave it (`COMMIT`,
    `ROLLBACK`, `ATTACH`, most pragmas). Give your own tables a prefix such as `app_`. Foreign keys are not enforced.
    """

    def execute(
        self, statement: str, bindings: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """Run SQL and return its rows, all of them.

        Raises:
            TransactionError: The statement failed, or the time of this call is over. The message has what was changed.
            UsageError: The tool has returned, or its transaction was ended by a statement that failed.
        """


class Attempt(Protocol):
    """Runs the effect of a tool, for `work` of `Transactional.append_within`."""

    def __call__(self, effect: Callable[[Transaction], T], *, within_s: float) -> T:
        """Let `effect` write, and return what it returned. Whatever it raises, what it wrote is undone.

        Args:
            effect: Called at once, in this thread. The transaction is void when it has returned.
            within_s: Seconds it has; a statement that takes longer is interrupted, and a later one refused.
        """


class Immediate(Protocol):
    """Appends something small while the event loop waits, which costs less than the way to a thread."""

    @property
    def is_ready(self) -> bool:
        """Whether `append_now` may append: where it is False, it returns None for every append of this moment."""

    def append_now(self, session: str, batch: Batch) -> int | None:
        """Append here and now, and return the new end; None where `Store.append` is to be called instead.

        It is as durable as after an append with `Sync.NORMAL`. After None nothing was written: the store is busy, an
        append here has just cost time, or something is wrong, which `append` reports.
        """


class Transactional(Protocol):
    """Commits a tool's effect together with the records of its outcome."""

    async def append_within(
        self, session: str, work: Callable[[Attempt], Batch], *, expected: int, epoch: int
    ) -> Batch:
        """Let `work` write and return what to append, commit both together or neither, and return what was appended.

        Durable (`Sync.FULL`) when it returns. All other appends to this store wait meanwhile.

        Args:
            work: Called in another thread, after `expected` and `epoch` were found to hold, once for each call of this.
                They are also those of the batch it returns.
            expected, epoch: See `Batch`.

        Raises:
            MidstreamError: As `Store.append` does. Nothing was written, by `work` neither.
        """


class OpenedSession(Struct, frozen=True):
    """Result of opening a session with a secret.

    Args:
        session: The session, or the one it is part of.
        is_client: Whether it was the client's own secret: a viewer's opens it for looking.
        stream_digest: Stands for the secret in what is kept of the session's streams, also when the secret changes.
        viewer: Which viewer's it was; b"" of the client's own.
        expires_at: When a viewer's ends, in seconds since 1970.
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
        """Open a session, until it is locked; None for one that was written before there was an escrow.

        Where only the old secret opens it, and it is the client's own, the new one opens it from then on and the old
        one no more. That is one write.

        Args:
            begins: An unused session may be begun; then this is its secret.

        Raises:
            WrongSecretError: It does not open it; there may be no such session.
            MidstreamError: The operator's keys or the store cannot be had.
        """

    async def holds(self, session: str) -> bool:
        """Whether a session can only be opened with a secret."""

    def lock(self, session: str) -> None:
        """Drop the keys of a session. Nothing of it may be in use any more."""

    async def share(self, session: str, *, for_s: float) -> str:
        """Return a new secret that opens an open session for looking, for so many seconds.

        Raises:
            SessionLockedError: It is not open, or not by its client's own secret.
            LimitReachedError: As many are good as may be. Nothing was changed.
        """

    async def withdraw_viewers(self, session: str) -> None:
        """Let no viewer's secret open a session any more."""

    async def drop_deleted_keys(self) -> None:
        """Drop the keys of sessions that do not exist any more: the node that deleted them died before it could."""

    async def is_good(self, opened: OpenedSession) -> bool:
        """Whether what was opened by a viewer's secret may still be looked at."""


def require_as_found(session: str, *, is_free: bool | None, now: bool | None) -> None:
    """Raise `JournalMovedError` where a session is not as a claim expects it; see `Store.claim`.

    Args:
        now: Whether its last node has given it up; None where there is no such session.
    """
    if is_free is not None and now is not is_free:
        raise JournalMovedError(f"session {session!r} was given up, claimed or deleted meanwhile")


def require_version(key: str, found: int, expected: int) -> None:
    """Raise `EntryMovedError` where an entry has another version than the one it is to replace; 0 is no entry."""
    if found != expected:
        raise EntryMovedError(f"entry {key!r} has version {found}, not {expected}")
