"""Ways to authenticate, as the server uses them: each also finds whether a credential that it accepted is still good.

A function of an application is one of them. It cannot be called without the credential itself, which is not kept; so
`Access(still_valid=...)` decides about what was issued for it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec import Struct
from starlette.requests import HTTPConnection
from typing_extensions import override

from midstream.environment import World
from midstream.server.auth.principals import Principal
from midstream.store.contract import KeyValue

T = TypeVar("T")
Authenticate = Callable[[HTTPConnection], Principal | Awaitable[Principal | None] | None]
"""Return who makes this request; None for a stranger."""
StillValid = Callable[[Principal], bool | Awaitable[bool]]
"""Return whether a principal may still use what was issued to them."""


class ServerProof(Struct, frozen=True):
    """Proof that a server has the key of this user.

    Args:
        start: Random name of this start of the server. The token that it accepts is made of it.
        proof: HMAC of the client's nonce, the address and the start, under the key.
    """

    start: str
    proof: str


class CredentialSource:
    """A way to authenticate requests."""

    async def __call__(self, connection: HTTPConnection) -> Principal | None:
        """Return who makes this request; None for a stranger."""
        raise NotImplementedError

    async def is_current(self, principal: Principal) -> bool:
        """Return whether the credential that `principal.source` names would be accepted now."""
        raise NotImplementedError

    def has_changed(self) -> bool:
        """Return whether credentials may have ended since the last call: live connections are then checked."""
        return False

    def prove(self, nonce: str, connection: HTTPConnection) -> ServerProof | None:  # noqa: ARG002 - for those that can
        """Return the proof for a client of this user; None where this way has no such key."""
        return None

    async def refresh(self, kv: KeyValue, world: World) -> None:
        """Write to the store what other processes of the store need. Called at the start, and every `WATCH_S`
        seconds.
        """


class FunctionSource(CredentialSource):
    """A function of the application."""

    def __init__(self, authenticate: Authenticate, still_valid: StillValid | None = None) -> None:
        self._authenticate = authenticate
        self._still_valid = still_valid

    @override
    async def __call__(self, connection: HTTPConnection) -> Principal | None:
        return await settle(self._authenticate(connection))

    @override
    async def is_current(self, principal: Principal) -> bool:
        if principal.source:
            return False  # another way accepted it, which this server does not have
        return self._still_valid is None or await settle(self._still_valid(principal))


class FirstOf(CredentialSource):
    """Several ways, tried one after the other."""

    def __init__(self, ways: tuple[Authenticate, ...], still_valid: StillValid | None = None) -> None:
        self.ways = ways
        self._sources = [source_of(way, still_valid) for way in ways]

    @override
    async def __call__(self, connection: HTTPConnection) -> Principal | None:
        for way in self._sources:
            principal = await way(connection)
            if principal is not None:
                return principal
        return None

    @override
    async def is_current(self, principal: Principal) -> bool:
        return any([await way.is_current(principal) for way in self._sources])

    @override
    def has_changed(self) -> bool:
        # Each must be called: it stores what it has seen.
        changes = [way.has_changed() for way in self._sources]
        return any(changes)

    @override
    def prove(self, nonce: str, connection: HTTPConnection) -> ServerProof | None:
        proofs = (way.prove(nonce, connection) for way in self._sources)
        return next((proof for proof in proofs if proof is not None), None)

    @override
    async def refresh(self, kv: KeyValue, world: World) -> None:
        for way in self._sources:
            await way.refresh(kv, world)


def source_of(authenticate: Authenticate, still_valid: StillValid | None = None) -> CredentialSource:
    """Return a way to authenticate as the server uses it."""
    if isinstance(authenticate, FirstOf):
        return FirstOf(authenticate.ways, still_valid)
    if isinstance(authenticate, CredentialSource):
        return authenticate
    return FunctionSource(authenticate, still_valid)


async def settle(value: T | Awaitable[T]) -> T:
    """Return what a function of the application returned, which may be a coroutine."""
    return await value if inspect.isawaitable(value) else value
