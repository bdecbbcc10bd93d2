"""Responses that can be asked for later, in the key-value part of the store.

The intent stands there before a background answer is begun, and the whole answer before anybody is told that it is
complete. A gateway that dies in between leaves an intent: whoever asks for it, `LOST_AFTER_S` after its process last
said that it lives, is told that it failed. It is not asked again by itself: what the upstream had done by then nobody
here knows, and an agent that edits files must not do it twice unasked.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.core.formats.parts import Json, Value
from midstream.errors import EntryMovedError, MidstreamError
from midstream.store.contract import KeyValue, KeyValueEntry
from midstream.world import World

RESPONSES = "gateway-responses"
EVENTS = "gateway-events"
KEPT_S = 3600.0
"""Seconds that a response can be asked for; a client that is away longer asks its host."""
BEAT_S = 5.0
"""Seconds between two signs of life of a process, in the entry of each answer it is at."""
LOST_AFTER_S = 20.0
"""Seconds without a sign of life after which an answer counts as lost."""
SWEEP_S = 600.0
"""Seconds between two looks for responses that are too old."""
EVENTS_BYTES_MAX = 8 * 1024 * 1024
"""Of the events of one response; of a longer one only the end can be played back later."""

LOST = "the gateway ended while this answer was made; nobody knows how far the upstream got: ask again"
_log = logging.getLogger(__name__)


class Entry(Struct, frozen=True, omit_defaults=True):
    """A response as it is stored.

    Args:
        response: The object its API has for it.
        items: What was asked, with all that came before.
        session: Whose conversation it is.
        own: How many of the items came with the request itself, at the end of them.
        is_open: It is being made.
    """

    response: Json
    items: list[Value]
    session: str = ""
    own: int = 0
    is_open: bool = False


_entry_of = msgspec.json.Decoder(Entry).decode


class Stored(Struct, frozen=True):
    """An entry with the version that replaces it."""

    entry: Entry
    version: int
    at: float


class StoredResponses:
    """The responses of a gateway, and of others that share its store."""

    def __init__(self, kv: KeyValue, world: World) -> None:
        self._kv = kv
        self._world = world
        self._open: dict[str, Stored] = {}
        """What this process is at."""
        self._writing = asyncio.Lock()
        """A sign of life and the end of an answer replace the same entry."""

    async def begin(self, response_id: str, entry: Entry) -> None:
        """Write the intent. Durable when it returns.

        Raises:
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was written.
        """
        async with self._writing:
            await self._keep(response_id, replace(entry, is_open=True), 0)

    async def end(self, response_id: str, entry: Entry, events: bytes) -> None:
        """Write the whole answer. Durable when it returns.

        Raises:
            EntryMovedError: Another process took this one for dead, and may have said so.
            StoreFullError, StoreBusyError, StoreDamagedError: The answer is not there; its events may be.
        """
        if len(events) <= EVENTS_BYTES_MAX:
            now = self._world.now()
            await self._kv.kv_put(EVENTS, response_id, events, expected=0, at=now)
        async with self._writing:
            known = self._open.pop(response_id, None)
            await self._keep(response_id, entry, known.version if known else 0)

    async def find(self, response_id: str) -> Entry | None:
        """Return a response, or None where there is none (any more). One whose process died has failed."""
        kept = await self._kv.kv_get(RESPONSES, response_id)
        if kept is None or kept.at < self._world.now() - KEPT_S:
            return None
        found = _read(kept)
        is_lost = found is not None and found.is_open and kept.at < self._world.now() - LOST_AFTER_S
        if found is None or not is_lost:
            return found
        failed = replace(found, is_open=False, response=_failed(found.response))
        try:
            await self._kv.kv_put(
                RESPONSES,
                response_id,
                msgspec.json.encode(failed),
                expected=kept.version,
                at=self._world.now(),
            )
        except EntryMovedError:
            return await self.find(response_id)  # its process lives: it wrote in between
        return failed

    async def events(self, response_id: str) -> list[bytes]:
        """Return the events of a response, in order; empty where they are not kept."""
        kept = await self._kv.kv_get(EVENTS, response_id)
        return [] if kept is None else [piece + b"\n\n" for piece in kept.body.split(b"\n\n")[:-1]]

    async def delete(self, response_id: str) -> None:
        """Remove a response for good."""
        self._open.pop(response_id, None)
        for namespace in (RESPONSES, EVENTS):
            kept = await self._kv.kv_get(namespace, response_id)
            if kept is not None:
                await self._kv.kv_delete(namespace, response_id, expected=kept.version)

    async def tend(self) -> None:
        """Give signs of life and remove what is too old, until cancelled."""
        swept_at = self._world.monotonic() - SWEEP_S
        while True:
            try:
                for response_id in list(self._open):
                    await self._beat(response_id)
                if self._world.monotonic() - swept_at >= SWEEP_S:
                    swept_at = self._world.monotonic()
                    await self._sweep()
            except MidstreamError as error:
                _log.warning("the responses' entries cannot be tended: %s", error.code)
            await self._world.sleep(BEAT_S)

    async def _beat(self, response_id: str) -> None:
        async with self._writing:
            known = self._open.get(response_id)
            if known is None:
                return  # it ended meanwhile
            try:
                await self._keep(response_id, known.entry, known.version)
            except EntryMovedError:  # another process took this one for dead: the store has the last word
                _log.warning("an answer was given up for lost elsewhere", extra={"response": response_id})

    async def _keep(self, response_id: str, entry: Entry, expected: int) -> None:
        now = self._world.now()
        body = msgspec.json.encode(entry)
        version = await self._kv.kv_put(RESPONSES, response_id, body, expected=expected, at=now)
        if entry.is_open:
            self._open[response_id] = Stored(entry, version, now)

    async def _sweep(self) -> None:
        until = self._world.now() - KEPT_S
        for namespace in (RESPONSES, EVENTS):
            for kept in await self._kv.kv_list(namespace):
                if kept.at < until:
                    await self._kv.kv_delete(namespace, kept.key, expected=kept.version)


def _read(kept: KeyValueEntry) -> Entry | None:
    """Read an entry; one that cannot be read counts as none."""
    try:
        return _entry_of(kept.body)
    except msgspec.DecodeError:
        _log.warning("a stored response cannot be read", extra={"response": kept.key})
        return None


def _failed(response: Json) -> Json:
    return {**response, "status": "failed", "error": {"code": "server_error", "message": LOST}}
