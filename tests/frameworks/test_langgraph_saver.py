"""Checkpoints in a key-value store: the newest one, its writes, and none from a process that lost the session."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from midstream.environment import World
from midstream.errors import EntryMovedError
from midstream.frameworks.langgraph_saver import KeyValueSaver
from midstream.store.memory import MemoryKeyValue

CONFIG: Any = {"configurable": {"thread_id": "s", "checkpoint_ns": ""}, "metadata": {"midstream_turn": 3}}


async def saver_on(kv: MemoryKeyValue) -> KeyValueSaver:
    saver = KeyValueSaver(World())
    saver.kv = kv
    await saver.load("s")
    return saver


async def test_a_checkpoint_and_its_writes_are_read_by_the_next_process() -> None:
    kv = MemoryKeyValue()
    saver = await saver_on(kv)
    assert await saver.aget_tuple(CONFIG) is None
    kept = await saver.aput(CONFIG, empty_checkpoint(), {"source": "input"}, {})
    await saver.aput_writes(kept, [("messages", "a"), ("__interrupt__", 1)], "task")
    await saver.aput_writes(kept, [("messages", "b"), ("__interrupt__", 2)], "task")
    found = await (await saver_on(kv)).aget_tuple(CONFIG)
    assert found is not None
    assert found.metadata.get("midstream_turn") == 3
    assert found.pending_writes == [("task", "messages", "a"), ("task", "__interrupt__", 2)]
    assert [each.config async for each in saver.alist(CONFIG)] == [kept]
    await saver.adelete_thread("s")
    assert await (await saver_on(kv)).aget_tuple(CONFIG) is None


async def test_a_process_that_lost_the_session_changes_nothing() -> None:
    kv = MemoryKeyValue()
    old, new = await saver_on(kv), await saver_on(kv)
    await new.aput(CONFIG, empty_checkpoint(), {"source": "input"}, {})
    with pytest.raises(EntryMovedError):
        await old.aput(CONFIG, empty_checkpoint(), {"source": "input"}, {})
