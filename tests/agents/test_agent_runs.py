from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import cast

import pytest

from midstream.agents.agent_runs import EVENTS_MAX, AgentRun, SilenceLimits
from midstream.agents.pool import Pooled
from midstream.agents.upstreams import MessageTaken, Setup, UpstreamEvent, UpstreamMessage
from midstream.engine.agent import Agent
from midstream.engine.host import Host as SessionHost
from midstream.errors import ModelStalledError, UpstreamFailedError, UpstreamGoneError, UsageError
from midstream.models.responses import (
    Finished,
    KeepAlive,
    TextDelta,
    UpstreamCallEnded,
    UpstreamCallStarted,
    Working,
)
from midstream.session.records import Record, TurnEnded
from midstream.store.memory import MemoryStore
from midstream.testing import FakeWorld, run_turn
from midstream.testing.scripted_upstream import ScriptedAgent, ScriptedUpstream
from midstream.timing import StallBudgets

LIMITS = SilenceLimits()


def test_budgets_are_positive_and_finite() -> None:
    for wrong in (0.0, -1.0, float("nan"), float("inf"), 2.0**31):
        with pytest.raises(UsageError, match="`idle_s` is "):
            SilenceLimits(idle_s=wrong)


async def test_events_arrive_as_they_are_sent() -> None:
    events = [MessageTaken("a"), TextDelta("x"), Finished()]
    assert await _run_script(events) == events


async def test_silence_before_the_first_event_is_a_stall() -> None:
    with pytest.raises(ModelStalledError, match="scripted sent nothing for 120 s"):
        await _run_script([120.5, TextDelta("x")])


async def test_every_event_ends_a_silence_even_without_output() -> None:
    events = [119.0, KeepAlive(), 119.0, Working(), 119.0, MessageTaken("a"), 119.0, Finished()]
    assert (await _run_script(events))[-1] == Finished()


async def test_a_tool_of_the_upstream_may_take_ten_minutes_with_keep_alives() -> None:
    call = UpstreamCallStarted("1", "build", "{}")
    received = await _run_script([call, 599.0, UpstreamCallEnded("1", "ok"), Finished()])
    signs = [event for event in received if isinstance(event, Working)]
    assert len(signs) in range(28, 31)
    assert {*signs} == {Working("build")}


async def test_a_tool_that_never_ends_is_a_stall_with_the_tools_name() -> None:
    with pytest.raises(ModelStalledError, match="for 600 s while its tools were open: build"):
        await _run_script([UpstreamCallStarted("1", "build", "{}"), 601.0])


async def test_after_a_tool_the_short_budget_applies_again() -> None:
    call = [UpstreamCallStarted("1", "build", "{}"), UpstreamCallEnded("1", "ok")]
    with pytest.raises(ModelStalledError, match=r"for 120 s$"):
        await _run_script([*call, 121.0, Finished()])


async def test_after_the_first_event_the_short_budget_applies_even_if_the_first_token_may_take_long() -> None:
    thinking = [MessageTaken("a"), 599.0, KeepAlive(), 599.0]
    assert (await _run_script([*thinking, TextDelta("x"), Finished()], first_token_s=600.0))[-1] == Finished()
    with pytest.raises(ModelStalledError, match=r"for 120 s$"):
        await _run_script([*thinking, TextDelta("x"), 121.0, Finished()], first_token_s=600.0)
    with pytest.raises(ModelStalledError, match=r"for 600 s$"):
        await _run_script([MessageTaken("a"), 601.0, TextDelta("x")], first_token_s=600.0)
    with pytest.raises(ModelStalledError, match=r"for 120 s$"):
        await _run_script([MessageTaken("a"), 121.0, TextDelta("x")], first_token_s=60.0)


async def test_a_slow_reader_is_not_a_silence() -> None:
    world = FakeWorld()
    run = AgentRun(_script_answer(world, [TextDelta("x"), Finished()]), LIMITS, world, name="scripted")
    async with run:
        await world.advance(1000.0)
        assert [await run.next(), await run.next()] == [TextDelta("x"), Finished()]


async def test_an_agent_waits_for_a_slow_reader() -> None:
    world, content = FakeWorld(), list[int]()

    async def stream_events() -> AsyncIterator[UpstreamEvent]:
        for number in range(10 * EVENTS_MAX):
            content.append(number)
            yield TextDelta(str(number))

    async with AgentRun(stream_events(), SilenceLimits(close_s=0.1), world, name="scripted"):
        await world.settle()
        await world.settle()
        assert len(content) == EVENTS_MAX + 1


async def test_an_error_is_raised_after_the_events_before_it() -> None:
    received: list[UpstreamEvent] = []
    with pytest.raises(UpstreamGoneError):
        await _run_script([MessageTaken("a"), UpstreamGoneError("gone")], received)
    assert received == [MessageTaken("a")]


async def test_an_error_of_an_unknown_class_is_a_failed_run_without_its_message() -> None:
    with pytest.raises(UpstreamFailedError, match=r"^scripted failed with KeyError$") as raised:
        await _run_script([KeyError("what somebody wrote")])
    assert isinstance(raised.value.__cause__, KeyError)


