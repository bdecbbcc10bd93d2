"""Usage of the gateway: entries of answers, and totals of days.

An answer has an entry from before its beginning. Later the entry is folded into the totals of its day, which list the
names of the last folded entries. So an entry that is not removed yet counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

from midstream.history.messages import Usage
from midstream.number_checks import require_number

MILLION = 1_000_000
By = Literal["user", "model", "day"]

PRICE_MAX = 1e12
"""Greatest price of a million tokens, in any currency."""


class Prices(Struct, frozen=True):
    """Prices of a model for a million tokens each, in any one currency.

    Args:
        cached_input: Price of cached input; None for the price of other input.

    Raises:
        UsageError: A price is negative, or no finite number.
    """

    input: float
    output: float
    cached_input: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if (price := getattr(self, name)) is not None or name != "cached_input":
                require_number(name, price, "for a million tokens", most=PRICE_MAX)

    def cost_of(self, usage: Usage) -> float:
        """Return the cost of tokens."""
        cached = self.input if self.cached_input is None else self.cached_input
        parts = (
            (usage.input_tokens - usage.cached_tokens) * self.input,
            usage.cached_tokens * cached,
            usage.output_tokens * self.output,
        )
        return sum(parts) / MILLION


class UsageEntry(Struct, frozen=True, omit_defaults=True):
    """Usage of one answer.

    Args:
        principal: Principal of the key; "" for the gateway's own key.
        model: Name of the requested model, or of the upstream's.
        at: Time of the request, in seconds since 1970, which determines its day.
        session: The session with the answer; "" for a session in memory.
        ended_at: Time of the end; 0 before.
        usage: Tokens that the upstream reported; none before the end.
        cost: Cost by the prices at the end; None without a price.
    """

    principal: str
    model: str
    at: float
    session: str = ""
    ended_at: float = 0.0
    usage: Usage = Usage()
    cost: float | None = None

    @property
    def is_ended(self) -> bool:
        """Whether the answer has ended."""
        return self.ended_at > 0

    @property
    def totals(self) -> Totals:
        """The entry as a sum."""
        return Totals(1, self.usage, self.cost or 0.0, 0 if self.cost is None else 1)


class Totals(Struct, frozen=True, omit_defaults=True):
    """A sum of answers.

    Args:
        requests: Number of ended answers.
        priced: Number of them with a cost.
    """

    requests: int = 0
    usage: Usage = Usage()
    cost: float = 0.0
    priced: int = 0

    def __add__(self, other: Totals) -> Totals:
        """Return the sum."""
        return Totals(
            self.requests + other.requests,
            self.usage + other.usage,
            self.cost + other.cost,
            self.priced + other.priced,
        )

    @property
    def tokens(self) -> int:
        """All input and output tokens."""
        return self.usage.input_tokens + self.usage.output_tokens


class UsageLine(Struct, frozen=True):
    """The sum of one principal, one model and one day (`2026-11-27`, in UTC)."""

    day: str
    principal: str
    model: str
    totals: Totals


class DayTotals(Struct, frozen=True, omit_defaults=True):
    """Totals of one day's folded entries.

    Args:
        sums: Sums by principal and model.
        folded: Names of the last folded entries, which may not be removed yet.
    """

    sums: Mapping[str, Mapping[str, Totals]] = {}
    folded: tuple[str, ...] = ()

    def fold(self, entries: Mapping[str, UsageEntry]) -> DayTotals:
        """Return the totals with further entries of the day. Entries of `folded` must have been removed."""
        sums = {principal: dict(models) for principal, models in self.sums.items()}
        for entry in entries.values():
            models = sums.setdefault(entry.principal, {})
            models[entry.model] = models.get(entry.model, Totals()) + entry.totals
        return DayTotals(sums, tuple(entries))


def day_of(at: float) -> str:
    """Return the day of an instant (seconds since 1970), in UTC."""
    return datetime.fromtimestamp(at, UTC).date().isoformat()


def lines_of(days: Mapping[str, DayTotals], entries: Mapping[str, UsageEntry]) -> list[UsageLine]:
    """Return all sums by day, principal and model; each ended entry counts once, folded or not.

    Open entries do not count: a process may have been killed before the answer began.
    """
    sums: dict[tuple[str, str, str], Totals] = {}
    for day, totals in days.items():
        for principal, models in totals.sums.items():
            sums |= {(day, principal, model): each for model, each in models.items()}
    for name, entry in entries.items():
        day = day_of(entry.at)
        if entry.is_ended and (day not in days or name not in days[day].folded):
            key = (day, entry.principal, entry.model)
            sums[key] = sums.get(key, Totals()) + entry.totals
    return [UsageLine(*key, sums[key]) for key in sorted(sums)]


def group_lines(lines: Iterable[UsageLine], by: Collection[By]) -> list[UsageLine]:
    """Sum lines by some of their columns; the other columns are ""."""
    sums: dict[tuple[str, str, str], Totals] = {}
    for line in lines:
        key = (
            line.day if "day" in by else "",
            line.principal if "user" in by else "",
            line.model if "model" in by else "",
        )
        sums[key] = sums.get(key, Totals()) + line.totals
    return [UsageLine(*key, sums[key]) for key in sorted(sums)]
