"""The reference store: dictionaries. Tests compare every other store with it; nothing survives the process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from midstream.core.blobs import Blob
from midstream.core.records import Sync
from midstream.errors import JournalMovedError, LeaseHeldError, LeaseLostError, UsageError
from midstream.store.contract import Mark, SessionInfo, Stored
from midstream.world import World


class _Session(Struct):
    epoch: int
    owner: str | None
    created_at: float
    mark: Mark
    number: int
    records: list[Stored] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)


class Memory:
    """What several stores share, as several processes share a file."""

    def __init__(self) -> None:
        self.sessions: dict[str, _Session] = {}
        self.living: set[str] = set()
        self.epochs_spent = 0
        """The highest epoch of any deleted session: a new one starts above it."""
        self.numbers = 0

    def kill(self, owner: str) -> None:
        """Let an owner die: its sessions are free for the next claim."""
        self.living.discard(owner)


class MemoryStore:
    """A store without a disk: `Store` in its simplest form, for tests and short scripts.

    Args:
        memory: What it keeps its journals in; give several stores the same one to let them compete.
        world: Where the owner's id comes from.
    """

    def __init__(self, memory: Memory | None = None, *, world: World = World()) -> None:
        self.owner = ""
        self._memory = Memory() if memory is None else memory
        self._world = world

    async def open(self) -> None:
        """See `Store.open`."""
        if not self.owner:
            self.owner = self._world.new_id("owner")
            self._memory.living.add(self.owner)

    async def close(self) -> None:
        """See `Store.close`."""
        self._memory.kill(self.owner)
        self.owner = ""

    async def claim(self, session: str, *, at: float) -> int:
        """See `Store.claim`."""
        sessions = self._sessions()
        found = sessions.get(session)
        if found is None:
            self._memory.numbers += 1
            found = sessions[session] = _Session(
                epoch=self._memory.epochs_spent,
                owner=None,
                created_at=at,
                mark=Mark(is_live=False, at=at),
                number=self._memory.numbers,
            )
        self._refuse_if_held(session, found)
        found.owner = self.owner
        found.epoch += 1
        return found.epoch

    async def release(self, session: str, *, epoch: int) -> None:
        """See `Store.release`."""
        found = self._sessions().get(session)
        if found is not None and found.epoch == epoch:
            found.owner = None

    async def append(
        self,
        session: str,
        bodies: Sequence[bytes],
        *,
        expected: int,
        epoch: int,
        sync: Sync,  # noqa: ARG002 - nothing here survives anything
        mark: Mark | None = None,
        blobs: Sequence[Blob] = (),
    ) -> int:
        """See `Store.append`."""
        found = self._sessions().get(session)
        if found is None or found.epoch != epoch:
            raise LeaseLostError(f"session {session!r} has another epoch than {epoch}")
        end = len(found.records)
        if end != expected:
            raise JournalMovedError(f"session {session!r} ends at {end}, not at {expected}")
        found.records += [
            Stored(position, epoch, body) for position, body in enumerate(bodies, start=end + 1)
        ]
        found.blobs |= {blob.digest: blob.body for blob in blobs}
        if mark is not None:
            found.mark = replace(mark, title=mark.title or found.mark.title)
        return len(found.records)

    async def read(self, session: str, *, after: int, limit: int) -> list[Stored]:
        """See `Store.read`."""
        found = self._sessions().get(session)
        return [] if found is None else found.records[after : after + limit]

    async def blob(self, session: str, digest: str) -> bytes | None:
        """See `Store.blob`."""
        found = self._sessions().get(session)
        return None if found is None else found.blobs.get(digest)

    async def find(self, session: str) -> SessionInfo | None:
        """See `Store.find`."""
        found = self._sessions().get(session)
        return None if found is None else _line_of(session, found)

    async def list(self, *, live: bool | None = None) -> AsyncIterator[SessionInfo]:
        """See `Store.list`."""
        lines = [
            (found.mark.at, found.number, _line_of(session, found))
            for session, found in self._sessions().items()
            if live is None or found.mark.is_live == live
        ]
        for _, _, line in sorted(lines, key=lambda line: line[:2], reverse=True):
            yield line

    async def delete(self, session: str) -> bool:
        """See `Store.delete`."""
        found = self._sessions().get(session)
        if found is None:
            return False
        self._refuse_if_held(session, found)
        self._memory.epochs_spent = max(self._memory.epochs_spent, found.epoch)
        del self._memory.sessions[session]
        return True

    def _sessions(self) -> dict[str, _Session]:
        if not self.owner:
            raise UsageError("the store is not open: call `await store.open()` first")
        return self._memory.sessions

    def _refuse_if_held(self, session: str, found: _Session) -> None:
        if found.owner != self.owner and found.owner in self._memory.living:
            raise LeaseHeldError(f"session {session!r} belongs to {found.owner!r}, which is alive")


def _line_of(session: str, found: _Session) -> SessionInfo:
    return SessionInfo(session, len(found.records), found.epoch, found.created_at, found.mark)
