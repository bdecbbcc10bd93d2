"""Spans and metrics of a turn, by the conventions for generative AI, without content."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, Sampler, SamplingResult
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from opentelemetry.trace import SpanKind, StatusCode

from midstream.history.messages import UserMessage
from midstream.observability.opentelemetry import DURATION, OpenTelemetry
from midstream.session.records import AttemptStarted, MessageAccepted
from tests.frameworks.watched_turn import CANARY, run_watched_turn

NEWER = {"gen_ai.invoke_agent.duration", "gen_ai.execute_tool.duration"}
"""Metrics of the conventions' own repository, not yet in a released registry."""
REGISTERED = {
    *(value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")),
    "error.type",
}
MEASURED = {
    *(value for name, value in vars(gen_ai_metrics).items() if name.startswith("GEN_AI_")),
    *NEWER,
}


class Judging(Sampler):
    """A sampler that records the attributes available for its decision."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:  # noqa: ANN401 - any value
        self.shown.append(dict(kwargs.get("attributes") or args[4] or {}))
        return SamplingResult(Decision.RECORD_AND_SAMPLE)

    def get_description(self) -> str:
        return ALWAYS_ON.get_description()


class ExportingObserver:
    """An observer with its exported spans and metrics."""

    def __init__(self, *, agent: str = "") -> None:
        self._spans, self._reader, self.sampler = InMemorySpanExporter(), InMemoryMetricReader(), Judging()
        tracers, meters = TracerProvider(self.sampler), MeterProvider(metric_readers=[self._reader])
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self.observer = OpenTelemetry(agent=agent, tracers=tracers, meters=meters)

    @property
    def spans(self) -> list[ReadableSpan]:
        return [*self._spans.get_finished_spans()]

    @property
    def points(self) -> dict[str, list[dict[str, Any]]]:
        """Return the measured points, by the metric's name."""
        document = json.loads(self._reader.get_metrics_data().to_json())  # type: ignore[union-attr]  # there is some
        [scope] = document["resource_metrics"][0]["scope_metrics"]
        return {metric["name"]: metric["data"]["data_points"] for metric in scope["metrics"]}


async def test_a_turn_is_a_span_with_its_model_and_tool_calls_below_it() -> None:
    watching = ExportingObserver(agent="tested")
    await run_watched_turn(watching.observer)
    found = watching.spans
    assert [span.name for span in found] == [
        "chat scripted",
        "chat scripted",
        "execute_tool look",
        "chat scripted",
        "invoke_agent tested",
    ]
    failed, _, called, content, turn = found
    assert turn.context is not None
    assert {span.parent.span_id if span.parent else None for span in found[:-1]} == {turn.context.span_id}
    assert turn.parent is None
    assert dict(turn.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "midstream",
        "gen_ai.request.model": "scripted",
        "gen_ai.conversation.id": "s1",
        "gen_ai.agent.name": "tested",
        "midstream.turn": 1,
    }
    assert (failed.attributes or {})["error.type"] == "model_unavailable"
    assert failed.status.status_code is StatusCode.ERROR
    attributes = dict(called.attributes or {})
    assert attributes.pop("gen_ai.tool.call.id")
    assert attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.type": "function",
        "gen_ai.conversation.id": "s1",
        "gen_ai.agent.name": "tested",
        "midstream.turn": 1,
        "error.type": "error",
    }
    assert (called.kind, content.kind, turn.kind) == (SpanKind.INTERNAL, SpanKind.CLIENT, SpanKind.INTERNAL)
    assert dict(content.attributes or {}) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "midstream",
        "gen_ai.request.model": "scripted",
        "gen_ai.request.stream": True,
        "gen_ai.response.model": "m-1",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 700,
        "gen_ai.usage.output_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 200,
        "gen_ai.usage.cache_creation.input_tokens": 100,
        "gen_ai.conversation.id": "s1",
        "gen_ai.agent.name": "tested",
        "midstream.turn": 1,
        "midstream.response": 2,
        "midstream.attempt": 1,
    }
    assert turn.start_time is not None
    assert turn.end_time is not None
    assert all(
        turn.start_time <= (span.start_time or 0) <= (span.end_time or 0) <= turn.end_time for span in found
    )
    assert CANARY not in "".join(span.to_json() for span in found)


