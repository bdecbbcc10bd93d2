"""Deletion of sessions and their sub-agents' sessions, also if another node runs them."""

from __future__ import annotations

from typing import Protocol

from midstream.engine.awake_sessions import AwakeSessions
from midstream.engine.runner import Runner
from midstream.errors import (
    LeaseHeldError,
    MidstreamError,
    SessionLockedError,
    SessionNotFoundError,
    UnavailableError,
)
from midstream.session.child_names import root_of
from midstream.store.contract import Store

GIVE_UP_REQUESTS_MAX = 100
"""Requests to other nodes to release a session, or a sub-agent's session, that is to be deleted."""


class DeletableSessions(Protocol):
    """The sessions of a host."""

    awake: AwakeSessions

    async def session(self, session_id: str) -> Runner:
        """Return an existing session, awake."""

    async def awaken(self, session_id: str) -> Runner:
        """Return a session, awake, existing or not."""

    async def close(self, session_id: str, error: MidstreamError) -> None:
        """Close a session and its sub-agents in this process."""


class SessionDeletion:
    """The deletions that run in one host."""

    def __init__(self, sessions: DeletableSessions, store: Store) -> None:
        self._sessions = sessions
        self._store = store
        self._running: set[str] = set()
        """The root sessions of the running deletions."""

    async def delete(self, session_id: str) -> None:
        """Delete a session; see `Host.delete`."""
        try:
            await self._sessions.session(session_id)
        except SessionLockedError:
            await self._store.delete(session_id)  # no runner has it here, and deletion reads no record
            return
        self.refuse_while_running(session_id)
        for runner in self._sessions.awake.family_of(session_id):
            runner.refuse_while_running()
        self._running.add(root_of(session_id))
        try:
            await self._delete_and_close(session_id)
        finally:
            self._running.discard(root_of(session_id))

    def refuse_while_running(self, session_id: str) -> None:
        """Refuse work in a session while it, its parent or a sub-agent's session is being deleted. Its readers get no
        error.

        Raises:
            UnavailableError: One of them is being deleted.
        """
        if root_of(session_id) in self._running:
            raise UnavailableError(f"session {session_id!r} is being deleted", retry_after_s=1.0)

    async def _delete_and_close(self, session_id: str) -> None:
        # In this order: if the store refuses, nothing has changed and no reader got an error.
        try:
            await self._delete(session_id)
        except MidstreamError:
            raise
        except BaseException:  # the outcome is unknown: readers reconnect and see it
            error = UnavailableError(f"session {session_id!r} may be deleted")
            await self._sessions.close(session_id, error)
            raise
        await self._sessions.close(session_id, SessionNotFoundError(f"session {session_id!r} was deleted"))

    async def _delete(self, session_id: str) -> None:
        for _ in range(GIVE_UP_REQUESTS_MAX):
            try:
                await self._store.delete(session_id)
            except LeaseHeldError as error:
                holding = await self._sessions.awaken(error.session or session_id)
                await holding.request_release()
            else:
                return
        raise UnavailableError(f"session {session_id!r} is being opened; try again")
