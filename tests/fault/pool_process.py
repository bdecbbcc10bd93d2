"""A process with a pool in front of a server that outlives it, and which may kill itself between any two of its steps.

Started by `tests/fault/test_pool_kills.py`, warm: what it imports was imported once for all of them.
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

# At its first event the package works out, for most of a second, which kinds there are: once for all of them, too.
construct_type(type_=ResponseStreamEvent, value={"type": "response.created"})

Turns = list[list[str]]
"""What a host has said: the messages of each turn. All but the last turn have been answered."""


class Point(StrEnum):
    """Where a process kills itself."""

    BEFORE_RECORD = "before-record"
    """It knows what to do; nothing is written."""
    AFTER_RECORD = "after-record"
    """The record says that an agent is about to be told something; nothing is said."""
    OPENED = "opened"
    """The upstream has said that it took the message; the record does not say so."""
    CONFIRMED = "confirmed"
    """The record says so; nothing of the answer was shown."""
    SPEAKING = "speaking"
    """In the middle of the answer, or of one that nobody sees."""
    ANSWERED = "answered"
    """The answer is whole; the record still belongs to this run."""
    RELEASED = "released"
    """The record is let go of; the host does not know yet that the answer is whole."""
    NEVER = "never"


_WRITES: dict[tuple[int, str], Point] = {
    (1, "before"): Point.BEFORE_RECORD,
    (1, "after"): Point.AFTER_RECORD,
    (2, "before"): Point.OPENED,
    (2, "after"): Point.CONFIRMED,
    (3, "before"): Point.ANSWERED,
    (3, "after"): Point.RELEASED,
}
"""A turn writes its record three times."""


class Death:
    """Kills this process at one point."""

    def __init__(self, point: Point) -> None:
        self._point = point

    def reach(self, point: Point | None) -> None:
        if point is self._point:
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()


class DeadlyKeyValue:
    """A store's key-value part, with points between the writes of a record."""

    def __init__(self, store: KeyValue, death: Death) -> None:
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


def live(link: Connection, database: str, url: str, memory: Memory, point: Point) -> None:
    """Answer what is asked over `link`, each time with the words of the answer, until None is."""
    asyncio.run(_live(link, database, url, memory, Death(point)))


async def _live(link: Connection, database: str, url: str, memory: Memory, death: Death) -> None:
    store = SQLiteStore(Path(database))
    await store.open()
    kind = OpenAIChain if memory == "responses" else OpenAIConversation
    pool = Pooled(kind("gpt-5", api_key="key-1", base_url=url), DeadlyKeyValue(store, death))
    while (turns := await asyncio.to_thread(link.recv)) is not None:
        link.send(await _answer(pool, turns, death))
    await pool.aclose()
    await store.close()


async def _answer(pool: Pooled, turns: Turns, death: Death) -> str:
    words = ""
    try:
        async for event in pool.stream(ModelRequest("", _history(turns), session="s")):
            death.reach(Point.SPEAKING)
            if isinstance(event, TextDelta):
                words += event.text
    except ModelError as error:
        return f"failed: {error.code}"
    return words


def _history(turns: Turns) -> History:
    history = History()
    for number, texts in enumerate(turns):
        if number:  # not the words of the answer: they would be told again with a transcript
            history = history.then(Step(Response((Text("noted"),))))
        for text in texts:
            history = history.then(UserMessage.of(text))
    return history
