"""The only access to time, random numbers, ids and background tasks.

No other code of midstream reads a clock, draws a random number, creates an id or starts a task (a house test checks
this). So a test can use another world: a fake clock, seeded random numbers, a process that dies at a named fault point.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Fault(StrEnum):
    """The named points at which a test may kill the process. A test asserts that each one is reached."""

    BEFORE_APPEND = "before_append"
    """The records are decided and encoded; nothing is in the journal."""
    AFTER_APPEND = "after_append"
    """The records are in the journal; they are not published."""
    AFTER_PUBLISH = "after_publish"
    """Readers and senders may have been notified; pending work was not started."""
    BEFORE_TOOL = "before_tool"
    """The intent is in the journal; the tool was not called."""
    AFTER_TOOL = "after_tool"
    """The tool has returned; its outcome is not in the journal."""
    BEFORE_CLAIM = "before_claim"
    """The next node has folded the journal and not yet claimed the session."""
    AFTER_CLAIM = "after_claim"
    """The session is claimed; nothing was appended under the new epoch."""
    BEFORE_ACK = "before_ack"
    """A client's command is in the journal; its ack was not sent."""
    BEFORE_CHECKPOINT = "before_checkpoint"
    """A client is about to write its checkpoint."""
    AFTER_CHECKPOINT = "after_checkpoint"
    """A client has written its checkpoint and not yet acted on it."""

    BEFORE_PRUNE = "before_prune"
    """The fold of a journal's first records is computed; no record was removed."""
    AFTER_PRUNE = "after_prune"
    """The records were replaced by their fold."""


class Cancellable(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> object:
        """Cancel the call. Without effect after it has happened."""


_UNFINISHED: set[asyncio.Task[object]] = set()
"""Tasks of `World.finish`."""


class World:
    """The real world. Subclass it in tests, and pass it to the tested code."""

    # Called several times for each token, so these are the clocks themselves.
    now = staticmethod(time.time)
    """Return the wall clock in seconds since 1970, for records and for look-back."""
    monotonic = staticmethod(time.monotonic)
    """Return a clock in seconds that never goes back; for deadlines inside one process."""

    def chance(self) -> float:
        """Return a random number in [0, 1); for jitter."""
        return random.random()  # noqa: S311 - jitter is no secret

    def new_id(self, kind: str) -> str:
        """Return a new id such as `stream-3f…`: the kind and 128 random bits."""
        return f"{kind}-{secrets.token_hex(16)}"

    def new_secret(self) -> str:
        """Return 32 random bytes as base64url without padding."""
        return secrets.token_urlsafe(32)

    async def sleep(self, seconds: float) -> None:
        """Wait. A fake world returns when its clock has reached the time."""
        await asyncio.sleep(seconds)

    def later(self, seconds: float, do: Callable[[], None]) -> Cancellable:
        """Call a function after so many seconds, unless the returned object is cancelled before.

        For calls that are rarely made: a sleeping task costs several times more.
        """
        return asyncio.get_running_loop().call_later(seconds, do)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task. The caller must keep it, await it and handle its error."""
        return asyncio.get_running_loop().create_task(work, name=name)

    async def finish(self, *works: Coroutine[Any, Any, object], name: str) -> None:
        """Do works concurrently, and wait for their end. They continue if the caller is cancelled.

        The first exception is raised at once; the other works continue.
        """
        tasks = [self.spawn(work, name=name) for work in works]
        for task in tasks:  # an event loop keeps none
            _UNFINISHED.add(task)
            task.add_done_callback(_UNFINISHED.discard)
        await asyncio.shield(asyncio.gather(*tasks))

    def reach(self, point: Fault) -> None:
        """Report that the program has reached a named fault point. In the real world nothing happens."""
