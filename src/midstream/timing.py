"""Deadlines, backoff and the pauses servers ask for, as values. Time and chance come in as arguments."""

from __future__ import annotations

import datetime as dt
import email.utils
import math
from enum import StrEnum

from msgspec import Struct

from midstream.errors import UsageError


class StalledOn(StrEnum):
    """Thing that is waited for in silence."""

    FIRST_TOKEN = "first_token"  # noqa: S105 - no secret
    BETWEEN_TOKENS = "between_tokens"
    TOOL = "tool"


RETRY_AFTER_MAX_S = 3600.0
"""A server that asks for a longer pause is taken at an hour."""


class Deadline(Struct, frozen=True, gc=False, order=True):
    """An instant by which something is owed, and what, so that a log can say it."""

    at: float
    reason: str


class Backoff(Struct, frozen=True, gc=False):
    """How long to wait between tries.

    Args:
        first_s: Seconds before the second try.
        most_s: No wait is longer.
        factor: Growth from one wait to the next.
        jitter: Share of the wait that chance decides: 0 none, 1 all of it ("full jitter").
    """

    first_s: float
    most_s: float
    factor: float = 2.0
    jitter: float = 0.0

    def wait_s(self, failures: int, *, chance: float) -> float:
        """Return the seconds to wait after `failures` failures in a row; `chance` is in [0, 1)."""
        if failures <= 0:
            return 0.0
        exponent = min(failures - 1, 64)
        wait = min(self.most_s, self.first_s * self.factor**exponent)
        return wait * (1.0 - self.jitter * chance)


MODEL_BACKOFF = Backoff(first_s=1.0, most_s=4.0, jitter=0.25)
"""Between attempts of one model call: 1, 2, 4 s (the originals' rule), a quarter of it by chance."""

RECONNECT_BACKOFF = Backoff(first_s=1.0, most_s=30.0, jitter=1.0)
"""Between reconnects of a client, after a first one at once: 1 s to 30 s with full jitter."""


def retry_after_s(said: str, *, now: float) -> float | None:
    """Return the seconds that a `Retry-After` asks for, at most `RETRY_AFTER_MAX_S`; None where it asks for none.

    Args:
        said: Seconds, or an HTTP date in any of its three forms; anything may stand there.
        now: The wall clock, in seconds since 1970.
    """
    try:
        seconds = float(said)
    except ValueError:
        try:
            date = email.utils.parsedate_to_datetime(said)
            if date.tzinfo is None:  # the form of asctime: all dates of HTTP are UTC
                date = date.replace(tzinfo=dt.UTC)
            seconds = date.timestamp() - now
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), RETRY_AFTER_MAX_S) if math.isfinite(seconds) else None


class StallBudgets(Struct, frozen=True, gc=False):
    """How long there may be silence before it is told, and before it is cut. All in seconds.

    Args:
        first_token_s: Past this, and past two, four, eight times this, readers, log and counter are told.
        between_tokens_s, tool_s: Past these they are told, once per silence.
        first_token_max_s, between_tokens_max_s: Past these a model call is cut and tried again. A model that thinks
            for long without a sign needs more; a tool's limit is its own timeout.
        upstream_tool_max_s: Past this a model call is cut while a tool runs that its upstream runs itself.

    Raises:
        UsageError: A budget is not positive, or a limit is not finite: a turn must not wait for ever.
    """

    first_token_s: float = 30.0
    between_tokens_s: float = 15.0
    tool_s: float = 60.0
    first_token_max_s: float = 120.0
    between_tokens_max_s: float = 120.0
    upstream_tool_max_s: float = 600.0

    def __post_init__(self) -> None:
        limits = (self.first_token_max_s, self.between_tokens_max_s, self.upstream_tool_max_s)
        if not all(each > 0 for each in (self.first_token_s, self.between_tokens_s, self.tool_s)):
            raise UsageError("a budget for silence is a positive number of seconds (infinite: never told)")
        if not all(0 < each < math.inf for each in limits):
            raise UsageError("a limit for silence is a positive, finite number of seconds")

    def of(self, waiting_for: StalledOn) -> tuple[float, float | None]:
        """Return after how many seconds a silence is told, and after how many it is cut (None: not by us)."""
        match waiting_for:
            case StalledOn.FIRST_TOKEN:
                return self.first_token_s, self.first_token_max_s
            case StalledOn.BETWEEN_TOKENS:
                return self.between_tokens_s, self.between_tokens_max_s
            case StalledOn.TOOL:
                return self.tool_s, None
