"""A process with a pool in front of a server that survives it, which may kill itself between any two of its steps.

`tests/fault/test_pool_kills.py` starts it warm: the imports were done once for all of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path

from openai._models import construct_type
from openai.types.responses import ResponseStreamEvent

from midstream.agents.openai_conversation import Memory, OpenAIChain, OpenAIConversation
from midstream.agents.pool import Pooled
from midstream.agents.pool_entries import POOL_NAMESPACE
from midstream.errors import ModelError
from midstream.history.messages import History, Response, Step, Text, UserMessage
from midstream.models.responses import ModelRequest, TextDelta
from midstream.store.contract import KeyValue, KeyValueEntry
from midstream.store.sqlite import SQLiteStore

# At its first event the package resolves, for most of a second, its event types: once for all of them, too.
construct_type(type_=ResponseStreamEvent, value={"type": "response.created"})

Turns = list[list[str]]
"""The messages of each turn of a client application. All but the last turn have been answered."""


class PoolPoint(StrEnum):
    """The point where a process kills itself."""

    BEFORE_RECORD = "before-record"
    """The decision is made; nothing is written."""
    AFTER_RECORD = "after-record"
    """The record announces a message to an agent; nothing is sent."""
    OPENED = "opened"
    """The upstream has confirmed the message; the record does not have that."""
    CONFIRMED = "confirmed"
    """The record is confirmed; no part of the answer was shown."""
    SPEAKING = "speaking"
    """In the middle of the answer, or of an unread one."""
    ANSWERED = "answered"
    """The answer is whole; the record still belongs to this run."""
    RELEASED = "released"
    """The record is released; the client application has not received the end of the answer."""
    NEVER = "never"


_WRITES: dict[tuple[int, str], PoolPoint] = {
    (1, "before"): PoolPoint.BEFORE_RECORD,
    (1, "after"): PoolPoint.AFTER_RECORD,
    (2, "before"): PoolPoint.OPENED,
    (2, "after"): PoolPoint.CONFIRMED,
    (3, "before"): PoolPoint.ANSWERED,
    (3, "after"): PoolPoint.RELEASED,
}
"""A turn writes its record three times."""


class ProcessDeath:
    """Kills this process at one point."""

    def __init__(self, point: PoolPoint) -> None:
        self._point = point

    def reach(self, point: PoolPoint | None) -> None:
        if point is self._point:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


class DeadlyKeyValue:
    """A store's key-value part, with points between the writes of a record."""

    def __init__(self, store: KeyValue, death: ProcessDeath) -> None:
        self._store = store
        self._death = death
        self._writes = 0

    async def kv_get(self, namespace: str, key: str) -> KeyValueEntry | None:
        return await self._store.kv_get(namespace, key)

    async def kv_put(self, namespace: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        self._writes += namespace == POOL_NAMESPACE
        self._death.reach(_WRITES.get((self._writes, "before")))
        version = await self._store.kv_put(namespace, key, body, expected=expected, at=at)
        self._death.reach(_WRITES.get((self._writes, "after")))
        return version

    async def kv_delete(self, namespace: str, key: str, *, expected: int) -> bool:
        return await self._store.kv_delete(namespace, key, expected=expected)

    async def kv_list(self, namespace: str) -> Sequence[KeyValueEntry]:
        return await self._store.kv_list(namespace)


def live(link: Connection, database: str, url: str, memory: Memory, point: PoolPoint) -> None:
    """Answer the requests over `link`, each time with the text of the answer, until None arrives."""
    asyncio.run(_live(link, database, url, memory, ProcessDeath(point)))


async def _live(link: Connection, database: str, url: str, memory: Memory, death: ProcessDeath) -> None:
    store = SQLiteStore(Path(database))
    await store.open()
    kind = OpenAIChain if memory == "responses" else OpenAIConversation
    pool = Pooled(kind("gpt-5", api_key="key-1", base_url=url), DeadlyKeyValue(store, death))
    while (turns := await asyncio.to_thread(link.recv)) is not None:
        link.send(await _answer(pool, turns, death))
    await pool.aclose()
    await store.close()


async def _answer(pool: Pooled, turns: Turns, death: ProcessDeath) -> str:
    words = ""
    try:
        async for event in pool.stream(ModelRequest("", _history(turns), session="s")):
            death.reach(PoolPoint.SPEAKING)
            if isinstance(event, TextDelta):
                words += event.text
    except ModelError as error:
        return f"failed: {error.code}"
    return words


def _history(turns: Turns) -> History:
    history = History()
    for number, texts in enumerate(turns):
        if number:  # without the text of the answer: a full transcript would repeat it
            history = history.then(Step(Response((Text("noted"),))))
        for text in texts:
            history = history.then(UserMessage.of(text))
    return history