async def test_each_operation_has_the_metric_of_its_kind() -> None:
    watching = ExportingObserver(agent="tested")
    await run_watched_turn(watching.observer)
    points = watching.points
    assert {name: sum(point["count"] for point in each) for name, each in points.items()} == {
        "gen_ai.client.operation.duration": 3,
        "gen_ai.execute_tool.duration": 1,
        "gen_ai.invoke_agent.duration": 1,
        "gen_ai.client.token.usage": 2,
    }
    asked = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "midstream",
        "gen_ai.request.model": "scripted",
    }
    answered = {**asked, "gen_ai.response.model": "m-1"}
    assert [each["attributes"] for each in points["gen_ai.client.operation.duration"]] == [
        {**asked, "error.type": "model_unavailable"},
        asked,
        answered,
    ]
    assert [(each["attributes"], each["sum"]) for each in points["gen_ai.client.token.usage"]] == [
        ({**answered, "gen_ai.token.type": "input"}, 700),
        ({**answered, "gen_ai.token.type": "output"}, 30),
    ]
    [turn] = points["gen_ai.invoke_agent.duration"]
    assert turn["attributes"] == {"gen_ai.agent.name": "tested", "gen_ai.request.model": "scripted"}
    [call] = points["gen_ai.execute_tool.duration"]
    assert call["attributes"] == {
        "gen_ai.tool.name": "look",
        "gen_ai.tool.type": "function",
        "gen_ai.agent.name": "tested",
        "error.type": "error",
    }
    assert CANARY not in json.dumps(points)


async def test_every_name_is_from_the_conventions_or_ours() -> None:
    watching = ExportingObserver()
    await run_watched_turn(watching.observer)
    found = {name for span in watching.spans for name in span.attributes or {}}
    labels = {name for each in watching.points.values() for point in each for name in point["attributes"]}
    assert {name for name in found | labels if not name.startswith("midstream.")} <= REGISTERED
    assert {*watching.points} <= MEASURED
    assert {*DURATION.values()} <= MEASURED


async def test_a_sampler_receives_the_attributes_for_its_decision() -> None:
    watching = ExportingObserver()
    await run_watched_turn(watching.observer)
    by_operation = {each["gen_ai.operation.name"]: {*each} for each in watching.sampler.shown}
    models = {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"}
    assert models <= by_operation["chat"]
    assert models | {"gen_ai.agent.name"} <= by_operation["invoke_agent"]
    assert {"gen_ai.operation.name", "gen_ai.tool.name"} <= by_operation["execute_tool"]


@pytest.mark.parametrize(
    ("name", "provider", "model"),
    [
        ("openai-responses:gpt-5", "openai", "gpt-5"),
        ("anthropic-messages:opus", "anthropic", "opus"),
        ("local:smollm2:q4", "local", "smollm2:q4"),
        ("mine", "midstream", "mine"),
    ],
)
async def test_the_name_of_a_model_identifies_its_provider(name: str, provider: str, model: str) -> None:
    watching = ExportingObserver(agent="tested")
    for session in ("s1", "s1::1.1.0"):
        watching.observer.answers(session, "own", name)
        watching.observer.on_append(
            session, [MessageAccepted(1, UserMessage.of("hi"), 0.0), AttemptStarted(1, 1, 1, 0.0)]
        )
    own, child = watching.sampler.shown
    assert (own["gen_ai.provider.name"], own["gen_ai.request.model"]) == (provider, model)
    assert (own["gen_ai.agent.name"], child["gen_ai.agent.name"]) == ("tested", "own")


async def test_without_a_provider_nothing_is_exported_and_nothing_fails() -> None:
    await run_watched_turn(OpenTelemetry())
