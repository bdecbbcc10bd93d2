"""A store that is slow, busy and full at random, in front of the memory all processes share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from msgspec import Struct

from midstream.errors import LeaseHeldError, MidstreamError, StoreBusyError, StoreFullError
from midstream.store.contract import Batch, Immediate
from midstream.store.memory import MemoryStore
from midstream.testing.store_fakes import StoreInFront
from tests.simulation.loop import pass_time

BUSY_SHARE = 0.3
"""Share of immediate appends that find other work in progress."""


class Weather(Struct):
    """Delays and failures, for all stores of a run at once.

    Args:
        latency_s: Mean seconds before an operation takes effect, and again before its caller receives the result.
        failing: Share of writes that fail without effect.
        is_down: Every write fails.
        is_full: A failing write reports a full disk, otherwise a busy store.
    """

    latency_s: float = 0.0
    failing: float = 0.0
    is_down: bool = False
    is_full: bool = False


class WeatheredStore(StoreInFront):
    """A memory store with delays and failures. A failed operation has written nothing, as the contract requires.

    A cancelled or killed caller may be on either side of the effect: `latency_s` passes before it and after it.

    Args:
        store: The store behind it.
        weather: Shared by all stores of the run.
        chance: Source of delays and failures.
        note: Called for every operation with its result.
    """

    def __init__(
        self, store: MemoryStore, weather: Weather, chance: random.Random, note: Callable[..., None]
    ) -> None:
        super().__init__(store)
        self._memory = store
        self._weather = weather
        self._chance = chance
        self._note = note
        self._pending = 0
        self._is_quiet = asyncio.Event()

    async def before_operation(self, operation: str, session: str) -> None:
        await self._delay()
        weather = self._weather
        if operation not in _WRITES:
            return
        if weather.is_down or (weather.failing and self._chance.random() < weather.failing):
            self._note(operation, session, "failed")
            raise StoreFullError("the disk is full") if weather.is_full else StoreBusyError("it is busy")

    async def close(self) -> None:
        await self.before_operation("close", "")
        while self._pending:  # The started operation is finished.
            self._is_quiet.clear()
            await self._is_quiet.wait()
        await self.store.close()

    async def claim(self, session: str, *, at: float, is_free: bool | None = None) -> int:
        try:
            epoch = await super().claim(session, at=at, is_free=is_free)
        except LeaseHeldError:
            self._note("claim", session, "held")
            raise
        self._note("claim", session, epoch)
        await self._delay()
        return epoch

    async def release(self, session: str, *, epoch: int) -> None:
        await super().release(session, epoch=epoch)
        self._note("release", session, epoch)

    async def append(self, session: str, batch: Batch) -> int:
        await self.before_operation("append", session)
        try:
            end = await self.store.append(session, batch)
        except MidstreamError as error:
            self._note("append", session, error.code)
            raise
        self._note("append", session, batch.epoch, end, tuple(batch.bodies))
        await self._delay()
        return end

    @property
    def immediate(self) -> Immediate:
        return self

    @property
    def is_ready(self) -> bool:
        return not self._weather.is_down

    def append_now(self, session: str, batch: Batch) -> int | None:
        if self._weather.is_down or self._chance.random() < self._weather.failing + BUSY_SHARE:
            return None
        end = self._memory.append_now(session, batch)
        if end is not None:
            self._note("append", session, batch.epoch, end, tuple(batch.bodies))
        return end

    async def forward(self, session: str, body: bytes) -> bytes:
        answer = await super().forward(session, body)
        await self._delay()
        return answer

    async def _delay(self) -> None:
        if not self._weather.latency_s:
            return
        self._pending += 1
        try:
            await pass_time(self._chance.expovariate(1.0) * self._weather.latency_s)
        finally:
            self._pending -= 1
            self._is_quiet.set()


_WRITES = frozenset(("claim", "append", "prune", "delete", "forward", "answer", "kv_put", "kv_delete"))
