"""OpenTelemetry: spans and metrics by the conventions for generative AI, from the journal.

    asgi(agent, observers=[OpenTelemetry(agent="my-agent")])

A turn is a span `invoke_agent`, with a span `chat` for each call of the model and `execute_tool` for each run of a tool
below it. Whatever provider the process has configured gets them; without one they cost next to nothing. Names, numbers,
times and codes go into them, never what was said.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from opentelemetry import metrics, trace
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider

from midstream.core.intervals import OK, OPEN_MAX, Interval, Intervals, Kind
from midstream.core.records import Record
from midstream.version import __version__

OPERATION = {Kind.TURN: "invoke_agent", Kind.MODEL: "chat", Kind.CALL: "execute_tool"}
PROVIDER = "midstream"
"""Our models are of many providers and do not say which: the conventions ask for a name of one's own then."""
_WELL = frozenset({OK, "completed", "cancelled"})
_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)

Attributes = dict[str, str | int | Sequence[str]]


class OpenTelemetry:
    """An `Observer` that tells OpenTelemetry.

    Args:
        agent: Name of the agent, for its spans.
        tracers, meters: Where to; what the process has configured by default.
    """

    def __init__(
        self, *, agent: str = "", tracers: TracerProvider | None = None, meters: MeterProvider | None = None
    ) -> None:
        self._agent = agent
        self._intervals = Intervals()
        self._turns: OrderedDict[tuple[str, int], Span] = OrderedDict()
        self._tracer = (tracers or trace.get_tracer_provider()).get_tracer("midstream", __version__)
        meter = (meters or metrics.get_meter_provider()).get_meter("midstream", __version__)
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="How long turns, model calls and tool calls took.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of each model call, as its provider counted them.",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )

    def appended(self, session: str, records: Sequence[Record]) -> None:
        """See `Observer.appended`."""
        for record in records:
            for interval in self._intervals.add(session, record):
                if not interval.is_open:
                    self._end(interval)
                elif interval.kind is Kind.TURN:
                    self._begin_turn(interval)

    def _begin_turn(self, interval: Interval) -> None:
        span = self._tracer.start_span(
            f"invoke_agent {self._agent}".strip(),
            kind=SpanKind.INTERNAL,
            attributes=self._attributes_of(interval),
            start_time=_ns(interval.began_at),
        )
        self._turns[interval.session, interval.turn] = span
        if len(self._turns) > OPEN_MAX:
            self._turns.popitem(last=False)

    def _end(self, interval: Interval) -> None:
        attributes = self._attributes_of(interval)
        turn = self._turns.get((interval.session, interval.turn))
        if interval.kind is Kind.TURN:
            span = self._turns.pop((interval.session, interval.turn), None)
        else:
            parent = trace.set_span_in_context(turn) if turn is not None else None
            is_model = interval.kind is Kind.MODEL
            span = self._tracer.start_span(
                f"{OPERATION[interval.kind]} {interval.name}".strip(),
                context=parent,
                kind=SpanKind.CLIENT if is_model else SpanKind.INTERNAL,
                start_time=_ns(interval.began_at),
            )
        if span is not None:
            span.set_attributes(attributes)
            if "error.type" in attributes:
                span.set_status(Status(StatusCode.ERROR))
            span.end(_ns(interval.ended_at))
        self._measure(interval)

    def _measure(self, interval: Interval) -> None:
        shared: dict[str, str] = {
            "gen_ai.operation.name": OPERATION[interval.kind],
            "gen_ai.provider.name": PROVIDER,
        }
        if interval.kind is Kind.MODEL and interval.name:
            shared["gen_ai.response.model"] = interval.name
        failed = {"error.type": _error_of(interval)} if _error_of(interval) else {}
        self._duration.record(interval.seconds, {**shared, **failed})
        if interval.usage is not None:
            counts = {"input": interval.usage.input_tokens, "output": interval.usage.output_tokens}
            for kind, count in counts.items():
                self._tokens.record(count, {**shared, "gen_ai.token.type": kind})

    def _attributes_of(self, interval: Interval) -> Attributes:
        attributes: Attributes = {
            "gen_ai.operation.name": OPERATION[interval.kind],
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.conversation.id": interval.session,
            "midstream.turn": interval.turn,
        }
        if self._agent:
            attributes["gen_ai.agent.name"] = self._agent
        if interval.kind is Kind.CALL:
            attributes |= {"gen_ai.tool.name": interval.name, "gen_ai.tool.call.id": interval.call_id}
        if interval.kind is Kind.MODEL:
            attributes |= {"midstream.reply": interval.reply, "midstream.attempt": interval.attempt}
            if interval.name:
                attributes["gen_ai.response.model"] = interval.name
            if interval.finish:
                attributes["gen_ai.response.finish_reasons"] = [interval.finish]
            if interval.usage is not None:
                attributes["gen_ai.usage.input_tokens"] = interval.usage.input_tokens
                attributes["gen_ai.usage.output_tokens"] = interval.usage.output_tokens
        if error := _error_of(interval):
            attributes["error.type"] = error
        return attributes


def _error_of(interval: Interval) -> str:
    """Return what kind of error it ended with, "" for none."""
    return "" if interval.is_open or interval.outcome in _WELL else interval.code or interval.outcome


def _ns(at: float) -> int:
    return round(at * 1e9)
