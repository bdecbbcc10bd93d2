"""Work of the simulated sessions: a model with random output, tools of every policy, and a ledger of their effects."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from typing import cast

from msgspec import Struct, field
from msgspec.structs import replace

from midstream.engine.agent import Agent, sub_agent
from midstream.environment import World
from midstream.errors import (
    ContextOverflowError,
    ModelRejectedError,
    ModelUnavailableError,
)
from midstream.history.messages import Finish, ToolSpec
from midstream.models.model import Model
from midstream.models.responses import (
    Finished,
    ModelEvent,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
    ToolCallRequested,
)
from midstream.session.calls import OnDoubt
from midstream.session.permissions import Allowed, Ask, Permission
from midstream.session.records import ClientTool
from midstream.testing.history_checker import Execution
from midstream.testing.scripted_model import Pause, ScriptedModel, ScriptedStep, Stall, steps_since_user
from midstream.tools.function_tools import (
    DidNotHappen,
    Happened,
    Probed,
    Tool,
    current_call,
    question,
    report_progress,
    tool,
)
from tests.simulation.loop import pass_time

RESPONSES = 4
"""Responses of a turn after which the model calls no more tools."""
TOOL_S = 20.0
"""Seconds a tool may take; some take longer."""
STUBBORN_S = 300.0
"""Seconds that a tool which ignores cancellation continues, at worst."""
CLIENT_TOOL = "at_client"
CLIENT_TOOL_S = 20.0
"""Seconds a client has for its tool."""
ARGUMENTS = '{"word": "x"}'


class OutsideWorld(Struct):
    """The world outside of midstream, which outlives every process: the real effects of tools.

    Args:
        chance: Durations of tools, and whether they obey a cancellation.
        note: Called for every event here.
        model_failing: Share of model calls that fail.
        tool_s: Mean seconds of a tool.
    """

    chance: random.Random
    note: Callable[..., None]
    model_failing: float = 0.0
    tool_s: float = 0.3
    ledger: list[Execution] = field(default_factory=list)
    effects: Counter[str] = field(default_factory=Counter)
    """Number of effects of each call."""
    acts: Counter[str] = field(default_factory=Counter)
    """Number of permitted acts of an agent, by its session."""
    on_begin: Callable[[], None] = lambda: None
    """Called when a tool has begun."""

    async def work(self, name: str) -> str:
        """Act as a tool: record the beginning, take effect at some time, record the end."""
        call = current_call()
        run = Execution(call.session, call.turn, call.response, call.call_id, call.run, name, has_ended=False)
        self.ledger.append(run)
        at = len(self.ledger) - 1
        self.note("tool begins", name, call.effect_key, call.run)
        self.on_begin()
        is_stubborn = self.chance.random() < 0.1
        try:
            await pass_time(self._seconds())
            if self.chance.random() < 0.2:
                report_progress("half of it")
                await pass_time(self._seconds())
        except asyncio.CancelledError:
            if not is_stubborn:
                self.note("tool stopped", name, call.effect_key, call.run)
                raise
            await pass_time(STUBBORN_S if self.chance.random() < 0.3 else self._seconds() * 5)
        self.effects[call.effect_key] += 1
        self.ledger[at] = replace(run, has_ended=True)
        self.note("tool ends", name, call.effect_key, call.run)
        if self.chance.random() < 0.1:
            raise ValueError("it did not work")
        await pass_time(self._seconds() / 10)
        return f"{name} did it"

    async def probe(self) -> Probed:
        """Act as a probe: return whether the call took effect, as far as it can be found."""
        key = current_call().effect_key
        await pass_time(self._seconds())
        if self.chance.random() < 0.2:
            return None
        return Happened("it did it") if self.effects[key] else DidNotHappen()

    def _seconds(self) -> float:
        if self.chance.random() < 0.02:
            return TOOL_S * 1.5
        return self.chance.expovariate(1.0) * self.tool_s


def agent_of(outside: OutsideWorld, world: World) -> Agent:
    """Return the agent of one process: its tools have every policy, two of them are agents themselves."""
    deep = Agent(_model(outside, world), tools=_tools(outside, "read", "write"), name="deep")
    dive = sub_agent(deep, description="Go deep.", responses_max=2, timeout_s=60.0)
    helper = Agent(
        _model(outside, world),
        tools=[*_tools(outside, "read", "write", "held", "asked", "probed"), question(answer_s=120.0), dive],
        name="helper",
    )
    help_out = sub_agent(helper, description="Help.", responses_max=3, timeout_s=120.0)
    tools = [*_tools(outside, *_POLICIES), question(answer_s=300.0), help_out]
    return Agent(
        _model(outside, world), tools=tools, name="main", turn_s=outside.chance.choice([0.0, 0.0, 90.0])
    )


_POLICIES: dict[str, dict[str, object]] = {
    "read": {"has_effects": False},
    "write": {},
    "again": {"on_doubt": OnDoubt.RERUN},
    "keyed": {"on_doubt": OnDoubt.RERUN_WITH_KEY},
    "held": {"on_doubt": OnDoubt.HOLD, "answer_s": 600.0},
    "asked": {"needs_approval": True, "answer_s": 600.0},
    "asked_again": {"needs_approval": True, "on_doubt": OnDoubt.RERUN},
    "probed": {"on_doubt": OnDoubt.PROBE},
}


def _tools(outside: OutsideWorld, *names: str) -> list[Tool]:
    return [_tool(outside, name) for name in names]


def _tool(outside: OutsideWorld, name: str) -> Tool:
    async def work(word: str) -> str:
        """Do something."""
        return await outside.work(name)

    async def look(word: str) -> Probed:
        return await outside.probe()

    policy = _POLICIES[name]
    probe = {"probe": look} if policy.get("on_doubt") is OnDoubt.PROBE else {}
    return tool(name=name, timeout_s=TOOL_S, **policy, **probe)(work)  # type: ignore[call-overload, no-any-return]


def client_tools() -> tuple[ClientTool, ...]:
    """Return the tools that clients run themselves."""
    spec = ToolSpec(CLIENT_TOOL, "Ask the client.", {"type": "object"})
    return (ClientTool(spec, timeout_s=CLIENT_TOOL_S),)


# --- the model ------------------------------------------------------------------------------------------------


class _PermissionRequesting:
    """A model whose agent now and then requests a permission in the middle of its answer, as coding agents do."""

    name = "asking"

    def __init__(self, outside: OutsideWorld, world: World) -> None:
        self._outside = outside
        self._model = ScriptedModel(lambda request: _response(outside, request), world=world)

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Request a permission, and record the permitted act; then stream the answer."""
        chance = self._outside.chance
        if request.person is not None and chance.random() < 0.2:
            wanted = Permission("agent", "act", "execute", ARGUMENTS, is_vague=chance.random() < 0.2)
            terms = Ask("Sure?", chance.choice([0.0, 60.0]))
            asking = asyncio.ensure_future(request.person(wanted, terms))
            is_hasty = chance.random() < 0.2
            try:
                await asyncio.wait({asking}, timeout=chance.expovariate(0.5) if is_hasty else None)
            finally:
                asking.cancel()
            decision = asking.result() if asking.done() and not asking.cancelled() else "too late"
            if isinstance(decision, Allowed):
                self._outside.acts[request.session] += 1
                self._outside.note("agent acts", request.key, request.attempt)
        events = cast("AsyncGenerator[ModelEvent, None]", self._model.stream(request))
        async with contextlib.aclosing(events):
            async for event in events:
                yield event


