"""Counters of a pool's turns, for metrics."""

from __future__ import annotations

from collections import Counter

from midstream.agents.pool_entries import Eviction
from midstream.agents.pool_turns import AgentOrigin, End, TurnReport
from midstream.agents.reuse_classification import RequestRelation


class PoolCounters:
    """Counters that are updated on the event loop after each turn."""

    def __init__(self) -> None:
        self.evictions: Counter[Eviction] = Counter()
        """Records that were removed by a limit or by age, by the limit."""
        self.turns: Counter[tuple[RequestRelation, AgentOrigin, End]] = Counter()
        """Turns, by the request's relation, the agent's origin, and the end."""
        self.rebuilt: Counter[str] = Counter()
        """Turns in which a fresh agent replaced one with the conversation, by the reason."""
        self.errors: Counter[str] = Counter()
        """Turns that failed, by the error's code."""
        self.sends = 0
        """Messages sent to agents, including retries."""
        self.replays = 0
        """Whole transcripts sent to fresh agents."""
        self.input_tokens = 0
        """Input tokens of upstreams, from a cache or not, as far as they are reported."""
        self.cached_tokens = 0
        """The part of them from a cache."""
        self.cache_write_tokens = 0
        """The part of them written to a cache."""
        self.output_tokens = 0

    def take(self, report: TurnReport) -> None:
        """Count a finished turn."""
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
