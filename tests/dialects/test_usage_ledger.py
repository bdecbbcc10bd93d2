"""The ledger of usage: each answer counts once, whichever of its writes was the last before a process died."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from midstream.dialects.usage_ledger import (
    ENTRIES,
    FOLDED_AFTER_S,
    MONTHS,
    OPEN_MAX_S,
    UsageLedger,
    read_usage,
)
from midstream.dialects.usage_totals import Prices, Totals, UsageLine, group_lines
from midstream.environment import World
from midstream.errors import StoreBusyError, StoreDamagedError
from midstream.history.messages import Usage
from midstream.store.memory import MemoryStore
from tests.spec import spec

NOON = 1_795_780_800.0
DAY, MONTH = "2026-11-27", "2026-11"
USAGE = Usage(100, 10)


class LedgerClock(World):
    """A world with a settable time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = NOON

    def now(self) -> float:
        return self.time


class Died(BaseException):
    """The process died."""


class DyingLedgerStore(MemoryStore):
    """A store whose process dies after a given write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes_left: float = float("inf")
        self.on_write: Callable[[], Awaitable[None]] | None = None

    async def kv_put(self, *args: Any, **options: Any) -> int:  # noqa: ANN401 - as the store has them
        version: int = await self._write(super().kv_put, *args, **options)
        return version

    async def kv_delete(self, *args: Any, **options: Any) -> bool:  # noqa: ANN401 - as the store has them
        was_there: bool = await self._write(super().kv_delete, *args, **options)
        return was_there

    async def _write(self, write: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:  # noqa: ANN401
        if self.writes_left <= 0:
            raise Died
        self.writes_left -= 1
        if self.on_write is not None:
            on_write, self.on_write = self.on_write, None
            await on_write()
        return await write(*args, **options)


async def lines(store: MemoryStore) -> list[UsageLine]:
    return (await read_usage(store)).lines()


async def open_ledger_store() -> tuple[DyingLedgerStore, LedgerClock]:
    store = DyingLedgerStore()
    await store.open()
    return store, LedgerClock()


async def fold_all(ledger: UsageLedger) -> None:
    await ledger.fold(await ledger.refresh())


async def test_an_answer_counts_only_with_its_first_end() -> None:
    store, clock = await open_ledger_store()
    ledger, other = (UsageLedger(store, {"m": Prices(2, 10)}, clock) for _ in range(2))
    name = await ledger.begin("ada", "m", "s")
    assert await lines(store) == []  # it may never be started
    await other.end(name, USAGE, at=NOON + 1)
    await ledger.end(name, Usage(5, 5), at=NOON + 2)
    await other.end(name, Usage(6, 6), at=NOON + 3)
    cost = (100 * 2 + 10 * 10) / 1e6
    assert await lines(store) == [UsageLine(DAY, "ada", "m", Totals(1, USAGE, cost, 1))]
    await ledger.end("unknown", USAGE, at=NOON)
    dropped = await ledger.begin("ada", "m", "s")
    await ledger.drop(dropped)
    await ledger.end(dropped, USAGE, at=NOON)
    assert [line.totals.requests for line in await lines(store)] == [1]


async def test_usage_of_a_principal_is_visible_here_at_once_and_elsewhere_after_a_refresh() -> None:
    store, clock = await open_ledger_store()
    ledger, other = (UsageLedger(store, {"": Prices(1, 1)}, clock) for _ in range(2))
    clock.time = NOON - 24 * 3600.0
    for each in (ledger, other):
        await each.end(await each.begin("ada", "m", ""), USAGE, at=clock.time)
    clock.time = NOON
    await ledger.end(await ledger.begin("ada", "m", ""), USAGE, at=NOON)
    await ledger.end(await ledger.begin("eve", "m", ""), USAGE, at=NOON)
    assert (ledger.used("ada", DAY).tokens, ledger.used("ada", MONTH).tokens) == (110, 220)
    assert (other.used("ada", DAY).tokens, other.used("ada", MONTH).tokens) == (0, 110)
    for _ in range(2):
        for each in (ledger, other):
            await each.refresh()
            assert (each.used("ada", DAY).tokens, each.used("ada", MONTH).tokens) == (110, 330)
            assert each.used("ada", MONTH).cost == pytest.approx(330 / 1e6)
            assert each.used("nobody", MONTH) == Totals()
    clock.time = NOON + 31 * 24 * 3600.0
    await ledger.refresh()
    assert ledger.used("ada", "2026-12") == Totals()


@spec("REUSE-88")
@pytest.mark.parametrize("batch", [1, 2, 1000])
async def test_a_process_that_dies_at_any_write_of_folding_changes_no_sum(
    batch: int,
) -> None:
    deaths = 0
    for writes in itertools.count():
        store, clock = await open_ledger_store()
        ledger = UsageLedger(store, {}, clock, folded_max=batch)
        for number in range(5):
            await ledger.end(await ledger.begin("ada", f"m{number % 2}", ""), USAGE, at=NOON)
        await ledger.begin("ada", "m0", "s")
        expected = await lines(store)
        clock.time = NOON + FOLDED_AFTER_S
        store.writes_left = writes
        died = False
        try:
            for _ in range(7):
                await fold_all(ledger)
        except Died:
            died = True
        deaths += died
        store.writes_left = float("inf")
        assert await lines(store) == expected
        next_one = UsageLedger(store, {}, clock, folded_max=batch)
        for _ in range(7):
            await fold_all(next_one)
            assert await lines(store) == expected
        assert len(await store.kv_list(ENTRIES)) == 1  # the one without an end
        if not died:
            break
        assert writes < 50
    assert deaths >= 6


async def test_two_concurrent_folds_change_no_sum() -> None:
    for at in range(8):
        store, clock = await open_ledger_store()
        first, second = (UsageLedger(store, {}, clock) for _ in range(2))
        for _ in range(3):
            await first.end(await first.begin("ada", "m", ""), USAGE, at=NOON)
        clock.time = NOON + FOLDED_AFTER_S
        found = await first.refresh()
        store.writes_left = at
        with contextlib.suppress(Died):
            await first.fold(found)
        store.writes_left = float("inf")
        store.on_write = lambda second=second: fold_all(second)
        await first.fold(found)
        await fold_all(second)
        assert await lines(store) == [UsageLine(DAY, "ada", "m", Totals(3, USAGE + USAGE + USAGE))]


async def test_a_report_read_during_a_fold_counts_each_answer_once() -> None:
    store, clock = await open_ledger_store()
    ledger = UsageLedger(store, {}, clock)
    for _ in range(4):
        await ledger.end(await ledger.begin("ada", "m", ""), USAGE, at=NOON)
    clock.time = NOON + FOLDED_AFTER_S
    reports = [asyncio.create_task(lines(store)) for _ in range(20)]
    await fold_all(ledger)
    for report in await asyncio.gather(*reports):
        assert [line.totals.requests for line in report] == [4]


async def test_an_answer_that_was_lost_with_its_process_is_folded_after_a_day() -> None:
    store, clock = await open_ledger_store()
    ledger = UsageLedger(store, {}, clock)
    await ledger.begin("ada", "m", "")
    clock.time = NOON + OPEN_MAX_S - 1
    await fold_all(ledger)
    assert len(await store.kv_list(ENTRIES)) == 1
    clock.time = NOON + OPEN_MAX_S
    await fold_all(ledger)
    assert await store.kv_list(ENTRIES) == []
    assert await lines(store) == [UsageLine(DAY, "ada", "m", Totals(1))]
    clock.time = NOON + 431 * 24 * 3600.0
    await fold_all(ledger)
    assert await lines(store) == []


async def test_a_busy_store_loses_no_count() -> None:
    store, clock = await open_ledger_store()
    ledger = UsageLedger(store, {}, clock)
    name = await ledger.begin("ada", "m", "")

    async def refuse() -> None:
        raise StoreBusyError("busy")

    store.on_write = refuse
    with pytest.raises(StoreBusyError):
        await ledger.end(name, USAGE, at=NOON)
    await ledger.end(name, USAGE, at=NOON)
    assert group_lines(await lines(store), ())[0].totals == Totals(1, USAGE)


async def test_a_damaged_row_is_omitted_and_never_replaced() -> None:
    store, clock = await open_ledger_store()
    ledger = UsageLedger(store, {}, clock)
    await ledger.end(await ledger.begin("ada", "m", ""), USAGE, at=NOON)
    await store.kv_put(ENTRIES, "torn", b"{", expected=0, at=NOON)
    await ledger.end("torn", USAGE, at=NOON)
    assert await lines(store) == [UsageLine(DAY, "ada", "m", Totals(1, USAGE))]
    await store.kv_put(f"{MONTHS}{MONTH}", DAY, b"{", expected=0, at=NOON)
    clock.time = NOON + FOLDED_AFTER_S
    with pytest.raises(StoreDamagedError):
        await fold_all(ledger)
    assert await lines(store) == [UsageLine(DAY, "ada", "m", Totals(1, USAGE))]
