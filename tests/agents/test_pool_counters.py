"""The counters of a pool are those of its turns."""

from __future__ import annotations

from midstream.agents.pool_counters import PoolCounters
from midstream.agents.pool_turns import AgentOrigin, End, TurnReport
from midstream.agents.reuse_classification import RequestRelation
from midstream.history.messages import Usage
from midstream.models.responses import Finished, TextDelta
from midstream.testing.scripted_upstream import ScriptedUpstream, Trouble
from tests.agents.pooling import PoolBench
from tests.spec import spec


def test_each_turn_is_counted_once_in_each_counter() -> None:
    counters = PoolCounters()
    counters.take(
        TurnReport("s", RequestRelation.NEW, "", AgentOrigin.FRESH, End.WHOLE, sends=1, usage=Usage(10, 2))
    )
    counters.take(
        TurnReport(
            "s",
            RequestRelation.CONTINUATION,
            "",
            AgentOrigin.FRESH,
            End.FAILED,
            sends=2,
            replays=1,
            rebuilt="upstream_gone",
            error="model_stalled",
            usage=Usage(30, 4, 20, 5),
        )
    )
    assert counters.turns == {
        (RequestRelation.NEW, AgentOrigin.FRESH, End.WHOLE): 1,
        (RequestRelation.CONTINUATION, AgentOrigin.FRESH, End.FAILED): 1,
    }
    assert (counters.rebuilt, counters.errors) == ({"upstream_gone": 1}, {"model_stalled": 1})
    assert (counters.sends, counters.replays) == (3, 1)
    assert (counters.input_tokens, counters.cached_tokens, counters.output_tokens) == (40, 20, 6)
    assert counters.cache_write_tokens == 5


@spec("REUSE-78")
async def test_a_pool_counts_the_results_of_its_turns() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    await host.send_messages("two")
    bench.trouble(Trouble.GONE)
    await host.send_messages("three")
    counters = host.pool.counters
    assert counters.turns == {
        (RequestRelation.NEW, AgentOrigin.FRESH, End.WHOLE): 1,
        (RequestRelation.CONTINUATION, AgentOrigin.RESUMED, End.WHOLE): 1,
        (RequestRelation.CONTINUATION, AgentOrigin.FRESH, End.WHOLE): 1,
    }
    assert counters.rebuilt == {"upstream_gone": 1}
    assert counters.input_tokens == sum(report.usage.input_tokens for report in bench.reports if report.usage)


@spec("REUSE-49", "REUSE-78")
async def test_tokens_that_an_upstream_does_not_report_are_unknown_and_not_zero() -> None:
    bench = PoolBench(ScriptedUpstream(answer=lambda _: [TextDelta("yes"), Finished()]))
    host = await bench.host()
    await host.send_messages("one")
    await host.send_messages("two", "three")
    assert host.events[-1] == Finished()
    assert [report.usage for report in bench.reports] == [None, None]
    assert "tokens=unknown" in host.report.line
    assert host.pool.counters.input_tokens == 0
