"""Tries of one conditional write, until its outcome is certain.

A server refuses a write while another one of its subject is under way. That may be an earlier try of the same write
whose answer was lost: without a majority it stays under way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from midstream.environment import World
from midstream.errors import StoreBusyError
from midstream.store.jetstream.jetstream_errors import SubjectMovedError, UnknownOutcomeError
from midstream.store.jetstream.jetstream_link import JetStreamLink, SubjectWrite

T = TypeVar("T")

TRIES_MAX = 100
"""Times that a write is decided again because of concurrent writes."""
PAUSE_S = 0.05
"""Seconds before a retry on an unchanged subject."""


class WriteTries:
    """The tries of one write.

    Args:
        what: Its subject, for the message of an error.
    """

    def __init__(self, link: JetStreamLink, world: World, what: str) -> None:
        self.is_unknown = False
        """Whether the answer to a try was lost: it may have happened or may still happen."""
        self._link = link
        self._world = world
        self._what = what
        self._count = 0
        self._met: Hashable = None

    async def read(self, read: Callable[[], Awaitable[T]]) -> T:
        """Run a read. If the outcome of a try is unknown, retry as long as the servers cannot be reached.

        Raises:
            MidstreamError: The servers refused, or did not answer and no outcome is unknown.
        """
        return await (self._link.settle(read) if self.is_unknown else read())

    async def begin(self, met: Hashable) -> None:
        """Begin the next try, after a pause if the subject is unchanged.

        Args:
            met: The messages before the write.

        Raises:
            StoreBusyError: Other writes came first each time. Nothing was written.
        """
        self._count += 1
        if self._count > TRIES_MAX and not self.is_unknown:
            raise StoreBusyError(f"{self._what} is written by others all the time", retry_after_s=1.0)
        if self._count > 1 and met == self._met:
            await self._world.sleep(PAUSE_S)
        self._met = met

    async def commit(self, stream: str, writes: list[SubjectWrite]) -> int | None:
        """Write, and return the last sequence number; None: read again.

        Raises:
            MidstreamError: The servers refused. Nothing was written.
        """
        try:
            return await self._link.commit(stream, writes)
        except SubjectMovedError:
            return None
        except UnknownOutcomeError:
            self.is_unknown = True
            return None
        except StoreBusyError:
            if not self.is_unknown:
                raise
            return None
