"""Failures that leave an agent as good as before, and answers that were cut: what that costs a pool."""

from __future__ import annotations

import pytest

from midstream.agents.abilities import Abilities
from midstream.agents.pool_turns import AgentOrigin
from midstream.agents.prior_transcript import DONE
from midstream.errors import ModelRejectedError, ModelUnavailableError
from midstream.history.messages import Finish, History, Response, Step, Text, UserMessage
from midstream.testing.scripted_upstream import ScriptedUpstream, Trouble
from tests.agents.pooling import Bench, assert_told_once
from tests.spec import spec


@spec("REUSE-19", "REUSE-79")
@pytest.mark.parametrize("behind", ["", "third"])
@pytest.mark.parametrize("can_fork", [True, False])
async def test_behind_a_cut_answer_a_fork_goes_on_without_the_transcript(can_fork: bool, behind: str) -> None:  # noqa: FBT001
    bench = Bench(ScriptedUpstream(abilities=Abilities(can_fork=can_fork)))
    host = await bench.host()
    await host.say("first")
    cut = Step(Response((Text("I began"),), Finish.INTERRUPTED))
    host.history = host.history.then(UserMessage.of("second")).then(cut)
    report = await host.say(*[behind] if behind else [])
    told = bench.told()[-1]
    assert (report.way, report.sends) == (AgentOrigin.FORKED if can_fork else AgentOrigin.FRESH, 1)
    assert ("first" in told) is not can_fork
    assert told.index("second") < told.index("I began") < told.index(DONE)
    assert told.endswith(behind)
    assert_told_once(bench, host)
    assert (await host.say("fourth")).way is AgentOrigin.RESUMED


@spec("REUSE-82")
async def test_a_message_that_is_refused_after_a_whole_answer_costs_no_transcript_and_the_next_refusal_does() -> (
    None
):
    bench = Bench()
    host = await bench.host()
    await host.say("one")
    bench.trouble(Trouble.REJECTED)
    assert isinstance(await host.fail("two"), ModelRejectedError)
    assert len(bench.told()) == 2
    host.history = History(host.history.entries[:-1])
    bench.trouble(Trouble.REJECTED)
    report = await host.say("three")
    assert (report.rebuilt, report.way) == ("model_rejected", AgentOrigin.FRESH)
    assert_told_once(bench, host)


@spec("REUSE-82")
async def test_after_a_cut_answer_a_refusal_may_be_of_the_memory() -> None:
    bench = Bench()
    host = await bench.host()
    await host.say("first")
    bench.trouble(Trouble.DIES_OPENED, Trouble.DIES_OPENED)
    await host.fail("second")
    bench.trouble(Trouble.REJECTED)
    report = await host.say("third")
    assert (report.rebuilt, report.way) == ("model_rejected", AgentOrigin.FRESH)
    assert_told_once(bench, host)


@spec("REUSE-83")
async def test_a_message_that_the_agent_has_dropped_is_sent_with_the_next_one() -> None:
    bench = Bench(ScriptedUpstream(drops=True))
    host = await bench.host()
    await host.say("one")
    bench.trouble(Trouble.OUTAGE_OPENED)
    assert isinstance(await host.fail("two"), ModelUnavailableError)
    assert bench.upstream.live == 1
    report = await host.say("three")
    assert (report.way, report.rebuilt, report.sends) == (AgentOrigin.RESUMED, "", 1)
    assert bench.told()[-1] == "two\n\n\n\nthree"
    assert (len(bench.upstream.memory.talks), len(bench.upstream.opened)) == (1, 1)
    assert_told_once(bench, host)


@spec("REUSE-83")
async def test_a_stopped_turn_of_an_agent_that_may_drop_its_message_leaves_no_record() -> None:
    bench = Bench(ScriptedUpstream(drops=True))
    host = await bench.host()
    await host.say("one")
    bench.trouble(Trouble.DIES_OPENED, Trouble.DIES_SPEAKING)
    await host.fail("two")
    assert await bench.record() is None
