"""Usage of the gateway in its store: each answer counts once, also when processes are killed.

The order of effects: an entry is written before the answer is begun, so that an answer cannot be made without one. Its
name stands in the journal with the request. The process that runs the session adds the tokens when the answer has
ended; where it was killed before that, another one finds the entry still open and reads the journal. Nothing is ever
added to an entry that has ended, and only entries that were written before an answer exist, so none counts twice.

Old entries are folded into the totals of their day, one write with a condition, and then removed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from midstream.dialects.usage_totals import (
    DayTotals,
    Prices,
    Totals,
    UsageEntry,
    UsageLine,
    day_of,
    lines_of,
)
from midstream.environment import World
from midstream.errors import EntryMovedError, StoreDamagedError, UnavailableError
from midstream.history.messages import Usage
from midstream.store.contract import KeyValueEntry, Store, StoreReader

ENTRIES = "gateway-usage"
"""Namespace of the entries of answers, by their names."""
MONTHS = "gateway-usage-"
"""Beginning of the namespaces of the totals of days, one for each month (`gateway-usage-2026-11`), by the days."""
KEPT_S = 400 * 24 * 3600.0
"""Seconds for which totals are kept."""
FOLDED_AFTER_S = 60.0
"""Seconds after its end in which an entry is kept by itself."""
OPEN_MAX_S = 24 * 3600.0
"""Seconds after which an entry without an end is folded as it is: its answer was lost with the memory of a process."""
FOLDED_MAX = 1000
"""Entries that are folded in one write."""
READS_MAX = 10
"""Tries to read all entries between two changes of a day's totals."""

T = TypeVar("T")
_entry = msgspec.json.Decoder(UsageEntry).decode
_day = msgspec.json.Decoder(DayTotals).decode


class Snapshot(msgspec.Struct, frozen=True):
    """All usage at one moment: the totals of days, and the entries beside them."""

    days: Mapping[str, DayTotals]
    entries: Mapping[str, UsageEntry]

    def lines(self) -> list[UsageLine]:
        """Return the sums by day, principal and model."""
        return lines_of(self.days, self.entries)


async def read_usage(store: StoreReader, *, since: str = "") -> Snapshot:
    """Return the usage in a store, each answer once.

    Args:
        since: The first month whose totals are read (`2026-11`), or a day of it; "" for all.

    Raises:
        UnavailableError: Other processes change it all the time.
    """
    before = await _read_days(store, since)
    for _ in range(READS_MAX):
        rows = await store.kv_list(ENTRIES)
        after = await _read_days(store, since)
        if before == after:
            days = {row.key: day for row in after if (day := _decode(row, _day)) is not None}
            return Snapshot(
                days, {row.key: entry for row in rows if (entry := _decode(row, _entry)) is not None}
            )
        before = after
    raise UnavailableError("usage is folded all the time: retry", retry_after_s=1.0)


async def _read_days(store: StoreReader, since: str) -> list[KeyValueEntry]:
    rows: list[KeyValueEntry] = []
    for namespace in sorted(await store.kv_namespaces()):
        if namespace.startswith(MONTHS) and namespace >= _namespace_of(since):
            rows += await store.kv_list(namespace)
    return rows


def _decode(row: KeyValueEntry, decode: Callable[[bytes], T]) -> T | None:
    """Return the value of a row; None where it is damaged, or of another version."""
    try:
        return decode(row.body)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _namespace_of(day: str) -> str:
    """Return where the totals of a day are."""
    return MONTHS + day[: len("2026-11")]


