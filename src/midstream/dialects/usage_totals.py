"""Usage of the gateway: what one request used, and the totals of a day.

An entry stands for one answer, from before it is begun. Later it is folded into the totals of its day, which name the
entries that were folded last: so an entry that was not removed yet counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct

from midstream.history.messages import Usage

MILLION = 1_000_000
By = Literal["user", "model", "day"]


class Prices(Struct, frozen=True):
    """Prices of a model for a million tokens each, in any one currency.

    Args:
        cached_input: Of input that came from a cache; None: as other input.
    """

    input: float
    output: float
    cached_input: float | None = None

    def cost_of(self, usage: Usage) -> float:
        """Return what so many tokens cost."""
        cached = self.input if self.cached_input is None else self.cached_input
        parts = (
            (usage.input_tokens - usage.cached_tokens) * self.input,
            usage.cached_tokens * cached,
            usage.output_tokens * self.output,
        )
        return sum(parts) / MILLION


class UsageEntry(Struct, frozen=True, omit_defaults=True):
    """One answer.

    Args:
        principal: Whose key it was requested with; "" for the gateway's own.
        model: The name of the model that was requested, or that of the upstream.
        at: When it was requested, in seconds since 1970: it counts for the day of that moment.
        session: The session whose journal has the answer; "" where none on disk has it.
        ended_at: When it ended; 0 before.
        usage: Tokens that the model counted; none before the end, nor where the upstream did not count them.
        cost: By the prices at the end; None where the model has none.
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
        """Whether nothing will be added to it."""
        return self.ended_at > 0

    @property
    def totals(self) -> Totals:
        """Itself as a sum."""
        return Totals(1, self.usage, self.cost or 0.0, 0 if self.cost is None else 1)


class Totals(Struct, frozen=True, omit_defaults=True):
    """A sum of answers.

    Args:
        requests: How many answers have ended.
        priced: How many of them have a cost.
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
        """All tokens, in and out."""
        return self.usage.input_tokens + self.usage.output_tokens


class UsageLine(Struct, frozen=True):
    """The sum of one principal, one model and one day (`2026-11-27`, in UTC)."""

    day: str
    principal: str
    model: str
    totals: Totals


class DayTotals(Struct, frozen=True, omit_defaults=True):
    """The entries of one day that were folded.

    Args:
        sums: By principal and model.
        folded: The names of the entries that were folded last; they may still be there.
    """

    sums: Mapping[str, Mapping[str, Totals]] = {}
    folded: tuple[str, ...] = ()

    def fold(self, entries: Mapping[str, UsageEntry]) -> DayTotals:
        """Return it with further entries of the day. Those that were folded before must be gone."""
        sums = {principal: dict(models) for principal, models in self.sums.items()}
        for entry in entries.values():
            models = sums.setdefault(entry.principal, {})
            models[entry.model] = models.get(entry.model, Totals()) + entry.totals
        return DayTotals(sums, tuple(entries))


def day_of(at: float) -> str:
    """Return the day of an instant (seconds since 1970), in UTC."""
    return datetime.fromtimestamp(at, UTC).date().isoformat()


def lines_of(days: Mapping[str, DayTotals], entries: Mapping[str, UsageEntry]) -> list[UsageLine]:
    """Return all sums, by day, principal and model; each entry that has ended counts once, folded or not.

    An open entry may be one of an answer that was never begun, since its process was killed between the two.
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
    """Return the sums of these lines by some of their columns; the others are ""."""
    sums: dict[tuple[str, str, str], Totals] = {}
    for line in lines:
        key = (
            line.day if "day" in by else "",
            line.principal if "user" in by else "",
            line.model if "model" in by else "",
        )
        sums[key] = sums.get(key, Totals()) + line.totals
    return [UsageLine(*key, sums[key]) for key in sorted(sums)]
