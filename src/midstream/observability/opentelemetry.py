"""OpenTelemetry: spans and metrics by the conventions for generative AI, from the journal.

    asgi(agent, observers=[OpenTelemetry(agent="my-agent")])

A turn is a span `invoke_agent`, with a span `chat` for each call of the model and `execute_tool` for each run of a tool
below it. They are sent to the configured provider; without one they cost almost nothing. They contain names, numbers,
times and codes, never content of a conversation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from msgspec import Struct
from typing_extensions import override

from midstream.extras import extra
from midstream.observability.observers import Introduced, Observer
from midstream.session.child_names import PART_MARK
from midstream.session.records import Record
from midstream.session.turn_durations import OK, OPEN_MAX, Interval, IntervalKind, Intervals
from midstream.version import __version__

with extra("otel"):
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider

OPERATION = {IntervalKind.TURN: "invoke_agent", IntervalKind.MODEL: "chat", IntervalKind.CALL: "execute_tool"}
DURATION = {
    IntervalKind.TURN: "gen_ai.invoke_agent.duration",
    IntervalKind.MODEL: "gen_ai.client.operation.duration",
    IntervalKind.CALL: "gen_ai.execute_tool.duration",
}
PROVIDER = "midstream"
"""Value of the required attribute if a model's name does not include its provider."""
PROVIDERS = {
    "anthropic-messages": "anthropic",
    "claude": "anthropic",
    "codex": "openai",
    "openai-compatible": "openai",
    "openai-responses": "openai",
}
"""The conventions' name of a provider, by the prefix of a model's name; any other prefix is used itself."""
_WELL = frozenset({OK, "completed", "cancelled"})
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TURN_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)

Attributes = dict[str, str | int | bool | Sequence[str]]


class _Answering(Struct, frozen=True):
    """The agent and the model of a session."""

    agent: str
    provider: str = PROVIDER
    model: str = ""


