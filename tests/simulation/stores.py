"""A store that is slow, busy and full as chance has it, in front of the memory all processes share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from msgspec import Struct

from midstream.core.blobs import Blob
from midstream.core.records import Sync
from midstream.errors import LeaseHeldError, MidstreamError, StoreBusyError, StoreFullError
from midstream.store.contract import Mark, News, SessionInfo, Stored
from midstream.store.memory import MemoryStore
from tests.simulation.loop import pass_time


class Weather(Struct):
    """How bad it is, for all stores of a run at once.

    Args:
        latency_s: Mean seconds before an operation takes effect, and again before its caller hears of it.
        failing: Share of writes that fail without effect.
        is_down: Every write fails.
        is_full: What a failing write says: the disk is full, or else that it is busy.
    """

    latency_s: float = 0.0
    failing: float = 0.0
    is_down: bool = False
    is_full: bool = False


class WeatheredStore:
    """A memory store in bad weather. What fails has written nothing, as the contract says.

    A cancelled or killed caller may stand on either side of the effect: `latency_s` passes before it and after it.

    Args:
        store: The store behind it.
        weather: Shared by all stores of the run.
        chance: Where delays and failures come from.
        note: Told of every operation and what came of it.
    """

    def __init__(
        self, store: MemoryStore, weather: Weather, chance: random.Random, note: Callable[..., None]
    ) -> None:
        self.store = store
        self._weather = weather
        self._chance = chance
        self._note = note
        self._pending = 0
        self._is_quiet = asyncio.Event()

    async def open(self) -> None:
        await self._delay()
        await self.store.open()

    async def close(self) -> None:
        await self._delay()
        while self._pending:  # what was asked for is finished
            self._is_quiet.clear()
            await self._is_quiet.wait()
        await self.store.close()

    async def claim(self, session: str, *, at: float) -> int:
        await self._write("claim", session)
        try:
            epoch = await self.store.claim(session, at=at)
        except LeaseHeldError:
            self._note("claim", session, "held")
            raise
        self._note("claim", session, epoch)
        await self._delay()
        return epoch

    async def release(self, session: str, *, epoch: int) -> None:
        await self._delay()
        await self.store.release(session, epoch=epoch)
        self._note("release", session, epoch)

    async def append(
        self,
        session: str,
        bodies: Sequence[bytes],
        *,
        expected: int,
        epoch: int,
        sync: Sync,
        mark: Mark | None = None,
        blobs: Sequence[Blob] = (),
        seal: bytes = b"",
    ) -> int:
        await self._write("append", session)
        try:
            end = await self.store.append(
                session, bodies, expected=expected, epoch=epoch, sync=sync, mark=mark, blobs=blobs, seal=seal
            )
        except MidstreamError as error:
            self._note("append", session, error.code)
            raise
        self._note("append", session, epoch, end, tuple(bodies))
        await self._delay()
        return end

    async def prune(self, session: str, body: bytes, *, position: int, epoch: int) -> bool:
        await self._write("prune", session)
        return await self.store.prune(session, body, position=position, epoch=epoch)

    async def blob(self, session: str, digest: str) -> bytes | None:
        await self._delay()
        return await self.store.blob(session, digest)

    async def read(self, session: str, *, after: int, limit: int) -> list[Stored]:
        await self._delay()
        return await self.store.read(session, after=after, limit=limit)

    async def find(self, session: str) -> SessionInfo | None:
        await self._delay()
        return await self.store.find(session)

    async def list(self, *, live: bool | None = None) -> AsyncIterator[SessionInfo]:
        await self._delay()
        async for each in self.store.list(live=live):
            yield each

    async def delete(self, session: str) -> bool:
        await self._write("delete", session)
        return await self.store.delete(session)

    async def watch(self, followed: Mapping[str, int]) -> News:
        await self._delay()
        return await self.store.watch(followed)

    async def hand_over(self, session: str, body: bytes) -> bytes:
        await self._write("hand over", session)
        answer = await self.store.hand_over(session, body)
        await self._delay()
        return answer

    async def answer(self, letter: int, body: bytes) -> None:
        await self._write("answer", str(letter))
        await self.store.answer(letter, body)

    async def _write(self, what: str, session: str) -> None:
        await self._delay()
        weather = self._weather
        if weather.is_down or (weather.failing and self._chance.random() < weather.failing):
            self._note(what, session, "failed")
            raise StoreFullError("the disk is full") if weather.is_full else StoreBusyError("it is busy")

    async def _delay(self) -> None:
        if not self._weather.latency_s:
            return
        self._pending += 1
        try:
            await pass_time(self._chance.expovariate(1.0) * self._weather.latency_s)
        finally:
            self._pending -= 1
            self._is_quiet.set()
