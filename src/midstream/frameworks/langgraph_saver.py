"""Checkpoints of served LangGraph graphs in the engine's store, by session.

A thread is one entry: the newest checkpoint of the graph and of each subgraph, with the writes of their tasks. Writes
are conditional on the version, so a process that lost its session cannot change the entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from midstream.environment import World
from midstream.extras import extra
from midstream.store.contract import GRAPHS, KeyValue
from midstream.store.memory import MemoryKeyValue

with extra("langgraph"):
    from langchain_core.runnables import RunnableConfig
    from langgraph.checkpoint.base import (
        WRITES_IDX_MAP,
        BaseCheckpointSaver,
        ChannelVersions,
        Checkpoint,
        CheckpointMetadata,
        CheckpointTuple,
        get_checkpoint_metadata,
    )

Typed = tuple[str, bytes]
"""A value serialized by LangGraph: type and bytes."""


class Write(Struct):
    """One write of a task to a channel."""

    task: str
    place: int
    channel: str
    value: Typed


class Space(Struct):
    """The newest checkpoint of a graph or a subgraph."""

    checkpoint_id: str
    checkpoint: Typed
    metadata: Typed
    parent: str = ""
    writes: list[Write] = field(default_factory=list)


class GraphThread(Struct):
    """The stored state of a session's thread.

    Args:
        spaces: Checkpoints by namespace; "" is the graph itself.
        answers: Answers of people to calls whose tool called `interrupt`, by call.
        returned: Return values that are not only text, by call: text and value.
    """

    spaces: dict[str, Space] = field(default_factory=dict)
    answers: dict[str, list[Typed]] = field(default_factory=dict)
    returned: dict[str, tuple[str, Typed]] = field(default_factory=dict)


class KeyValueSaver(BaseCheckpointSaver[str]):
    """Checkpointer of one engine. `load` a thread before its graph runs."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.kv: KeyValue = MemoryKeyValue()
        self._world = world
        self._threads: dict[str, tuple[GraphThread, int]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def load(self, session: str) -> GraphThread:
        """Read a thread from the store: another process may have changed it."""
        found = await self.kv.kv_get(GRAPHS, session)
        thread = msgspec.msgpack.decode(found.body, type=GraphThread) if found is not None else GraphThread()
        self._threads[session] = (thread, found.version if found is not None else 0)
        return thread

    def thread(self, session: str) -> GraphThread:
        """Return a loaded thread."""
        return self._threads[session][0]

    def release_thread(self, session: str) -> None:
        """Remove a thread from memory."""
        self._threads.pop(session, None)
        self._locks.pop(session, None)

    async def keep_answers(self, session: str, answers: Mapping[str, Sequence[object]]) -> None:
        """Store people's answers to calls whose tool called `interrupt`."""
        thread, _ = self._threads[session]
        typed = {name: [self.serde.dumps_typed(each) for each in values] for name, values in answers.items()}
        if any(thread.answers.get(name) != values for name, values in typed.items()):
            thread.answers.update(typed)
            await self._keep(session)

    async def store_returned(self, session: str, call_id: str, text: str, value: object) -> None:
        """Store a call's return value that is not only text.

        Raises:
            TypeError, ValueError: The value cannot be serialized.
        """
        if session not in self._threads:
            await self.load(session)
        self._threads[session][0].returned[call_id] = (text, self.serde.dumps_typed(value))
        await self._keep(session)

    # --- the interface of a LangGraph checkpointer ------------------------------------------------------------

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Return the newest checkpoint; None if another one is requested."""
        session, namespace, checkpoint_id = _place(config)
        thread, _ = self._threads[session]
        space = thread.spaces.get(namespace)
        if space is None or (checkpoint_id and checkpoint_id != space.checkpoint_id):
            return None
        load = self.serde.loads_typed
        return CheckpointTuple(
            _config(session, namespace, space.checkpoint_id),
            load(space.checkpoint),
            load(space.metadata),
            _config(session, namespace, space.parent) if space.parent else None,
            [(each.task, each.channel, load(each.value)) for each in space.writes],
        )

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002, ARG002 - LangGraph's names
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Yield the newest checkpoint; earlier ones are not kept."""
        found = await self.aget_tuple(config) if config is not None and before is None else None
        if found is not None and limit != 0:
            yield found

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,  # noqa: ARG002 - a checkpoint is stored completely
    ) -> RunnableConfig:
        """Replace the previous checkpoint."""
        session, namespace, parent = _place(config)
        thread, _ = self._threads[session]
        if not namespace:  # the tasks of the previous step have ended, with their subgraphs
            thread.spaces = {name: each for name, each in thread.spaces.items() if ":" not in name}
            thread.answers, thread.returned = {}, {}
        thread.spaces[namespace] = Space(
            checkpoint["id"],
            self.serde.dumps_typed(checkpoint),
            self.serde.dumps_typed(get_checkpoint_metadata(config, metadata)),
            parent,
        )
        await self._keep(session)
        return _config(session, namespace, checkpoint["id"])

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",  # noqa: ARG002 - the order of tasks is LangGraph's
    ) -> None:
        """Store writes of a task of the newest checkpoint."""
        session, namespace, checkpoint_id = _place(config)
        space = self._threads[session][0].spaces.get(namespace)
        if space is None or space.checkpoint_id != checkpoint_id:
            return  # writes of an earlier step
        known = {(each.task, each.place): at for at, each in enumerate(space.writes)}
        for index, (channel, value) in enumerate(writes):
            place = WRITES_IDX_MAP.get(channel, index)
            write = Write(task_id, place, channel, self.serde.dumps_typed(value))
            at = known.get((task_id, place))
            if at is None:
                space.writes.append(write)
            elif place < 0:
                space.writes[at] = write
        await self._keep(session)

    async def adelete_thread(self, thread_id: str) -> None:
        """Delete a thread."""
        found = await self.kv.kv_get(GRAPHS, thread_id)
        if found is not None:
            await self.kv.kv_delete(GRAPHS, thread_id, expected=found.version)
        self.release_thread(thread_id)

    async def _keep(self, session: str) -> None:
        async with self._locks.setdefault(session, asyncio.Lock()):
            thread, version = self._threads[session]
            body = msgspec.msgpack.encode(thread)
            kept = await self.kv.kv_put(GRAPHS, session, body, expected=version, at=self._world.now())
            self._threads[session] = (thread, kept)


def _place(config: RunnableConfig) -> tuple[str, str, str]:
    known = config.get("configurable", {})
    return str(known["thread_id"]), str(known.get("checkpoint_ns", "")), str(known.get("checkpoint_id") or "")


def _config(session: str, namespace: str, checkpoint_id: str) -> RunnableConfig:
    return {
        "configurable": {
            "thread_id": session,
            "checkpoint_ns": namespace,
            "checkpoint_id": checkpoint_id,
        }
    }