class OpenTelemetry(Observer, Introduced):
    """An `Observer` that exports to OpenTelemetry.

    Args:
        agent: The name of the agent in its spans; its own name by default. Sub-agents have their own names.
        tracers, meters: The providers; by default those that the process has configured.
    """

    def __init__(
        self, *, agent: str = "", tracers: TracerProvider | None = None, meters: MeterProvider | None = None
    ) -> None:
        self._agent = agent
        self._intervals = Intervals()
        self._turns: OrderedDict[tuple[str, int], Span] = OrderedDict()
        self._answering: OrderedDict[str, _Answering] = OrderedDict()
        self._tracer = (tracers or trace.get_tracer_provider()).get_tracer("midstream", __version__)
        meter = (meters or metrics.get_meter_provider()).get_meter("midstream", __version__)
        self._durations = {
            kind: meter.create_histogram(
                DURATION[kind],
                unit="s",
                description=f"How long it took: {OPERATION[kind]}.",
                explicit_bucket_boundaries_advisory=_TURN_SECONDS if kind is IntervalKind.TURN else _SECONDS,
            )
            for kind in IntervalKind
        }
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of each model call, as its provider counted them.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )

    @override
    def answers(self, session: str, agent: str, model: str) -> None:
        beginning, colon, rest = model.partition(":")
        provider = PROVIDERS.get(beginning, beginning) if colon else PROVIDER
        named = agent if PART_MARK in session else self._agent or agent
        self._answering[session] = _Answering(named, provider, rest if colon else model)
        self._answering.move_to_end(session)
        if len(self._answering) > OPEN_MAX:
            self._answering.popitem(last=False)

    @override
    def on_append(self, session: str, records: Sequence[Record]) -> None:
        for record in records:
            for interval in self._intervals.add(session, record):
                if not interval.is_open:
                    self._end(interval)
                elif interval.kind is IntervalKind.TURN:
                    self._begin_turn(interval)

    def _begin_turn(self, interval: Interval) -> None:
        self._turns[interval.session, interval.turn] = self._start_span(interval)
        if len(self._turns) > OPEN_MAX:
            self._turns.popitem(last=False)

    def _start_span(self, interval: Interval, parent: Span | None = None) -> Span:
        """Start a span with all known attributes, because samplers use only these."""
        attributes = self._attributes_of(interval)
        named = {
            IntervalKind.TURN: self._answering_agent(interval).agent,
            IntervalKind.MODEL: attributes.get("gen_ai.request.model", interval.name),
            IntervalKind.CALL: interval.name,
        }
        return self._tracer.start_span(
            f"{OPERATION[interval.kind]} {named[interval.kind]}".strip(),
            context=trace.set_span_in_context(parent) if parent is not None else None,
            kind=SpanKind.CLIENT if interval.kind is IntervalKind.MODEL else SpanKind.INTERNAL,
            attributes=attributes,
            start_time=_ns(interval.began_at),
        )

    def _end(self, interval: Interval) -> None:
        turn = self._turns.get((interval.session, interval.turn))
        if interval.kind is IntervalKind.TURN:
            span = self._turns.pop((interval.session, interval.turn), None)
        else:
            span = self._start_span(interval, turn)
        if span is not None:
            span.set_attributes(self._attributes_of(interval))
            if _error_of(interval):
                span.set_status(Status(StatusCode.ERROR))
            span.end(_ns(interval.ended_at))
        self._measure(interval)

    def _measure(self, interval: Interval) -> None:
        labels = {
            name: value
            for name, value in self._attributes_of(interval).items()
            if name in _LABELS[interval.kind] and isinstance(value, str)
        }
        self._durations[interval.kind].record(interval.seconds, labels)
        if interval.usage is not None:
            labels.pop("error.type", None)
            counts = {"input": interval.usage.input_tokens, "output": interval.usage.output_tokens}
            for kind, count in counts.items():
                self._tokens.record(count, {**labels, "gen_ai.token.type": kind})

    def _answering_agent(self, interval: Interval) -> _Answering:
        return self._answering.get(interval.session) or _Answering(self._agent)

    def _attributes_of(self, interval: Interval) -> Attributes:
        who = self._answering_agent(interval)
        attributes: Attributes = {
            "gen_ai.operation.name": OPERATION[interval.kind],
            "gen_ai.conversation.id": interval.session,
            "midstream.turn": interval.turn,
        }
        if who.agent:
            attributes["gen_ai.agent.name"] = who.agent
        if interval.kind is IntervalKind.CALL:
            attributes["gen_ai.tool.name"] = interval.name
            attributes["gen_ai.tool.call.id"] = interval.call_id
            attributes["gen_ai.tool.type"] = "function"
        else:
            attributes["gen_ai.provider.name"] = who.provider
            if who.model:
                attributes["gen_ai.request.model"] = who.model
        if interval.kind is IntervalKind.MODEL:
            attributes |= _attributes_of_response(interval)
        if error := _error_of(interval):
            attributes["error.type"] = error
        return attributes


_LABELS = {
    IntervalKind.TURN: {"gen_ai.agent.name", "gen_ai.request.model", "error.type"},
    IntervalKind.MODEL: {
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.response.model",
        "error.type",
    },
    IntervalKind.CALL: {"gen_ai.tool.name", "gen_ai.tool.type", "gen_ai.agent.name", "error.type"},
}
"""The attributes of a span that are labels of its metric: only those with a bounded number of values."""


def _attributes_of_response(interval: Interval) -> Attributes:
    attributes: Attributes = {
        "gen_ai.request.stream": True,
        "midstream.response": interval.response,
        "midstream.attempt": interval.attempt,
    }
    if interval.name:
        attributes["gen_ai.response.model"] = interval.name
    if interval.finish:
        attributes["gen_ai.response.finish_reasons"] = [interval.finish]
    if interval.usage is not None:
        attributes["gen_ai.usage.input_tokens"] = interval.usage.input_tokens
        attributes["gen_ai.usage.output_tokens"] = interval.usage.output_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = interval.usage.cached_tokens
        attributes["gen_ai.usage.cache_creation.input_tokens"] = interval.usage.cache_write_tokens
    return attributes


def _error_of(interval: Interval) -> str:
    """Return the kind of error that ended it; "" for none."""
    return "" if interval.is_open or interval.outcome in _WELL else interval.code or interval.outcome


def _ns(at: float) -> int:
    return round(at * 1e9)
