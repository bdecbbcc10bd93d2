"""The store contract: what every store promises, in prose and as a protocol.

A session's journal is a line of records numbered from 1 without gap. The one durable operation is `append`: all
records or none, only at the expected position, only under the newest epoch. A record once read is never changed;
`prune` may replace a record and all before it by what they fold to, and no position ever changes.

* **Order.** Appends to one session take effect in the order in which they return; sessions are independent.
* **Durability.** `Sync.FULL`: the records, and all appended before them in this store, are on disk when `append`
  returns. `Sync.NORMAL`: they survive the death of the process. A reader never sees a record of an append that
  later turns out not to have happened, except after a power cut under `NORMAL`, which a new epoch makes visible.
* **Epochs.** `claim` gives a session to an owner and raises its epoch. From then on appends under an older epoch
  fail with `LeaseLostError`. A claim fails with `LeaseHeldError` while another living owner holds the session.
* **Life of an owner.** An owner lives as long as its process holds its operating-system lock: a killed process
  frees it at once, so the next claim succeeds within milliseconds. One that is frozen, not dead, may count as dead
  after a time the store names; what it does when it goes on is refused by the epoch.
* **Neighbours.** Several owners may share a place. `watch` tells each what the others left for it; `hand_over` brings a
  command to whoever owns a session, for as long as it takes: an owner that dies with a command undecided leaves it to
  the next one. A command may be told, and decided, more than once; deciding it twice must be harmless. One whose sender
  is dead is told to nobody any more: whoever asked there asks again elsewhere, and may have been refused there.
* **Cancellation.** A cancelled `append` may have happened or not; the caller reads the journal to know.
* **Blobs** are large results that records name by their digest. They are appended with the record that names them,
  kept once for each session, never changed, and removed with it.
* **Effects.** A store that keeps its journals in a database of the tools' may let a tool write there in the append of
  its outcome: `Transactional`. It is no part of `Store`.
* **Shelves** keep small values beside the journals, such as what a pool knows of its agents: `Shelf`. An entry is
  replaced whole, and only by whoever has read what it replaces. It is no part of `Store`.
* **Escrow.** A store may be unable to read a session unless its client has shown a secret: `Escrowed`. Whatever needs
  to read it then raises `SessionLockedError`. It is no part of `Store`.
* **Errors** are those of `midstream.errors`; whatever is raised, nothing was half-written.

`midstream.testing.store_contract` is this page as a test suite; every store runs it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from midstream.core.blobs import Blob
from midstream.core.records import Sync
from midstream.tools import Transaction

T = TypeVar("T")

ESCROW = "escrow"
"""The shelf that has the wrapped keys of sessions which only their clients can open, each under the session's name."""
OWNERS = "access-owners"
"""The shelf that says whose sessions are, each under the session's name."""
GRAPHS = "langgraph-threads"
"""The shelf of the checkpoints of served LangGraph graphs, each under its session's name."""
OF_SESSIONS = (ESCROW, OWNERS, GRAPHS)
"""Shelves whose entries belong to the sessions of their names, and go with them."""


class Stored(Struct, frozen=True, gc=False):
    """A record as it lies in the journal; `body` is its JSON."""

    position: int
    epoch: int
    body: bytes


