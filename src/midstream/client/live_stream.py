"""One active stream of a client: protocol endpoint, transport, checkpoint and tools.

One task does all waiting. Each change of the stream (by the application, a tool, a frame, the clock) only wakes the
task. The task then converts outcomes to commands, stores changes, sends frames, starts tools and delivers events, in
this order. So no lock is needed, and everything is stored before it is sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from midstream.client.checkpoint_file import BeginningSeen, CheckpointFile, FileWrite, Place, StreamBegun
from midstream.client.local_tools import LocalTools, StartLocally
from midstream.client.stream_carrier import Carrier, Connect, ReadSecrets, SignalingTasks
from midstream.environment import Fault, World
from midstream.history.messages import ToolResult
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.event_inbox import Applied, ClientEvent, Replaced

EVENTS_UNREAD_MAX = 1024
"""Events in the queue of the application; beyond them, reading from the server stops (two full frames)."""


class Attachment:
    """Runs one stream. Call `start`, then `next` until it returns None, then `close`.

    Args:
        stream: A new or resumed stream.
        connect: Opens a connection, or raises `MidstreamError`.
        read_secrets: Reads the session's secrets, which another process may have changed, or raises `MidstreamError`.
        file: State file of the stream.
        begun: Data of a new stream for the file; None for a resumed stream and for a reader.
        tools: This client's tool calls in the stream; None for a reader.
        on_reconnecting: Called when `ClientStream.is_reconnecting` changes.
        on_stalled: Called at a stall with the thing for which the turn waits.
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
        self._writer = _CheckpointWriter(stream, file, begun)
        self._world = world
        self._tasks = SignalingTasks(world)
        self._carrier = Carrier(stream, connect, read_secrets, self._tasks, world)
        self._tools = tools
        self._calls: dict[Place, asyncio.Task[ToolResult | None]] = {}
        self._status = _StatusReport(stream, on_reconnecting, on_stalled)
        self._unread: deque[ClientEvent] = deque()
        self._in_hand: ClientEvent | None = None
        """The event that the application received last, and may not have handled."""
        self._is_closing = False
        self._is_over = False
        """Whether the stream has ended, and its last events are in `_unread`; only then its end is reported."""
        self._delivered = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    # --- methods of the client -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the task of the stream."""
        self._running = self._world.spawn(self._run(), name=f"midstream stream {self.stream.stream!r}")
        self._running.add_done_callback(lambda _: self._delivered.set())

    async def next(self) -> ClientEvent | None:
        """Return the next event, or None after the last one; the previous event then counts as handled (STREAM-24).

        Raises:
            MidstreamError: The stream ended with this error, or could not be stored. Earlier events were returned.
        """
        self._forward()
        while not self._unread:
            self._raise_failure()
            if self._is_over and self.stream.error is not None:
                raise self.stream.error
            if self._is_over or self._running is None:
                return None
            self._delivered.clear()
            await self._delivered.wait()
        self._in_hand = self._unread.popleft()
        return self._in_hand

    def _forward(self) -> None:
        if isinstance(self._in_hand, Applied | Replaced):
            self.stream.mark_handled(self._in_hand.event_id)
        self._in_hand = None
        self._tasks.signal.set()

    def abort(self) -> None:
        """Cancel the turn; see `wait_for_acks`."""
        self.stream.abort()
        self._tasks.signal.set()

    async def wait_for_acks(self) -> None:
        """Wait until the server has acknowledged all commands, or the stream has ended.

        Raises:
            MidstreamError: The stream ended with this error.
        """
        while not (self.stream.is_acknowledged or self.stream.is_ended):
            self._raise_failure()
            if self._running is None:
                return
            self._delivered.clear()
            await self._delivered.wait()
        if self.stream.error is not None:
            raise self.stream.error

    async def close(self) -> None:
        """Detach: store the last changes, and release all resources. Idempotent.

        Raises:
            MidstreamError: The last changes could not be stored, and the error was not raised before.
        """
        if self._in_hand is not None and self._in_hand.event_id == self.stream.end:
            self._forward()  # an application that stops at the last event has handled it
        self.stream.detach()
        self._is_closing = True
        self._tasks.signal.set()
        if self._running is not None:
            await asyncio.wait((self._running,))
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._running is not None and self._running.done():
            ended, self._running = self._running, None
            ended.result()

    # --- the one task -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                is_last = self._is_closing
                self._tasks.signal.clear()
                await self._settle()
                if is_last:
                    return
                self._carrier.tend(is_paused=len(self._unread) >= EVENTS_UNREAD_MAX)
                await self._tasks.signal.wait()
                self._carrier.take_finished()
                self._take_results()
        finally:
            for task in self._calls.values():
                self._tasks.stop(task)
            self._carrier.close()
            await self._tasks.wait_for_ends()

    async def _settle(self) -> None:
        """Store changes, send frames, start tools, and deliver events."""
        events = self.stream.events()
        if events:
            self._writer.note_first(events[0])
        if self._tools is not None:
            for event in events:
                if isinstance(event, Applied):
                    self._tools.take(event.record)
        await self._writer.write(self._outcomes)
        await self._carrier.send(self.stream.frames_to_send())
        if self._tools is not None:
            for start in self._tools.to_start():
                self._calls[start.place] = self._tasks.spawn(
                    self._run_tool(self._tools, start), f"tool {start.call.name!r}"
                )
            for place in self._tools.to_stop():
                if task := self._calls.pop(place, None):
                    self._tasks.stop(task)
        self._unread.extend(events)
        self._is_over = self.stream.is_ended
        self._status.report()
        self._delivered.set()

    def _outcomes(self) -> Sequence[FileWrite]:
        """Submit the outcomes of finished calls as commands; return their other changes of the file."""
        if self._tools is None:
            return ()
        for payload in self._tools.answers():
            self.stream.submit(payload)
        return self._tools.writes()

    async def _run_tool(self, tools: LocalTools, start: StartLocally) -> ToolResult | None:
        self._world.reach(Fault.BEFORE_TOOL)
        result = await tools.run(start)
        self._world.reach(Fault.AFTER_TOOL)
        return result

    def _take_results(self) -> None:
        for place in [place for place, task in self._calls.items() if task.done()]:
            assert self._tools is not None
            self._tools.note_end(place, self._calls.pop(place).result())