async def test_an_answer_that_ends_without_a_finish_is_a_failed_run() -> None:
    with pytest.raises(UpstreamFailedError, match="stopped in the middle"):
        await _run_script([TextDelta("x")])


async def test_an_upstream_that_cancels_itself_is_a_failed_run() -> None:
    async def stream_events() -> AsyncIterator[UpstreamEvent]:
        yield TextDelta("x")
        raise asyncio.CancelledError

    async with AgentRun(stream_events(), LIMITS, FakeWorld(), name="scripted") as run:
        await run.next()
        with pytest.raises(UpstreamFailedError):
            await run.next()


async def test_the_answer_is_closed_in_the_task_that_read_it() -> None:
    world, tasks = FakeWorld(), list[object]()

    async def stream_events() -> AsyncIterator[UpstreamEvent]:
        tasks.append(asyncio.current_task())
        try:
            yield TextDelta("x")
            await asyncio.Event().wait()
        finally:
            tasks.append(asyncio.current_task())

    run = AgentRun(stream_events(), LIMITS, world, name="scripted")
    await run.next()
    await run.__aexit__(RuntimeError, RuntimeError(), None)
    assert tasks[0] is tasks[1]


async def test_a_run_that_does_not_stop_is_abandoned_and_its_events_are_dropped() -> None:
    async def stream_events() -> AsyncIterator[UpstreamEvent]:
        yield TextDelta("x")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await release.wait()
            yield TextDelta("late")

    release, world = asyncio.Event(), FakeWorld()
    run = AgentRun(stream_events(), SilenceLimits(close_s=0.01), world, name="scripted")
    await run.next()
    await run.__aexit__(RuntimeError, RuntimeError(), None)
    assert run.is_abandoned
    release.set()
    await world.settle()


@pytest.mark.parametrize("is_finished", [False, True])
async def test_a_run_whose_end_is_not_awaited_is_abandoned_and_stops(*, is_finished: bool) -> None:
    stopped, release, world = asyncio.Event(), asyncio.Event(), FakeWorld()

    async def stream_events() -> AsyncIterator[UpstreamEvent]:
        yield TextDelta("x")
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()
            stopped.set()

    run = AgentRun(stream_events(), LIMITS, world, name="scripted")
    await run.next()
    kind, error = (None, None) if is_finished else (RuntimeError, RuntimeError())
    ending = asyncio.create_task(run.__aexit__(kind, error, None))
    await world.settle()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert run.is_abandoned
    release.set()
    async with asyncio.timeout(60):
        await stopped.wait()


class Thinker(ScriptedUpstream):
    """An upstream whose agents send their ids, then think for five minutes before the first text."""

    async def open(self, setup: Setup, *, resume: str = "") -> ThinkingAgent:
        return ThinkingAgent(self, setup, resume)


class ThinkingAgent(ScriptedAgent):
    async def send(
        self, outgoing: UpstreamMessage, *, key: str, is_forced: bool = False
    ) -> AsyncGenerator[UpstreamEvent, None]:
        async for event in super().send(outgoing, key=key, is_forced=is_forced):
            yield event
            if isinstance(event, MessageTaken):
                await self._upstream.world.sleep(300.0)


@pytest.mark.parametrize(("first_token_max_s", "status"), [(600.0, "completed"), (120.0, "failed")])
async def test_a_slow_first_token_is_cut_by_the_agents_own_budget(
    first_token_max_s: float, status: str
) -> None:
    world, store = FakeWorld(), MemoryStore()
    upstream = Thinker(world=world)
    pool = Pooled(upstream, store, world=world)
    stalls = StallBudgets(first_token_max_s=first_token_max_s)
    host = SessionHost(Agent(pool, stalls=stalls), store, world=world)

    async def stream_events() -> Record:
        await host.start()
        return (await run_turn(host, "s", "one"))[-1]

    ended = await world.live_through(stream_events())
    assert isinstance(ended, TurnEnded)
    assert ended.status.value == status
    assert (len(upstream.sends) == 1) is (status == "completed")
    await world.live_through(host.stop())


async def _run_script(
    steps: Sequence[object], received: list[UpstreamEvent] | None = None, *, first_token_s: float = 0.0
) -> list[UpstreamEvent]:
    """Let an agent send these steps (events, seconds of silence, errors), and collect the received events."""
    world = FakeWorld()
    events: list[UpstreamEvent] = [] if received is None else received

    async def collect() -> None:
        content = _script_answer(world, steps)
        async with AgentRun(content, LIMITS, world, name="scripted", first_token_s=first_token_s) as run:
            while not isinstance(event := await run.next(), Finished):
                events.append(event)
            events.append(event)

    await world.live_through(collect())
    return events


async def _script_answer(world: FakeWorld, steps: Sequence[object]) -> AsyncIterator[UpstreamEvent]:
    for step in steps:
        if isinstance(step, Exception):
            raise step
        if isinstance(step, float):
            await world.sleep(step)
        else:
            yield cast("UpstreamEvent", step)
