"""Stores small values of MCP sessions outside the sessions of the agent; they survive a server."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from msgspec import Struct

from midstream.dialects.mcp_messages import HANDSHAKES, CallPlace, Json, McpClient, digest_of
from midstream.dialects.opaque_tokens import pack
from midstream.engine.host import Host
from midstream.errors import EntryMovedError
from midstream.server.auth.caller import Caller

SESSIONS, CALLS = "mcp-sessions", "mcp-calls"
"""Namespaces of MCP sessions, and of calls whose session is not derived from their id."""
KEPT_S = 30 * 24 * 3600.0
"""Seconds for which an MCP session is kept after its last use."""
TOUCH_S = 24 * 3600.0
"""Seconds between two records of its use."""
SWEEP_S = 600.0
"""Seconds between two searches for expired values."""
SWEPT_MAX = 500
"""Maximum number of expired values to remove each time."""


class _Note(Struct, frozen=True):
    version: str
    can_elicit: bool = False


class McpSessions:
    """The MCP sessions of a store, which all its servers share."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._swept_at = 0.0

    async def begin(self, caller: Caller, params: Json) -> McpClient:
        """Begin a session for a client; return the client with the negotiated version."""
        await self._sweep()
        wanted, capabilities = params.get("protocolVersion"), params.get("capabilities")
        version = wanted if wanted in HANDSHAKES else HANDSHAKES[-1]
        client = McpClient(version, capabilities if isinstance(capabilities, dict) else {})
        name, store = self._host.world.new_id("mcp"), self._host.store
        body = msgspec.json.encode(_Note(version, client.can_elicit))
        await store.kv_put(SESSIONS, caller.stored_name(name), body, expected=0, at=self._host.world.now())
        return msgspec.structs.replace(client, session=name)

    async def find(self, caller: Caller, name: str) -> McpClient | None:
        """Return the client of a session; None if the session does not exist."""
        key, store, now = caller.stored_name(name), self._host.store, self._host.world.now()
        kept = await store.kv_get(SESSIONS, key)
        if kept is None:
            return None
        if now - kept.at > TOUCH_S:
            with suppress(EntryMovedError):
                await store.kv_put(SESSIONS, key, kept.body, expected=kept.version, at=now)
        note = msgspec.json.decode(kept.body, type=_Note)
        return McpClient(note.version, {"elicitation": {}} if note.can_elicit else {}, name)

    async def end(self, caller: Caller, name: str) -> bool:
        """End a session; return whether it existed. Its calls continue."""
        key, store = caller.stored_name(name), self._host.store
        kept = await store.kv_get(SESSIONS, key)
        return kept is not None and await store.kv_delete(SESSIONS, key, expected=kept.version)

    async def note_call(self, client: McpClient, rpc_id: object, session: str, stream: str) -> None:
        """Store the session of a call before it begins, if its client chose the session or id, so that any server can
        cancel it.

        Args:
            session: Session of the agent.
            stream: Name of the call's stream in it.
        """
        key = f"{client.session}.{digest_of(rpc_id)}"
        with suppress(EntryMovedError):  # a repetition
            body = msgspec.json.encode((session, stream))
            await self._host.store.kv_put(CALLS, key, body, expected=0, at=self._host.world.now())

    async def find_call(self, client: McpClient, rpc_id: object) -> tuple[str, str] | None:
        """Return what `note_call` stored: the session and the stream of a call."""
        kept = await self._host.store.kv_get(CALLS, f"{client.session}.{digest_of(rpc_id)}")
        return None if kept is None else msgspec.json.decode(kept.body, type=tuple[str, str])

    async def note_return(self, place: CallPlace) -> None:
        """Store that a client reconnected to its call at any server, so that the call is not cancelled."""
        key, store = f"back.{pack(place)}", self._host.store
        kept = await store.kv_get(CALLS, key)
        with suppress(EntryMovedError):  # by another return
            version = kept.version if kept else 0
            await store.kv_put(CALLS, key, b"", expected=version, at=self._host.world.now())

    async def returned_at(self, place: CallPlace) -> float:
        """Return the time when a client last reconnected to its call, in seconds since 1970; 0 for never."""
        kept = await self._host.store.kv_get(CALLS, f"back.{pack(place)}")
        return 0.0 if kept is None else kept.at

    async def _sweep(self) -> None:
        now, store = self._host.world.now(), self._host.store
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        for namespace in (SESSIONS, CALLS):
            old = [each for each in await store.kv_list(namespace) if each.at < now - KEPT_S]
            for kept in old[:SWEPT_MAX]:
                await store.kv_delete(namespace, kept.key, expected=kept.version)
