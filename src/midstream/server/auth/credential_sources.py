"""Authenticators of the server. Each one also checks whether a credential that it accepted is still valid.

A function of an application needs the credential itself, which is not kept. So `Access(still_valid=...)` decides about
credentials that were derived from it.
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
"""Returns the principal of a request, or None if it has no known credential."""
StillValid = Callable[[Principal], bool | Awaitable[bool]]
"""Returns whether a principal may still use credentials that were issued to them."""


class ServerProof(Struct, frozen=True):
    """Proof that a server has the key of this user.

    Args:
        start: Random id of this start of the server. The accepted token is derived from it.
        proof: HMAC of the client's nonce, the address and the start, under the key.
    """

    start: str
    proof: str


class CredentialSource:
    """Authenticator of requests."""

    async def __call__(self, connection: HTTPConnection) -> Principal | None:
        """Return the principal of a request, or None if it has no known credential."""
        raise NotImplementedError

    async def is_current(self, principal: Principal) -> bool:
        """Return whether the credential of `principal.source` would still be accepted."""
        raise NotImplementedError

    def has_changed(self) -> bool:
        """Return whether credentials may have ended since the last call. Open connections are then checked."""
        return False

    def prove(self, nonce: str, connection: HTTPConnection) -> ServerProof | None:  # noqa: ARG002 - for those that can
        """Return the proof for a local client; None without a key of the user."""
        return None

    async def refresh(self, kv: KeyValue, world: World) -> None:
        """Update shared rows in the store. Called at the start, and every `WATCH_S` seconds."""


class FunctionSource(CredentialSource):
    """Authentication by a function of the application."""

    def __init__(self, authenticate: Authenticate, still_valid: StillValid | None = None) -> None:
        self._authenticate = authenticate
        self._still_valid = still_valid

    @override
    async def __call__(self, connection: HTTPConnection) -> Principal | None:
        return await settle(self._authenticate(connection))

    @override
    async def is_current(self, principal: Principal) -> bool:
        if principal.source:
            return False  # it was accepted by an authenticator that this server does not have
        return self._still_valid is None or await settle(self._still_valid(principal))


class FirstOf(CredentialSource):
    """Several authenticators, tried one after the other."""

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
        # Each must be called, because it stores the state that it has seen.
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
    """Convert an application's authenticator to a `CredentialSource`."""
    if isinstance(authenticate, FirstOf):
        return FirstOf(authenticate.ways, still_valid)
    if isinstance(authenticate, CredentialSource):
        return authenticate
    return FunctionSource(authenticate, still_valid)


async def settle(value: T | Awaitable[T]) -> T:
    """Return the result of an application's function, which may be a coroutine."""
    return await value if inspect.isawaitable(value) else value