class Mark(Struct, frozen=True, gc=False, omit_defaults=True):
    """What a listing shows of a session; written in the transaction of the append that changed it.

    Args:
        is_live: A turn is open that waits for more than people, so that a new owner must look at it.
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


class Appendix(Struct, frozen=True):
    """What one append writes: see `Store.append` for each."""

    bodies: Sequence[bytes]
    mark: Mark | None = None
    blobs: Sequence[Blob] = ()
    seal: bytes = b""


class SessionInfo(Struct, frozen=True, gc=False):
    """One line of a listing."""

    session: str
    end: int
    epoch: int
    created_at: float
    mark: Mark
    is_free: bool = False
    """Its last owner gave it up, and nobody has claimed it since. (That of a dead owner was not given up.)"""
    oldest: int = 0
    """Position of the first record: 1, above that where the journal was pruned, 0 where it is empty."""
    seal: bytes = b""
    """What was last kept beside the end (see `Store.append`), of the same moment as `end`; a listing leaves it out."""


class Letter(Struct, frozen=True, gc=False):
    """A command that was handed over: for a session that the reader owns, or that no living owner holds."""

    number: int
    session: str
    body: bytes


class News(Struct, frozen=True):
    """What others left for an owner.

    Args:
        moved: Followed sessions that end elsewhere than the follower knows, or are gone.
        letters: Commands to decide, oldest first; each is told once under each epoch of its session.
        orphans: Sessions with an open turn that no living owner holds; each is told once under each epoch.
        peers: How many other living owners there are.
    """

    moved: frozenset[str] = frozenset()
    letters: tuple[Letter, ...] = ()
    orphans: tuple[str, ...] = ()
    peers: int = 0


class Store(Protocol):
    """Where journals live. See the module's text for what holds of every method."""

    async def open(self) -> None:
        """Make ready: create what is missing, take the owner's lock. Calling it twice is harmless.

        Raises:
            StoreBusyError, StoreFullError, StoreDamagedError: Nothing was changed.
        """

    async def close(self) -> None:
        """Finish what was asked for, give up all leases, let go of files. Calling it twice is harmless.

        From then on everything but `open` raises `UsageError`.
        """

    async def claim(self, session: str, *, at: float) -> int:
        """Take a session (new or not) for this store's owner and return its new epoch, one above the last.

        Raises:
            LeaseHeldError: Another living owner holds it. Nothing was changed.
        """

    async def release(self, session: str, *, epoch: int) -> None:
        """Give a session up, so that anybody may claim it. Without effect if `epoch` is not the newest."""

    async def append(
        self,
        session: str,
        bodies: Sequence[bytes],
        *,
        expected: int,
        epoch: int,
        sync: Sync,
        mark: Mark | None = None,
        blobs: Sequence[Blob] = (),
        seal: bytes = b"",
    ) -> int:
        """Append records, all or none, and return the new end.

        Args:
            expected: Position of the last record the caller has folded; 0 for an empty journal.
            epoch: The caller's epoch, from `claim`.
            sync: How durable it must be when this returns.
            mark: The session's new line in listings, if it changed.
            blobs: Large results that the records name; one that is there already is left as it is.
            seal: Kept beside the end in the same step, for a store in front of this one; b"" leaves what is there.

        Raises:
            JournalMovedError: The end is not `expected`. Nothing was written.
            LeaseLostError: A newer epoch exists. Nothing was written.
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was written.
            UsageError: This store keeps a seal of its own, and was given one. Nothing was written.
        """

    async def read(self, session: str, *, after: int, limit: int) -> list[Stored]:
        """Return up to `limit` records that follow position `after`, in order; empty at the end.

        A session nobody ever claimed reads as empty.
        """

    async def prune(self, session: str, body: bytes, *, position: int, epoch: int) -> bool:
        """Remove the records before `position`, put `body` in the place of that one, and return whether it was done.

        Whoever owns the session is not disturbed: what follows, the end and the epoch stay. Survives the death of the
        process when it returns; after a power cut it has happened, or not.

        Args:
            body: What the records up to and with `position` fold to, which nothing but they decide.
            position, epoch: Of the record. Where there is no such one (the session was deleted, or pruned further),
                nothing is done.

        Raises:
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was changed.
        """

    async def blob(self, session: str, digest: str) -> bytes | None:
        """Return a large result of a session, or None where it has none of this digest."""

    async def find(self, session: str) -> SessionInfo | None:
        """Return the session's line, or None where there is no such session."""

    def list(
        self, *, live: bool | None = None, of: Collection[str] | None = None
    ) -> AsyncIterator[SessionInfo]:
        """Iterate over the sessions, last changed first.

        Args:
            live: Only those with (or without) an open turn.
            of: Only these sessions and their parts. What it costs depends on how many they are, and on no others.
        """

    async def delete(self, session: str) -> bool:
        """Remove a session with all its records, blobs and letters for good; return whether there was one.

        Its parts go with it, all or none: the sessions whose names begin with its own and `core.parts.PART_MARK`; and,
        of a store that is a `Shelf`, the entries of its name in the shelves `OF_SESSIONS`. A session made later under
        the same name starts above all its epochs, so that no old owner and no old event id
        fits it.

        Raises:
            LeaseHeldError: Another living owner holds it, or the part that the error names. Nothing was changed.
        """

    async def watch(self, followed: Mapping[str, int]) -> News:
        """Wait for news, and return them; at once where there are some. A cancelled call has told nothing.

        Not to be called again before it has returned or was cancelled.

        Args:
            followed: Sessions whose journals somebody here follows without owning them, and the end known here.
        """

    async def hand_over(self, session: str, body: bytes) -> bytes:
        """Hand a command to the session's owner, and return its answer once there is one.

        Cancelled, it may still be decided, or not.
        """

    async def answer(self, letter: int, body: bytes) -> None:
        """Answer a letter, so that it is told to nobody again.

        Without effect where another living owner holds its session by now, or the sender waits no more.
        """