def _model(outside: OutsideWorld, world: World) -> Model:
    return _PermissionRequesting(outside, world)


def _response(outside: OutsideWorld, request: ModelRequest) -> list[ScriptedStep]:
    chance = outside.chance
    outside.note("model is asked", request.key, request.attempt)
    steps: list[ScriptedStep] = [Pause(chance.expovariate(5.0))]
    if chance.random() < 0.2:
        steps.append(ThinkingDelta("hm", "signature"))
    for number in range(chance.randrange(4)):
        steps += [
            TextDelta(f"{'said' if number else 'I'}{request.attempt} "),
            Pause(chance.expovariate(10.0)),
        ]
    if chance.random() < outside.model_failing:
        return [*steps, *_accident(chance)]
    names = [each.name for each in request.tools]
    if names and steps_since_user(request.history) < RESPONSES and chance.random() < 0.7:
        return [*steps, *_calls(chance, names), Finished(Finish.CALLS)]
    return [*steps, TextDelta("That is all."), Finished()]


def _calls(chance: random.Random, names: list[str]) -> list[ScriptedStep]:
    called: list[ScriptedStep] = []
    for number in range(chance.choice([1, 1, 1, 2, 2, 3])):
        name = chance.choice(names) if chance.random() < 0.97 else "nothing_of_the_kind"
        called.append(ToolCallRequested(f"c{number}", name, _arguments(chance, name)))
    return called


def _arguments(chance: random.Random, name: str) -> str:
    if chance.random() < 0.02:
        return '{"word": 1, "more": '
    if name == "ask_user":
        return '{"question": "Which one?"}'
    if name in ("helper", "deep"):
        return '{"task": "Do it."}'
    return ARGUMENTS


def _accident(chance: random.Random) -> list[ScriptedStep]:
    match chance.randrange(8):
        case 0:
            return [ModelUnavailableError("it broke", retry_after_s=chance.choice([None, 3.0, 500.0]))]
        case 1:
            return [Stall()]
        case 2:
            return []  # The stream ends in the middle.
        case 3:
            return [Finished()]
        case 4:
            return [ContextOverflowError("too long")]
        case 5:
            return [ModelRejectedError("no")]
        case _:
            return [ModelUnavailableError("it broke")]
