"""One stream of a client at work: its half of the protocol, a transport, the checkpoint, the tools.

One task does everything that waits. Every change of the stream (by the application, a tool that ended, a frame, the
clock) only rings; the task then settles: outcomes become commands, changes are kept, frames are sent, tools are
started, events are handed out, always in this order. So nothing here needs a lock, and nothing leaves before its write.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from midstream.client.checkpoint_file import BeginningSeen, CheckpointFile, FileWrite, Place, StreamBegun
from midstream.client.local_tools import LocalTools, StartLocally
from midstream.client.session_secrets import SecretsToShow
from midstream.client.transports import Transport
from midstream.environment import Fault, World
from midstream.errors import ConnectionLostError, MidstreamError
from midstream.history.messages import Result
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.event_inbox import Applied, ClientEvent, Replaced

EVENTS_UNREAD_MAX = 1024
"""Events the application has not asked for; above it nothing is read from the server (two full frames)."""
SEND_S = 30.0
"""Seconds a server may leave one write unread before its connection counts as dead."""
STOP_S = 2.0
"""Seconds that stopped tools and closing connections have before they are left alone."""

_log = logging.getLogger(__name__)

T = TypeVar("T")
ReadSecrets = Callable[[], Coroutine[Any, Any, SecretsToShow]]
Connect = Callable[[], Coroutine[Any, Any, Transport]]


class Attachment:
    """Keep one stream going. Call `start`, then `next` until it returns None, then `close`.

    Args:
        stream: New or resumed.
        connect: Makes a connection; raises `MidstreamError` where it cannot.
        read_secrets: Reads what opens the session, which another process may have changed; raises like it.
        file: Where the stream is kept.
        begun: The facts about a new stream for the file; None for a resumed one and for a reader.
        tools: The calls this client runs in it; None for a reader.
        on_reconnecting: Called whenever `ClientStream.is_reconnecting` changes.
        on_stalled: Called with what the turn waits for when it stalls.
    """

    def __init__(
        self,
        stream: ClientStream,
        connect: Connect,
        *,
        read_secrets: ReadSecrets,
        file: CheckpointFile,
        begun: StreamBegun | None,
        tools: LocalTools | None,
        world: World,
        on_reconnecting: Callable[[bool], None],
        on_stalled: Callable[[str], None],
    ) -> None:
        self.stream = stream
        self._connect = connect
        self._read_secrets = read_secrets
        self._file = file
        self._begun = begun
        self._tools = tools
        self._seen: BeginningSeen | None = None
        """The stream's first event, where the file does not have it yet."""
        self._is_new = stream.is_unread
        self._world = world
        self._on_reconnecting = on_reconnecting
        self._on_stalled = on_stalled
        self._was_reconnecting = self._was_stalled = False
        self._unread: deque[ClientEvent] = deque()
        self._in_hand: ClientEvent | None = None
        """What the application has and may not be done with."""
        self._is_paused = False
        self._is_closing = False
        self._is_over = False
        """The stream has ended and its last events are in `_unread`: before that its end is nobody's business."""
        self._is_failure_told = False
        self._bell = asyncio.Event()
        self._news = asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._transport: Transport | None = None
        self._heard_bytes = 0
        self._unlocking: asyncio.Task[SecretsToShow] | None = None
        self._connecting: asyncio.Task[Transport] | None = None
        self._receiving: asyncio.Task[bytes] | None = None
        self._timer: asyncio.Task[None] | None = None
        self._timer_at = 0.0
        self._calls: dict[Place, asyncio.Task[Result | None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    # --- what the client does -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin; nothing was sent before."""
        self._running = self._world.spawn(self._run(), name=f"midstream stream {self.stream.stream!r}")
        self._running.add_done_callback(lambda _: self._news.set())

    async def next(self) -> ClientEvent | None:
        """Return the next event, or None after the last one. The one before it is handled with that (STREAM-24).

        Raises:
            MidstreamError: The stream ended with it, or could not be kept. The events before it were returned.
        """
        self._forward()
        while not self._unread:
            self._raise_failure()
            if self._is_over and self.stream.error is not None:
                raise self.stream.error
            if self._is_over or self._running is None or self._running.done():
                return None
            self._news.clear()
            await self._news.wait()
        self._in_hand = self._unread.popleft()
        return self._in_hand

    def _forward(self) -> None:
        if isinstance(self._in_hand, Applied | Replaced):
            self.stream.handled(self._in_hand.event_id)
        self._in_hand = None
        self._bell.set()

    def abort(self) -> None:
        """Stop the turn; see `acknowledged`."""
        self.stream.abort()
        self._bell.set()

    async def acknowledged(self) -> None:
        """Wait until the server has every command, or the stream has ended.

        Raises:
            MidstreamError: It ended with this error.
        """
        while not (self.stream.is_acknowledged or self.stream.is_ended):
            self._raise_failure()
            if self._running is None or self._running.done():
                return
            self._news.clear()
            await self._news.wait()
        if self.stream.error is not None:
            raise self.stream.error

    async def close(self) -> None:
        """Detach: keep what there is to keep and let go of everything else. Calling it twice is harmless.

        Raises:
            MidstreamError: The last changes could not be stored, and that was not reported before.
        """
        if self._in_hand is not None and self._in_hand.event_id == self.stream.end:
            self._forward()  # whoever leaves at the last event has seen the turn to its end
        self.stream.detach()
        self._is_closing = True
        self._bell.set()
        if self._running is not None:
            await asyncio.wait((self._running,))
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what ended the task, once."""
        if self._running is not None and self._running.done() and not self._is_failure_told:
            self._is_failure_told = True
            self._running.result()

    # --- the one task -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                is_last = self._is_closing
                self._bell.clear()
                await self._settle()
                if is_last:
                    return
                self._tend()
                await self._bell.wait()
                self._take_finished()
        finally:
            await self._let_go()

    async def _settle(self) -> None:
        """Store, then send, then act, then deliver."""
        events = self.stream.events()
        if self._is_new and events:
            self._is_new, self._seen = False, BeginningSeen(events[0].event_id)
        if self._tools is not None:
            for event in events:
                if isinstance(event, Applied):
                    self._tools.take(event.record)
        while writes := self._writes():
            await self._file.write(self.stream.stream, writes)
        frames = self.stream.frames_to_send()
        if frames and self._transport is not None:
            await self._send(self._transport, frames)
        if self._tools is not None:
            for start in self._tools.to_start():
                self._start(start)
            for place in self._tools.to_stop():
                if task := self._calls.pop(place, None):
                    self._stop(task)
        self._unread.extend(events)
        self._is_over = self.stream.is_ended
        if self.stream.is_reconnecting is not self._was_reconnecting:
            self._was_reconnecting = self.stream.is_reconnecting
            self._on_reconnecting(self._was_reconnecting)
        if self.stream.is_stalled is not self._was_stalled:
            self._was_stalled = self.stream.is_stalled
            if self._was_stalled:
                self._on_stalled(self.stream.waiting_on)
        self._news.set()

    def _writes(self) -> list[FileWrite]:
        """Return what one transaction must keep; an outcome stands in it together with its command (STREAM-18)."""
        writes: list[FileWrite] = []
        if self._tools is not None:
            for payload in self._tools.answers():
                self.stream.submit(payload)
            writes += self._tools.writes()
        if not self.stream.is_kept:
            writes.clear()
        writes = [*self.stream.writes(), *writes]
        if writes and self._seen is not None and self.stream.is_kept:
            writes.insert(0, self._seen)
            self._seen = None
        if writes and self._begun is not None:
            writes.insert(0, self._begun)
            self._begun = None
        return writes

    async def _send(self, transport: Transport, frames: Sequence[bytes]) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await transport.send(frames)
        except TimeoutError:
            self._drop(ConnectionLostError(f"the server took nothing for {SEND_S:g} s"))

    def _tend(self) -> None:
        """Have the connection, the read and the timer that the stream needs, and no others."""
        now = self._world.monotonic()
        if not self.stream.is_connection_wanted and (self._transport or self._connecting):
            self._drop(None)
        if self.stream.wants_secret and self._unlocking is None:
            self._unlocking = self._spawn(self._read_secrets(), "unlock")
        is_due = self.stream.is_connection_wanted and not self.stream.wants_secret
        if is_due and not (self._transport or self._connecting):
            self._connecting = self._spawn(self._connect(), "connect")
        is_paused = len(self._unread) >= EVENTS_UNREAD_MAX
        if self._is_paused and not is_paused:
            self.stream.listens_again(now=now)
        self._is_paused = is_paused
        if self._transport is not None and self._receiving is None and not is_paused:
            self._receiving = self._spawn(self._transport.receive(), "receive")
        deadline = self.stream.next_deadline()
        if self._timer is not None and (deadline is None or deadline.at < self._timer_at):
            self._timer.cancel()
            self._timer = None
        if self._timer is None and deadline is not None and not is_paused:
            self._timer_at = deadline.at
            self._timer = self._spawn(self._world.sleep(max(deadline.at - now, 0.0)), "timer")

    def _take_finished(self) -> None:
        """Pass the results of finished tasks to the stream."""
        now = self._world.monotonic()
        if self._timer is not None and self._timer.done():
            self._timer.result()
            self._timer = None
            if not self._is_paused:
                self._note_bytes(now)
                self.stream.handle_deadline(now=now)
        if self._unlocking is not None and self._unlocking.done():
            self._take_secrets(self._unlocking)
            self._unlocking = None
        if self._connecting is not None and self._connecting.done():
            made, self._connecting = self._connecting, None
            try:
                self._transport = made.result()
                self._heard_bytes = self._transport.received_bytes
            except MidstreamError as error:
                self.stream.disconnected(error, chance=self._world.chance(), now=now)
            else:
                self.stream.connected(now=now)
        if self._receiving is not None and self._receiving.done():
            received, self._receiving = self._receiving, None
            try:
                body = received.result()
            except MidstreamError as error:
                self._drop(error)
            else:
                self._heard_bytes = self._transport.received_bytes if self._transport else 0
                self.stream.receive(body, now=now)
        for place in [place for place, task in self._calls.items() if task.done()]:
            assert self._tools is not None
            self._tools.ended(place, self._calls.pop(place).result())

    def _take_secrets(self, unlocking: asyncio.Task[SecretsToShow]) -> None:
        """Show what opens the session now; where that cannot be read, what was shown before may still do."""
        try:
            shown = unlocking.result()
        except MidstreamError as error:
            _log.debug("what opens a session cannot be read now: %s", error.code)
            shown = SecretsToShow()
        self.stream.show(shown.secret, shown.old_secret)

    def _note_bytes(self, now: float) -> None:
        """Take bytes for a sign of life: a long frame on a slow line is no silence (STREAM-46)."""
        if self._transport is not None and self._transport.received_bytes != self._heard_bytes:
            self._heard_bytes = self._transport.received_bytes
            self.stream.was_heard(now=now)

    # --- tasks ------------------------------------------------------------------------------------------------

    def _start(self, start: StartLocally) -> None:
        self._calls[start.place] = self._spawn(self._run_tool(start), f"tool {start.call.name!r}")

    async def _run_tool(self, start: StartLocally) -> Result | None:
        assert self._tools is not None
        self._world.reach(Fault.BEFORE_TOOL)
        result = await self._tools.run(start)
        self._world.reach(Fault.AFTER_TOOL)
        return result

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = self._world.spawn(work, name=f"midstream {name}")
        task.add_done_callback(lambda _: self._bell.set())
        return task

    def _drop(self, error: MidstreamError | None) -> None:
        """Release the connection and inform the stream; it is closed in the background."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._leave(_close_if_made(self._connecting))
        if self._receiving is not None:
            self._stop(self._receiving)
        if self._transport is not None:
            self._leave(self._transport.close())
        self._connecting = self._receiving = self._transport = None
        self.stream.disconnected(error, chance=self._world.chance(), now=self._world.monotonic())
        self._bell.set()

    def _stop(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task; its end is awaited at the end, within a bound."""
        task.cancel()
        self._leave(_ended(task))

    def _leave(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._world.spawn(work, name="midstream end")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _let_go(self) -> None:
        for waiting in (self._timer, self._unlocking):
            if waiting is not None:
                self._stop(waiting)
        for task in self._calls.values():
            self._stop(task)
        self._drop(None)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=STOP_S)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Wait for a cancelled task and ignore its result."""
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()


async def _close_if_made(connecting: asyncio.Task[Transport]) -> None:
    """Wait for a cancelled attempt to connect; it may have been faster."""
    await _ended(connecting)
    if not connecting.cancelled() and connecting.exception() is None:
        await connecting.result().close()
