"""Whose a session is: one row for each, kept beside it in the store, written before the session is begun, gone with it.

The tenant is the first part of every session's name in the store (`tenant:name`), and a row is read by that whole
name, so that no question of one tenant can be answered by what belongs to another.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.core.parts import root_of
from midstream.errors import LimitReachedError, SessionNotFoundError, ShelfMovedError
from midstream.server.subjects import Subject
from midstream.store.contract import OWNERS, Shelf
from midstream.world import World

REVOKED_SHELF = "access-revoked"
READERS_MAX = 100
"""Subjects with whom one session is shared: whoever needs more decides by `authorize`."""
_TRIES_MAX = 10


class Owner(Struct, frozen=True):
    """Whose a session is, and who else may look.

    Args:
        tenant, subject: Its owner.
        readers: Subjects of the tenant who may look at it.
    """

    tenant: str
    subject: str
    readers: tuple[str, ...] = ()


class Rights:
    """The rows of owners, and the times at which subjects were locked out."""

    def __init__(self, shelf: Shelf, world: World) -> None:
        self._shelf = shelf
        self._world = world

    async def owner_of(self, session: str) -> Owner | None:
        """Return whose a session (or the one it is part of) is; None where nobody's."""
        kept = await self._shelf.kept(OWNERS, root_of(session))
        return None if kept is None else msgspec.json.decode(kept.body, type=Owner)

    async def claim(self, session: str, subject: Subject) -> Owner:
        """Make a session a subject's, if it is nobody's, and return whose it is."""
        owner = Owner(subject.tenant, subject.id)
        body = msgspec.json.encode(owner)
        try:
            await self._shelf.keep(OWNERS, root_of(session), body, expected=0, at=self._world.now())
        except ShelfMovedError:
            return await self.owner_of(session) or owner
        return owner

    async def share(self, session: str, readers: Sequence[str]) -> Owner:
        """Let these subjects of the owner's tenant look at a session, and no others; return the new row.

        Raises:
            SessionNotFoundError: It is nobody's.
            LimitReachedError: They are more than `READERS_MAX`. Nothing was changed.
            ShelfMovedError: Somebody else changed it at this moment. Nothing was changed.
        """
        if len(readers) > READERS_MAX:
            raise LimitReachedError(f"a session is shared with {READERS_MAX} subjects at most")
        kept = await self._shelf.kept(OWNERS, root_of(session))
        if kept is None:
            raise SessionNotFoundError(f"there is no session {session!r}")
        owner = replace(msgspec.json.decode(kept.body, type=Owner), readers=tuple(readers))
        body = msgspec.json.encode(owner)
        await self._shelf.keep(OWNERS, kept.key, body, expected=kept.version, at=self._world.now())
        return owner

    async def lock_out(self, subject: Subject) -> None:
        """Let nothing count any more that was issued to a subject until now."""
        for _ in range(_TRIES_MAX):
            kept = await self._shelf.kept(REVOKED_SHELF, subject.key)
            try:
                now = self._world.now()
                version = kept.version if kept else 0
                await self._shelf.keep(REVOKED_SHELF, subject.key, b"{}", expected=version, at=now)
            except ShelfMovedError:
                continue
            return

    async def locked_out_at(self, subject: Subject) -> float:
        """Return when a subject was locked out last, in seconds since 1970; 0 for never."""
        kept = await self._shelf.kept(REVOKED_SHELF, subject.key)
        return kept.at if kept else 0.0


def is_of_tenant(session: str, tenant: str) -> bool:
    """Whether a session of the store can belong to a tenant; without tenants they all can."""
    return not tenant or root_of(session).startswith(f"{tenant}:")


def name_in_store(session: str, tenant: str) -> str:
    """Return the name under which the store knows a tenant's session; a name that has it already stays."""
    return session if not tenant or session.startswith(f"{tenant}:") else f"{tenant}:{session}"


def name_outside(session: str, tenant: str) -> str:
    """Return the name by which a tenant knows its session."""
    return session.removeprefix(f"{tenant}:") if tenant else session
