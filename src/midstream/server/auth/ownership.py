"""Ownership of sessions: one row of each session in the store.

The row is written before the session begins, and is deleted with it. The stored name of a session begins with the
tenant (`tenant:name`). Rows are read by the stored name, so that tenants are separate.

An index in a namespace of each principal lists its own sessions and those that it may read, so that a list does not
read the sessions of others. An index entry is written before the row. Stale entries are not shown, and are removed
later.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import suppress

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import (
    AccessError,
    EntryDamagedError,
    EntryMovedError,
    KeyMissingError,
    LimitReachedError,
    SessionNotFoundError,
)
from midstream.retries import REPLACE_ATTEMPTS_MAX
from midstream.server.auth.principals import Principal
from midstream.server.auth.stored_rows import version_of
from midstream.session.child_names import root_of
from midstream.store.contract import PRINCIPAL_OF, KeyValue

TENANCY_NAMESPACE = "access-tenancy"
"""Namespace with one row: whether the principals of this store have tenants."""
_TENANCY = "tenants"
READERS_MAX = 100
"""Greatest number of readers of one session. An application with more uses `authorize`."""
BEGINNING_S = 3600.0
"""Age after which an index entry without a matching owner is stale; before, the session may be beginning."""
LOOKED_AT = 20
"""Index entries that are checked for staleness at each list."""


class Owner(Struct, frozen=True):
    """Owner and readers of a session.

    Args:
        tenant, principal: The owner.
        readers: Principals of the tenant that may read it.
        claim: Random id from the beginning of the session; a later session of this name has another one. "" in old
            rows.
    """

    tenant: str
    principal: str
    readers: tuple[str, ...] = ()
    claim: str = ""


UNREADABLE = Owner("\0unreadable", "\0unreadable")
"""Placeholder for an owner that cannot be read; no principal has such a name."""
_log = logging.getLogger(__name__)


class Ownership:
    """Owners of the sessions of a store."""

    def __init__(self, kv: KeyValue, world: World) -> None:
        self._kv = kv
        self._world = world

    async def owner_of(self, session: str) -> Owner | None:
        """Return the owner of a session, or of its parent session; None without one.

        For a row that cannot be read, it returns `UNREADABLE`: only operators may access the session.
        """
        try:
            kept = await self._kv.kv_get(PRINCIPAL_OF, root_of(session))
        except (EntryDamagedError, KeyMissingError) as error:
            _log.error("the owner of a session cannot be read: %s", error.message, extra={"session": session})
            return UNREADABLE
        return None if kept is None else _decode(kept.body)

    async def claim(self, session: str, principal: Principal) -> Owner:
        """Make a principal the owner of a session without one, and return the owner.

        Raises:
            AccessError: The principal has a tenant, and others of this store do not, or the reverse. Nothing was
                written.
        """
        if not principal.is_operator:
            await self._require_one_tenancy(has_tenant=bool(principal.tenant))
        owner = Owner(principal.tenant, principal.id, claim=self._world.new_id("claim"))
        body = msgspec.json.encode(owner)
        await self._note(session, principal.tenant, principal.id)
        try:
            await self._kv.kv_put(PRINCIPAL_OF, root_of(session), body, expected=0, at=self._world.now())
        except EntryMovedError:
            return await self.owner_of(session) or owner
        return owner

    async def _require_one_tenancy(self, *, has_tenant: bool) -> None:
        """Require that all principals have a tenant, or none: otherwise one without could use the names of a tenant."""
        for _ in range(REPLACE_ATTEMPTS_MAX):
            known, version = await self._tenancy(default=has_tenant)
            if known != has_tenant:
                have = "no tenant" if has_tenant else "tenants"
                raise AccessError(
                    f"principals of this store have {have}; give every principal a tenant, or none"
                )
            if version is None:
                return
            body = msgspec.json.encode(known)
            with suppress(EntryMovedError):
                await self._kv.kv_put(
                    TENANCY_NAMESPACE, _TENANCY, body, expected=version, at=self._world.now()
                )
                return

    async def _tenancy(self, *, default: bool) -> tuple[bool, int | None]:
        """Return whether the principals of this store have tenants, and the version of the row if it must be written.

        If the row cannot be read, the rows of owners decide.
        """
        try:
            kept = await self._kv.kv_get(TENANCY_NAMESPACE, _TENANCY)
        except EntryDamagedError as error:
            owners = [_decode(each.body) for each in await self._kv.kv_list(PRINCIPAL_OF)]
            known = any(owner.tenant for owner in owners) if owners else default
            return known, error.version
        return (default, 0) if kept is None else (msgspec.json.decode(kept.body, type=bool), None)

    async def share(self, session: str, readers: Sequence[str]) -> Owner:
        """Replace the readers of a session, and return the new row.

        Raises:
            SessionNotFoundError: The session has no owner.
            LimitReachedError: There are more than `READERS_MAX` readers. Nothing was changed.
            EntryMovedError: Another caller changed the row at the same time. Nothing was changed.
        """
        if len(readers) > READERS_MAX:
            raise LimitReachedError(f"a session can be shared with at most {READERS_MAX} principals")
        kept = await self._kv.kv_get(PRINCIPAL_OF, root_of(session))
        if kept is None:
            raise SessionNotFoundError(f"no session {session!r}")
        owner = replace(_decode(kept.body), readers=tuple(readers))
        for reader in readers:
            await self._note(session, owner.tenant, reader)
        body = msgspec.json.encode(owner)
        await self._kv.kv_put(PRINCIPAL_OF, kept.key, body, expected=kept.version, at=self._world.now())
        return owner

    async def sessions_of(self, principal: Principal) -> list[str]:
        """Return the sessions in the index of a principal, without sub-agents' sessions. Entries may be stale.

        Each call checks a few entries, from a random place on, and removes stale ones.
        """
        namespace = _namespace_of(principal.tenant, principal.id)
        noted = await self._kv.kv_list(namespace)
        begin = int(self._world.chance() * len(noted))
        gone: set[str] = set()
        for kept in [*noted[begin:], *noted[:begin]][:LOOKED_AT]:
            owner = await self.owner_of(kept.key)
            is_theirs = owner is not None and principal.id in (owner.principal, *owner.readers)
            if not is_theirs and kept.at < self._world.now() - BEGINNING_S:
                gone.add(kept.key)
                await self._kv.kv_delete(namespace, kept.key, expected=kept.version)
        return [kept.key for kept in noted if kept.key not in gone]

    async def _note(self, session: str, tenant: str, principal: str) -> None:
        """Write an index entry for a principal; a new write also renews the age of an existing entry."""
        namespace, key = _namespace_of(tenant, principal), root_of(session)
        for _ in range(REPLACE_ATTEMPTS_MAX):
            version = await version_of(self._kv, namespace, key)
            with suppress(EntryMovedError):
                await self._kv.kv_put(namespace, key, b"{}", expected=version, at=self._world.now())
                return


def _decode(body: bytes) -> Owner:
    try:
        return msgspec.json.decode(body, type=Owner)
    except (msgspec.DecodeError, RecursionError):  # damaged, or of another version
        return UNREADABLE


def _namespace_of(tenant: str, principal: str) -> str:
    # An encrypted store does not encrypt names of namespaces.
    digest = hashlib.blake2b(
        f"{tenant}:{principal}".encode("utf-8", "surrogatepass"), digest_size=16, person=b"midstream-index"
    )
    return f"access-sessions-{digest.hexdigest()}"


def is_of_tenant(session: str, tenant: str) -> bool:
    """Return whether a session (stored name) can belong to a tenant; without a tenant, always."""
    return not tenant or root_of(session).startswith(f"{tenant}:")


def name_in_store(session: str, tenant: str) -> str:
    """Return the stored name of a tenant's session; a stored name is returned unchanged."""
    return session if not tenant or session.startswith(f"{tenant}:") else f"{tenant}:{session}"


def name_outside(session: str, tenant: str) -> str:
    """Return the tenant's name for a stored name."""
    return session.removeprefix(f"{tenant}:") if tenant else session
