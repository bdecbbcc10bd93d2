"""Suspects of crashes are resumed one at a time; all other sessions at once."""

from __future__ import annotations

import asyncio

from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.history.messages import UserMessage
from midstream.models.responses import ModelRequest
from midstream.session.turn.commands import Cancel, SendMessage
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel, ScriptedStep, Stall, calls, steps_since_user, text
from midstream.tools.function_tools import tool
from tests.engine.test_host import _die, _start
from tests.spec import spec

WAIT_S = 60.0
SUSPECTS = ("a", "b", "c")


class Tools:
    """The running tools, and their end."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.began = 0
        self.changed = asyncio.Condition()
        self.go = asyncio.Event()

    async def work(self) -> str:
        """Work, as often as you like."""
        self.running += 1
        self.began += 1
        self.most = max(self.most, self.running)
        async with self.changed:
            self.changed.notify_all()
        try:
            await self.go.wait()
        finally:
            self.running -= 1
        return "worked"

    async def until_started(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(lambda: self.began >= count)


def _response(request: ModelRequest) -> list[ScriptedStep]:
    message = request.history.entries[0]
    assert isinstance(message, UserMessage)
    if message == UserMessage.of("wait"):
        return [Stall()]
    return text("done") if steps_since_user(request.history) else calls(("work", "{}"))


async def _host(store: MemoryStore, tools: Tools) -> Host:
    work = tool(on_doubt="rerun", has_effects=False)(tools.work)
    return await _start(Host(Agent(ScriptedModel(_response), tools=[work]), store))


async def _die_in_its_tools(store: MemoryStore) -> None:
    tools = Tools()
    host = await _host(store, tools)
    for session in SUSPECTS:
        await (await host.session(session, create=True)).submit(SendMessage(UserMessage.of("work")))
    await (await host.session("model", create=True)).submit(SendMessage(UserMessage.of("wait")))
    await tools.until_started(len(SUSPECTS))
    await _die(host)


async def _wait_for_end(host: Host, session: str) -> None:
    runner = await host.session(session)
    async with asyncio.timeout(WAIT_S):
        while runner.state.is_live:
            await runner.wait(runner.newest.position)


@spec("TURN-84", "TURN-57")
async def test_suspects_resume_one_at_a_time_until_all_have_resumed() -> None:
    store = MemoryStore()
    await _die_in_its_tools(store)
    tools = Tools()
    host = await _host(store, tools)
    assert (host.recovery.resumed, host.recovery.is_done) == (4, True)
    model = await host.session("model")
    assert model.state.suspected == 0
    states = [(await host.session(each)).state for each in SUSPECTS]
    assert [each.suspected for each in states] == [1, 1, 1]
    await tools.until_started(1)
    tools.go.set()
    for session in SUSPECTS:
        await _wait_for_end(host, session)
    assert (tools.began, tools.most) == (3, 1)
    await host.stop()


@spec("TURN-84")
async def test_a_held_suspect_can_be_cancelled_and_a_graceful_end_makes_no_suspect() -> None:
    store = MemoryStore()
    await _die_in_its_tools(store)
    tools = Tools()
    host = await _host(store, tools)
    await tools.until_started(1)
    held = [each for each in SUSPECTS if (await host.session(each)).state.turn.calls[0].runs == 1]  # type: ignore[union-attr] # in its tool
    assert len(held) == 2
    await (await host.session(held[0])).submit(Cancel())
    await host.stop(grace_s=0.01)

    tools = Tools()
    tools.go.set()
    host = await _host(store, tools)
    for session in SUSPECTS:
        await _wait_for_end(host, session)
    statuses = {each: (await host.session(each)).state.last_turn.status for each in SUSPECTS}  # type: ignore[union-attr] # ended
    assert statuses.pop(held[0]) == "cancelled"
    assert set(statuses.values()) == {"completed"}
    await host.stop()
