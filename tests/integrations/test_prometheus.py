"""Counters of a turn, without a word of it, and a page that Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from midstream.core.calls import QuestionKind
from midstream.core.records import Judgement, MemoryJudged, QuestionAsked, StalledOn, StallNoticed
from midstream.integrations.prometheus import Prometheus
from tests.integrations.watched_turn import CANARY, watched_turn


def _samples(page: bytes) -> dict[str, float]:
    return {
        " ".join(
            (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items())))
        ): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


async def test_what_ended_is_counted_with_its_outcome() -> None:
    prometheus = Prometheus()
    await watched_turn(prometheus)
    prometheus.appended(
        "s1",
        [
            QuestionAsked(1, 1, "c", QuestionKind.APPROVAL, "d", 0.0, CANARY),
            StallNoticed(1, 1, StalledOn.TOOL, 9.0, 0.0),
            MemoryJudged(1, 1, 1, Judgement("continuation", CANARY, "resumed"), 0.0),
        ],
    )
    page = prometheus.page({"streams": 3})
    found = _samples(page)
    assert found["midstream_ended_total kind=turn outcome=completed"] == 1
    assert found["midstream_ended_total kind=model outcome=ok"] == 2
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
