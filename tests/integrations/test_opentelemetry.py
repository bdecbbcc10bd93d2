"""Spans and metrics of a turn, by the conventions for generative AI, without a word of it."""

from __future__ import annotations

import json

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from midstream.integrations.opentelemetry import OpenTelemetry
from tests.integrations.watched_turn import CANARY, watched_turn


async def test_a_turn_is_a_span_with_its_model_and_tool_calls_below_it() -> None:
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    tracers, meters = TracerProvider(), MeterProvider(metric_readers=[reader])
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    await watched_turn(OpenTelemetry(agent="tested", tracers=tracers, meters=meters))

    found = spans.get_finished_spans()
    assert [span.name for span in found] == [
        "chat",
        "chat",
        "execute_tool look",
        "chat m-1",
        "invoke_agent tested",
    ]
    failed, _, called, said, turn = found
    assert {span.parent.span_id if span.parent else None for span in found[:-1]} == {turn.context.span_id}
    assert turn.parent is None
    assert dict(turn.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "midstream",
        "gen_ai.conversation.id": "s1",
        "gen_ai.agent.name": "tested",
        "midstream.turn": 1,
    }
    assert (failed.attributes or {})["error.type"] == "model_unavailable"
    assert failed.status.status_code is StatusCode.ERROR
    assert (called.attributes or {})["gen_ai.tool.name"] == "look"
    assert (called.attributes or {})["error.type"] == "error"
    attributes = dict(said.attributes or {})
    assert said.kind is SpanKind.CLIENT
    assert attributes["gen_ai.response.model"] == "m-1"
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (700, 30)
    assert turn.start_time is not None
    assert turn.end_time is not None
    assert all(
        turn.start_time <= (span.start_time or 0) <= (span.end_time or 0) <= turn.end_time for span in found
    )

    document = json.loads(reader.get_metrics_data().to_json())  # type: ignore[union-attr]  # something was measured
    [scope] = document["resource_metrics"][0]["scope_metrics"]
    points = {metric["name"]: metric["data"]["data_points"] for metric in scope["metrics"]}
    assert {name: sum(point["count"] for point in each) for name, each in points.items()} == {
        "gen_ai.client.operation.duration": 5,
        "gen_ai.client.token.usage": 2,
    }
    counts = {
        each["attributes"]["gen_ai.token.type"]: each["sum"] for each in points["gen_ai.client.token.usage"]
    }
    assert counts == {"input": 700, "output": 30}
    assert CANARY not in "".join(span.to_json() for span in found) + json.dumps(document)


async def test_without_a_provider_nothing_happens_and_nothing_fails() -> None:
    await watched_turn(OpenTelemetry())
