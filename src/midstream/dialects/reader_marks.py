"""Entries about the readers of responses, for the other processes of a store and for the next one."""

from __future__ import annotations

import contextlib

from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import EntryMovedError
from midstream.session.applications import ApplicationResponse
from midstream.store.contract import Store

READERS = "gateway-readers"
"""Namespace of nodes with readers of a response, by response id and node name. The body is the epoch of the session if
that node runs it, else empty."""
DELIVERED = "gateway-delivered"
"""Namespace of responses that a client has received to their end."""
MARKED_WITHIN_S = 0.5
"""Seconds after the begin of a response, or after its end, in which its node writes these entries."""
PAUSE_S = 0.02


class ReaderMarks:
    """The entries of one store about the readers of responses. If the store fails, methods raise its errors."""

    def __init__(self, store: Store, world: World) -> None:
        self._store = store
        self._world = world

    async def add(self, response_id: str, runner: Runner | None) -> None:
        """Store that this node has readers of a response.

        Args:
            runner: The session of the response, if it is awake here.
        """
        key = self._key(response_id)
        if await self._store.kv_get(READERS, key) is None:
            epoch = str(runner.state.epoch) if runner is not None and runner.has_lease else ""
            await self._store.kv_put(READERS, key, epoch.encode(), expected=0, at=self._world.now())

    async def remove(self, response_id: str) -> None:
        """Store that this node has no readers of a response any more."""
        key = self._key(response_id)
        if (kept := await self._store.kv_get(READERS, key)) is not None:
            await self._store.kv_delete(READERS, key, expected=kept.version)

    async def is_read_elsewhere(self, response_id: str) -> bool:
        """Return whether another node has readers of a response; a dead node with readers also counts."""
        return bool(await self._epochs(response_id))

    async def note_delivered(self, response_id: str) -> None:
        """Store that a client has received a response to its end."""
        with contextlib.suppress(EntryMovedError):  # another reader received it too
            await self._store.kv_put(DELIVERED, response_id, b"", expected=0, at=self._world.now())

    async def was_delivered(self, response_id: str) -> bool:
        """Return whether a client has received a response to its end, at any node."""
        return await self._store.kv_get(DELIVERED, response_id) is not None

    async def is_used_elsewhere(self, response: ApplicationResponse, runner: Runner) -> bool:
        """Return whether a client has received a response to its end, or reads it at the living node that runs it.

        This waits while the entries may still change: for a response that has just begun, or has just ended with a
        reader, and until the store would have noticed the death of the node.
        """
        begun_at, epoch = self._world.monotonic(), runner.state.epoch
        first_s = min(max(response.at + MARKED_WITHIN_S - self._world.now(), 0.0), MARKED_WITHIN_S)
        last_s = MARKED_WITHIN_S + self._store.death_noticed_s
        while True:
            if await self.was_delivered(response.id):
                return True
            if runner.is_stale:
                await runner.refresh()
            epochs, waited_s = await self._epochs(response.id), self._world.monotonic() - begun_at
            if waited_s >= (last_s if epochs else first_s):
                return False
            is_open = (runner.state.application.response(response.number) or response).is_open
            is_alive = runner.state.epoch == epoch and waited_s >= self._store.death_noticed_s
            if is_open and is_alive and str(epoch) in epochs:
                return await self._store.is_held_elsewhere(runner.session_id)
            await self._world.sleep(PAUSE_S)

    async def _epochs(self, response_id: str) -> set[str]:
        """Return the bodies of the entries of all other nodes with readers."""
        own = self._key(response_id)
        rows = await self._store.kv_list(READERS)
        return {row.body.decode() for row in rows if row.key.startswith(f"{response_id} ") and row.key != own}

    def _key(self, response_id: str) -> str:
        return f"{response_id} {self._store.node}"
