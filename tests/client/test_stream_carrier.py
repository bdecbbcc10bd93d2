from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from midstream.client.session_secrets import SecretsToShow
from midstream.client.stream_carrier import Carrier, SignalingTasks
from midstream.errors import ConnectionLostError, UnavailableError
from midstream.history.messages import Text
from midstream.protocol import frames
from midstream.protocol.client_stream import ClientStream
from midstream.protocol.frames import Open, SendPayload, Welcome
from midstream.testing import FakeWorld


class CarrierTransport:
    """A transport whose frames a test sends and reads."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.coming: deque[bytes] = deque()
        self.received_bytes = 0
        self.is_closed = False

    async def send(self, frames: Sequence[bytes]) -> None:
        self.sent += frames

    async def receive(self) -> bytes:
        if not self.coming:
            raise ConnectionLostError("cut")
        return self.coming.popleft()

    async def close(self) -> None:
        self.is_closed = True


class CarrierBench:
    """A stream with a message, and its carrier; the first connection attempts fail as often as a test sets."""

    def __init__(self, *, failures: int = 0) -> None:
        self.world = FakeWorld()
        self.stream = ClientStream("a", "secret", now=self.world.monotonic())
        self.stream.submit(SendPayload((Text("hi"),)))
        self.stream.writes()
        self.tasks = SignalingTasks(self.world)
        self.lines: list[CarrierTransport] = []
        self.failures = failures
        self.secrets_read = 0
        self.carrier = Carrier(self.stream, self._connect, self._read_secrets, self.tasks, self.world)

    async def _connect(self) -> CarrierTransport:
        if self.failures:
            self.failures -= 1
            raise UnavailableError("not yet")
        self.lines.append(CarrierTransport())
        return self.lines[-1]

    async def _read_secrets(self) -> SecretsToShow:
        self.secrets_read += 1
        return SecretsToShow("secret")

    async def step(self) -> None:
        """Run one step, as an attachment does between two wake-ups."""
        self.tasks.signal.clear()
        self.stream.writes()
        await self.carrier.send(self.stream.frames_to_send())
        self.carrier.tend(is_paused=False)
        await self.world.live_through(self.tasks.signal.wait())
        self.carrier.take_finished()

    async def until_connected(self, lines: int) -> None:
        async with asyncio.timeout(60):
            while len(self.lines) < lines or not self.lines[-1].sent:
                await self.step()


async def test_the_open_and_the_commands_are_sent_with_the_connection() -> None:
    bench = CarrierBench(failures=2)
    await bench.until_connected(1)
    first, second = (frames.decode_client(body) for body in bench.lines[0].sent)
    assert isinstance(first, Open)
    assert (first.stream, first.connection) == ("a", 1)
    assert isinstance(second, frames.CommandFrame)
    bench.carrier.close()
    await bench.tasks.wait_for_ends()


async def test_a_lost_connection_is_closed_and_the_secrets_are_read_before_the_next() -> None:
    bench = CarrierBench()
    await bench.until_connected(1)
    bench.lines[0].coming.append(frames.encode(Welcome("a", "1-1", "1-1", is_encrypted=True)))
    await bench.until_connected(2)
    assert bench.lines[0].is_closed
    assert bench.secrets_read == 1
    bench.carrier.close()
    await bench.tasks.wait_for_ends()
    assert bench.lines[1].is_closed
