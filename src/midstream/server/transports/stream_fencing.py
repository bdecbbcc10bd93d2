"""Notices to the other processes of a store that a connection has its stream (STREAM-102).

`Connections` fences connections of one process. Other processes read in the journal that a newer connection has a
stream, and end their older ones. A command records this; for a connection without commands, this module appends a
record. The welcome does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging

from midstream.engine.host import Host
from midstream.errors import DrainingError, MidstreamError, UnavailableError
from midstream.retries import NOTICE_ATTEMPTS_MAX, RECONNECT_BACKOFF
from midstream.session.session import Received

_log = logging.getLogger(__name__)


class Notices:
    """Notices in progress, one for each stream and connection number."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str, int], asyncio.Task[None]] = {}

    def give(self, host: Host, session_id: str, notice: Received) -> None:
        """Write a notice soon, at this process or at the one that runs the session."""
        key = session_id, notice.stream, notice.connection
        if key in self._under_way:
            return
        task = host.world.spawn(self._give(host, session_id, notice), name=f"notice in {session_id}")
        self._under_way[key] = task
        task.add_done_callback(lambda _: self._under_way.pop(key, None))

    def stop(self) -> None:
        """Stop writing notices. The process and its connections end."""
        for task in self._under_way.values():
            task.cancel()

    async def _give(self, host: Host, session_id: str, notice: Received) -> None:
        await host.world.sleep(0.0)  # send the welcome first
        for failures in range(1, NOTICE_ATTEMPTS_MAX + 1):
            try:
                runner = await host.session(session_id)
                await runner.submit(notice)
            except DrainingError:
                return
            except UnavailableError as error:
                _log.info("a notice is delayed: %s", error.code, extra={"session": session_id})
                await host.world.sleep(RECONNECT_BACKOFF.wait_s(failures, chance=host.world.chance()))
            except MidstreamError as error:
                # A still newer connection has the stream, or the session has ended.
                _log.debug("a notice was not written: %s", error.code, extra={"session": session_id})
                return
            else:
                return