class UsageLedger:
    """The usage of the gateways of one store, and how much of it each principal has.

    Args:
        store: Where it is kept; several processes may share it.
        prices: Of models, by the names that entries have; those of "" are for every other model.
        folded_max: Entries that are folded in one write.
    """

    def __init__(
        self,
        store: Store,
        prices: Mapping[str, Prices],
        world: World,
        *,
        folded_max: int = FOLDED_MAX,
    ) -> None:
        self._store = store
        self._prices = prices
        self._world = world
        self._folded_max = folded_max
        self._begun: dict[str, tuple[int, UsageEntry]] = {}
        """Entries that this process wrote and that have not ended, with their versions."""
        self._sums: dict[str, dict[str, Totals]] = {}
        """What each principal used on each day of this month, as of the last `refresh`."""
        self._added: dict[str, UsageEntry] = {}
        """Entries that ended here since the last `refresh` began."""
        self._refreshing = asyncio.Lock()
        self.is_needed = False
        """`used` was called since the last `refresh`."""

    async def begin(self, principal: str, model: str, session: str) -> str:
        """Write the entry of an answer that is about to be begun, and return its name.

        Args:
            session: See `UsageEntry`.

        Raises:
            MidstreamError: The store refuses. Nothing may be begun.
        """
        name = self._world.new_id("usage")
        entry = UsageEntry(principal, model, self._world.now(), session)
        self._begun[name] = (await self._put(name, entry, 0), entry)
        return name

    async def drop(self, name: str) -> None:
        """Remove the entry of an answer that was not begun.

        Raises:
            MidstreamError: The store refuses.
        """
        self._begun.pop(name, None)
        await self._remove(name)

    async def end(self, name: str, usage: Usage | None, *, at: float) -> None:
        """Add what an answer used. Without effect where it has ended already, and where there is no such entry.

        Raises:
            MidstreamError: The store refuses; it is to be tried again.
        """
        known = self._begun.get(name)
        if known is None:
            row = await self._store.kv_get(ENTRIES, name)
            entry = None if row is None else _decode(row, _entry)
            known = None if row is None or entry is None else (row.version, entry)
        if known is None or known[1].is_ended:
            return
        version, entry = known
        prices = self._prices.get(entry.model) or self._prices.get("")
        usage = usage or Usage()
        cost = None if prices is None else prices.cost_of(usage)
        ended = replace(entry, ended_at=at, usage=usage, cost=cost)
        try:
            await self._put(name, ended, version)
        except EntryMovedError:  # another process was faster
            self._begun.pop(name, None)
            return
        self._begun.pop(name, None)
        self._added[name] = ended

    def used(self, principal: str, since: str) -> Totals:
        """Return what the answers of a principal used since a day: all that ended before the last `refresh`, and here.

        Args:
            since: A day (`2026-11-27`) or the month (`2026-11`), in this month.
        """
        self.is_needed = True
        total = Totals()
        for day, sums in self._sums.get(principal, {}).items():
            if day >= since:
                total += sums
        for entry in self._added.values():
            if entry.principal == principal and day_of(entry.at) >= since:
                total += entry.totals
        return total

    async def refresh(self) -> Snapshot:
        """Read what all processes have counted in this month, for `used`, and return it.

        Raises:
            MidstreamError: The store refuses, or others change it all the time.
        """
        async with self._refreshing:
            self.is_needed = False
            known, begun = [*self._added], [*self._begun]
            month = day_of(self._world.now())[: len("2026-11")]
            found = await read_usage(self._store, since=month)
            sums: dict[str, dict[str, Totals]] = defaultdict(lambda: defaultdict(Totals))
            for line in found.lines():
                if line.day >= month:
                    sums[line.principal][line.day] += line.totals
            self._sums = sums
            for name in begun:
                entry = found.entries.get(name)
                if entry is None or entry.is_ended:  # by another process
                    self._begun.pop(name, None)
            for name in known:
                del self._added[name]
            for name in [*self._added]:
                entry = found.entries.get(name)
                if entry is not None and entry.is_ended:  # it ended while this was read
                    del self._added[name]
            return found

    async def fold(self, found: Snapshot) -> None:
        """Fold old entries into the totals of their days, and remove them.

        Args:
            found: The newest usage, see `refresh`.

        Raises:
            MidstreamError: The store refuses. What was folded counts once all the same.
        """
        now = self._world.now()
        by_day: dict[str, dict[str, UsageEntry]] = defaultdict(dict)
        for name, entry in found.entries.items():
            since = entry.ended_at + FOLDED_AFTER_S if entry.is_ended else entry.at + OPEN_MAX_S
            if since <= now:
                by_day[day_of(entry.at)][name] = entry
        for day, entries in sorted(by_day.items()):
            await self._fold_day(day, entries)
        oldest = _namespace_of(day_of(now - KEPT_S))
        for namespace in await self._store.kv_namespaces():
            if namespace.startswith(MONTHS) and namespace < oldest:
                for row in await self._store.kv_list(namespace):
                    await self._store.kv_delete(namespace, row.key, expected=row.version)

    async def _fold_day(self, day: str, entries: dict[str, UsageEntry]) -> None:
        row = await self._store.kv_get(_namespace_of(day), day)
        version, totals = (0, DayTotals()) if row is None else (row.version, _decode(row, _day))
        if totals is None:
            raise StoreDamagedError(f"the usage of {day} cannot be read: its entries are kept apart")
        for name in totals.folded:  # a process was killed before it had removed them
            await self._remove(name)
            entries.pop(name, None)
        chosen: dict[str, UsageEntry] = {}
        for name in [*entries][: self._folded_max]:
            kept = await self._store.kv_get(ENTRIES, name)
            entry = None if kept is None else _decode(kept, _entry)
            if entry is not None:  # as it is now; another process may have folded it meanwhile
                chosen[name] = entry
        if not chosen:
            return
        body = msgspec.json.encode(totals.fold(chosen))
        try:
            await self._store.kv_put(_namespace_of(day), day, body, expected=version, at=self._world.now())
        except EntryMovedError:
            return  # another process folds this day
        for name in chosen:
            await self._remove(name)

    async def _remove(self, name: str) -> None:
        kept = await self._store.kv_get(ENTRIES, name)
        if kept is not None:
            await self._store.kv_delete(ENTRIES, name, expected=kept.version)

    async def _put(self, name: str, entry: UsageEntry, expected: int) -> int:
        body = msgspec.json.encode(entry)
        return await self._store.kv_put(ENTRIES, name, body, expected=expected, at=self._world.now())
