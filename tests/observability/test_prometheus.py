"""Counters of a turn, without content, and a page that Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from midstream.history.messages import Response, Usage
from midstream.observability.prometheus import MODELS_MAX, Prometheus
from midstream.session.calls import QuestionKind
from midstream.session.records import (
    AttemptStarted,
    QuestionAsked,
    ResponseCompleted,
    ReuseDecided,
    ReuseDecision,
    StallNoticed,
)
from midstream.timing import StalledOn
from tests.frameworks.watched_turn import CANARY, run_watched_turn


def _samples(page: bytes) -> dict[str, float]:
    return {
        " ".join(
            (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items())))
        ): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


def test_the_number_of_model_labels_is_bounded() -> None:
    prometheus = Prometheus()
    for turn in range(1, MODELS_MAX + 51):
        response = Response((), model=f"model-{turn}", usage=Usage(10, 5))
        prometheus.on_append(
            "s1", [AttemptStarted(turn, 1, 1, 0.0), ResponseCompleted(turn, 1, 1, response, 1.0)]
        )
    found = _samples(prometheus.page({}))
    reported = [name for name in found if name.startswith("midstream_tokens_total") and "type=input" in name]
    assert len(reported) == MODELS_MAX + 1
    assert found["midstream_tokens_total model=other type=input"] == 500


async def test_ended_turns_and_calls_are_counted_with_their_outcome() -> None:
    prometheus = Prometheus()
    await run_watched_turn(prometheus)
    prometheus.on_append(
        "s1",
        [
            QuestionAsked(1, 1, "c", QuestionKind.APPROVAL, "d", 0.0, CANARY),
            StallNoticed(1, 1, StalledOn.TOOL, 9.0, 0.0),
            ReuseDecided(1, 1, 1, ReuseDecision("continuation", CANARY, "resumed"), 0.0),
        ],
    )
    page = prometheus.page({"streams": 3})
    found = _samples(page)
    assert found["midstream_ended_total kind=turn outcome=completed"] == 1
    assert found["midstream_ended_total kind=model outcome=ok"] == 2
    assert found["midstream_tokens_total model=m-1 type=cache_write"] == 100
    assert found["midstream_ended_total kind=model outcome=model_unavailable"] == 1
    assert found["midstream_ended_total kind=call outcome=error"] == 1
    assert found["midstream_seconds_count kind=model"] == 3
    assert found["midstream_tokens_total model=m-1 type=input"] == 700
    assert found["midstream_tokens_total model=m-1 type=cached"] == 200
    assert found["midstream_questions_total kind=approval"] == 1
    assert found["midstream_memory_judged_total kind=continuation way=resumed"] == 1
    assert found["midstream_stalls_total waiting_for=tool"] == 1
    assert found["midstream_streams"] == 3
    assert _samples(prometheus.page({"streams": 1}))["midstream_streams"] == 1
    assert CANARY not in page.decode()
