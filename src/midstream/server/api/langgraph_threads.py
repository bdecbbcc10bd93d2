"""The threads of LangGraph clients: sessions as threads, and stored values of threads without a message."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request

from midstream.dialects.run_fold import RunFold
from midstream.engine.host import Host
from midstream.engine.journal import require_session_id
from midstream.engine.runner import Runner
from midstream.errors import (
    EntryMovedError,
    SessionNotFoundError,
    UnavailableError,
)
from midstream.server.api.run_folds import RunFolds
from midstream.server.auth.caller import Caller, caller_of
from midstream.server.auth.principals import Action
from midstream.server.auth.session_unlocking import secrets_in, unlock
from midstream.server.transports.connection import Connections

Json = dict[str, Any]

NOTES = "langgraph-threads"
"""Namespace of values stored outside sessions: the creation time of a thread, and its metadata."""
EMPTY_S = 24 * 3600.0
"""Seconds for which a thread without a message is kept, and metadata of a deleted session."""
SWEEP_S = 600.0
"""Seconds between two searches for such threads."""
SWEPT_MAX = 500
"""Maximum number of old threads that are examined each time."""
WRITES_MAX = 8
"""Attempts to change metadata of a thread in case of concurrent changes."""


class ThreadNote(Struct, frozen=True):
    """Values of a thread that are stored outside its session."""

    at: float
    metadata: Json = {}


class OpenThread(Struct, frozen=True):
    """The thread of a request.

    Args:
        id: Id of the thread for clients.
        session: Name of the session in the store.
        caller: Client of the request.
        runner: Runner of the session; None if it has no message yet.
        note: Values stored outside the session; None for none.
    """

    id: str
    session: str
    caller: Caller
    runner: Runner | None
    note: ThreadNote | None


class ThreadNotes:
    """Stores values of threads outside their sessions."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._swept_at = 0.0
        self._swept_to = 0

    async def find(self, session: str) -> ThreadNote | None:
        """Return the stored values of a thread, or None."""
        kept = await self._host.store.kv_get(NOTES, session)
        return None if kept is None else msgspec.json.decode(kept.body, type=ThreadNote)

    async def change(self, session: str, metadata: Json) -> ThreadNote:
        """Add metadata to a thread. Creates the thread if it does not exist."""
        store = self._host.store
        for _ in range(WRITES_MAX):
            kept = await store.kv_get(NOTES, session)
            old = ThreadNote(self._host.world.now()) if kept is None else None
            old = old or msgspec.json.decode(kept.body if kept else b"", type=ThreadNote)
            note = ThreadNote(old.at, {**old.metadata, **metadata})
            body, version = msgspec.json.encode(note), kept.version if kept else 0
            try:
                await store.kv_put(NOTES, session, body, expected=version, at=self._host.world.now())
            except EntryMovedError:
                continue
            return note
        raise UnavailableError("other clients are changing this thread: retry", retry_after_s=1.0)

    async def delete(self, session: str) -> None:
        """Remove the stored values of a thread."""
        store = self._host.store
        while (kept := await store.kv_get(NOTES, session)) is not None:
            await store.kv_delete(NOTES, session, expected=kept.version)

    async def sweep(self) -> None:
        """Remove stored values of some old threads without a session."""
        now, store = self._host.world.now(), self._host.store
        if now - self._swept_at < SWEEP_S:
            return
        self._swept_at = now
        old = [kept for kept in await store.kv_list(NOTES) if kept.at < now - EMPTY_S]
        place = self._swept_to if self._swept_to < len(old) else 0
        self._swept_to = place + SWEPT_MAX
        for kept in old[place : self._swept_to]:
            if await store.find(kept.key) is None:
                await store.kv_delete(NOTES, kept.key, expected=kept.version)


class GraphThreads:
    """Opens sessions as threads, with the permissions of the client."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self.host = host
        self.connections = connections
        self.notes = ThreadNotes(host)
        self.folds = RunFolds(host, RunFold)

    @asynccontextmanager
    async def opened(self, request: Request, action: Action = Action.READ) -> AsyncIterator[OpenThread]:
        """Open the thread that the path of a request names.

        Raises:
            SessionNotFoundError: The session does not exist, or belongs to another caller.
            MidstreamError: The caller may not perform the action.
        """
        thread = request.path_params["thread"]
        require_session_id(thread)
        caller = caller_of(request.scope)
        session = caller.stored_name(thread)
        caller.set_session(session)
        note = await self.notes.find(session)
        has_messages = await self.host.store.find(session) is not None
        if note is None or has_messages:
            await caller.require_existing(action)
        elif caller.is_known:
            await caller.require(action)
        if note is None and not has_messages:
            raise SessionNotFoundError(
                f"no session {session!r}"
            )  # the same error as for a session of another caller
        with await unlock(self.host, session, secrets_in(request), action):
            runner = await self.host.session(session) if has_messages else None
            yield OpenThread(thread, session, caller, runner, note)

    async def exists(self, session: str) -> bool:
        """Return whether a thread was created, or its session has a message."""
        return await self.host.store.find(session) is not None or await self.notes.find(session) is not None
