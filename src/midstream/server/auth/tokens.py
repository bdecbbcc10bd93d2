"""Credentials that this server issues: tickets, login links, cookies, viewers' passes.

Each is 128 random bits behind the name of its kind. The store keeps a digest with what it is good for, so that every
process of the store accepts it, and a reader of the store cannot use it. What was used up, is too old or never was
looks the same from outside.

Each is bound to its source. That is the credential of this server that was sent when it was issued (its parent), or, at
the end of the chain, the credential from outside, such as a line of a token file. The whole chain is checked at each
use: a credential is good only as long as everything above it is.
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
"""Return whether the credential from outside that a principal's credentials come from is still good."""

TICKET_S = 30.0
"""Seconds a ticket is good for: a page requests one when it is about to connect."""
LOGIN_LINK_S = 3600.0
"""Seconds in which a printed link may be opened, once."""
COOKIE_S = 30 * 24 * 3600.0
"""Seconds after which a browser must log in again, however often it is used."""
COOKIE_IDLE_S = 7 * 24 * 3600.0
"""Seconds without use after which a browser must log in again."""
VIEWER_S_MAX = 30 * 24 * 3600.0
"""Longest life of a viewer's pass, in seconds."""
SWEEP_S = 600.0
"""Seconds between two removals of credentials that have ended."""
CHAIN_MAX = 8
"""Credentials above one another: cookies and links that were issued for a cookie, and so on."""
ID_LENGTH = 16
"""Characters of the digest by which people name a credential."""
NAMESPACE = "access-passes"
_WORD_CHARS_MAX = 64
_TOUCH_SHARE = 1 / 100
"""Part of `idle_s` after which a use is written down again."""


class TokenKind(StrEnum):
    """Properties of a pass."""

    TICKET = "ticket"
    """Opens one connection, once."""
    LOGIN = "login"
    """Is exchanged for a cookie, once."""
    COOKIE = "cookie"
    VIEWER = "viewer"
    """Lets its bearer read one session."""


class AccessToken(Struct, frozen=True, omit_defaults=True):
    """Rights that a pass gives.

    Args:
        kind: See `TokenKind`.
        principal: Whom it lets in.
        issued_at, expires_at: In seconds since 1970.
        session, action, origin: What a ticket is bound to: "" is no session, action, or page.
        issuer: Key of the principal that it was issued by; "" for its own principal.
        parent: Digest of the credential of this server that it was issued for; "" for one from outside.
        idle_s, used_at: It ends when it was not used for so many seconds, the last time then; 0 for no such end.
    """

    kind: TokenKind
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
        """Key of the principal that answers for it."""
        return self.issuer or self.principal.key

    @property
    def ends_at(self) -> float:
        """When it ends, in seconds since 1970, unless it is used before."""
        return min(self.expires_at, self.used_at + self.idle_s) if self.idle_s else self.expires_at


