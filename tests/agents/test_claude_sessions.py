"""Transcripts in our stores: the SDK's own conformance kit, and what it does not check."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from midstream.errors import EntryMovedError
from midstream.store.memory import Memory, MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.testing import FakeWorld

pytest.importorskip("claude_agent_sdk", reason="the Claude Agent SDK is not installed")

from claude_agent_sdk import SessionKey
from claude_agent_sdk.testing import run_session_store_conformance

from midstream.agents import claude_sessions
from midstream.agents.claude_sessions import KeyValueSessions

DAY_S = 24 * 3600.0
KEY = SessionKey(project_key="-srv-project", session_id="979cab47-a5b0-45fa-9cfa-13a3a4678ae1")


def entry(uuid: str | None, **more: object) -> Any:  # noqa: ANN401 - the SDK's opaque entries
    return {"type": "user", **({} if uuid is None else {"uuid": uuid}), **more}


@pytest.fixture
async def memory() -> AsyncIterator[MemoryStore]:
    store = MemoryStore(Memory())
    await store.open()
    yield store
    await store.close()


async def test_the_sdk_conformance_kit_passes_in_memory() -> None:
    async def fresh() -> KeyValueSessions:
        store = MemoryStore(Memory())
        await store.open()
        return KeyValueSessions(store)

    await run_session_store_conformance(fresh)


async def test_the_sdk_conformance_kit_passes_in_a_file(tmp_path: Path) -> None:
    opened: list[SQLiteStore] = []

    async def fresh() -> KeyValueSessions:
        store = SQLiteStore(tmp_path / f"{len(opened)}.db")
        await store.open()
        opened.append(store)
        return KeyValueSessions(store)

    try:
        await run_session_store_conformance(fresh)
    finally:
        for store in opened:
            await store.close()


async def test_a_repeated_entry_is_stored_once(memory: MemoryStore) -> None:
    sessions = KeyValueSessions(memory)
    await sessions.append(KEY, [entry("a"), entry("b"), entry("a")])
    await sessions.append(KEY, [entry("b"), entry("c")])
    await KeyValueSessions(memory).append(KEY, [entry("c"), entry("d")])
    await sessions.append(KEY, [entry("d")])
    assert await sessions.load(KEY) == [entry("a"), entry("b"), entry("c"), entry("d")]


async def test_a_session_without_a_change_for_30_days_is_deleted_with_its_sub_agents(
    memory: MemoryStore,
) -> None:
    world = FakeWorld()
    sessions, old, kept = (
        KeyValueSessions(memory, world=world),
        KEY,
        [str(uuid.UUID(int=number)) for number in range(2)],
    )
    await sessions.append(old, [entry("a")])
    await sessions.append(SessionKey(**old, subpath="subagents/agent-1"), [entry("b")])
    resumed, new = (SessionKey(project_key=old["project_key"], session_id=each) for each in kept)
    await sessions.append(resumed, [entry("c")])
    await world.advance(29 * DAY_S)
    await sessions.append(SessionKey(**resumed, subpath="subagents/agent-2"), [entry("d")])
    await world.advance(2 * DAY_S)
    await sessions.append(new, [entry("e")])
    assert {each["session_id"] for each in await sessions.list_sessions(old["project_key"])} == {*kept}
    assert await sessions.load(old) is None
    assert await sessions.list_subkeys(old) == []
    assert await sessions.load(resumed) == [entry("c")]
    assert len([name for name in await memory.kv_namespaces() if name.startswith("claude-transcript")]) == 3


async def test_entries_without_an_id_are_stored_each_time(memory: MemoryStore) -> None:
    sessions = KeyValueSessions(memory)
    await sessions.append(KEY, [entry(None, title="t")])
    await sessions.append(KEY, [entry(None, title="t"), entry(None, title="t")])
    assert await sessions.load(KEY) == [entry(None, title="t")] * 3


async def test_two_processes_append_to_one_transcript_and_lose_nothing(memory: MemoryStore) -> None:
    first, second = KeyValueSessions(memory), KeyValueSessions(memory)

    async def add(sessions: KeyValueSessions, name: str) -> None:
        for number in range(20):
            await sessions.append(KEY, [entry(f"{name}{number}")])
            await asyncio.sleep(0)

    await asyncio.gather(add(first, "a"), add(second, "b"))
    loaded = await KeyValueSessions(memory).load(KEY)
    assert loaded is not None
    ids = [found["uuid"] for found in loaded]
    assert [name for name in ids if name[0] == "a"] == [f"a{number}" for number in range(20)]
    assert [name for name in ids if name[0] == "b"] == [f"b{number}" for number in range(20)]
    assert len(ids) == 40


async def test_an_append_that_always_conflicts_fails_after_its_tries(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Taken(MemoryStore):
        async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
            if namespace.startswith("claude-transcript"):
                raise EntryMovedError("taken")
            return await super().kv_put(namespace, key, body, expected=expected, at=at)

    monkeypatch.setattr(claude_sessions, "TRIES_MAX", 3)
    store = Taken(memory._memory)
    await store.open()
    with pytest.raises(EntryMovedError, match="another process 3 times"):
        await KeyValueSessions(store).append(KEY, [entry("a")])
    await store.close()


async def test_the_cache_of_transcripts_is_limited(
    memory: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claude_sessions, "KNOWN_MAX", 2)
    sessions = KeyValueSessions(memory)
    for number in range(5):
        await sessions.append(SessionKey(project_key="p", session_id=str(number)), [entry("a")])
    assert len(sessions._known) == 2
    await sessions.append(SessionKey(project_key="p", session_id="0"), [entry("a"), entry("b")])
    assert await sessions.load(SessionKey(project_key="p", session_id="0")) == [entry("a"), entry("b")]


async def test_a_session_can_be_created_again_after_it_was_deleted(memory: MemoryStore) -> None:
    sessions = KeyValueSessions(memory)
    await sessions.append(KEY, [entry("a")])
    await sessions.append({**KEY, "subpath": "subagents/x"}, [entry("s")])
    await sessions.delete(KEY)
    assert (
        await sessions.list_subkeys({"project_key": KEY["project_key"], "session_id": KEY["session_id"]})
        == []
    )
    await sessions.append(KEY, [entry("b")])
    assert await sessions.load(KEY) == [entry("b")]
    assert [found["session_id"] for found in await sessions.list_sessions("-srv-project")] == [
        KEY["session_id"]
    ]
