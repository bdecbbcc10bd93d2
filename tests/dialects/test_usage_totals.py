"""Sums of usage: the cost of a request, and each entry once in them, folded or not."""

from __future__ import annotations

from msgspec.structs import replace

from midstream.dialects.usage_totals import (
    DayTotals,
    Prices,
    Totals,
    UsageEntry,
    UsageLine,
    day_of,
    group_lines,
    lines_of,
)
from midstream.history.messages import Usage

NOON = 1_795_780_800.0
"""2026-11-27 12:00 UTC."""
DAY_S = 24 * 3600.0
USAGE = Usage(1000, 200, 400, 0, 50)


def test_a_day_is_a_day_in_utc() -> None:
    assert (day_of(NOON), day_of(NOON + DAY_S / 2 - 1), day_of(NOON + DAY_S / 2)) == (
        "2026-11-27",
        "2026-11-27",
        "2026-11-28",
    )


def test_cached_input_has_its_own_price() -> None:
    assert Prices(2, 10).cost_of(USAGE) == (1000 * 2 + 200 * 10) / 1e6
    assert Prices(2, 10, 0.5).cost_of(USAGE) == (600 * 2 + 400 * 0.5 + 200 * 10) / 1e6
    assert Prices(2, 10, 0).cost_of(Usage(5, 0, 5)) == 0


def test_each_entry_counts_once_whether_it_was_folded_or_not() -> None:
    entries = {
        "1": UsageEntry("ada", "m", NOON, "", NOON + 1, USAGE, 0.5),
        "2": UsageEntry("ada", "m", NOON + 5, "", NOON + 9, USAGE),
        "3": UsageEntry("", "n", NOON, "", NOON + 1),
        "4": UsageEntry("ada", "m", NOON + DAY_S, "", NOON + DAY_S + 1, Usage(1, 1), 0.25),
    }
    expected = [
        UsageLine("2026-11-27", "", "n", Totals(1)),
        UsageLine("2026-11-27", "ada", "m", Totals(2, USAGE + USAGE, 0.5, 1)),
        UsageLine("2026-11-28", "ada", "m", Totals(1, Usage(1, 1), 0.25, 1)),
    ]
    assert lines_of({}, entries | {"5": UsageEntry("ada", "m", NOON)}) == expected  # the last has not ended
    first = {"1": entries["1"], "3": entries["3"]}
    folded = {"2026-11-27": DayTotals().fold(first)}
    assert lines_of(folded, entries) == expected  # nothing was removed yet
    rest = {name: entry for name, entry in entries.items() if name not in first}
    assert lines_of(folded, rest) == expected
    again = {"2026-11-27": folded["2026-11-27"].fold({"2": entries["2"]})}
    assert lines_of(again, rest) == expected
    assert lines_of(again, {"4": entries["4"]}) == expected


def test_sums_are_grouped_by_some_columns() -> None:
    lines = [
        UsageLine("2026-11-27", "ada", "m", Totals(1, Usage(1, 2))),
        UsageLine("2026-11-28", "ada", "n", Totals(2, Usage(3, 4), 0.5, 1)),
        UsageLine("2026-11-28", "eve", "m", Totals(4)),
    ]
    assert group_lines(lines, ["user"]) == [
        UsageLine("", "ada", "", Totals(3, Usage(4, 6), 0.5, 1)),
        UsageLine("", "eve", "", Totals(4)),
    ]
    assert [each.model for each in group_lines(lines, ["model"])] == ["m", "n"]
    assert [(each.day, each.totals.requests) for each in group_lines(lines, ["day"])] == [
        ("2026-11-27", 1),
        ("2026-11-28", 6),
    ]
    assert group_lines(lines, ("day", "user", "model")) == lines
    assert group_lines(lines, ())[0].totals.tokens == 10


def test_an_entry_folded_without_an_end_is_a_request_without_tokens() -> None:
    entry = UsageEntry("ada", "m", NOON)
    assert (entry.is_ended, entry.totals) == (False, Totals(1))
    assert replace(entry, ended_at=NOON).is_ended
