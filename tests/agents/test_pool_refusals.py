"""Messages of a pool after failures that leave an agent unchanged, interrupted answers and dead runs."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from midstream.agents.pool_entries import POOL_NAMESPACE, key_of
from midstream.agents.pool_records import encode
from midstream.agents.pool_turns import AgentOrigin
from midstream.agents.prior_transcript import DONE, UNRECORDED
from midstream.agents.upstream_abilities import Abilities
from midstream.errors import ModelRejectedError, ModelUnavailableError
from midstream.history.messages import Finish, History, Response, Step, Text, UserMessage
from midstream.models.responses import ModelRequest
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_upstream import ScriptedUpstream, Trouble
from tests.agents.pooling import PoolBench, assert_sent_once
from tests.spec import spec


@spec("REUSE-19", "REUSE-79")
@pytest.mark.parametrize("behind", ["", "third"])
@pytest.mark.parametrize("can_fork", [True, False])
async def test_after_an_interrupted_answer_a_fork_continues_without_the_transcript(
    can_fork: bool,  # noqa: FBT001
    behind: str,
) -> None:
    bench = PoolBench(ScriptedUpstream(abilities=Abilities(can_fork=can_fork)))
    host = await bench.host()
    await host.send_messages("first")
    cut = Step(Response((Text("I began"),), Finish.INTERRUPTED))
    host.history = host.history.then(UserMessage.of("second")).then(cut)
    report = await host.send_messages(*[behind] if behind else [])
    received = bench.sent_texts()[-1]
    assert (report.way, report.sends) == (AgentOrigin.FORKED if can_fork else AgentOrigin.FRESH, 1)
    assert ("first" in received) is not can_fork
    assert received.index("second") < received.index("I began") < received.index(DONE)
    assert received.endswith(behind)
    assert_sent_once(bench, host)
    assert (await host.send_messages("fourth")).way is AgentOrigin.RESUMED


@spec("REUSE-82")
async def test_a_message_refused_after_a_whole_answer_costs_no_transcript_and_the_next_refusal_does() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    bench.trouble(Trouble.REJECTED)
    assert isinstance(await host.fail("two"), ModelRejectedError)
    assert len(bench.sent_texts()) == 2
    host.history = History(host.history.entries[:-1])
    bench.trouble(Trouble.REJECTED)
    report = await host.send_messages("three")
    assert (report.rebuilt, report.way) == ("model_rejected", AgentOrigin.FRESH)
    assert_sent_once(bench, host)


@spec("REUSE-82")
async def test_after_an_interrupted_answer_a_refusal_may_concern_the_conversation() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("first")
    bench.trouble(Trouble.DIES_OPENED, Trouble.DIES_OPENED)
    await host.fail("second")
    bench.trouble(Trouble.REJECTED)
    report = await host.send_messages("third")
    assert (report.rebuilt, report.way) == ("model_rejected", AgentOrigin.FRESH)
    assert_sent_once(bench, host)


@spec("REUSE-83")
async def test_a_message_that_the_agent_dropped_is_sent_with_the_next_one() -> None:
    bench = PoolBench(ScriptedUpstream(drops=True))
    host = await bench.host()
    await host.send_messages("one")
    bench.trouble(Trouble.OUTAGE_OPENED)
    assert isinstance(await host.fail("two"), ModelUnavailableError)
    assert bench.upstream.live == 1
    report = await host.send_messages("three")
    assert (report.way, report.rebuilt, report.sends) == (AgentOrigin.RESUMED, "", 1)
    assert bench.sent_texts()[-1] == "two\n\n\n\nthree"
    assert (len(bench.upstream.memory.talks), len(bench.upstream.opened)) == (1, 1)
    assert_sent_once(bench, host)


@spec("REUSE-83")
async def test_a_cancelled_turn_of_an_agent_that_may_drop_its_message_leaves_no_record() -> None:
    bench = PoolBench(ScriptedUpstream(drops=True))
    host = await bench.host()
    await host.send_messages("one")
    bench.trouble(Trouble.DIES_OPENED, Trouble.DIES_SPEAKING)
    await host.fail("two")
    assert await bench.record() is None


async def kill_run(bench: PoolBench) -> None:
    """Leave the entry as a process does that was killed after it had sent a message."""
    key = key_of(bench.upstream.name, "s")
    kept, record = await bench.store.kv_get(POOL_NAMESPACE, key), await bench.record()
    assert kept is not None
    assert record is not None
    await bench.store.kv_put(
        POOL_NAMESPACE, key, encode(replace(record, run="run-dead")), expected=kept.version, at=1e6
    )


@spec("REUSE-86")
@pytest.mark.parametrize("can_fork", [True, False])
@pytest.mark.parametrize("next_words", ["", "third"])
async def test_a_message_of_a_dead_run_is_sent_with_a_notice_that_a_tool_may_have_taken_effect(
    can_fork: bool,  # noqa: FBT001
    next_words: str,
) -> None:
    bench = PoolBench(ScriptedUpstream(abilities=Abilities(can_fork=can_fork)))
    host = await bench.host()
    await host.send_messages("first")
    await host.send_messages("second")
    history = host.history
    await kill_run(bench)
    host.history = History(history.entries[:-1])  # the client has no answer
    report = await host.send_messages(*[next_words] if next_words else [])
    assert report.way is (AgentOrigin.FORKED if can_fork else AgentOrigin.FRESH)
    received = bench.sent_texts()[-1]
    assert received.count(UNRECORDED) == 1
    assert received.index(UNRECORDED) < received.rindex(next_words or "second")
    await host.send_messages("fourth")
    assert UNRECORDED not in bench.sent_texts()[-1]


@spec("REUSE-86")
async def test_another_answer_or_an_edited_message_has_no_such_notice() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("first")
    await host.send_messages("second")
    host.history = History(host.history.entries[:-1])
    await host.ask()
    assert UNRECORDED not in bench.sent_texts()[-1]
    await kill_run(bench)
    host.history = History(host.history.entries[:2])
    await host.send_messages("something else")
    assert UNRECORDED not in bench.sent_texts()[-1]


@spec("REUSE-86")
@pytest.mark.parametrize(
    ("trouble", "is_sent"),
    [
        (Trouble.DIES_OPENED, True),
        (Trouble.HANGS, True),
        (Trouble.FAILED, True),
        (Trouble.GONE, False),
    ],
)
async def test_a_fresh_agent_is_informed_if_the_previous_one_may_have_started(
    trouble: Trouble,
    is_sent: bool,  # noqa: FBT001
) -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("first")
    bench.trouble(trouble)
    assert (await host.send_messages("second")).way is AgentOrigin.FRESH
    assert (UNRECORDED in bench.sent_texts()[-1]) is is_sent


@spec("REUSE-86")
@pytest.mark.parametrize("can_fork", [True, False])
async def test_a_retry_after_an_answer_that_failed_without_output_has_a_notice(
    can_fork: bool,  # noqa: FBT001
) -> None:
    bench = PoolBench(ScriptedUpstream(abilities=Abilities(can_fork=can_fork)))
    host = await bench.host()
    bench.trouble(Trouble.DIES_OPENED)
    await host.fail("first")
    await host.ask()
    assert bench.sent_texts()[-1].count(UNRECORDED) == 1
    host.history = History(host.history.entries[:-1])
    await host.ask()  # another answer
    assert UNRECORDED not in bench.sent_texts()[-1]


@spec("REUSE-86")
async def test_an_upstream_without_own_tools_is_not_informed() -> None:
    bench = PoolBench(ScriptedUpstream(abilities=Abilities(takes_tools=True)))
    host = await bench.host()
    await host.send_messages("first")
    await kill_run(bench)
    host.history = History(host.history.entries[:-1])
    await host.ask()
    assert UNRECORDED not in bench.sent_texts()[-1]


async def test_the_next_turn_waits_for_the_record_of_a_turn_that_is_cancelled_twice() -> None:
    class Held(MemoryStore):
        is_free = asyncio.Event()

        async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
            await self.is_free.wait()
            return await super().kv_delete(namespace, key, expected=expected)

    bench = PoolBench()
    bench.store = store = Held(bench.place)
    host = await bench.host()
    await host.send_messages("alpha")
    bench.trouble(Trouble.HANGS)
    request = ModelRequest("", host.history.then(UserMessage.of("bravo")), session="s")

    async def listen() -> None:
        async for _ in host.pool.stream(request):
            pass

    listening = bench.world.spawn(listen(), name="listen")
    for _ in range(2):
        await bench.world.settle()
        listening.cancel()
    await asyncio.wait({listening})
    host.history = request.history
    following = bench.world.spawn(host.send_messages("charlie"), name="next turn")
    await bench.world.settle()
    assert bench.sent_texts() == ["alpha", "bravo"]
    store.is_free.set()
    assert (await following).replays == 1
