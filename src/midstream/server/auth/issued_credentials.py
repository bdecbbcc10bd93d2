"""Credentials that this server issues: tickets, login links, cookies, viewer tokens.

A credential has 128 random bits after the name of its kind. The store keeps its digest and its rights, so that every
process of the store accepts it, and a reader of the store cannot use it. Callers cannot distinguish used, expired and
unknown credentials.

A credential is derived from the one that was sent when it was issued (its parent). The end of the chain is a credential
from outside, such as a line of a credential file. Each use checks the whole chain: a credential is valid only while all
credentials above it are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.environment import World
from midstream.errors import AccessError, EntryMovedError, UnauthorizedError
from midstream.server.auth.principals import Principal
from midstream.server.auth.revocations import Revocations
from midstream.server.auth.stored_rows import read_row
from midstream.store.contract import KeyValue, KeyValueEntry

IsCurrent = Callable[[Principal], Awaitable[bool]]
"""Returns whether the outside credential of a principal, the end of the chain, is still valid."""

TICKET_S = 30.0
"""Seconds for which a ticket is valid: a page requests one just before it connects."""
LOGIN_LINK_S = 3600.0
"""Seconds for which a printed login link is valid."""
COOKIE_S = 30 * 24 * 3600.0
"""Seconds after which a browser must log in again in any case."""
COOKIE_IDLE_S = 7 * 24 * 3600.0
"""Seconds without use after which a browser must log in again."""
VIEWER_S_MAX = 30 * 24 * 3600.0
"""Longest validity of a viewer token, in seconds."""
SWEEP_S = 600.0
"""Seconds between two removals of expired credentials."""
CHAIN_MAX = 8
"""Greatest length of a chain: a cookie that was derived from a link of a cookie, and so on."""
ID_LENGTH = 16
"""Characters of a digest that identify a credential for people."""
NAMESPACE = "access-passes"
_TOKEN_CHARS_MAX = 64
_TOUCH_SHARE = 1 / 100
"""Part of `idle_s` after which a use is stored again."""


class CredentialKind(StrEnum):
    """Kind of a credential."""

    TICKET = "ticket"
    """Opens one connection, once."""
    LOGIN = "login"
    """A login code: is exchanged for a cookie, once."""
    COOKIE = "cookie"
    VIEWER = "viewer"
    """Permits reading one session."""


class StoredCredential(Struct, frozen=True, omit_defaults=True):
    """Stored data of a credential.

    Args:
        kind: Kind of the credential.
        principal: Principal of the bearer.
        issued_at, expires_at: Seconds since 1970.
        session, action, origin: Restrictions of a ticket; each "" for none.
        issuer: Key of the principal that issued it; "" for its own principal.
        parent: Digest of the credential of this server from which it was derived; "" for one from outside.
        idle_s, used_at: It expires `idle_s` seconds after its last use at `used_at`; 0 for no such limit.
    """

    kind: CredentialKind
    principal: Principal
    issued_at: float
    expires_at: float
    session: str = ""
    action: str = ""
    origin: str = ""
    issuer: str = ""
    parent: str = ""
    idle_s: float = 0.0
    used_at: float = 0.0

    @property
    def issued_by(self) -> str:
        """Key of the principal that issued it."""
        return self.issuer or self.principal.key

    @property
    def ends_at(self) -> float:
        """Time at which it expires if it is not used before, in seconds since 1970."""
        return min(self.expires_at, self.used_at + self.idle_s) if self.idle_s else self.expires_at


class CredentialIssuer:
    """Issues, checks and revokes the credentials of this server.

    Args:
        is_current: Checks the outside credential of a chain; see `credential_sources`.
    """

    def __init__(self, kv: KeyValue, world: World, revocations: Revocations, is_current: IsCurrent) -> None:
        self._kv = kv
        self._world = world
        self._revocations = revocations
        self._is_current = is_current
        self._sweep_at = 0.0

    async def issue(
        self,
        kind: CredentialKind,
        principal: Principal,
        *,
        for_s: float,
        idle_s: float = 0.0,
        session: str = "",
        action: str = "",
        origin: str = "",
    ) -> str:
        """Issue a credential for `for_s` seconds, or until the principal's own credential expires.

        Raises:
            AccessError: The chain is too long. Nothing was issued.
        """
        token = self._world.new_id(kind.value)
        now = self._world.now()
        credential = StoredCredential(
            kind, principal, now, now + for_s, session, action, origin, idle_s=idle_s
        )
        await self.keep(token, credential)
        return token

    async def keep(self, token: str, credential: StoredCredential) -> None:
        """Store a credential whose secret (from `World.new_id`) already exists.

        Its parent is `credential.parent`, or the credential that its principal sent.

        Raises:
            AccessError: The chain is too long. Nothing was stored.
        """
        now, principal = self._world.now(), credential.principal
        expires_at = min(credential.expires_at, principal.expires_at or credential.expires_at)
        parent = credential.parent or principal.via
        credential = replace(credential, expires_at=expires_at, parent=parent, used_at=now)
        if len(await self._chain_of(credential)) > CHAIN_MAX:
            raise AccessError("too many logins were derived from one another; log in with a token")
        await self._sweep(now)
        await self._kv.kv_put(NAMESPACE, key_of(token), msgspec.json.encode(credential), expected=0, at=now)

    async def take(self, kind: CredentialKind, token: str) -> StoredCredential:
        """Consume a credential, and return its data.

        Raises:
            UnauthorizedError: It is not a valid credential of this kind, or another caller consumed it.
        """
        row, found = await self._find(kind, token)
        if not await self._kv.kv_delete(NAMESPACE, row.key, expected=row.version):
            raise _refusal_of(kind)
        await self._require_unbroken(found)
        return found

    async def show(self, kind: CredentialKind, token: str) -> StoredCredential:
        """Return the data of a credential.

        Raises:
            UnauthorizedError: It is not a valid credential of this kind.
        """
        row, found = await self._find(kind, token)
        await self._require_unbroken(found)
        await self._touch(row, found)
        return found

    async def require_unrevoked(self, principal: Principal, since: float) -> None:
        """Require that all credentials of a principal, which connected at `since` (seconds since 1970), are valid.

        Raises:
            UnauthorizedError: A credential has expired or was revoked.
        """
        if principal.via:
            row = await read_row(self._kv, NAMESPACE, principal.via)
            found = _decode(row) if row is not None else None
            if found is None or found.ends_at <= self._world.now():
                raise UnauthorizedError("the credential of this connection is no longer valid")
            await self._require_unbroken(found)
        if await self._revocations.locked_out_at(principal.key) >= since:
            raise UnauthorizedError("this principal was locked out; send a new credential")
        if not await self._is_current(principal):
            raise UnauthorizedError("the token of this connection is no longer valid")

    async def above_cookie(self, principal: Principal) -> Principal:
        """Return a principal with the parent of their cookie as credential, for a new cookie that replaces it."""
        row = await read_row(self._kv, NAMESPACE, principal.via) if principal.via else None
        found = _decode(row) if row is not None else None
        if found is None or found.kind is not CredentialKind.COOKIE:
            return principal
        return replace(principal, via=found.parent)

    async def withdraw(self, token: str) -> None:
        """Revoke a credential with all derived ones. An unknown one changes nothing."""
        await self.revoke([key_of(token)])

    async def revoke_viewer_tokens(self, session: str) -> int:
        """Revoke all viewer tokens of a session with all derived credentials; return the number."""
        rows = await self.read_all()
        return await self.revoke([key for key, credential in rows if credential.principal.session == session])

    async def revoke(self, keys: Sequence[str]) -> int:
        """Revoke credentials, by their digests, with all derived ones; return the number of removed rows.

        Parents are removed first: after a crash in between, the rest have a broken chain.
        """
        children: dict[str, list[str]] = {}
        for key, credential in await self.read_all():
            children.setdefault(credential.parent, []).append(key)
        going = list(dict.fromkeys(keys))
        for key in going:  # grows during the loop
            going += [child for child in children.get(key, ()) if child not in going]
        gone = 0
        for key in going:
            row = await read_row(self._kv, NAMESPACE, key)
            while row is not None and not await self._kv.kv_delete(NAMESPACE, key, expected=row.version):
                row = await read_row(self._kv, NAMESPACE, key)  # its last use was stored in between
            gone += row is not None
        return gone

    async def read_all(self) -> Sequence[tuple[str, StoredCredential]]:
        """Return all stored credentials with their digests, newest write first.

        Rows that cannot be read are left out; their credentials are refused anyway.
        """
        rows = [(row.key, _decode(row)) for row in await self._kv.kv_list(NAMESPACE)]
        return [(key, credential) for key, credential in rows if credential is not None]

    async def _find(self, kind: CredentialKind, token: str) -> tuple[KeyValueEntry, StoredCredential]:
        row = await read_row(self._kv, NAMESPACE, key_of(token)) if len(token) <= _TOKEN_CHARS_MAX else None
        found = _decode(row) if row is not None else None
        if row is None or found is None or found.kind is not kind or found.ends_at <= self._world.now():
            raise _refusal_of(kind)
        return row, found

    async def _require_unbroken(self, credential: StoredCredential) -> None:
        """Require that a credential and all credentials above it are valid."""
        chain = await self._chain_of(credential)
        now, last = self._world.now(), chain[-1][1]
        for row, each in chain:
            if await self._revocations.locked_out_at(each.issued_by) >= each.issued_at:
                raise UnauthorizedError("this principal was locked out; send a new credential")
            if each.ends_at <= now:
                raise _refusal_of(credential.kind)
            if row is not None:
                await self._touch(row, each)
        if last.parent or not await self._is_current(credential.principal):
            raise UnauthorizedError(f"the credential behind this {credential.kind.value} is no longer valid")

    async def _chain_of(
        self, credential: StoredCredential
    ) -> list[tuple[KeyValueEntry | None, StoredCredential]]:
        """Return a credential and those above it. If the last one has a parent, the chain is broken or too long."""
        chain: list[tuple[KeyValueEntry | None, StoredCredential]] = [(None, credential)]
        while len(chain) <= CHAIN_MAX and (parent := chain[-1][1].parent):
            row = await read_row(self._kv, NAMESPACE, parent)
            found = _decode(row) if row is not None else None
            if row is None or found is None:
                break
            chain.append((row, found))
        return chain

    async def _touch(self, row: KeyValueEntry, credential: StoredCredential) -> None:
        """Store the time of use of a credential that expires without use."""
        now = self._world.now()
        if credential.idle_s and now - credential.used_at >= credential.idle_s * _TOUCH_SHARE:
            body = msgspec.json.encode(replace(credential, used_at=now))
            with suppress(EntryMovedError):  # another use was stored, or it was revoked
                await self._kv.kv_put(NAMESPACE, row.key, body, expected=row.version, at=now)

    async def _sweep(self, now: float) -> None:
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        for row in await self._kv.kv_list(NAMESPACE):
            credential = _decode(row)
            if credential is None or credential.ends_at <= now:
                await self._kv.kv_delete(NAMESPACE, row.key, expected=row.version)


def key_of(token: str) -> str:
    """Return the digest of a credential, its key in the store."""
    return hashlib.blake2b(token.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _decode(row: KeyValueEntry) -> StoredCredential | None:
    """Decode a row; return None if it is damaged, or of another version."""
    try:
        return msgspec.json.decode(row.body, type=StoredCredential)
    except (msgspec.DecodeError, RecursionError):
        return None


def _refusal_of(kind: CredentialKind) -> UnauthorizedError:
    names = {CredentialKind.LOGIN: "login link", CredentialKind.VIEWER: "viewer token"}
    return UnauthorizedError(f"this {names.get(kind, kind.value)} is not, or no longer, valid")