class AccessTokens:
    """Issue, check and revoke the credentials of this server.

    Args:
        is_current: Checks the end of each chain. See `credential_sources`.
    """

    def __init__(self, kv: KeyValue, world: World, revocations: Revocations, is_current: IsCurrent) -> None:
        self._kv = kv
        self._world = world
        self._revocations = revocations
        self._is_current = is_current
        self._sweep_at = 0.0

    async def issue(
        self,
        kind: TokenKind,
        principal: Principal,
        *,
        for_s: float,
        idle_s: float = 0.0,
        session: str = "",
        action: str = "",
        origin: str = "",
    ) -> str:
        """Return a new pass. It ends with the principal's own credential, if that is earlier than `for_s` seconds.

        Raises:
            AccessError: Too many credentials stand above it. Nothing was issued.
        """
        word = self._world.new_id(kind.value)
        now = self._world.now()
        token = AccessToken(kind, principal, now, now + for_s, session, action, origin, idle_s=idle_s)
        await self.keep(word, token)
        return word

    async def keep(self, word: str, token: AccessToken) -> None:
        """Store a word that was drawn already (by `World.new_id`) as a token.

        Its parent is the credential that its principal sent, where the token names none.

        Raises:
            AccessError: Too many credentials stand above it. Nothing was stored.
        """
        now, principal = self._world.now(), token.principal
        expires_at = min(token.expires_at, principal.expires_at or token.expires_at)
        parent = token.parent or principal.via
        token = replace(token, expires_at=expires_at, parent=parent, used_at=now)
        if len(await self._chain_of(token)) > CHAIN_MAX:
            raise AccessError("too many logins were derived from one another; log in with a token")
        await self._sweep(now)
        await self._kv.kv_put(NAMESPACE, key_of(word), msgspec.json.encode(token), expected=0, at=now)

    async def take(self, kind: TokenKind, word: str) -> AccessToken:
        """Use a pass up and return what it was good for.

        Raises:
            UnauthorizedError: It is not a token of this kind, not any more, or another caller was faster.
        """
        row, found = await self._find(kind, word)
        if not await self._kv.kv_delete(NAMESPACE, row.key, expected=row.version):
            raise _refusal_of(kind)
        await self._require_unbroken(found)
        return found

    async def show(self, kind: TokenKind, word: str) -> AccessToken:
        """Return what a pass is good for.

        Raises:
            UnauthorizedError: It is no pass of this kind, or not any more.
        """
        row, found = await self._find(kind, word)
        await self._require_unbroken(found)
        await self._touch(row, found)
        return found

    async def require_standing(self, principal: Principal, since: float) -> None:
        """Require that the credentials behind a principal, which came at `since` (seconds since 1970), are still good.

        Raises:
            UnauthorizedError: One of them has ended or was revoked.
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
        """Return a principal as the credential above their cookie shows it, for a cookie in the place of that one."""
        row = await read_row(self._kv, NAMESPACE, principal.via) if principal.via else None
        found = _decode(row) if row is not None else None
        if found is None or found.kind is not TokenKind.COOKIE:
            return principal
        return replace(principal, via=found.parent)

    async def withdraw(self, word: str) -> None:
        """End a pass, and all that was issued for it. Harmless where it is none."""
        await self.revoke([key_of(word)])

    async def withdraw_viewers(self, session: str) -> int:
        """End all viewers' passes of a session, and what was issued for them; return how many there were."""
        rows = await self.read_all()
        return await self.revoke([key for key, token in rows if token.principal.session == session])

    async def revoke(self, keys: Sequence[str]) -> int:
        """End credentials, named by their digests, and all that was issued for them; return how many rows went.

        The named ones go first: after a crash in between, the rest have a broken chain.
        """
        children: dict[str, list[str]] = {}
        for key, token in await self.read_all():
            children.setdefault(token.parent, []).append(key)
        going = list(dict.fromkeys(keys))
        for key in going:  # grows while it is read
            going += [child for child in children.get(key, ()) if child not in going]
        gone = 0
        for key in going:
            row = await read_row(self._kv, NAMESPACE, key)
            while row is not None and not await self._kv.kv_delete(NAMESPACE, key, expected=row.version):
                row = await read_row(self._kv, NAMESPACE, key)  # a use was written down in between
            gone += row is not None
        return gone

    async def read_all(self) -> Sequence[tuple[str, AccessToken]]:
        """Return all credentials that are stored, each with its digest, last written first.

        A row that cannot be read is left out; its credential is refused as well.
        """
        rows = [(row.key, _decode(row)) for row in await self._kv.kv_list(NAMESPACE)]
        return [(key, token) for key, token in rows if token is not None]

    async def _find(self, kind: TokenKind, word: str) -> tuple[KeyValueEntry, AccessToken]:
        row = await read_row(self._kv, NAMESPACE, key_of(word)) if len(word) <= _WORD_CHARS_MAX else None
        found = _decode(row) if row is not None else None
        if row is None or found is None or found.kind is not kind or found.ends_at <= self._world.now():
            raise _refusal_of(kind)
        return row, found

    async def _require_unbroken(self, token: AccessToken) -> None:
        """Require that a credential, and all above it, are as they were when it was issued."""
        chain = await self._chain_of(token)
        now, last = self._world.now(), chain[-1][1]
        for row, each in chain:
            if await self._revocations.locked_out_at(each.issued_by) >= each.issued_at:
                raise UnauthorizedError("this principal was locked out; send a new credential")
            if each.ends_at <= now:
                raise _refusal_of(token.kind)
            if row is not None:
                await self._touch(row, each)
        if last.parent or not await self._is_current(token.principal):
            raise UnauthorizedError(f"the credential behind this {token.kind.value} is no longer valid")

    async def _chain_of(self, token: AccessToken) -> list[tuple[KeyValueEntry | None, AccessToken]]:
        """Return a credential and those above it; the last one has a parent where the chain is broken or too long."""
        chain: list[tuple[KeyValueEntry | None, AccessToken]] = [(None, token)]
        while len(chain) <= CHAIN_MAX and (parent := chain[-1][1].parent):
            row = await read_row(self._kv, NAMESPACE, parent)
            found = _decode(row) if row is not None else None
            if row is None or found is None:
                break
            chain.append((row, found))
        return chain

    async def _touch(self, row: KeyValueEntry, token: AccessToken) -> None:
        """Write down that a credential was used, where its end depends on that."""
        now = self._world.now()
        if token.idle_s and now - token.used_at >= token.idle_s * _TOUCH_SHARE:
            body = msgspec.json.encode(replace(token, used_at=now))
            with suppress(EntryMovedError):  # another use was written down, or it was revoked
                await self._kv.kv_put(NAMESPACE, row.key, body, expected=row.version, at=now)

    async def _sweep(self, now: float) -> None:
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        for row in await self._kv.kv_list(NAMESPACE):
            token = _decode(row)
            if token is None or token.ends_at <= now:
                await self._kv.kv_delete(NAMESPACE, row.key, expected=row.version)


def key_of(word: str) -> str:
    """Return what is kept of a pass: its digest."""
    return hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _decode(row: KeyValueEntry) -> AccessToken | None:
    """Return what a row holds; None where it is damaged, or of another version."""
    try:
        return msgspec.json.decode(row.body, type=AccessToken)
    except (msgspec.DecodeError, RecursionError):
        return None


def _refusal_of(kind: TokenKind) -> UnauthorizedError:
    names = {TokenKind.LOGIN: "login link", TokenKind.VIEWER: "viewer's pass"}
    return UnauthorizedError(f"this {names.get(kind, kind.value)} is not, or no longer, valid")
