"""Conversations without a name, which any process of a store recognizes by their messages.

The conversation's digest is stored as one entry, before the end of an answer is sent. So after a restart, or at a
second gateway on the store, the upstream need not receive the whole conversation again.
"""

from __future__ import annotations

import logging

from midstream.agents.pool_records import RECORD_AGE_MAX_S
from midstream.dialects.conversation_index import OPENINGS_MAX, ConversationIndex, ConversationPlace
from midstream.environment import World
from midstream.errors import EntryMovedError
from midstream.history.messages import Response
from midstream.store.contract import STORE_FAILURES, KeyValue

CONVERSATIONS = "gateway-conversations"
SWEEP_S = 600.0
"""Seconds between two removals of old conversations."""

_log = logging.getLogger(__name__)


class Conversations:
    """Names of conversations by the digest of their messages up to the newest response.

    If the store fails, requests still succeed with the index of this process.

    Args:
        kv: Key-value store of the entries; processes may share it.
        world: The clock.
    """

    def __init__(self, kv: KeyValue, world: World) -> None:
        self._kv = kv
        self._world = world
        self._here = ConversationIndex()

    async def look_up(self, place: ConversationPlace) -> str:
        """Return the name of the conversation that continues at a place, or ""."""
        found = self._here.look_up(place)
        if found or not place.before:
            return found
        try:
            kept = await self._kv.kv_get(CONVERSATIONS, place.before.hex())
        except STORE_FAILURES as error:
            _log.warning("a conversation cannot be looked up: %s", error.code)
            return ""
        return "" if kept is None else kept.body.decode("utf-8", "replace")

    async def add_response(self, session: str, place: ConversationPlace, response: Response) -> None:
        """Record a response durably, and remove the old digest of the conversation."""
        known_by = self._here.add_response(session, place, response)
        body, now = session.encode(), self._world.now()
        try:
            await self._kv.kv_put(CONVERSATIONS, known_by.hex(), body, expected=0, at=now)
        except EntryMovedError:
            return  # another conversation has equal messages: either may continue
        except STORE_FAILURES as error:
            _log.warning("a conversation cannot be stored: %s", error.code)
            return
        await self._delete(session, place)

    async def tend(self) -> None:
        """Periodically remove old entries, and those beyond the limit, until cancelled."""
        while True:
            try:
                await self._sweep()
            except STORE_FAILURES as error:
                _log.warning("old entries of conversations cannot be removed: %s", error.code)
            await self._world.sleep(SWEEP_S)

    async def _delete(self, session: str, place: ConversationPlace) -> None:
        if not place.before:
            return
        try:
            kept = await self._kv.kv_get(CONVERSATIONS, place.before.hex())
            if kept is not None and kept.body == session.encode():
                await self._kv.kv_delete(CONVERSATIONS, kept.key, expected=kept.version)
        except STORE_FAILURES as error:
            _log.warning("an old entry of a conversation was not removed: %s", error.code)

    async def _sweep(self) -> None:
        until = self._world.now() - RECORD_AGE_MAX_S
        for number, kept in enumerate(await self._kv.kv_list(CONVERSATIONS)):
            if number >= OPENINGS_MAX or kept.at < until:
                await self._kv.kv_delete(CONVERSATIONS, kept.key, expected=kept.version)
