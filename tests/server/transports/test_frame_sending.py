from __future__ import annotations

import asyncio
from collections.abc import Sequence

from midstream.server.transports.frame_sending import SEND_S, FrameSending
from midstream.testing import FakeWorld


class Sink:
    """A client that accepts a write when the test allows it."""

    def __init__(self, error: OSError | None = None) -> None:
        self.taken: list[bytes] = []
        self.opened = asyncio.Event()
        self._error = error

    async def send(self, frames: Sequence[bytes]) -> None:
        await self.opened.wait()
        if self._error is not None:
            raise self._error
        self.taken += frames


class Queue:
    def __init__(self, *frames: bytes) -> None:
        self.frames = [*frames]

    def __call__(self) -> Sequence[bytes]:
        frames, self.frames = self.frames, []
        return frames


async def test_frames_are_sent_in_order_and_one_write_at_a_time() -> None:
    sink, queue, world = Sink(), Queue(b"1"), FakeWorld()
    sending = FrameSending(sink, queue, world)
    first = asyncio.create_task(sending.flush())
    await asyncio.sleep(0)
    queue.frames = [b"2"]
    second = asyncio.create_task(sending.flush())
    await asyncio.sleep(0)
    assert (sending.is_sending, sending.late_at) == (True, world.monotonic() + SEND_S)
    sink.opened.set()
    await asyncio.gather(first, second)
    assert (sink.taken, sending.is_sending, sending.is_gone) == ([b"1", b"2"], False, False)


async def test_a_disconnected_client_receives_no_more_frames() -> None:
    sink = Sink(OSError("reset"))
    sink.opened.set()
    sending = FrameSending(sink, Queue(b"1"), FakeWorld())
    await sending.flush()
    assert (sink.taken, sending.is_gone) == ([], True)
