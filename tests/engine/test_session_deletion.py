from __future__ import annotations

import asyncio

import pytest

from midstream.engine import sleeping
from midstream.engine.agent import Agent, sub_agent
from midstream.engine.host import Host
from midstream.errors import (
    JournalMovedError,
    SessionBusyError,
    SessionNotFoundError,
    UnavailableError,
)
from midstream.history.messages import UserMessage
from midstream.session.turn.commands import SendMessage
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import ScriptedModel, Stall, calls, run_turn, text
from tests.engine.test_host import SlowTo, _start


async def test_a_session_is_deleted_only_while_no_turn_runs() -> None:
    store = MemoryStore()
    host = await _start(Host(Agent(ScriptedModel([text("a"), [Stall()]])), store))
    await run_turn(host, "s", "hi")
    await host.delete("s")
    assert await store.find("s") is None
    with pytest.raises(SessionNotFoundError):
        await host.session("s")
    stalling = await _start(Host(Agent(ScriptedModel([[Stall()]])), MemoryStore()))
    await (await stalling.session("t", create=True)).submit(SendMessage(UserMessage.of("hi")))
    with pytest.raises(SessionBusyError):
        await stalling.delete("t")
    await host.stop()
    await stalling.stop()


async def test_a_session_that_wakes_during_its_deletion_does_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleeping, "SESSIONS_AWAKE_MAX", 1)
    store = SlowTo("delete", MemoryStore())
    host = await _start(Host(Agent(ScriptedModel([text("a")])), store))
    await run_turn(host, "s", "one")
    deleting = asyncio.ensure_future(host.delete("s"))
    await store.was_called.wait()
    await host.session("t", create=True)
    assert host.awake.get("s") is None, "it went to sleep"
    woken = await host.session("s")
    with pytest.raises(UnavailableError, match="is being deleted"):
        await woken.submit(SendMessage(UserMessage.of("two")))
    store.may_continue.set()
    await deleting
    with pytest.raises(SessionNotFoundError):
        await woken.wait(woken.newest.position)
    await run_turn(host, "s", "another session of that name")
    await host.stop()


async def test_a_session_deleted_by_another_process_starts_empty() -> None:
    memory = Memory()
    here = await _start(Host(Agent(ScriptedModel([text("a")])), MemoryStore(memory)))
    await run_turn(here, "s", "one")
    there = await _start(Host(Agent(ScriptedModel([text("b")])), MemoryStore(memory)))
    cached = await there.session("s")
    await here.delete("s")
    await run_turn(here, "s", "anew, and longer than before")
    await run_turn(here, "s", "still")
    await here.stop()

    with pytest.raises(JournalMovedError):
        await cached.submit(SendMessage(UserMessage.of("two")))
    await run_turn(there, "s", "two")
    assert (await there.session("s")).state.turns == 3
    await there.stop()


async def test_a_cancelled_deletion_closes_the_sessions_of_all_sub_agents() -> None:
    helper = sub_agent(
        Agent(ScriptedModel([text("found")]), name="finder"), name="research", description="Finds."
    )
    ask = calls(("research", '{"task": "find it"}'), ("research", '{"task": "and this"}'))
    host = await _start(Host(Agent(ScriptedModel([ask, text("thanks")]), tools=[helper]), MemoryStore()))
    await run_turn(host, "s", "hi")
    family = host.awake.family_of("s")
    assert len(family) == 3
    deleting = asyncio.create_task(host.delete("s"))
    async with asyncio.timeout(60):
        while host.awake.get("s") is not None:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0)
    deleting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await deleting
    assert host.awake.family_of("s") == []
    async with asyncio.timeout(60):
        while not all(runner.has_failed for runner in family):  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0)
    await host.stop()
