"""Two processes with one session on one SQLite file: own stores, pools and clocks, one upstream."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from midstream.agents.pool import Pooled
from midstream.agents.pool_turns import AgentOrigin
from midstream.agents.upstreams import UpstreamEvent
from midstream.errors import ModelError
from midstream.history.messages import History, Response, Step, Text, UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_upstream import (
    AgentConversation,
    ScriptedUpstream,
    Trouble,
    UpstreamMemory,
    words_of,
)
from tests.spec import spec

ROUNDS = 25
TOKEN = re.compile(r"\bword\d+\b")


def repeat_texts(talk: AgentConversation) -> list[UpstreamEvent]:
    """Answer with all the client application's texts that the agent has."""
    text = [token for received in talk.messages for token in TOKEN.findall(words_of(received.message))]
    return [TextDelta(" ".join(text).replace("word", "#")), Finished()]


@asynccontextmanager
async def two_processes(path: Path, memory: UpstreamMemory) -> AsyncIterator[list[Pooled]]:
    stores = [SQLiteStore(path) for _ in range(2)]
    for store in stores:
        await store.open()
    pools = [Pooled(ScriptedUpstream(memory, answer=repeat_texts), store) for store in stores]
    try:
        yield pools
    finally:
        for pool in pools:
            await pool.aclose()
        for store in stores:
            await store.close()


@spec("REUSE-37", "REUSE-50")
@pytest.mark.parametrize("seed", range(4))
async def test_no_message_is_lost_or_duplicated(tmp_path: Path, seed: int) -> None:
    chance, memory, history = random.Random(seed), UpstreamMemory(), History()
    async with two_processes(tmp_path / "x.db", memory) as pools:
        for number in range(ROUNDS):
            history = history.then(UserMessage.of(f"word{number}"))
            if chance.random() < 0.3:
                trouble = chance.choice([Trouble.GONE, Trouble.FAILED, Trouble.BUSY, Trouble.NEW_CHAT])
                _upstream_of(chance.choice(pools)).troubles.append(trouble)
            asked = pools if chance.random() < 0.5 else [chance.choice(pools)]
            answers = await asyncio.gather(*(_ask(pool, history) for pool in asked))
            wanted = " ".join(f"#{reported}" for reported in range(number + 1))
            assert {answer for answer in answers if answer} <= {wanted}
            history = history.then(Step(Response((Text("noted"),))))
        for pool in pools:
            _upstream_of(pool).troubles.clear()
        history = history.then(UserMessage.of("word-last"))
        await _ask(pools[0], history)
        history = history.then(Step(Response((Text("noted"),)))).then(UserMessage.of("word-after"))
        await _ask(pools[1], history)
        report = pools[1].last("s")
        assert report is not None
        assert report.way is AgentOrigin.RESUMED
        assert memory.wrongs == []


async def _ask(pool: Pooled, history: History) -> str:
    try:
        events = [event async for event in pool.stream(ModelRequest("", history, session="s"))]
    except ModelError:
        return ""
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def _upstream_of(pool: Pooled) -> ScriptedUpstream:
    upstream = pool._upstream
    assert isinstance(upstream, ScriptedUpstream)
    return upstream
