"""Limits of a gateway's users: requests per minute, concurrent answers, tokens and cost per day and month.

The limits of requests and of concurrent answers apply to all gateways of a store together, with the delay that `Limits`
states. Tokens and cost come from the ledger: all gateways, up to 2 s ago.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta

from midstream.dialects.api_callers import Allowance, ApiCaller
from midstream.dialects.api_errors import INSUFFICIENT_QUOTA, RATE_LIMIT_EXCEEDED, RATE_LIMITED, ApiError
from midstream.dialects.gateway_bodies import RefusedError
from midstream.dialects.usage_ledger import UsageLedger
from midstream.environment import World
from midstream.errors import LimitReachedError
from midstream.server.limits import REPORTED_MAX, Rate, digest_of_caller
from midstream.server.node_reporting import FleetCounter

PARTS = 1_000_000
"""Sum of the requests of one minute at the limit; each request is an equal part of it."""
BUSY_S = 1.0
"""Seconds until a retry when the limit of concurrent answers is reached."""


class OpenAnswers:
    """Number of answers in progress for each principal; see `FleetCounter`.

    Args:
        count: Returns the answers in progress in this process by principal, without those about to begin.
    """

    def __init__(self, count: Callable[[], Mapping[str, int]]) -> None:
        self._count = count
        self._beginning: Counter[str] = Counter()
        self._elsewhere: Mapping[str, float] = {}
        self.on_half_used: Callable[[], None] | None = None
        """See `FleetCounter.on_half_used`."""

    def open_of(self, principal: str) -> float:
        """Return the number for a principal in all processes."""
        here = self._beginning[principal] + self._count().get(principal, 0)
        return here + self._elsewhere.get(digest_of_caller(principal), 0.0)

    @contextlib.contextmanager
    def count_beginning(self, principal: str) -> Iterator[None]:
        """Count one answer that is about to begin, until the end of the block."""
        self._beginning[principal] += 1
        if self.on_half_used is not None:
            self.on_half_used()
        try:
            yield
        finally:
            self._beginning[principal] -= 1
            if not self._beginning[principal]:
                del self._beginning[principal]

    def own_counts(self) -> dict[str, float]:
        """See `FleetCounter.own_counts`."""
        counts = Counter(self._count())
        counts.update(self._beginning)
        return {digest_of_caller(name): float(count) for name, count in counts.most_common(REPORTED_MAX)}

    def set_other_counts(self, counts: Mapping[str, float]) -> None:
        """See `FleetCounter.set_other_counts`."""
        self._elsewhere = counts


class GatewayLimits:
    """Admits answers within the allowances of their callers; see `Admission`.

    Args:
        ledger: Usage of each principal.
        count_open: See `OpenAnswers`.
    """

    def __init__(
        self, ledger: UsageLedger, count_open: Callable[[], Mapping[str, int]], world: World
    ) -> None:
        self._ledger = ledger
        self._world = world
        self.requests = Rate(PARTS, "requests", world)
        self.answers = OpenAnswers(count_open)

    @property
    def counters(self) -> dict[str, FleetCounter]:
        """Limits of all gateways of a store together, by name."""
        return {"user_requests": self.requests, "user_answers": self.answers}

    @contextlib.contextmanager
    def admit(self, caller: ApiCaller) -> Iterator[None]:
        """See `Admission.admit`."""
        allowance = caller.allowance
        if not caller.principal:
            yield
            return
        if allowance.limits_usage:
            self._check_usage(caller.principal, allowance)
        limit = allowance.concurrent_requests
        if limit and self.answers.open_of(caller.principal) >= limit:
            raise _refused(f"{limit} answers for this key are in progress, its limit", retry_after_s=BUSY_S)
        if allowance.requests_per_minute:
            self._count_request(caller.principal, allowance.requests_per_minute)
        with self.answers.count_beginning(caller.principal):
            yield

    def _count_request(self, principal: str, limit: int) -> None:
        share = max(1, PARTS // limit)
        try:
            self.requests.check(principal, share)
        except LimitReachedError as error:
            words = f"this key may begin {limit} requests in one minute"
            raise _refused(words, retry_after_s=error.retry_after_s) from error
        self.requests.add(principal, share)

    def _check_usage(self, principal: str, allowance: Allowance) -> None:
        now = datetime.fromtimestamp(self._world.now(), UTC)
        day, month = now.date().isoformat(), now.strftime("%Y-%m")
        limit = allowance.tokens_per_day
        if limit and self._ledger.used(principal, day).tokens >= limit:
            midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
            words = f"the {limit} tokens of this key for {day} (UTC) are used"
            raise _refused(words, retry_after_s=(midnight - now).total_seconds(), is_final=True)
        used = self._ledger.used(principal, month)
        limit = allowance.tokens_per_month
        if limit and used.tokens >= limit:
            raise _no_quota(f"the {limit} tokens of this key for {month} (UTC) are used")
        if allowance.budget_per_month and used.cost >= allowance.budget_per_month:
            raise _no_quota(
                f"the budget of this key for {month} (UTC), {allowance.budget_per_month:g}, is used"
            )


def _refused(message: str, *, retry_after_s: float | None, is_final: bool = False) -> RefusedError:
    if retry_after_s is not None:
        message = f"{message}; try again in {max(1, round(retry_after_s))} s"  # Codex reads the pause here
    return RefusedError(
        ApiError(RATE_LIMITED, RATE_LIMIT_EXCEEDED, message, is_final=is_final, retry_after_s=retry_after_s)
    )


def _no_quota(message: str) -> RefusedError:
    return RefusedError(
        ApiError(RATE_LIMITED, INSUFFICIENT_QUOTA, f"{message}; ask the operator of the gateway")
    )
