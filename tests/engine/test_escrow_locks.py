"""Client keys are in memory while a client is connected or work runs; work without keys waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from midstream.engine import escrow_locks
from midstream.engine.agent import Agent, sub_agent
from midstream.engine.escrow_locks import Locks
from midstream.engine.host import Host
from midstream.engine.pruning import Pruner
from midstream.environment import World
from midstream.errors import SessionLockedError, UnauthorizedError, WrongSecretError
from midstream.history.messages import UserMessage
from midstream.session.child_names import PART_MARK
from midstream.session.records import TurnEnded, TurnStatus
from midstream.session.retention import Retention
from midstream.session.turn.commands import SendMessage
from midstream.store.encryption.ciphers import FileKeys
from midstream.store.encryption.escrow import EscrowedStore, escrow_store
from midstream.store.memory import Memory, MemoryStore
from midstream.testing import ScriptedModel, calls, run_turn, text
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import Gate, Response, Script
from midstream.testing.turns import records_until_end
from midstream.tools.function_tools import Tool, tool
from tests.spec import spec

SECRET = "s" * 43
OTHER = "o" * 43


@pytest.fixture(autouse=True)
def _no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(escrow_locks, "LINGER_S", 0.0)


def _host(
    folder: Path,
    script: Script,
    memory: Memory,
    *,
    tools: list[Tool] | None = None,
    world: World = World(),
    retention: Retention = Retention(),
) -> Host:
    path = folder / "keys"
    if not path.exists():
        FileKeys.make(path)
    store = escrow_store(MemoryStore(memory), FileKeys(path), world=world)
    return Host(Agent(ScriptedModel(script), tools=tools or []), store, world=world, retention=retention)


def _locks(host: Host) -> Locks:
    assert host.locks is not None
    return host.locks


def _is_locked(host: Host) -> bool:
    assert isinstance(host.store, EscrowedStore)
    return not (host.store.keys._roots or host.store._known or host.store._writing or len(host.awake))


async def _until(is_so: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while True:
            found = is_so()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0)


async def _killed(host: Host, memory: Memory) -> None:
    """Let a process die in the middle of its work."""
    assert isinstance(host.store, EscrowedStore)
    inner = host.store._store._store
    assert isinstance(inner, MemoryStore)
    memory.kill(inner.node)
    tasks = [task for runner in host.awake.runners.values() for task in (runner._task, *runner._work.tasks)]
    for task in (*host._caretaker._loops, *tasks):
        if task is not None:
            task.cancel()
    await _locks(host).stop()


@spec("STREAM-92")
async def test_a_turn_without_readers_continues_and_then_its_keys_are_deleted(tmp_path: Path) -> None:
    gate, world = asyncio.Event(), FakeWorld()
    memory = Memory()
    host = _host(tmp_path, [[Gate(gate), *text("the end")]], memory, world=world)
    await host.start()
    with await _locks(host).hold("s", SECRET, begins=True):
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
    for _ in range(10):
        await asyncio.sleep(0)
    assert runner.state.is_live
    assert not _is_locked(host)
    gate.set()
    records = await records_until_end(runner, after=0)
    assert isinstance(records[-1], TurnEnded)
    await world.advance(2 * escrow_locks.IDLE_CHECK_S)
    assert _is_locked(host)
    with pytest.raises(SessionLockedError):
        await host.session("s")
    with await _locks(host).hold("s", SECRET):
        assert (await host.session("s")).state.turns == 1
    await host.stop(grace_s=0.1)


@spec("STREAM-90")
async def test_a_start_deletes_the_key_shares_of_deleted_sessions(tmp_path: Path) -> None:
    memory, world = Memory(), FakeWorld()
    first = _host(tmp_path, [text("one")], memory, world=world)
    await first.start()
    with await _locks(first).hold("s", SECRET, begins=True):
        await run_turn(first, "s", "hi")
    await first.stop(grace_s=0.1)
    del memory.sessions["s"]
    await world.advance(3601.0)
    second = _host(tmp_path, [], memory, world=world)
    await second.start()
    await _until(lambda: set(memory.values["escrow"]) == {""})
    await second.stop(grace_s=0.1)


@spec("STREAM-92")
async def test_the_last_of_several_holders_locks(tmp_path: Path) -> None:
    world = FakeWorld()
    host = _host(tmp_path, [text("one")], Memory(), world=world)
    await host.start()
    locks = _locks(host)
    with await locks.hold("s", SECRET, begins=True):
        with await locks.hold("s", SECRET):
            await run_turn(host, "s", "hi")
            with pytest.raises(WrongSecretError):  # a refused caller holds nothing, and releases nothing
                await locks.hold("s", OTHER)
        await world.advance(10.0)
        assert not _is_locked(host)
    await world.advance(10.0)
    assert _is_locked(host)
    await host.stop(grace_s=0.1)


@spec("STREAM-92")
async def test_a_client_that_reconnects_soon_finds_the_session_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(escrow_locks, "LINGER_S", 5.0)
    world = FakeWorld()
    host = _host(tmp_path, [text("one")], Memory(), world=world)
    await host.start()
    with await _locks(host).hold("s", SECRET, begins=True):
        await run_turn(host, "s", "hi")
    awake = host.awake.get("s")
    for _ in range(3):
        await world.advance(4.0)
        with await _locks(host).hold("s", SECRET):
            assert host.awake.get("s") is awake
    await world.advance(5.0)
    assert _is_locked(host)
    await host.stop(grace_s=0.1)


async def test_a_client_that_connects_during_the_lock_keeps_the_session_unlocked(tmp_path: Path) -> None:
    world = FakeWorld()
    host = _host(tmp_path, [text("one")], Memory(), world=world)
    await host.start()
    locks = _locks(host)
    with await locks.hold("s", SECRET, begins=True):
        await run_turn(host, "s", "hi")
    for pause in range(12):  # at each point of the lock
        with await locks.hold("s", SECRET):
            assert (await host.session("s")).state.turns == 1
        for _ in range(pause):
            await asyncio.sleep(0)
        with await locks.hold("s", SECRET):
            assert (await host.session("s")).state.turns == 1
    await world.advance(2 * escrow_locks.IDLE_CHECK_S)
    assert _is_locked(host)
    await host.stop(grace_s=0.1)


@spec("STREAM-93")
@pytest.mark.parametrize("is_survivor", [False, True])
async def test_unfinished_work_waits_for_its_client_without_an_error(
    tmp_path: Path,
    is_survivor: bool,  # noqa: FBT001 - started before or after the other one died
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    memory, ran = Memory(), [0]

    @tool
    async def once() -> str:
        """Count."""
        ran[0] += 1
        return "done"

    model: list[Response] = [calls(("once", "{}")), [Gate(asyncio.Event())]]
    first = _host(tmp_path, model, memory, tools=[once])
    second = _host(tmp_path, [text("none"), text("the end")], memory, tools=[once])
    await first.start()
    if is_survivor:
        await second.start()
    with await _locks(first).hold("s", SECRET, begins=True):
        runner = await first.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        await _until(lambda: len(first.agent.model.requests) == 2)  # type: ignore[attr-defined]
        await _killed(first, memory)
    await second.start()
    await second.wait_for_recovery()

    async def is_one_locked() -> bool:
        return [second.is_locked(info) async for info in second.store.list()] == [True]

    await _until(is_one_locked)
    assert second.recovery.failed == 0
    assert len(second.awake) == 0
    logged = [
        record.getMessage() for record in caplog.records if "waits for its client" in record.getMessage()
    ]
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(logged) <= 1, "it is asked once for each epoch"
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []
    with pytest.raises(SessionLockedError):
        await second.session("s")
    with await _locks(second).hold("s", SECRET):
        follower = await second.session("s")
        records = await records_until_end(follower, after=0)
    assert isinstance(records[-1], TurnEnded)
    assert records[-1].status is TurnStatus.COMPLETED
    assert ran == [1]
    assert [second.is_locked(info) async for info in second.store.list()] == [False]
    await second.stop(grace_s=0.1)


@spec("STREAM-93")
async def test_a_sub_agents_turn_continues_with_that_of_its_parent(tmp_path: Path) -> None:
    memory = Memory()
    path = tmp_path / "keys"
    FileKeys.make(path)

    def host(child: Script) -> Host:
        helper = sub_agent(Agent(ScriptedModel(child)), name="helper", description="Helps.")
        store = escrow_store(MemoryStore(memory), FileKeys(path))
        asking = ScriptedModel([calls(("helper", '{"task": "work"}')), text("the end")])
        return Host(Agent(asking, tools=[helper]), store)

    held = asyncio.Event()
    first = host([[Gate(held)]])
    await first.start()
    with await _locks(first).hold("s", SECRET, begins=True):
        runner = await first.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        await _until(lambda: any(PART_MARK in each for each in memory.sessions))
        await _until(lambda: all(each.records for each in memory.sessions.values()))
        await _killed(first, memory)
    second = host([text("worked")])
    await second.start()
    await second.wait_for_recovery()
    assert second.recovery.failed == 0
    assert second.recovery.locked == second.recovery.total > 0
    with await _locks(second).hold("s", SECRET):
        records = await records_until_end(await second.session("s"), after=0)
        assert isinstance(records[-1], TurnEnded)
        assert records[-1].status is TurnStatus.COMPLETED
    await _until(lambda: _is_locked(second))
    await second.stop(grace_s=0.1)


@spec("STREAM-93")
async def test_work_of_another_process_does_not_wait_for_its_client(tmp_path: Path) -> None:
    gate = asyncio.Event()
    memory = Memory()
    first = _host(tmp_path, [[Gate(gate), *text("the end")]], memory)
    second = _host(tmp_path, [], memory)
    await first.start()
    with await _locks(first).hold("s", SECRET, begins=True):
        runner = await first.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        await second.start()
        await second.wait_for_recovery()
        assert (second.recovery.locked, second.recovery.failed) == (1, 0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert [second.is_locked(info) async for info in second.store.list()] == [False]
        gate.set()
        await records_until_end(runner, after=0)
    await first.stop(grace_s=0.1)
    await second.stop(grace_s=0.1)


# --- pruning


@spec("STREAM-91")
async def test_due_records_are_pruned_when_the_client_leaves_and_not_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory, world = Memory(), FakeWorld()
    retention = Retention(events_for_s=None, events_max=1)
    host = _host(tmp_path, [text("a few words")], memory, world=world)
    await host.start()
    with await _locks(host).hold("s", SECRET, begins=True):
        await run_turn(host, "s", "hi")
        await run_turn(host, "s", "again")
    await world.advance(10.0)
    assert _is_locked(host)
    count = len(memory.sessions["s"].records)
    pruner = Pruner(host, host.store, world, retention)
    await pruner.sweep()
    await pruner.sweep()
    assert len(memory.sessions["s"].records) == count
    assert caplog.records == []
    host._caretaker._pruner = pruner
    with await _locks(host).hold("s", SECRET):
        await host.session("s")
    for _ in range(20):
        await world.advance(1.0)
    assert _is_locked(host)
    assert len(memory.sessions["s"].records) < count
    with await _locks(host).hold("s", SECRET):
        assert (await host.session("s")).state.turns == 2
    await host.stop(grace_s=0.1)


@spec("STREAM-91")
async def test_a_session_is_deleted_at_its_time_without_its_client(tmp_path: Path) -> None:
    memory, world = Memory(), FakeWorld()
    retention = Retention(sessions_for_s=1000.0)
    first = _host(tmp_path, [[Gate(asyncio.Event())]], memory, world=world)
    await first.start()
    for session in ("rests", "runs"):
        with await _locks(first).hold(session, SECRET, begins=True):
            runner = await first.session(session, create=True)
            await runner.submit(SendMessage(UserMessage.of("hi")))
    await _killed(first, memory)
    second = _host(tmp_path, [text("one")], memory, world=world)
    await second.start()
    await second.wait_for_recovery()

    async def are_both_locked() -> bool:
        return [second.is_locked(info) async for info in second.store.list()] == [True, True]

    await _until(are_both_locked)
    with await _locks(second).hold("rests", SECRET):
        await records_until_end(await second.session("rests"), after=0)
    await world.advance(10.0)
    pruner = Pruner(second, second.store, world, retention)
    await pruner.sweep()
    assert set(memory.sessions) == {"rests", "runs"}
    await world.advance(1000.0)
    await pruner.sweep()
    assert memory.sessions == {}  # also the one whose client never reconnected
    assert set(memory.values["escrow"]) == {""}
    await second.stop(grace_s=0.1)


# --- viewers


@spec("STREAM-89")
async def test_a_viewers_access_is_checked_again_when_it_expires(tmp_path: Path) -> None:
    world = FakeWorld()
    host = _host(tmp_path, [text("one")], Memory(), world=world)
    await host.start()
    locks = _locks(host)
    with await locks.hold("s", SECRET, begins=True) as held:
        await run_turn(host, "s", "hi")
        assert not held.is_viewer
        word = await locks.escrow.share("s", for_s=90.0)
    with await locks.hold("s", word) as looking:
        assert looking.opened is not None
        assert looking.is_viewer
        ending = asyncio.ensure_future(locks.until_withdrawn(looking.opened))
        await world.advance(89.0)
        assert not ending.done()
        await world.advance(1.0)
        assert isinstance(await asyncio.wait_for(ending, 60), UnauthorizedError)
    await host.stop(grace_s=0.1)


@spec("STREAM-89")
async def test_access_withdrawn_at_another_server_ends_within_a_minute(tmp_path: Path) -> None:
    memory, world = Memory(), FakeWorld()
    host, other = (_host(tmp_path, [text("one")], memory, world=world) for _ in range(2))
    await host.start()
    await other.start()
    with await _locks(host).hold("s", SECRET, begins=True):
        await run_turn(host, "s", "hi")
        word = await _locks(host).escrow.share("s", for_s=900.0)
        with await _locks(other).hold("s", word) as looking:
            assert looking.opened is not None
            ending = asyncio.ensure_future(_locks(other).until_withdrawn(looking.opened))
            await world.advance(1.0)
            await _locks(host).revoke_viewer_tokens("s")
            await world.advance(60.0)
            assert isinstance(await asyncio.wait_for(ending, 60), UnauthorizedError)
    await host.stop(grace_s=0.1)
    await other.stop(grace_s=0.1)
