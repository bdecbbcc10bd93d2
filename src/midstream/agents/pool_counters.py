"""Results of a pool's turns, as numbers that only grow: for metrics."""

from __future__ import annotations

from collections import Counter

from midstream.agents.pool_entries import Eviction
from midstream.agents.pool_turns import AgentOrigin, End, TurnReport
from midstream.agents.reuse_classification import RequestRelation


class PoolCounters:
    """Read it whenever you like; it is written on the loop's thread, after each turn."""

    def __init__(self) -> None:
        self.evictions: Counter[Eviction] = Counter()
        """Records that a limit removed, or that were too old to be used, by the limit."""
        self.turns: Counter[tuple[RequestRelation, AgentOrigin, End]] = Counter()
        """Turns, by what the request was, how the agent was got, and how it ended."""
        self.rebuilt: Counter[str] = Counter()
        """Turns in which a fresh agent had to take the place of one that should have known, by the reason."""
        self.errors: Counter[str] = Counter()
        """Turns that failed, by the error's code."""
        self.sends = 0
        """Messages that agents were sent, all tries counted."""
        self.replays = 0
        """How often a fresh agent was sent a whole conversation."""
        self.input_tokens = 0
        """What upstreams read, from a cache or not, as far as they count."""
        self.cached_tokens = 0
        """What of that came from a cache."""
        self.cache_write_tokens = 0
        """What of that was written to a cache."""
        self.output_tokens = 0

    def take(self, report: TurnReport) -> None:
        """Count a turn that is over."""
        self.turns[report.kind, report.way, report.end] += 1
        if report.rebuilt:
            self.rebuilt[report.rebuilt] += 1
        if report.error:
            self.errors[report.error] += 1
        self.sends += report.sends
        self.replays += report.replays
        if report.usage is not None:
            self.input_tokens += report.usage.input_tokens
            self.cached_tokens += report.usage.cached_tokens
            self.cache_write_tokens += report.usage.cache_write_tokens
            self.output_tokens += report.usage.output_tokens