class Attempt(Protocol):
    """How `work` of `Transactional.append_within` lets an effect happen."""

    def __call__(self, effect: Callable[[Transaction], T], *, within_s: float) -> T:
        """Let `effect` write, and return what it returned. Whatever it raises, what it wrote is undone.

        Args:
            effect: Called at once, in this thread. The transaction is void when it has returned.
            within_s: Seconds it has; a statement that takes longer is interrupted, and a later one refused.
        """


@runtime_checkable
class Immediate(Protocol):
    """A store that may append something small while the event loop waits, which costs less than asking a thread."""

    def append_at_once(
        self, session: str, work: Callable[[], bytes], *, expected: int, epoch: int
    ) -> bytes | None:
        """Append one record here and now, and return it; None where `Store.append` is to be asked instead.

        It is as durable as after an append with `Sync.NORMAL`. After None nothing was written: somebody else is at
        work, an append here has just cost time, or something is wrong, which `append` will say.

        Args:
            work: Makes the record; called at most once, and only where nothing is known that forbids the append.
            expected, epoch: See `Store.append`.
        """


@runtime_checkable
class Transactional(Protocol):
    """A store that can commit a tool's effect together with the records of its outcome."""

    async def append_within(
        self, session: str, work: Callable[[Attempt], Appendix], *, expected: int, epoch: int
    ) -> Appendix:
        """Let `work` write and say what to append, commit both together or neither, and return what was appended.

        Durable (`Sync.FULL`) when it returns. All other appends to this store wait meanwhile.

        Args:
            work: Called in another thread, after `expected` and `epoch` were found to hold, once for each call of this.
            expected, epoch: See `Store.append`.

        Raises:
            MidstreamError: As `Store.append` does. Nothing was written, by `work` neither.
        """


class Kept(Struct, frozen=True, gc=False):
    """An entry of a shelf. `version` counts its writes from 1; `at` is the time of the last, in seconds since 1970."""

    key: str
    version: int
    body: bytes
    at: float


@runtime_checkable
class Shelf(Protocol):
    """A store that also keeps small values by name, for several processes at once. Each method is one transaction."""

    async def kept(self, shelf: str, key: str) -> Kept | None:
        """Return an entry, or None where there is none."""

    async def keep(self, shelf: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        """Write an entry and return its new version. Survives the death of the process when it returns.

        Args:
            expected: The version this replaces, 0 where there is no entry. A dropped key starts again above all its
                versions, so that nobody who read the old entry replaces the new one.
            at: When it is written.

        Raises:
            ShelfMovedError: The entry has another version. Nothing was written.
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was written.
        """

    async def drop(self, shelf: str, key: str, *, expected: int) -> bool:
        """Remove an entry if it has this version; return whether it was removed."""

    async def shelf(self, shelf: str) -> Sequence[Kept]:
        """Return all entries of a shelf, last written first."""


class Opened(Struct, frozen=True):
    """What a secret opened.

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
    """Opens sessions for those who show a secret, in this process; each session with its parts."""

    async def open(
        self, session: str, secret: str, old_secret: str = "", *, begins: bool = False
    ) -> Opened | None:
        """Open a session, until it is locked; None for one that was written before there was an escrow.

        Where only the old secret opens it, and it is the client's own, the new one opens it from then on and the old
        one no more. That is one write.

        Args:
            begins: A session nobody has said anything in may be begun; then this is its secret.

        Raises:
            WrongSecretError: It does not open it; there may be no such session.
            MidstreamError: The operator's keys or the store cannot be had.
        """

    async def holds(self, session: str) -> bool:
        """Whether a session can only be opened with a secret."""

    def lock(self, session: str) -> None:
        """Forget the keys of a session. Nothing of it may be in use any more."""

    async def share(self, session: str, *, for_s: float) -> str:
        """Return a new secret that opens an open session for looking, for so many seconds.

        Raises:
            SessionLockedError: It is not open, or not by its client's own secret.
            LimitReachedError: As many are good as may be. Nothing was changed.
        """

    async def withdraw_viewers(self, session: str) -> None:
        """Let no viewer's secret open a session any more."""

    async def forget_deleted(self) -> None:
        """Drop what opens sessions that are not there any more: whoever deleted them died before it could."""

    async def is_good(self, opened: Opened) -> bool:
        """Whether what was opened by a viewer's secret may still be looked at."""


@runtime_checkable
class Escrowed(Protocol):
    """A store in which clients hold the keys of their sessions."""

    @property
    def escrow(self) -> Escrow:
        """What opens them."""
