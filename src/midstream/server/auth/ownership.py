"""Ownership of sessions: one row for each, kept beside it in the store, written before it is begun, gone with it.

The tenant is the first part of every session's name in the store (`tenant:name`), and a row is read by that whole
name, so that no question of one tenant can be answered by what belongs to another.

A namespace of each principal names the sessions it owns or may look at, so that a list costs what is in it and not what
others have. It is written before the row that counts; what it names too much is not shown, and taken out in time.
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
"""Namespace of one row: whether the principals of this store have tenants."""
_TENANCY = "tenants"
READERS_MAX = 100
"""Principals with whom one session is shared: an application that needs more decides by `authorize`."""
BEGINNING_S = 3600.0
"""Seconds after which a noted session of another owner, or without one, is not just being begun."""
LOOKED_AT = 20
"""Noted sessions of a principal that are looked at when they are asked for."""


class Owner(Struct, frozen=True):
    """Owner of a session, and the others who may read it.

    Args:
        tenant, principal: Its owner.
        readers: Principals of the tenant who may look at it.
        claim: Drawn when it was begun: a later session of this name has another one. "" in rows of before.
    """

    tenant: str
    principal: str
    readers: tuple[str, ...] = ()
    claim: str = ""


UNREADABLE = Owner("\0unreadable", "\0unreadable")
"""Stands for an owner that cannot be read: no principal has such a name."""
_log = logging.getLogger(__name__)


class Ownership:
    """The rows of owners."""

    def __init__(self, kv: KeyValue, world: World) -> None:
        self._kv = kv
        self._world = world

    async def owner_of(self, session: str) -> Owner | None:
        """Return whose a session (or the one it is part of) is; None where it has none.

        A row that cannot be read is `UNREADABLE`, whose session is visible to operators only.
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
            AccessError: The principal has a tenant and others of this store have none, or the reverse. Nothing was
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
        """Require that all principals have a tenant, or none: without one, a session could be given a tenant's name."""
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
        """Return whether the principals of this store have tenants, and the version of the row to write, if any.

        If the row cannot be read, the rows of owners show it.
        """
        try:
            kept = await self._kv.kv_get(TENANCY_NAMESPACE, _TENANCY)
        except EntryDamagedError as error:
            owners = [_decode(each.body) for each in await self._kv.kv_list(PRINCIPAL_OF)]
            known = any(owner.tenant for owner in owners) if owners else default
            return known, error.version
        return (default, 0) if kept is None else (msgspec.json.decode(kept.body, type=bool), None)

    async def share(self, session: str, readers: Sequence[str]) -> Owner:
        """Let these principals of the owner's tenant look at a session, and no others; return the new row.

        Raises:
            SessionNotFoundError: It has no owner.
            LimitReachedError: They are more than `READERS_MAX`. Nothing was changed.
            EntryMovedError: Another caller changed it at this moment. Nothing was changed.
        """
        if len(readers) > READERS_MAX:
            raise LimitReachedError(f"a session is shared with {READERS_MAX} principals at most")
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
        """Return the sessions that a principal may own or look at, without their parts, and perhaps some that are gone.

        A few of them are looked at each time, wherever chance begins, so that no more stay noted than are there.
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
        """Note that a session is, or is about to be, visible to a principal; again where it was: it must not look
        old.
        """
        namespace, key = _namespace_of(tenant, principal), root_of(session)
        for _ in range(REPLACE_ATTEMPTS_MAX):
            version = await version_of(self._kv, namespace, key)
            with suppress(EntryMovedError):
                await self._kv.kv_put(namespace, key, b"{}", expected=version, at=self._world.now())
                return


def _decode(body: bytes) -> Owner:
    try:
        return msgspec.json.decode(body, type=Owner)
    except (msgspec.DecodeError, RecursionError):  # of another version
        return UNREADABLE


def _namespace_of(tenant: str, principal: str) -> str:
    # Names of namespaces are not encrypted, where the store is.
    digest = hashlib.blake2b(
        f"{tenant}:{principal}".encode("utf-8", "surrogatepass"), digest_size=16, person=b"midstream-index"
    )
    return f"access-sessions-{digest.hexdigest()}"


def is_of_tenant(session: str, tenant: str) -> bool:
    """Whether a session of the store can belong to a tenant; without tenants they all can."""
    return not tenant or root_of(session).startswith(f"{tenant}:")


def name_in_store(session: str, tenant: str) -> str:
    """Return the store's name of a tenant's session; a name that has it already stays."""
    return session if not tenant or session.startswith(f"{tenant}:") else f"{tenant}:{session}"


def name_outside(session: str, tenant: str) -> str:
    """Return the tenant's name of its session."""
    return session.removeprefix(f"{tenant}:") if tenant else session
