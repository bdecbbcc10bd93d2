"""Credentials that this server issues: tickets, login links, cookies, viewers' passes.

Each is 128 random bits behind the name of its kind. The store keeps a digest with what it is good for, so that every
process of the store accepts it, and a reader of the store cannot use it. What was used up, is too old or never was
looks the same from outside.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct

from midstream.environment import World
from midstream.errors import UnauthorizedError
from midstream.server.auth.principals import Principal
from midstream.store.contract import KeyValue, KeyValueEntry

TICKET_S = 30.0
"""Seconds a ticket is good for: a page asks for one when it is about to connect."""
LOGIN_LINK_S = 3600.0
"""Seconds in which a printed link may be opened, once."""
COOKIE_S = 7 * 24 * 3600.0
"""Seconds a browser stays logged in."""
VIEWER_S_MAX = 30 * 24 * 3600.0
"""Longest life of a viewer's pass, in seconds."""
SWEEP_S = 600.0
"""Seconds between two looks for passes that are too old."""
NAMESPACE = "access-passes"
_WORD_CHARS_MAX = 64


class TokenKind(StrEnum):
    """Properties of a pass."""

    TICKET = "ticket"
    """Opens one connection, once."""
    LOGIN = "login"
    """Is exchanged for a cookie, once."""
    COOKIE = "cookie"
    VIEWER = "viewer"
    """Lets its bearer read one session."""


class AccessToken(Struct, frozen=True):
    """Rights that a pass gives.

    Args:
        kind: See `TokenKind`.
        principal: Whom it lets in.
        issued_at, expires_at: In seconds since 1970.
        session, action, origin: What a ticket is bound to: "" is no session, action, or page.
    """

    kind: TokenKind
    principal: Principal
    issued_at: float
    expires_at: float
    session: str = ""
    action: str = ""
    origin: str = ""


class AccessTokens:
    """Issue and check passes."""

    def __init__(self, kv: KeyValue, world: World) -> None:
        self._kv = kv
        self._world = world
        self._sweep_at = 0.0

    async def issue(
        self,
        kind: TokenKind,
        principal: Principal,
        *,
        for_s: float,
        session: str = "",
        action: str = "",
        origin: str = "",
    ) -> str:
        """Return a new pass. It ends with the principal's own credential, if that is earlier than `for_s` seconds."""
        word = self._world.new_id(kind.value)
        await self.keep(word, kind, principal, for_s=for_s, session=session, action=action, origin=origin)
        return word

    async def keep(
        self,
        word: str,
        kind: TokenKind,
        principal: Principal,
        *,
        for_s: float,
        session: str = "",
        action: str = "",
        origin: str = "",
    ) -> None:
        """Store a word that was drawn already (by `World.new_id`) as a token."""
        now = self._world.now()
        ends_at = now + for_s
        if principal.expires_at is not None:
            ends_at = min(ends_at, principal.expires_at)
        issued = AccessToken(kind, principal, now, ends_at, session, action, origin)
        await self._sweep(now)
        await self._kv.kv_put(NAMESPACE, key_of(word), msgspec.json.encode(issued), expected=0, at=now)

    async def take(self, kind: TokenKind, word: str) -> AccessToken:
        """Use a pass up and return what it was good for.

        Raises:
            UnauthorizedError: It is not a token of this kind, not any more, or another caller was faster.
        """
        kept, found = await self._find(kind, word)
        if not await self._kv.kv_delete(NAMESPACE, kept.key, expected=kept.version):
            raise _refusal_of(kind)
        return found

    async def show(self, kind: TokenKind, word: str) -> AccessToken:
        """Return what a pass is good for.

        Raises:
            UnauthorizedError: It is no pass of this kind, or not any more.
        """
        return (await self._find(kind, word))[1]

    async def has(self, key: str) -> bool:
        """Whether the pass of this digest is still kept."""
        return await self._kv.kv_get(NAMESPACE, key) is not None

    async def withdraw(self, word: str) -> None:
        """Let a pass be none. Harmless where it is none."""
        kept = await self._kv.kv_get(NAMESPACE, key_of(word))
        if kept is not None:
            await self._kv.kv_delete(NAMESPACE, kept.key, expected=kept.version)

    async def withdraw_viewers(self, session: str) -> int:
        """Let all viewers' passes of a session be none, and what was issued for them; return how many there were."""
        fitting = [kept for kept, issued in await self._all() if issued.principal.session == session]
        return sum([await self._kv.kv_delete(NAMESPACE, kept.key, expected=kept.version) for kept in fitting])

    async def _find(self, kind: TokenKind, word: str) -> tuple[KeyValueEntry, AccessToken]:
        kept = await self._kv.kv_get(NAMESPACE, key_of(word)) if len(word) <= _WORD_CHARS_MAX else None
        if kept is not None:
            found = msgspec.json.decode(kept.body, type=AccessToken)
            if found.kind is kind and self._world.now() < found.expires_at:
                return kept, found
        raise _refusal_of(kind)

    async def _sweep(self, now: float) -> None:
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        for kept, issued in await self._all():
            if issued.expires_at <= now:
                await self._kv.kv_delete(NAMESPACE, kept.key, expected=kept.version)

    async def _all(self) -> Sequence[tuple[KeyValueEntry, AccessToken]]:
        return [
            (kept, msgspec.json.decode(kept.body, type=AccessToken))
            for kept in await self._kv.kv_list(NAMESPACE)
        ]


def key_of(word: str) -> str:
    """Return what is kept of a pass: its digest."""
    return hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _refusal_of(kind: TokenKind) -> UnauthorizedError:
    names = {TokenKind.LOGIN: "login link", TokenKind.VIEWER: "viewer's pass"}
    return UnauthorizedError(f"this {names.get(kind, kind.value)} is not, or no longer, valid")
