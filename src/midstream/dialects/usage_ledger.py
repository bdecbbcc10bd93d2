"""Usage of the gateway in its store: each answer counts exactly once, also when processes are killed.

An entry is written before its answer begins, and its name is in the journal with the request. When the answer has
ended, the process that runs the session adds the tokens. If that process was killed, another one finds the open entry
and reads the journal. An ended entry never changes, so no answer counts twice.

Old entries are added to the totals of their day in one conditional write, and then removed.
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
"""Prefix of the namespaces with totals by day, one for each month (`gateway-usage-2026-11`)."""
KEPT_S = 400 * 24 * 3600.0
"""Seconds for which totals are kept."""
FOLDED_AFTER_S = 60.0
"""Seconds after the end of an answer until its entry may be folded."""
OPEN_MAX_S = 24 * 3600.0
"""Seconds after which an open entry is folded without tokens: its answer was lost with a process's memory."""
FOLDED_MAX = 1000
"""Greatest number of entries that are folded in one write."""
READS_MAX = 10
"""Attempts to read all entries without a concurrent change of a day's totals."""

T = TypeVar("T")
_entry = msgspec.json.Decoder(UsageEntry).decode
_day = msgspec.json.Decoder(DayTotals).decode


class Snapshot(msgspec.Struct, frozen=True):
    """All usage at one moment: totals of days, and entries that are not folded."""

    days: Mapping[str, DayTotals]
    entries: Mapping[str, UsageEntry]

    def lines(self) -> list[UsageLine]:
        """Return the sums by day, principal and model."""
        return lines_of(self.days, self.entries)


async def read_usage(store: StoreReader, *, since: str = "") -> Snapshot:
    """Return the usage in a store, with each answer once.

    Args:
        since: First month to read (`2026-11`), or a day of it; "" for all.

    Raises:
        UnavailableError: Other processes keep folding entries.
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
    raise UnavailableError("other processes fold usage at the same time: retry", retry_after_s=1.0)


async def _read_days(store: StoreReader, since: str) -> list[KeyValueEntry]:
    rows: list[KeyValueEntry] = []
    for namespace in sorted(await store.kv_namespaces()):
        if namespace.startswith(MONTHS) and namespace >= _namespace_of(since):
            rows += await store.kv_list(namespace)
    return rows


def _decode(row: KeyValueEntry, decode: Callable[[bytes], T]) -> T | None:
    """Decode a row; return None if it is damaged, or of another version."""
    try:
        return decode(row.body)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _namespace_of(day: str) -> str:
    return MONTHS + day[: len("2026-11")]


class UsageLedger:
    """The usage of all gateways of one store, by principal.

    Args:
        store: Store of the usage; processes may share it.
        prices: Prices of models by their names in entries; "" stands for all other models.
        folded_max: Greatest number of entries that are folded in one write.
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
        """Open entries of this process, with their versions."""
        self._sums: dict[str, dict[str, Totals]] = {}
        """Usage of each principal on each day of this month, from the last `refresh`."""
        self._added: dict[str, UsageEntry] = {}
        """Entries that ended here since the last `refresh` began."""
        self._refreshing = asyncio.Lock()
        self.is_needed = False
        """Whether `used` was called since the last `refresh`."""

    async def begin(self, principal: str, model: str, session: str) -> str:
        """Write the entry of an answer before its beginning; return the entry's name.

        Args:
            session: See `UsageEntry`.

        Raises:
            MidstreamError: The store fails. The answer must not begin.
        """
        name = self._world.new_id("usage")
        entry = UsageEntry(principal, model, self._world.now(), session)
        self._begun[name] = (await self._put(name, entry, 0), entry)
        return name

    async def drop(self, name: str) -> None:
        """Remove the entry of an answer that did not begin.

        Raises:
            MidstreamError: The store fails.
        """
        self._begun.pop(name, None)
        await self._remove(name)

    async def end(self, name: str, usage: Usage | None, *, at: float) -> None:
        """Record the usage of an ended answer. An ended or missing entry does not change.

        Raises:
            MidstreamError: The store fails; the caller must retry.
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
        except EntryMovedError:  # another process ended it first
            self._begun.pop(name, None)
            return
        self._begun.pop(name, None)
        self._added[name] = ended

    def used(self, principal: str, since: str) -> Totals:
        """Return the usage of a principal since a day: from the last `refresh`, and of later ends at this process.

        Args:
            since: A day of this month (`2026-11-27`), or this month (`2026-11`).
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
        """Read this month's usage of all processes, for `used`, and return it.

        Raises:
            MidstreamError: The store fails, or other processes keep changing the usage.
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
                if entry is not None and entry.is_ended:  # the answer ended during the read
                    del self._added[name]
            return found

    async def fold(self, found: Snapshot) -> None:
        """Add old entries to the totals of their days, and remove them.

        Args:
            found: The newest usage, see `refresh`.

        Raises:
            MidstreamError: The store fails. Folded entries still count once.
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
            raise StoreDamagedError(f"the totals of {day} cannot be read; its entries are not folded")
        for name in totals.folded:  # a killed process may not have removed them
            await self._remove(name)
            entries.pop(name, None)
        chosen: dict[str, UsageEntry] = {}
        for name in [*entries][: self._folded_max]:
            kept = await self._store.kv_get(ENTRIES, name)
            entry = None if kept is None else _decode(kept, _entry)
            if entry is not None:  # read again, because another process may have folded it
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
