"""After any end of a turn, every provider accepts the next prompt.

The real runtime runs through generated lives: models that stop in the middle, fail, stall or return nothing,
tools that fail or ignore a cancel, a cancel at any moment, a process that dies at any fault point and one that
restarts hours later. After each turn, and for each request in between, the prompt is checked for every profile.
(The hang in issue 3 started with a history that no provider answered.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.environment import Fault
from midstream.errors import (
    ContextOverflowError,
    MidstreamError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
)
from midstream.history.messages import File, History, Step, Text, UserMessage
from midstream.history.operations import check_by_name as check
from midstream.history.profiles import PROFILES
from midstream.history.rendering import render
from midstream.models.responses import Finished, ModelRequest, TextDelta, ThinkingDelta
from midstream.session.turn.commands import Cancel, SendMessage
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.fake_worlds import Crashed, FakeWorld
from midstream.testing.scripted_model import (
    Response,
    ScriptedModel,
    ScriptedStep,
    Stall,
    calls,
    steps_since_user,
    text,
)
from midstream.tools.function_tools import Tool, tool
from tests.search import tried
from tests.spec import spec

RESPONSES: dict[str, Sequence[ScriptedStep]] = {
    "fine": text("all is well"),
    "nothing": [Finished()],
    "a thought alone": [ThinkingDelta("hm"), Finished()],
    "silence": [Stall()],
    "half a thought": [ThinkingDelta("hm"), Stall()],
    "half a sentence": [ThinkingDelta("hm"), TextDelta("Half a "), Stall()],
    "white space": [TextDelta(" \n"), Stall()],
    "refused": [TextDelta("Half "), ModelRejectedError("no")],
    "down": [ThinkingDelta("hm"), ModelUnavailableError("503")],
    "stalled": [ModelStalledError("silence")],
    "too long": [ContextOverflowError("too long")],
    "same ids": calls(("a", "quick", "{}"), ("a", "quick", "{}"), text="Look:"),
    "no ids": calls(("", "quick", ""), ("", "fails", "{}")),
    "odd": calls(("x" * 70, "no such tool!", '{"broken'), ("functions.quick:0", "quick", "{}")),
    "slow": calls(("a", "slow", "{}"), ("b", "quick", "{}")),
    "stubborn": calls(("a", "stubborn", "{}"), ("b", "slow", "{}")),
}
WORDS = [
    (Text("go on"),),
    (Text(""),),
    (),
    (File("image/png", data="AAAA"),),
    (Text("look"), File("image/png", data="!")),
]
DEATHS = [
    Fault.BEFORE_APPEND,
    Fault.AFTER_APPEND,
    Fault.AFTER_PUBLISH,
    Fault.BEFORE_TOOL,
    Fault.AFTER_TOOL,
]


class TurnPlan(Struct):
    """The course of one turn: its message, the model's behaviour, its cancel, the death of the process."""

    parts: tuple[Text | File, ...]
    responses: list[str]
    cancel_after_s: float | None
    death: tuple[Fault, int] | None
    away_s: float


plans = st.builds(
    TurnPlan,
    st.sampled_from(WORDS),
    st.lists(st.sampled_from(sorted(RESPONSES)), min_size=1, max_size=3),
    st.sampled_from([None, 0.0, 0.011, 0.021, 0.031, 0.3, 2.0]),
    st.one_of(st.none(), st.tuples(st.sampled_from(DEATHS), st.integers(1, 6))),
    st.sampled_from([60.0, 3 * 60 * 60.0]),
)


def refusing_profiles(history: History) -> dict[str, object]:
    """Return the profiles that refuse a history."""
    found: dict[str, object] = {}
    for name, profile in PROFILES.items():
        sent = render(history, "Be brief.", name)
        findings = check(sent.messages, name, format=profile.format, system=sent.system or None)
        if findings:
            found[name] = findings
    return found


