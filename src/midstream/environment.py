"""The one door to time, chance, identity and background tasks.

Nothing else in midstream calls a clock, draws a random number, makes an id or starts a task (a house test
checks it), so that a test can put another world in its place: a fake clock, a seeded chance, a process that
dies at a named fault point.
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
    """The named points at which a test may let the process die. A test asserts that each one is reached."""

    BEFORE_APPEND = "before_append"
    """The records are decided and encoded; nothing is in the journal."""
    AFTER_APPEND = "after_append"
    """The records are in the journal; they are not published."""
    AFTER_PUBLISH = "after_publish"
    """Readers and senders may have been notified; pending work were not yet started."""
    BEFORE_TOOL = "before_tool"
    """The intent is in the journal; the tool was not called."""
    AFTER_TOOL = "after_tool"
    """The tool has returned; its outcome is not in the journal."""
    BEFORE_CLAIM = "before_claim"
    """A new owner has folded the journal and not yet taken the session."""
    AFTER_CLAIM = "after_claim"
    """The epoch is taken; nothing was appended under it."""
    BEFORE_ACK = "before_ack"
    """A client's chunk is in the journal; its ack was not sent."""
    BEFORE_CHECKPOINT = "before_checkpoint"
    """A client is about to write its checkpoint."""
    AFTER_CHECKPOINT = "after_checkpoint"
    """A client has written its checkpoint and not yet acted on it."""

    BEFORE_PRUNE = "before_prune"
    """What a journal's first records fold to is ready; nothing of them was removed."""
    AFTER_PRUNE = "after_prune"
    """They were removed, and what they fold to stands in their place."""


class Cancellable(Protocol):
    """Request that can be cancelled."""

    def cancel(self) -> object:
        """Let it not happen. Without effect if it has happened."""


class World:
    """The real world. Subclass it in tests; hand it to whatever you start."""

    # Asked several times for each token: the clocks themselves, not calls that call them.
    now = staticmethod(time.time)
    """Return the wall clock in seconds since 1970; for records that people read and for look-back."""
    monotonic = staticmethod(time.monotonic)
    """Return a clock in seconds that never goes back; for deadlines inside one process."""

    def chance(self) -> float:
        """Return a random number in [0, 1); for jitter."""
        return random.random()  # noqa: S311 - jitter is no secret

    def new_id(self, kind: str) -> str:
        """Return a fresh id such as `stream-3f…`: 128 random bits behind the name of its kind."""
        return f"{kind}-{secrets.token_hex(16)}"

    def new_secret(self) -> str:
        """Return 32 random bytes as base64url without padding."""
        return secrets.token_urlsafe(32)

    async def sleep(self, seconds: float) -> None:
        """Wait. A fake world returns when its clock has got there."""
        await asyncio.sleep(seconds)

    def later(self, seconds: float, do: Callable[[], None]) -> Cancellable:
        """Call something when so much time has passed, unless what this returns is cancelled before.

        For what is rarely due: a task that sleeps costs several times more.
        """
        return asyncio.get_running_loop().call_later(seconds, do)

    def spawn(self, work: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """Start a task. The caller keeps it, awaits it and sees its error."""
        return asyncio.get_running_loop().create_task(work, name=name)

    def reach(self, point: Fault) -> None:
        """Report that the program has reached a named fault point. In the real world nothing happens."""
