"""Silence is reported, cut at its limit, and the watchdog itself does no harm. The fake world has the clock."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math

import pytest

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.engine.watchdog import RECENT_MAX, Level, OnStall, StallSeen, Watch
from midstream.history.messages import UserMessage
from midstream.models.responses import KeepAlive
from midstream.session.records import StallNoticed, TurnEnded, TurnStatus, decode
from midstream.session.turn.commands import Resume, SendMessage, Stalled, StallFinished
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import ScriptedModel, Stall, text
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import ScriptedStep
from midstream.timing import StallBudgets, StalledOn
from tests.spec import spec

BUDGETS = StallBudgets(first_token_s=30.0, between_tokens_s=15.0, tool_s=60.0)
FIRST, BETWEEN, TOOL = StalledOn.FIRST_TOKEN, StalledOn.BETWEEN_TOKENS, StalledOn.TOOL


class WatchScene:
    """A watch in its own world; `script` is the watched task."""

    def __init__(
        self, call_id: str = "", on_stall: OnStall | None = None, budgets: StallBudgets = BUDGETS
    ) -> None:
        self.world = FakeWorld()
        self.stalls: list[Stalled | StallFinished] = []
        place = ("s", 1, 2, call_id)
        self.watch = Watch(self.world, budgets, place, self.stalls.append, on_stall)

    async def live(self, *pauses_s: float, mark: str = "token") -> None:
        """Report progress after each pause."""
        async with self.watch:
            for pause_s in pauses_s:
                await self.world.sleep(pause_s)
                self.watch.note_progress(mark)

    async def run(self, *pauses_s: float) -> None:
        await self.world.live_through(self.live(*pauses_s))


@spec("TURN-65")
async def test_silence_and_its_end_are_reported_once() -> None:
    scene = WatchScene()
    await scene.run(29.0, 14.0, 100.0, 14.0)
    assert scene.stalls == [Stalled(1, 2, BETWEEN, 15.0), StallFinished(1, 2, BETWEEN, 100.0)]


@spec("TURN-65")
async def test_each_silence_is_a_separate_episode() -> None:
    scene = WatchScene()
    await scene.run(31.0, 16.0, 1.0, 17.0)
    assert scene.stalls == [
        Stalled(1, 2, FIRST, 30.0),
        StallFinished(1, 2, FIRST, 31.0),
        Stalled(1, 2, BETWEEN, 15.0),
        StallFinished(1, 2, BETWEEN, 16.0),
        Stalled(1, 2, BETWEEN, 15.0),
        StallFinished(1, 2, BETWEEN, 17.0),
    ]


@spec("TURN-65")
async def test_without_a_first_token_each_doubling_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[StallSeen] = []
    scene = WatchScene(on_stall=seen.append, budgets=StallBudgets(first_token_max_s=600.0))
    await scene.run(500.0, 40.0)
    warned = [30.0, 60.0, 120.0, 240.0, 480.0]
    assert scene.stalls == [
        *(Stalled(1, 2, FIRST, silent_s) for silent_s in warned),
        StallFinished(1, 2, FIRST, 500.0),
        Stalled(1, 2, BETWEEN, 15.0),
        StallFinished(1, 2, BETWEEN, 40.0),
    ]
    assert [each.silent_s for each in seen if each.level is Level.ADVISORY] == [*warned, 15.0]
    assert [each.levelname for each in caplog.records].count("WARNING") == len(warned) + 1


class Jumping(FakeWorld):
    """A world whose clock can jump, as it does for a process that was suspended."""

    jumped_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.jumped_s


@spec("TURN-65")
async def test_a_late_check_warns_once() -> None:
    world, stalls = Jumping(), list[Stalled | StallFinished]()
    budgets = StallBudgets(first_token_max_s=600.0)
    async with Watch(world, budgets, ("s", 1, 1, ""), stalls.append):
        await world.advance(1.0)
        world.jumped_s = 200.0
        await world.advance(100.0)
    assert [each.silent_s for each in stalls] == [215.0, 240.0]


@spec("TURN-65")
async def test_a_tool_has_its_own_budget_and_is_never_cut_here() -> None:
    scene = WatchScene("c1")
    await scene.run(59.0, 10_000.0)
    assert scene.stalls == [Stalled(1, 2, TOOL, 60.0, "c1"), StallFinished(1, 2, TOOL, 10_000.0, "c1")]


@spec("TURN-65")
async def test_a_tool_that_ends_or_is_cancelled_ends_its_stall(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "midstream")
    for error in (None, asyncio.CancelledError()):
        scene = WatchScene("c1")

        async def ending(scene: WatchScene = scene, error: BaseException | None = error) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                async with scene.watch:
                    await scene.world.sleep(75.0)
                    if error is not None:
                        raise error

        await scene.world.live_through(ending())
        assert scene.stalls == [Stalled(1, 2, TOOL, 60.0, "c1"), StallFinished(1, 2, TOOL, 75.0, "c1")]
    assert [each.levelname for each in caplog.records].count("INFO") == 2


async def test_a_budget_may_be_infinite() -> None:
    world, stalls = FakeWorld(), list[Stalled | StallFinished]()
    watch = Watch(world, StallBudgets(tool_s=math.inf), ("s", 1, 1, "c1"), stalls.append)
    async with watch:
        await world.advance(1e6)
    assert (stalls, world.next_wake_at) == ([], None)


@spec("TURN-64")
@pytest.mark.parametrize(("pauses_s", "cut_at_s"), [((500.0,), 120.0), ((100.0, 500.0), 220.0)])
async def test_silence_past_the_limit_is_cut(pauses_s: tuple[float, ...], cut_at_s: float) -> None:
    scene = WatchScene()
    began_at = scene.world.now()
    with pytest.raises(TimeoutError):
        await scene.run(*pauses_s)
    assert scene.watch.silent_s == 120.0
    assert scene.world.now() - began_at == cut_at_s


@spec("TURN-64")
async def test_pings_are_not_progress_and_time_spent_in_our_own_code_does_not_count() -> None:
    scene = WatchScene()

    async def pinging() -> None:
        async with scene.watch:
            for _ in range(100):
                await scene.world.sleep(5.0)
                scene.watch.note_ping()

    with pytest.raises(TimeoutError):
        await scene.world.live_through(pinging())
    assert scene.watch.silent_s == 120.0

    held = WatchScene()

    async def slow_journal() -> None:
        async with held.watch:
            held.watch.hold()
            await held.world.sleep(10_000.0)
            held.watch.note_progress("token")
            await held.world.sleep(14.0)

    await held.world.live_through(slow_journal())
    assert held.stalls == []


@spec("TURN-65")
async def test_the_log_has_the_last_events_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    scene = WatchScene()

    async def note_much_progress() -> None:
        async with scene.watch:
            for number in range(2 * RECENT_MAX):
                scene.watch.note_progress(f"kind {number}")
            for _ in range(1000):
                scene.watch.note_progress("TextDelta")
            await scene.world.sleep(4.0)
            scene.watch.note_ping()
            await scene.world.sleep(12.0)
            scene.watch.note_progress("TextDelta")

    with caplog.at_level(logging.INFO):
        await scene.world.live_through(note_much_progress())
    noticed, resumed = [record.__dict__ for record in caplog.records]
    assert (noticed["session"], noticed["turn"], noticed["response"]) == ("s", 1, 2)
    assert (noticed["waiting_for"], noticed["silent_s"], noticed["heartbeat_s_ago"]) == (
        "between_tokens",
        15.0,
        11.0,
    )
    assert len(noticed["recent"]) == RECENT_MAX
    assert noticed["recent"][-1] == "TextDelta x1000, 15.0 s ago"
    assert "resumed" in resumed["msg"]
    assert resumed["silent_s"] == 16.0


@spec("TURN-65")
async def test_the_agents_counter_receives_every_level() -> None:
    seen: list[StallSeen] = []
    scene = WatchScene(on_stall=seen.append)
    with pytest.raises(TimeoutError):
        await scene.run(31.0, 500.0)
    assert [(each.level, each.waiting_for, each.silent_s) for each in seen] == [
        (Level.ADVISORY, FIRST, 30.0),
        (Level.OVER, FIRST, 31.0),
        (Level.ADVISORY, BETWEEN, 15.0),
        (Level.FAIL, BETWEEN, 120.0),
    ]


@spec("TURN-66")
async def test_a_failing_counter_is_logged_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: StallSeen) -> None:
        raise ZeroDivisionError

    scene = WatchScene(on_stall=broken)
    await scene.run(31.0, 16.0)
    assert [type(each) for each in scene.stalls] == [Stalled, StallFinished, Stalled, StallFinished]
    assert [record.exc_info is not None for record in caplog.records].count(True) >= 2

    with pytest.raises(TimeoutError):  # and silence past the limit is still cut
        await WatchScene(on_stall=broken).run(500.0)


@spec("TURN-66")
async def test_a_failing_watchdog_does_not_affect_the_work(caplog: pytest.LogCaptureFixture) -> None:
    class Dizzy(FakeWorld):
        """A world whose clock fails for callers that read it too often."""

        looks = 0

        def monotonic(self) -> float:
            self.looks += 1
            if self.looks > 1:
                raise OSError("no clock")
            return super().monotonic()

    world = Dizzy()
    watch = Watch(world, BUDGETS, ("s", 1, 1, ""), lambda _: None)

    async def work() -> str:
        async with watch:
            await world.sleep(1.0)
        return "done"

    assert await world.live_through(work()) == "done"
    assert "watchdog failed" in caplog.text


async def test_nothing_is_left_behind() -> None:
    scene = WatchScene()
    before = asyncio.all_tasks()
    await scene.run(1.0)
    await scene.world.settle()
    assert asyncio.all_tasks() == before
    assert scene.world.next_wake_at is None


@spec("TURN-64", "TURN-30")
async def test_a_provider_that_never_answers_ends_the_turn_in_limited_time_and_it_can_be_resumed() -> None:
    world = FakeWorld()
    answers: list[list[ScriptedStep]] = [[Stall()], [Stall()], [KeepAlive(), Stall()], [*text("at last")]]
    model = ScriptedModel(lambda _: answers.pop(0), world=world)
    memory = Memory()
    host = Host(Agent(model), MemoryStore(memory, world=world), world=world)

    async def turn() -> Runner:
        await host.start()
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        while runner.state.is_live:
            await runner.wait(runner.newest.position)
        return runner

    began_at = world.now()
    runner = await world.live_through(turn())
    assert world.now() - began_at <= 3 * 120.0 + 1.0 + 2.0
    records = [decode(each.body) for each in memory.sessions["s"].records]
    end = records[-1]
    assert isinstance(end, TurnEnded)
    assert (end.status, end.code) == (TurnStatus.FAILED, "model_stalled")
    silences = [each.silent_s for each in records if isinstance(each, StallNoticed)]
    assert silences == [30.0, 60.0] * 3

    async def resume() -> None:
        await runner.submit(Resume())
        while runner.state.is_live:
            await runner.wait(runner.newest.position)

    await world.live_through(resume())
    end = decode(memory.sessions["s"].records[-1].body)
    assert isinstance(end, TurnEnded)
    assert end.status is TurnStatus.COMPLETED
    await host.stop(grace_s=0.0)
