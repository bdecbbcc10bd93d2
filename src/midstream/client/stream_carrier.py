"""The tasks of one stream: they open, read and close its transport, and time its deadlines.

Each task sets an event when it is done. `tend` starts and stops tasks as the stream needs them; `take_finished` passes
their results to the stream. The task of `live_stream.Attachment` calls both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from midstream.client.session_secrets import SecretsToShow
from midstream.client.transports import Transport
from midstream.environment import World
from midstream.errors import ConnectionLostError, MidstreamError
from midstream.protocol.client_stream import ClientStream

SEND_S = 30.0
"""Seconds for a server to take one write; then its connection counts as dead."""
STOP_S = 2.0
"""Seconds for stopped tasks and closing connections to end; then they are abandoned."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
ReadSecrets = Callable[[], Coroutine[Any, Any, SecretsToShow]]
Connect = Callable[[], Coroutine[Any, Any, Transport]]


class SignalingTasks:
    """Tasks that set an event when they are done, and background tasks that close resources."""

    def __init__(self, world: World) -> None:
        self.signal = asyncio.Event()
        self._world = world
        self._ending: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task."""
        task = self._world.spawn(work, name=f"midstream {name}")
        task.add_done_callback(lambda _: self.signal.set())
        return task

    def stop(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task, and ignore its result."""
        task.cancel()
        self.leave(_wait_for_end(task))

    def leave(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the closing of a resource in the background."""
        task = self._world.spawn(work, name="midstream end")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def wait_for_ends(self) -> None:
        """Wait for background tasks, at most `STOP_S`."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=STOP_S)


class Carrier:
    """The transport of one stream.

    Args:
        connect: Opens a connection, or raises `MidstreamError`.
        read_secrets: Reads the session's secrets, which another process may have changed, or raises `MidstreamError`.
    """

    def __init__(
        self,
        stream: ClientStream,
        connect: Connect,
        read_secrets: ReadSecrets,
        tasks: SignalingTasks,
        world: World,
    ) -> None:
        self._stream = stream
        self._connect = connect
        self._read_secrets = read_secrets
        self._tasks = tasks
        self._world = world
        self._is_paused = False
        self._transport: Transport | None = None
        self._received_bytes = 0
        self._unlocking: asyncio.Task[SecretsToShow] | None = None
        self._connecting: asyncio.Task[Transport] | None = None
        self._receiving: asyncio.Task[bytes] | None = None
        self._timer: asyncio.Task[None] | None = None
        self._timer_at = 0.0

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send frames if there is a connection; drop a connection that takes nothing for `SEND_S`."""
        if not frames or self._transport is None:
            return
        try:
            async with asyncio.timeout(SEND_S):
                await self._transport.send(frames)
        except TimeoutError:
            self.drop(ConnectionLostError(f"the server accepted no data for {SEND_S:g} s"))

    def tend(self, *, is_paused: bool) -> None:
        """Start and stop the connection, the read and the timer as the stream needs them.

        Args:
            is_paused: Whether to stop reading, because the application has many unread events.
        """
        now = self._world.monotonic()
        stream = self._stream
        if not stream.is_connection_wanted and (self._transport or self._connecting):
            self.drop(None)
        if stream.needs_secret and self._unlocking is None:
            self._unlocking = self._tasks.spawn(self._read_secrets(), "unlock")
        is_due = stream.is_connection_wanted and not stream.needs_secret
        if is_due and not (self._transport or self._connecting):
            self._connecting = self._tasks.spawn(self._connect(), "connect")
        if self._is_paused and not is_paused:
            stream.resume_reading(now=now)
        self._is_paused = is_paused
        if self._transport is not None and self._receiving is None and not is_paused:
            self._receiving = self._tasks.spawn(self._transport.receive(), "receive")
        self._set_timer(now)

    def _set_timer(self, now: float) -> None:
        deadline = self._stream.next_deadline()
        if self._timer is not None and (deadline is None or deadline.at < self._timer_at):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and deadline is not None and not self._is_paused:
            self._timer_at = deadline.at
            self._timer = self._tasks.spawn(self._world.sleep(max(deadline.at - now, 0.0)), "timer")

    def take_finished(self) -> None:
        """Pass the results of finished tasks to the stream."""
        now = self._world.monotonic()
        if self._timer is not None and self._timer.done():
            self._timer.result()
            self._timer = None
            if not self._is_paused:
                self._note_bytes(now)
                self._stream.handle_deadline(now=now)
        if self._unlocking is not None and self._unlocking.done():
            self._take_secrets(self._unlocking)
            self._unlocking = None
        if self._connecting is not None and self._connecting.done():
            made, self._connecting = self._connecting, None
            try:
                self._transport = made.result()
                self._received_bytes = self._transport.received_bytes
            except MidstreamError as error:
                self._stream.end_connection(error, chance=self._world.chance(), now=now)
            else:
                self._stream.begin_connection(now=now)
        if self._receiving is not None and self._receiving.done():
            received, self._receiving = self._receiving, None
            try:
                body = received.result()
            except MidstreamError as error:
                self.drop(error)
            else:
                self._received_bytes = self._transport.received_bytes if self._transport else 0
                self._stream.receive(body, now=now)

    def _take_secrets(self, unlocking: asyncio.Task[SecretsToShow]) -> None:
        """Use the current secrets; if they cannot be read, the previous ones may still be valid."""
        try:
            shown = unlocking.result()
        except MidstreamError as error:
            _log.debug("the secrets of a session cannot be read now: %s", error.code)
            shown = SecretsToShow()
        self._stream.show(shown.secret, shown.old_secret)

    def _note_bytes(self, now: float) -> None:
        """Report received bytes to the stream: an incomplete long frame is not silence (STREAM-46)."""
        if self._transport is not None and self._transport.received_bytes != self._received_bytes:
            self._received_bytes = self._transport.received_bytes
            self._stream.note_traffic(now=now)

    def drop(self, error: MidstreamError | None) -> None:
        """Drop the connection, inform the stream, and close it in the background."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._tasks.leave(_close_begun(self._connecting))
        if self._receiving is not None:
            self._tasks.stop(self._receiving)
        if self._transport is not None:
            self._tasks.leave(self._transport.close())
        self._connecting = self._receiving = self._transport = None
        self._stream.end_connection(error, chance=self._world.chance(), now=self._world.monotonic())
        self._tasks.signal.set()

    def close(self) -> None:
        """Stop the timer and all tasks."""
        for waiting in (self._timer, self._unlocking):
            if waiting is not None:
                self._tasks.stop(waiting)
        self.drop(None)


async def _wait_for_end(task: asyncio.Task[Any]) -> None:
    """Wait for a cancelled task, and ignore its result."""
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


async def _close_begun(connecting: asyncio.Task[Transport]) -> None:
    """Wait for a cancelled attempt to connect, and close the connection if it succeeded."""
    await _wait_for_end(connecting)
    if not connecting.cancelled() and connecting.exception() is None:
        await connecting.result().close()