class _CheckpointWriter:
    """Writes the changes of one stream to the file, beginning with its creation."""

    def __init__(self, stream: ClientStream, file: CheckpointFile, begun: StreamBegun | None) -> None:
        self._stream = stream
        self._file = file
        self._begun = begun
        self._is_new = stream.is_unread
        self._seen: BeginningSeen | None = None
        """The stream's first event, until it is stored."""

    def note_first(self, event: ClientEvent) -> None:
        """Note the first event of a new stream for the next write."""
        if self._is_new:
            self._is_new, self._seen = False, BeginningSeen(event.event_id)

    async def write(self, outcomes: Callable[[], Sequence[FileWrite]]) -> None:
        """Store all changes; an outcome and its command are in one transaction (STREAM-18)."""
        while writes := self._changes(outcomes()):
            await self._file.write(self._stream.stream, writes)

    def _changes(self, outcomes: Sequence[FileWrite]) -> list[FileWrite]:
        writes = [*self._stream.writes(), *(outcomes if self._stream.is_kept else ())]
        if writes and self._seen is not None and self._stream.is_kept:
            writes.insert(0, self._seen)
            self._seen = None
        if writes and self._begun is not None:
            writes.insert(0, self._begun)
            self._begun = None
        return writes


class _StatusReport:
    """Reports changes of a stream's state to the application."""

    def __init__(
        self,
        stream: ClientStream,
        on_reconnecting: Callable[[bool], None],
        on_stalled: Callable[[str], None],
    ) -> None:
        self._stream = stream
        self._on_reconnecting = on_reconnecting
        self._on_stalled = on_stalled
        self._was_reconnecting = self._was_stalled = False

    def report(self) -> None:
        """Call the callbacks for changes since the last call."""
        if self._stream.is_reconnecting is not self._was_reconnecting:
            self._was_reconnecting = self._stream.is_reconnecting
            self._on_reconnecting(self._was_reconnecting)
        if self._stream.is_stalled is not self._was_stalled:
            self._was_stalled = self._stream.is_stalled
            if self._was_stalled:
                self._on_stalled(self._stream.waiting_on)
