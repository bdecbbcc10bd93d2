"""The pool: which messages it sends to which agent, and its record afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import pytest
from msgspec import Struct
from msgspec.structs import replace

from midstream.agents.pool import Pooled, PoolLimits
from midstream.agents.pool_entries import POOL_NAMESPACE, RETENTION_NAMESPACE, key_of
from midstream.agents.pool_records import encode
from midstream.agents.pool_turns import REBUILT_NOTE, AgentOrigin, End
from midstream.agents.reuse_classification import RequestRelation
from midstream.agents.upstream_abilities import Abilities
from midstream.agents.upstreams import MessageTaken, Setup, UpstreamEvent
from midstream.engine.agent import Agent
from midstream.engine.host import Host as SessionHost
from midstream.errors import (
    ModelAccessError,
    ModelError,
    ModelStalledError,
    StoreBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
    UsageError,
)
from midstream.history.messages import Finish, History, Step, Thinking, Usage, UserMessage
from midstream.models.responses import (
    Finished,
    ModelEvent,
    ModelRequest,
    ReuseReported,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
    Working,
)
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing import run_turn
from midstream.testing.scripted_upstream import (
    AgentConversation,
    ScriptedAgent,
    ScriptedUpstream,
    Trouble,
    words_of,
)
from midstream.tools.forwarded_servers import ForwardedMcpServer
from tests.agents.pooling import PoolApplication, PoolBench, assert_sent_once, is_complete
from tests.spec import spec

DAY_S = 24 * 3600.0


# --- messages -------------------------------------------------------------------------------------------------


@spec("REUSE-30")
async def test_each_message_is_sent_once_and_nothing_else() -> None:
    bench = PoolBench()
    host = await bench.host()
    for text in ("one", "two", "three"):
        await host.send_messages(text)
    assert bench.sent_texts() == ["one", "two", "three"]
    assert bench.upstream.opened == [""]


@spec("REUSE-31")
async def test_another_process_continues_from_the_record() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    await host.pool.aclose()
    host.pool = await bench.pool()
    report = await host.send_messages("two")
    assert (report.way, report.kind) == (AgentOrigin.RESUMED, RequestRelation.CONTINUATION)
    assert bench.upstream.opened == ["", "agent-1"]
    assert bench.sent_texts() == ["one", "two"]


@spec("REUSE-32")
async def test_several_messages_are_sent_one_by_one_and_only_the_last_answer_is_shown() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    report = await host.send_messages("two", "three")
    assert bench.sent_texts() == ["one", "two", "three"]
    assert host.text == "answer 3"
    assert report.usage == Usage(len("two") + len("three"), 4)
    assert host.events[-1] == Finished(usage=report.usage)
    assert Working() in host.events


@spec("REUSE-32")
@pytest.mark.parametrize(
    "trouble", [Trouble.DIES_OPENED, Trouble.DIES_SPEAKING, Trouble.CUT, Trouble.HANGS_SPEAKING]
)
async def test_if_one_of_several_messages_fails_a_fresh_agent_receives_all(trouble: Trouble) -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("alpha")
    bench.trouble(trouble)
    report = await host.send_messages("bravo", "charlie")
    assert (report.way, report.replays) == (AgentOrigin.FRESH, 1)
    assert host.text == "answer 1"
    assert (
        bench.sent_texts()[-1].index("alpha")
        < bench.sent_texts()[-1].index("bravo")
        < bench.sent_texts()[-1].index("charlie")
    )


@spec("REUSE-32")
async def test_a_cancel_between_two_messages_sends_no_more_and_leaves_no_record() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    host.history = History((*host.history.entries, *map(UserMessage.of, ("two", "three"))))
    stream = _stream(host.pool, ModelRequest("", host.history, session="s"))
    await anext(stream)
    await stream.aclose()
    assert bench.sent_texts() == ["one", "two"]
    assert await bench.record() is None


@spec("REUSE-32")
async def test_an_agent_that_calls_tools_between_two_messages_is_replaced() -> None:
    def answer(talk: AgentConversation) -> list[UpstreamEvent]:
        if words_of(talk.messages[-1].message) == "two":
            return [ToolCallRequested("c", "look", "{}"), Finished(Finish.CALLS)]
        return [TextDelta("ok"), Finished()]

    bench = PoolBench(ScriptedUpstream(answer=answer))
    host = await bench.host()
    await host.send_messages("one")
    assert (await host.send_messages("two", "three")).way is AgentOrigin.FRESH


@spec("REUSE-33")
async def test_results_go_to_the_agent_that_made_the_calls() -> None:
    def answer(talk: AgentConversation) -> list[UpstreamEvent]:
        if talk.messages[-1].message.results:
            return [TextDelta("done"), Finished()]
        return [ToolCallRequested("c1", "look", "{}"), Finished(Finish.CALLS)]

    bench = PoolBench(ScriptedUpstream(answer=answer, abilities=Abilities(takes_tools=True)))
    host = await bench.host()
    await host.send_messages("one")
    record = await bench.record()
    assert record is not None
    assert record.open_calls == ("c1",)
    report = await host.ask()
    assert (report.way, host.text) == (AgentOrigin.RESUMED, "done")
    assert bench.sent_texts() == ["one", "result of c1"]


@spec("REUSE-34")
async def test_an_edit_starts_a_fresh_agent_and_the_old_one_is_deleted() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    await host.send_messages("two")
    host.history = History(host.history.entries[:-2])
    report = await host.send_messages("other")
    await bench.world.settle()
    assert (report.kind, report.way, report.rebuilt) == (RequestRelation.DIVERGENCE, AgentOrigin.FRESH, "")
    assert bench.upstream.memory.forgotten == ["agent-1"]
    assert not any(isinstance(event, ThinkingDelta) for event in host.events)
    assert (await host.send_messages("next")).way is AgentOrigin.RESUMED


@spec("REUSE-34")
async def test_with_forks_an_edit_continues_from_the_common_prefix() -> None:
    bench = PoolBench(ScriptedUpstream(abilities=Abilities(can_fork=True)))
    host = await bench.host()
    for text in ("one", "two", "three"):
        await host.send_messages(text)
    host.history = History(host.history.entries[:-2])
    report = await host.send_messages("other")
    assert (report.way, report.replays, host.text) == (AgentOrigin.FORKED, 0, "answer 3")
    assert bench.sent_texts()[-1] == "other"
    assert bench.upstream.memory.forgotten == []
    assert (await host.send_messages("next")).way is AgentOrigin.RESUMED


@spec("REUSE-35")
@pytest.mark.parametrize("session", ["", "s"])
async def test_a_side_call_has_its_own_agent_that_is_deleted(session: str) -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    before = await bench.store.kv_list(POOL_NAMESPACE)
    request = ModelRequest("make a title", host.history, session=session, is_ephemeral=bool(session))
    events = [event async for event in host.pool.stream(request)]
    await bench.world.settle()
    assert is_complete(events)
    assert await bench.store.kv_list(POOL_NAMESPACE) == before
    assert bench.upstream.memory.forgotten == ["agent-2"]
    assert (await host.send_messages("two")).way is AgentOrigin.RESUMED


@spec("REUSE-35")
async def test_a_side_call_does_not_wait_for_the_running_turn() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    host.history = host.history.then(UserMessage.of("two"))
    running = _stream(host.pool, ModelRequest("", host.history, session="s"))
    await anext(running)
    title = ModelRequest("title", History((UserMessage.of("a title"),)), session="s")
    assert is_complete([event async for event in host.pool.stream(title)])
    assert isinstance([event async for event in running][-1], Finished)
    assert len(bench.sent_texts()) == 3


# --- records --------------------------------------------------------------------------------------------------


@spec("REUSE-36")
async def test_the_record_is_pending_before_anything_is_sent_and_confirmed_by_the_first_event() -> None:
    seen: list[tuple[str, bool]] = []
    bench = PoolBench()

    class Looking(ScriptedAgent):
        async def send(self, *given: object, **named: object) -> AsyncGenerator[UpstreamEvent, None]:
            await self._note("asked")
            async for event in super().send(*given, **named):  # type: ignore[arg-type]
                yield event
                await self._note(type(event).__name__)

        async def _note(self, when: str) -> None:
            record = await bench.record()
            assert record is not None
            assert not record.is_resumable
            seen.append((f"{when}: {record.phase}", bool(record.run)))

    class Upstream(ScriptedUpstream):
        async def open(self, setup: Setup, *, resume: str = "") -> ScriptedAgent:
            return Looking(self, setup, resume)

    bench.upstream = Upstream()
    host = await bench.host()
    await host.send_messages("one")
    assert seen[0] == ("asked: pending", True)
    assert ("TextDelta: confirmed", True) in seen
    record = await bench.record()
    assert record is not None
    assert (record.is_resumable, record.run) == (True, "")


@spec("REUSE-36")
async def test_the_record_is_released_before_the_caller_receives_the_end() -> None:
    bench = PoolBench()
    host = await bench.host()
    request = ModelRequest("", History((UserMessage.of("one"),)), session="s")
    async for event in host.pool.stream(request):
        record = await bench.record()
        assert record is not None
        assert record.is_resumable == isinstance(event, Finished)


@spec("REUSE-37")
async def test_an_agent_of_a_dead_run_is_not_resumed_and_readers_are_informed() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    key = key_of(bench.upstream.name, "s")
    kept = await bench.store.kv_get(POOL_NAMESPACE, key)
    record = await bench.record()
    assert kept is not None
    assert record is not None
    await bench.store.kv_put(
        POOL_NAMESPACE, key, encode(replace(record, run="run-dead")), expected=kept.version, at=1e6
    )
    report = await host.send_messages("two")
    assert (report.way, report.rebuilt, report.replays) == (AgentOrigin.FRESH, "phase", 1)
    assert host.events[0] == ThinkingDelta(REBUILT_NOTE)


@spec("REUSE-37")
async def test_a_process_whose_entry_was_taken_over_finishes_and_leaves_the_entry_alone() -> None:
    bench = PoolBench()
    slow, quick = await bench.host(), await bench.host()
    request = ModelRequest("", History((UserMessage.of("one"),)), session="s")
    running = _stream(slow.pool, request)
    await anext(running)
    await quick.send_messages("one")
    taken = await bench.record()
    assert is_complete([event async for event in running])
    await bench.world.settle()
    assert await bench.record() == taken
    assert taken is not None
    assert taken.agent not in bench.upstream.memory.forgotten
    assert len(bench.upstream.memory.forgotten) == 1
    assert (await quick.send_messages("two")).way is AgentOrigin.RESUMED


@spec("REUSE-38")
@pytest.mark.parametrize("received", [0, 1])
async def test_a_cancelled_turn_leaves_a_true_record(received: int) -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("alpha")
    host.history = host.history.then(UserMessage.of("bravo"))
    if received:
        stream = _stream(host.pool, ModelRequest("", host.history, session="s"))
        await anext(stream)
        await stream.aclose()
    else:
        bench.trouble(Trouble.HANGS)
        listening = bench.world.spawn(
            _listen(host, ModelRequest("", host.history, session="s")), name="listen"
        )
        await bench.world.settle()
        listening.cancel()
        await asyncio.wait({listening})
    assert host.report.end is End.STOPPED
    record = await bench.record()
    if received:  # the agent has the message: the following one is sent alone
        assert record is not None
        assert record.is_resumable
        assert (await host.send_messages("charlie")).way is AgentOrigin.RESUMED
    else:  # whether the agent received it is unknown
        assert record is None
        assert (await host.send_messages("charlie")).replays == 1
    talk = bench.upstream.memory.talks[host.report.agent]
    assert [talk.words.count(text) for text in ("alpha", "bravo", "charlie")] == [1, 1, 1]


@spec("REUSE-38")
async def test_with_the_client_applications_tools_a_cancelled_turn_leaves_no_record() -> None:
    bench = PoolBench(ScriptedUpstream(abilities=Abilities(takes_tools=True)))
    host = await bench.host()
    await host.send_messages("one")
    host.history = host.history.then(UserMessage.of("two"))
    stream = _stream(host.pool, ModelRequest("", host.history, session="s"))
    await anext(stream)
    await stream.aclose()
    assert await bench.record() is None


@spec("REUSE-39")
async def test_records_too_old_or_too_many_are_removed_and_their_agents_deleted() -> None:
    bench = PoolBench()
    pool = await bench.pool()
    for number in range(202):
        await PoolApplication(pool, bench.world, session=f"s{number}").send_messages("one")
        await bench.world.advance(1.0)
    assert len(await bench.store.kv_list(POOL_NAMESPACE)) == 200
    assert (
        bench.upstream.memory.forgotten == ["agent-1", "agent-3"] or len(bench.upstream.memory.forgotten) == 2
    )
    await bench.world.advance(8 * DAY_S)
    report = await PoolApplication(pool, bench.world, session="s201").send_messages("one")
    assert report.kind is RequestRelation.NEW
    report = await PoolApplication(pool, bench.world, session="another").send_messages("one")
    assert len(await bench.store.kv_list(POOL_NAMESPACE)) == 2


@spec("REUSE-39")
async def test_a_damaged_record_costs_one_full_transcript_and_affects_no_other() -> None:
    bench = PoolBench()
    one, two = await bench.host(session="one"), await bench.host(session="two")
    for host in (one, two):
        await host.send_messages("hello")
    key = key_of(bench.upstream.name, "one")
    kept = await bench.store.kv_get(POOL_NAMESPACE, key)
    assert kept is not None
    await bench.store.kv_put(POOL_NAMESPACE, key, kept.body[:20], expected=kept.version, at=kept.at)
    assert [(await host.send_messages("more")).way for host in (one, two)] == [
        AgentOrigin.FRESH,
        AgentOrigin.RESUMED,
    ]
    assert (await one.send_messages("again")).way is AgentOrigin.RESUMED


@spec("REUSE-39")
async def test_without_a_working_store_a_fresh_agent_answers_the_turn() -> None:
    class Full(MemoryStore):
        async def kv_put(self, *_: object, **__: object) -> int:
            raise StoreBusyError("locked")

    bench = PoolBench()
    bench.store = Full(bench.place)
    host = await bench.host()
    await host.send_messages("one")
    report = await host.send_messages("two")
    assert (report.way, report.end) == (AgentOrigin.ASIDE, End.WHOLE)


@spec("REUSE-40")
async def test_ages_at_which_agents_were_gone_are_stored_and_not_tried_again() -> None:
    bench = PoolBench()
    for number in range(4):
        host = await bench.host(session=f"s{number}")
        await host.send_messages("one")
        bench.upstream.memory.expire(host.report.agent)
        await bench.world.advance(3600.0)
        opened = len(bench.upstream.opened)
        report = await host.send_messages("two")
        assert report.rebuilt == ("stale" if number == 3 else "upstream_gone")
        assert len(bench.upstream.opened) == opened + 1
    assert len(await bench.store.kv_list(RETENTION_NAMESPACE)) == 1


# --- failures -------------------------------------------------------------------------------------------------


class Expected(Struct, frozen=True):
    """The consequence of a fault: the final error, the number of sends, whether a full transcript was sent."""

    error: str = ""
    sends: int = 1
    is_replacement: bool = False


OK, ANEW = Expected(), Expected(sends=2, is_replacement=True)
AGAIN = Expected(sends=2)

TROUBLES: dict[Trouble, tuple[Expected, Expected]] = {
    Trouble.GONE_AT_OPEN: (Expected(sends=1, is_replacement=True), OK),
    Trouble.GONE: (ANEW, Expected("upstream_gone")),
    Trouble.FAILED: (ANEW, Expected("upstream_failed")),
    Trouble.UNAVAILABLE: (AGAIN, AGAIN),
    Trouble.ACK_LOST: (AGAIN, AGAIN),
    Trouble.RATE_LIMIT: (AGAIN, AGAIN),
    Trouble.BUSY: (AGAIN, AGAIN),
    Trouble.HANGS: (ANEW, ANEW),
    Trouble.HANGS_TAKEN: (ANEW, ANEW),
    Trouble.HANGS_OPENED: (ANEW, ANEW),
    Trouble.HANGS_SPEAKING: (Expected("model_stalled"), Expected("model_stalled")),
    Trouble.HANGS_IN_TOOL: (Expected("model_stalled"), Expected("model_stalled")),
    Trouble.DIES_OPENED: (ANEW, Expected("upstream_failed")),
    Trouble.OUTAGE_OPENED: (Expected("model_unavailable"), Expected("model_unavailable")),
    Trouble.DIES_SPEAKING: (Expected("upstream_failed"), Expected("upstream_failed")),
    Trouble.CUT: (Expected("upstream_failed"), Expected("upstream_failed")),
    Trouble.NEW_CHAT: (ANEW, OK),
    Trouble.UNAUTHENTICATED: (Expected("model_access"), Expected("model_access")),
    Trouble.REJECTED: (Expected("model_rejected"), Expected("model_rejected")),
    Trouble.OVERFLOW: (Expected("context_overflow"), Expected("context_overflow")),
    Trouble.FILTERED: (Expected("model_filtered"), Expected("model_filtered")),
}
"""For every fault: its consequence for a resumed agent, and for a fresh one."""


def test_the_table_has_every_fault() -> None:
    assert {*TROUBLES} == {*Trouble}


@spec("REUSE-41")
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("situation", ["resumed", "restarted", "fresh", "edited", "repeated", "queued"])
async def test_the_consequence_of_a_fault(trouble: Trouble, situation: str) -> None:
    bench = PoolBench()
    host = await bench.host()
    is_resumed = await _arrive(bench, host, situation)
    before = len(bench.upstream.sends)
    if not (trouble is Trouble.GONE_AT_OPEN and (not is_resumed or situation in ("resumed", "queued"))):
        bench.trouble(trouble)
    expected = TROUBLES[trouble][0 if is_resumed else 1]
    if trouble is Trouble.GONE_AT_OPEN and not bench.upstream.troubles:
        expected = OK
    error = ""
    try:
        await host.ask()
    except ModelError as failed:
        error = failed.code
    # An answer that breaks off unseen is requested again, unless a tool of the agent had started (REUSE-79).
    if situation == "queued":
        is_unseen = expected.error in ("upstream_failed", "model_stalled")
        is_unseen = is_unseen and trouble is not Trouble.HANGS_IN_TOOL
        assert error == ("" if is_unseen else expected.error)
    else:
        assert (error, len(bench.upstream.sends) - before) == (expected.error, expected.sends)
        assert bool(host.report.rebuilt) == expected.is_replacement
    assert bench.upstream.memory.wrongs == []
    if error:
        await host.ask()
    assert_sent_once(bench, host)
    assert (await host.send_messages("next")).way is AgentOrigin.RESUMED
    assert_sent_once(bench, host)


async def _arrive(bench: PoolBench, host: PoolApplication, situation: str) -> bool:
    """Bring a client application to the situation; return whether an agent is resumed then."""
    if situation != "fresh":
        await host.send_messages("first")
        await host.send_messages("second")
    match situation:
        case "restarted":
            await host.pool.aclose()
            host.pool = await bench.pool()
        case "edited":
            host.history = History(host.history.entries[:-2])
        case "repeated":
            host.history = History(host.history.entries[:-1])
            return False
        case "queued":
            host.history = host.history.then(UserMessage.of("third"))
    host.history = host.history.then(UserMessage.of("last"))
    return situation in ("resumed", "restarted", "queued")


@spec("REUSE-42")
async def test_the_retry_happens_once_and_its_error_has_the_first_as_cause() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    bench.trouble(Trouble.GONE, Trouble.FAILED)
    error = await host.fail("two")
    assert isinstance(error, UpstreamFailedError)
    assert isinstance(error.__cause__, UpstreamGoneError)
    assert len(bench.sent_texts()) == 3


@spec("REUSE-42")
async def test_a_rebuilt_conversation_is_noted_once_and_no_agent_receives_the_note() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    bench.trouble(Trouble.GONE)
    await host.send_messages("two")
    assert host.events[0] == ThinkingDelta(REBUILT_NOTE)
    noted = host.history.entries[-1]
    assert isinstance(noted, Step)
    thought = replace(
        noted, response=replace(noted.response, parts=(Thinking(REBUILT_NOTE), *noted.response.parts))
    )
    host.history = History((*host.history.entries[:-1], thought))
    await host.send_messages("three")
    assert [event for event in host.events if isinstance(event, ThinkingDelta)] == []
    bench.trouble(Trouble.GONE)
    await host.send_messages("four")
    assert not any(REBUILT_NOTE.strip() in received for received in bench.sent_texts())


@spec("REUSE-43")
@pytest.mark.parametrize(("is_good", "way"), [(True, AgentOrigin.FRESH), (False, AgentOrigin.RESUMED)])
async def test_an_idle_agent_with_an_access_error_is_replaced_if_the_key_is_valid(
    is_good: bool,  # noqa: FBT001 - a parameter of the test
    way: AgentOrigin,
) -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    await bench.world.advance(301.0)
    bench.trouble(Trouble.UNAUTHENTICATED)
    bench.upstream.is_key_good = is_good
    if is_good:
        assert (await host.send_messages("two")).way is way
        return
    assert isinstance(await host.fail("two"), ModelAccessError)
    bench.upstream.is_key_good = True
    assert (await host.ask()).way is way, "a refusal leaves the agent as it was"


@spec("REUSE-44")
async def test_attempts_at_one_message_have_one_key_and_another_agent_or_message_has_another() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    bench.trouble(Trouble.UNAVAILABLE, Trouble.UNAVAILABLE, None)
    await host.send_messages("two")
    bench.trouble(Trouble.GONE)
    await host.send_messages("three")
    await host.send_messages("three")
    keys = [received.key for received in bench.upstream.sends]
    assert keys[1] == keys[2] == keys[3]
    assert len({*keys}) == len(keys) - 2


@spec("REUSE-44")
async def test_a_network_failure_is_retried_after_half_a_second_and_one_and_a_half() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    began_at = bench.world.monotonic()
    bench.trouble(Trouble.UNAVAILABLE, Trouble.UNAVAILABLE)
    await host.send_messages("two")
    assert bench.world.monotonic() - began_at == pytest.approx(2.0)
    bench.trouble(Trouble.RATE_LIMIT)
    await host.send_messages("three")
    assert bench.world.monotonic() - began_at == pytest.approx(4.0)


@spec("REUSE-45")
async def test_a_second_stall_ends_the_turn() -> None:
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("one")
    bench.trouble(Trouble.HANGS, Trouble.HANGS)
    assert isinstance(await host.fail("two"), ModelStalledError)
    assert len(bench.sent_texts()) == 3


# --- agents ---------------------------------------------------------------------------------------------------


@spec("REUSE-46")
async def test_open_agents_are_limited_and_all_closed_at_the_end() -> None:
    bench = PoolBench()
    pool = await bench.pool(limits=PoolLimits(live_max=3))
    for number in range(10):
        await PoolApplication(pool, bench.world, session=f"s{number}").send_messages("one")
        await bench.world.settle()
    assert bench.upstream.live == 3
    assert bench.upstream.live_max <= 4
    await pool.aclose()
    assert (bench.upstream.live, bench.upstream.is_closed) == (0, True)
    assert bench.upstream.memory.forgotten == []


@spec("REUSE-46")
@pytest.mark.parametrize(
    ("limits", "is_open"),
    [(PoolLimits(), False), (PoolLimits(rest_s=100.0), True), (PoolLimits(rest_s=9.0), False)],
)
async def test_an_idle_agent_is_closed_after_the_time_of_its_upstream_or_of_the_limits(
    limits: PoolLimits,
    is_open: bool,  # noqa: FBT001
) -> None:
    bench = PoolBench(ScriptedUpstream(abilities=Abilities(rest_s=60.0)))
    host = PoolApplication(await bench.pool(limits=limits), bench.world)
    await host.send_messages("one")
    await bench.world.live_through(bench.world.sleep(61.0))
    await PoolApplication(host.pool, bench.world, session="other").send_messages("two")
    await bench.world.settle()
    assert bench.upstream.live == 1 + is_open


@spec("REUSE-47")
async def test_a_changed_set_of_servers_needs_a_fresh_agent() -> None:
    bench = PoolBench(ScriptedUpstream(abilities=Abilities(takes_servers=True)))
    servers = [ForwardedMcpServer("b"), ForwardedMcpServer("a")]
    host = PoolApplication(await bench.pool(servers=lambda: servers), bench.world)
    await host.send_messages("one")
    servers.reverse()
    assert (await host.send_messages("two")).way is AgentOrigin.RESUMED
    servers.append(ForwardedMcpServer("c"))
    report = await host.send_messages("three")
    assert (report.kind, report.way) == (RequestRelation.TOOLS_CHANGED, AgentOrigin.FRESH)
    assert [server.name for server in bench.upstream.sends[-1].setup.servers] == ["a", "b", "c"]


@spec("REUSE-47")
async def test_an_upstream_without_servers_receives_none_and_a_change_costs_nothing() -> None:
    bench = PoolBench()
    servers = [ForwardedMcpServer("a")]
    host = PoolApplication(await bench.pool(servers=lambda: servers), bench.world)
    await host.send_messages("one")
    servers.clear()
    assert (await host.send_messages("two")).way is AgentOrigin.RESUMED
    assert bench.upstream.sends[0].setup.servers == ()


async def test_an_answer_in_a_conversation_without_an_id_is_a_failure() -> None:
    class Nameless(ScriptedAgent):
        async def send(self, *given: object, **named: object) -> AsyncGenerator[UpstreamEvent, None]:
            async for event in super().send(*given, **named):  # type: ignore[arg-type]
                if not isinstance(event, MessageTaken):
                    yield event

    class Upstream(ScriptedUpstream):
        async def open(self, setup: Setup, *, resume: str = "") -> ScriptedAgent:
            return Nameless(self, setup, resume)

    bench = PoolBench(Upstream())
    assert isinstance(await (await bench.host()).fail("one"), UpstreamFailedError)


# --- concurrent turns -----------------------------------------------------------------------------------------


@spec("REUSE-48")
async def test_turns_of_one_session_wait_for_each_other_and_others_do_not() -> None:
    bench = PoolBench()
    pool = await bench.pool()
    one = ModelRequest("", History((UserMessage.of("one"),)), session="s")
    running = _stream(pool, one)
    await anext(running)
    waiting = bench.world.spawn(_all_of(pool, one), name="waiting")
    await bench.world.settle()
    assert not waiting.done()
    other = PoolApplication(pool, bench.world, session="t")
    await other.send_messages("one")
    assert is_complete([event async for event in running])
    await bench.world.settle()
    assert is_complete(waiting.result())


@spec("REUSE-48")
async def test_a_request_that_waited_too_long_takes_the_session_over() -> None:
    bench = PoolBench()
    pool = await bench.pool(limits=PoolLimits(wait_s=5.0))
    one = ModelRequest("", History((UserMessage.of("one"),)), session="s")
    running = _stream(pool, one)
    await anext(running)
    host = PoolApplication(pool, bench.world)
    await host.send_messages("one")
    record = await bench.record()
    assert record is not None
    assert record.agent == host.report.agent
    await running.aclose()
    assert await bench.record() == record


@spec("REUSE-48")
async def test_an_error_releases_the_session() -> None:
    bench = PoolBench()
    host = await bench.host()
    bench.trouble(Trouble.FAILED)
    await host.fail("one")
    await host.ask()
    assert is_complete(host.events)


# --- reports --------------------------------------------------------------------------------------------------


@spec("REUSE-49")
async def test_every_turn_is_reported_and_logged_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "midstream.agents.pool")
    bench = PoolBench()
    host = await bench.host()
    await host.send_messages("a secret")
    await host.send_messages("two")
    assert [report.kind for report in bench.reports] == [RequestRelation.NEW, RequestRelation.CONTINUATION]
    assert "kind=continuation (1 new at the end) way=resumed end=whole agent=agent-1" in caplog.text
    assert "tokens=3 in (0 cached), 2 out" in caplog.text
    assert "secret" not in caplog.text


@spec("REUSE-49")
async def test_a_failing_counter_does_not_fail_the_turn(caplog: pytest.LogCaptureFixture) -> None:
    def count(report: object) -> None:
        raise KeyError(report)

    bench = PoolBench()
    await bench.store.open()
    host = PoolApplication(Pooled(bench.upstream, bench.store, on_turn=count, world=bench.world), bench.world)
    await host.send_messages("one")
    assert "could not be counted" in caplog.text


def test_limits_are_positive() -> None:
    for wrong in ({"live_max": 0}, {"rest_s": 0.0}, {"wait_s": -1.0}):
        with pytest.raises(UsageError):
            PoolLimits(**wrong)


# --- with the runtime, and with a real store ------------------------------------------------------------------


@spec("REUSE-31")
async def test_an_agent_with_a_pooled_upstream_works(tmp_path: Path) -> None:
    upstream = ScriptedUpstream()
    store = SQLiteStore(tmp_path / "sessions.db")
    pool = Pooled(upstream, store)
    host = SessionHost(Agent(pool), store)
    await host.start()
    for text in ("one", "two", "three"):
        await run_turn(host, "s", text)
    assert [words_of(received.message) for received in upstream.sends] == ["one", "two", "three"]
    report = pool.last("s")
    assert report is not None
    assert report.way is AgentOrigin.RESUMED
    await host.stop()
    await pool.aclose()


async def _stream(pool: Pooled, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
    """Yield the agent's events; the pool's decision comes before anything is sent."""
    events = cast("AsyncGenerator[ModelEvent, None]", pool.stream(request))
    async with contextlib.aclosing(events):
        async for event in events:
            if not isinstance(event, ReuseReported):
                yield event


async def _listen(host: PoolApplication, request: ModelRequest) -> None:
    async for _ in host.pool.stream(request):
        pass


async def _all_of(pool: Pooled, request: ModelRequest) -> list[ModelEvent]:
    return [event async for event in pool.stream(request)]
