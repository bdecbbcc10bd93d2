"""Authentication of the user of this machine as the operator of their own servers.

A client of this user sends a nonce, and the server proves that it has the user's key. The client then sends a token
that is derived from the key, the address of the connection and the random id of the server's start. So the key is never
sent, and a program that impersonates the server receives no token. A token is valid for one start of the server.
"""

from __future__ import annotations

import hashlib
import hmac
from contextlib import suppress

from starlette.requests import HTTPConnection
from typing_extensions import override

from midstream.environment import World
from midstream.errors import EntryMovedError
from midstream.local_keys import address_of_socket, prove_server, start_of, token_for
from midstream.server.auth.bearer_tokens import bearer_token
from midstream.server.auth.credential_sources import CredentialSource, ServerProof
from midstream.server.auth.principals import OPERATOR, Principal
from midstream.server.auth.stored_rows import read_row, version_of
from midstream.store.contract import KeyValue

STARTS = "access-starts"
"""Namespace of the starts of servers that share a port."""
START_S = 30.0
"""Seconds for which a start counts after its server's last write."""


class LocalUser(CredentialSource):
    """Authenticates clients with the key of this machine's user.

    Args:
        key: See `midstream.local_keys.read_or_make_key`.
        shares_port: Other servers of this user share the port and the store. Each accepts the tokens of the others, for
            at most `START_S` seconds after their end.
        start: Id of the server's start, which its workers share; "" for a new one.
    """

    def __init__(
        self, key: str, *, shares_port: bool = False, start: str = "", world: World | None = None
    ) -> None:
        self._key = key
        self._start = start or (world or World()).new_id("start")
        self._shares_port = shares_port
        self._shared: tuple[KeyValue, World] | None = None
        digest = hashlib.blake2b(key.encode(), digest_size=16, person=b"midstream-source").hexdigest()
        self.principal = Principal(OPERATOR.id, is_operator=True, source=f"key:{digest}")
        """The operator, bound to this key: a new key ends credentials that were issued under the old one."""

    @override
    async def __call__(self, connection: HTTPConnection) -> Principal | None:
        shown = bearer_token(connection)
        start = start_of(shown)
        expected = token_for(self._key, _address_of(connection), start)
        if not hmac.compare_digest(expected.encode(), shown.encode()):
            return None
        return self.principal if start == self._start or await self._is_shared(start) else None

    @override
    async def is_current(self, principal: Principal) -> bool:
        return principal.source == self.principal.source

    @override
    def prove(self, nonce: str, connection: HTTPConnection) -> ServerProof:
        proof = prove_server(self._key, _address_of(connection), self._start, nonce)
        return ServerProof(self._start, proof)

    @override
    async def refresh(self, kv: KeyValue, world: World) -> None:
        if not self._shares_port:
            return
        self._shared = (kv, world)
        now = world.now()
        for other in await kv.kv_list(STARTS):
            if other.key != self._start and other.at < now - START_S:
                await kv.kv_delete(STARTS, other.key, expected=other.version)
        with suppress(EntryMovedError):
            version = await version_of(kv, STARTS, self._start)
            await kv.kv_put(STARTS, self._start, b"{}", expected=version, at=now)

    async def _is_shared(self, start: str) -> bool:
        if self._shared is None:
            return False
        kv, world = self._shared
        row = await read_row(kv, STARTS, start)
        return row is not None and row.at >= world.now() - START_S


def _address_of(connection: HTTPConnection) -> str:
    """Return the local address of the socket that accepted a request; headers do not count."""
    server = connection.scope.get("server") or ("", 0)
    return address_of_socket(server)
