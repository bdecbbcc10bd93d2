"""Appends of one session during an outage of its store: retried, and reported if the outage is long."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable

from midstream.environment import World
from midstream.errors import MidstreamError, UnavailableError
from midstream.retries import APPEND_ATTEMPTS_MAX, APPEND_BACKOFF

OUTAGE_REPORTED_AFTER_S = 5.0
"""Seconds without a successful append after which connections of the session end with the store's error."""

_log = logging.getLogger(__name__)


class Outages:
    """The appends of one session, retried while the store is full or locked.

    Args:
        refuse_clients: Called with the store's error after each failed append.
    """

    def __init__(
        self, world: World, session_id: str, refuse_clients: Callable[[MidstreamError], None]
    ) -> None:
        self._world = world
        self._session_id = session_id
        self._refuse_clients = refuse_clients
        self._since: float | None = None
        self._error: MidstreamError | None = None

    @property
    def error(self) -> MidstreamError | None:
        """The store's error, if no append succeeded for `OUTAGE_REPORTED_AFTER_S`; None otherwise."""
        if self._since is None or self._world.monotonic() - self._since < OUTAGE_REPORTED_AFTER_S:
            return None
        return self._error

    async def append(self, append: Callable[[], Awaitable[None]]) -> None:
        """Append, and retry while the store is unavailable: a model's output and a tool's outcome cannot be repeated.

        Raises:
            UnavailableError: All `APPEND_ATTEMPTS_MAX` tries failed. Nothing was written.
        """
        try:
            for failures in itertools.count(1):
                try:
                    await append()
                except UnavailableError as error:
                    if failures == APPEND_ATTEMPTS_MAX:
                        raise
                    if self._since is None:
                        self._since = self._world.monotonic()
                    self._error = error
                    extra = {"session": self._session_id}
                    _log.warning("append failed: %s; retrying", error.code, extra=extra)
                    self._refuse_clients(error)
                    await self._world.sleep(APPEND_BACKOFF.wait_s(failures, chance=self._world.chance()))
                else:
                    return
        finally:
            self._since = self._error = None
