"""Prometheus: counters and durations at `/metrics`, from the journal.

    asgi(agent, observers=[Prometheus()])

Labels are fixed words and names of models, so their number is limited. A provider may return any model name, so only a
limited number of names is distinguished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from midstream.extras import extra
from midstream.observability.observers import Observer
from midstream.session.records import QuestionAsked, Record, ReuseDecided, StallNoticed
from midstream.session.turn_durations import Interval, IntervalKind, Intervals

with extra("prometheus"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

MODELS_MAX = 100
"""Model names with counters of their own; tokens of other models are counted under `OTHER`."""
OTHER = "other"
_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Prometheus(Observer):
    """An `Observer` that counts, and a `MetricsPage` that shows it.

    Args:
        registry: The registry of the metrics; by default a new one.
    """

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._intervals = Intervals()
        ended = ("kind", "outcome")
        self._ended = Counter(
            "midstream_ended", "Turns, model calls and tool calls that ended.", ended, registry=self.registry
        )
        self._seconds = Histogram(
            "midstream_seconds", "How long they took.", ("kind",), buckets=_SECONDS, registry=self.registry
        )
        self._tokens = Counter(
            "midstream_tokens",
            "Tokens, as providers counted them.",
            ("type", "model"),
            registry=self.registry,
        )
        self._questions = Counter(
            "midstream_questions", "Questions to people.", ("kind",), registry=self.registry
        )
        self._stalls = Counter(
            "midstream_stalls",
            "Warnings of a silence: before the first token one more at each doubling.",
            ("waiting_for",),
            registry=self.registry,
        )
        self._judged = Counter(
            "midstream_memory_judged",
            "Requests, by their relation to the conversation that an upstream keeps.",
            ("kind", "way"),
            registry=self.registry,
        )
        self._gauges: dict[str, Gauge] = {}
        self._models: set[str] = set()

    @override
    def on_append(self, session: str, records: Sequence[Record]) -> None:
        for record in records:
            match record:
                case QuestionAsked():
                    self._questions.labels(record.kind.value).inc()
                case ReuseDecided():
                    self._judged.labels(record.judgement.kind, record.judgement.way).inc()
                case StallNoticed():
                    self._stalls.labels(record.waiting_for.value).inc()
                case _:
                    for interval in self._intervals.add(session, record):
                        self._count(interval)

    def page(self, figures: Mapping[str, float]) -> bytes:
        """See `MetricsPage.page`."""
        for name, value in figures.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"midstream_{name}", "See the guide.", registry=self.registry)
            self._gauges[name].set(value)
        return generate_latest(self.registry)

    def _count(self, interval: Interval) -> None:
        if interval.is_open:
            return
        self._ended.labels(interval.kind.value, interval.outcome).inc()
        self._seconds.labels(interval.kind.value).observe(interval.seconds)
        if interval.kind is IntervalKind.MODEL and interval.usage is not None:
            model = self._label_of(interval.name)
            self._tokens.labels("input", model).inc(interval.usage.input_tokens)
            self._tokens.labels("output", model).inc(interval.usage.output_tokens)
            self._tokens.labels("cached", model).inc(interval.usage.cached_tokens)
            self._tokens.labels("cache_write", model).inc(interval.usage.cache_write_tokens)

    def _label_of(self, model: str) -> str:
        if len(self._models) < MODELS_MAX:
            self._models.add(model)
        return model if model in self._models else OTHER