class GeneratedLife:
    """One session and its successive processes."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.hosts: list[Host] = []
        self.plan = TurnPlan((), [], None, None, 0.0)
        self.refused: list[object] = []
        self.at = 1_000_000.0
        self.world, self.host = self._process()

    def _process(self) -> tuple[FakeWorld, Host]:
        world = FakeWorld(len(self.hosts), at=self.at)
        model = ScriptedModel(self._response, delay_s=0.01, world=world)
        host = Host(Agent(model, tools=_tools(world)), MemoryStore(self.memory, world=world), world=world)
        self.hosts.append(host)
        return world, host

    def _response(self, request: ModelRequest) -> Response:
        if found := refusing_profiles(request.history):
            self.refused.append(found)
        number = steps_since_user(request.history)
        responses = self.plan.responses
        return RESPONSES[responses[number]] if number < len(responses) else text("done")

    async def turn(self, plan: TurnPlan) -> None:
        """Run one turn to its end, whatever that is."""
        self.plan = plan
        if plan.death is not None:
            point, count = plan.death
            self.world.crash_at(point, count=self.world.reached[point] + count)
        try:
            await self.world.live_through(self._send_message())
            if plan.cancel_after_s is not None:
                await self.world.advance(plan.cancel_after_s)
                await self.world.live_through(self._cancel())
            await self._await_end()
        except (Crashed, MidstreamError):
            assert self.world.is_dead
            self.memory.living.clear()
            self.at = self.world.now() + plan.away_s
            self.world, self.host = self._process()
            await self._await_end()
        self.world.crash_at(DEATHS[0], count=10**9)

    async def _send_message(self) -> None:
        await self.host.start()
        await self.host.wait_for_recovery()
        await (await self._runner()).submit(SendMessage(UserMessage(self.plan.parts)))

    async def _cancel(self) -> None:
        await (await self._runner()).submit(Cancel())

    async def _await_end(self) -> None:
        """Wait for the end of the turn; cancel it if the model is silent for ever."""
        try:
            await self.world.live_through(self._rest())
        except TimeoutError:
            await self.world.live_through(self._cancel())
            await self.world.live_through(self._rest())

    async def _rest(self) -> None:
        await self.host.start()
        await self.host.wait_for_recovery()
        runner = await self._runner()
        while runner.state.is_live:
            await runner.wait(runner.newest.position)

    async def _runner(self) -> Runner:
        return await self.host.session("s", create=True)


def _tools(world: FakeWorld) -> list[Tool]:
    async def quick() -> str:
        return ""

    async def fails() -> str:
        raise RuntimeError

    async def slow() -> str:
        await world.sleep(1.0)
        return "at last"

    async def stubborn() -> str:
        for _ in range(2):
            try:
                await world.sleep(1000.0)
            except asyncio.CancelledError:
                continue
        return "what?"

    return [tool(each) for each in (quick, fails, slow, stubborn)]


async def _live(turns: list[TurnPlan]) -> None:
    life = GeneratedLife()
    for plan in turns:
        async with asyncio.timeout(60):
            await life.turn(plan)
        session = (await life._runner()).state
        assert not session.is_live
        following = UserMessage.of("and now?")
        assert refusing_profiles(session.history.then(following)) == {}
        assert refusing_profiles(session.model_history.then(following)) == {}
        assert refusing_profiles(session.model_history) == {}
    assert life.refused == []
    for host in life.hosts:
        await host.stop(grace_s=0.0)


@pytest.mark.slow
@spec("HISTORY-90")
@settings(max_examples=tried(50), suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(plans, min_size=1, max_size=4))
def test_the_next_prompt_is_accepted_whatever_the_turns_end(turns: list[TurnPlan]) -> None:
    asyncio.run(_live(turns))


@pytest.mark.slow
@spec("HISTORY-90", "TURN-19")
def test_the_next_prompt_is_accepted_after_each_kind_of_end() -> None:
    for name in RESPONSES:
        for cancel_after_s in (None, 0.0, 0.021):
            asyncio.run(_live([TurnPlan((Text("go"),), [name], cancel_after_s, None, 60.0)]))


async def test_an_abort_keeps_the_text_and_the_finished_calls() -> None:
    life = GeneratedLife()
    await life.turn(TurnPlan((Text("go"),), ["half a sentence"], 0.031, None, 60.0))
    await life.turn(TurnPlan((Text("go"),), ["stubborn"], 2.0, None, 60.0))
    _, cut, _, stopped = (await life._runner()).state.history.entries
    assert isinstance(cut, Step)
    assert (cut.response.text, cut.response.finish) == ("Half a ", "interrupted")
    assert isinstance(stopped, Step)
    assert [result.outcome for result in stopped.results] == ["unknown", "cancelled"]
    await life.host.stop(grace_s=0.0)
