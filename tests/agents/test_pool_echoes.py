"""An upstream that does not report the resumed conversation is learned, and costs no full transcript per turn."""

from __future__ import annotations

import pytest

from midstream.agents.pool_turns import AgentOrigin, End
from midstream.testing.scripted_upstream import Trouble
from tests.agents.pooling import PoolBench
from tests.spec import spec


@spec("REUSE-81")
async def test_an_upstream_that_never_echoes_the_resumed_id_is_noted_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = PoolBench()
    for number in range(5):  # each time in another process
        host = await bench.host(session=f"s{number}")
        await host.send_messages("one")
        bench.trouble(Trouble.NEW_CHAT)
        host.pool = await bench.pool()
        report = await host.send_messages("two")
        assert (report.way, report.replays, report.end) == (AgentOrigin.FRESH, 1, End.WHOLE)
        assert (report.rebuilt, report.sends) == (("upstream_mismatch", 2) if number < 2 else ("unechoed", 1))
        bench.upstream.troubles.clear()
        report = await host.send_messages("three")  # the agent is open: nothing must be verified
        assert (report.way, report.sends, report.replays) == (AgentOrigin.RESUMED, 1, 0)
    assert sum("does not send the id" in each.message for each in caplog.records) == 1
    assert bench.upstream.memory.wrongs == []


@spec("REUSE-81")
async def test_one_echo_outweighs_all_resumptions_without_one() -> None:
    bench = PoolBench()
    for number, trouble in enumerate([None, *[Trouble.NEW_CHAT] * 4, None]):
        host = await bench.host(session=f"s{number}")
        await host.send_messages("one")
        bench.trouble(trouble)
        host.pool = await bench.pool()
        report = await host.send_messages("two")
        assert report.rebuilt == ("upstream_mismatch" if trouble else "")
