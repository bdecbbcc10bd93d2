"""Cancellation of turns whose client does not return (STREAM-55).

For a client with `cancel_after_s`, each connection writes a mark for its stream. When the connection is lost, its
server waits for that time, and cancels the turn if the mark has not changed. The marks are in a namespace of the store,
so that a client may return to another process. If the process dies, the turn continues.
"""

from __future__ import annotations

import asyncio
import logging

from midstream.engine.host import Host
from midstream.errors import EntryMovedError, MidstreamError
from midstream.retries import NOTICE_ATTEMPTS_MAX
from midstream.session.turn.commands import Cancel, Withdraw

NAMESPACE = "presence"

_log = logging.getLogger(__name__)

Place = tuple[str, str]
"""A session and a stream in it."""


class Presence:
    """Marks of the connected clients whose turns stop without them."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._world = host.world
        self._marks: dict[Place, bytes] = {}
        """The last mark of each stream at this process."""
        self._waiting: dict[bytes, asyncio.Task[None]] = {}

    async def arrive(self, place: Place) -> bytes:
        """Write and return a mark for the new connection of a stream.

        Raises:
            StoreFullError, StoreBusyError, StoreDamagedError: The mark was not written.
        """
        self._stop_waiting(self._marks.get(place, b""))
        mark = self._world.new_id("mark").encode()
        self._marks[place] = mark
        store = self._host.store
        for _ in range(NOTICE_ATTEMPTS_MAX):
            kept = await store.kv_get(NAMESPACE, _key(place))
            version = kept.version if kept else 0
            try:
                await store.kv_put(NAMESPACE, _key(place), mark, expected=version, at=self._world.now())
            except EntryMovedError:
                continue  # another connection of the stream wrote a mark
            break
        return mark

    def has_mark(self, place: Place) -> bool:
        """Whether an earlier connection of this stream wrote a mark here. The next connection must replace it."""
        return place in self._marks

    def leave(self, place: Place, mark: bytes, after_s: float | None) -> asyncio.Task[None]:
        """Stop a stream's turn in `after_s` seconds, unless its client returns. With None, only remove the mark.

        Returns the task that does this.
        """
        task = self._world.spawn(self._stop_after(place, mark, after_s), name=f"absence in {place[0]}")
        self._waiting[mark] = task
        task.add_done_callback(lambda _: self._waiting.pop(mark, None))
        return task

    def stop(self) -> None:
        """Stop all waits. The process ends, and the turns continue at other nodes."""
        for mark in [*self._waiting]:
            self._stop_waiting(mark)

    def _stop_waiting(self, mark: bytes) -> None:
        if (task := self._waiting.pop(mark, None)) is not None:
            task.cancel()

    async def _stop_after(self, place: Place, mark: bytes, after_s: float | None) -> None:
        if after_s is not None:
            await self._world.sleep(after_s)
        if not await self._remove_mark(place, mark) or after_s is None:
            return  # the client has returned to some process, or has closed the connection itself
        try:
            await self._stop_turn(place)
        except MidstreamError as error:
            _log.warning(
                "a turn continues without its client", extra={"session": place[0], "code": error.code}
            )

    async def _remove_mark(self, place: Place, mark: bytes) -> bool:
        """Remove a mark; return whether it was still the current one."""
        if self._marks.get(place) == mark:
            del self._marks[place]
        store = self._host.store
        try:
            kept = await store.kv_get(NAMESPACE, _key(place))
            is_ours = kept is not None and kept.body == mark
            return is_ours and await store.kv_delete(
                NAMESPACE, _key(place), expected=kept.version if kept else 0
            )
        except MidstreamError as error:
            _log.warning(
                "a mark of presence was not removed", extra={"session": place[0], "code": error.code}
            )
            return False

    async def _stop_turn(self, place: Place) -> None:
        session_id, stream = place
        runner = await self._host.session(session_id)
        known = runner.state.streams.get(stream)
        if known is not None and known.turn:
            await runner.submit(Cancel(known.turn))
        elif known is not None and known.queued:
            await runner.submit(Withdraw(known.queued))


def _key(place: Place) -> str:
    return f"{place[0]}/{place[1]}"
