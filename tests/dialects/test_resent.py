"""A gateway's readings of bodies with a known prefix: the same results as for any other, at lower cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import httpx2
import msgspec
import pytest
from msgspec.structs import replace

from midstream.agents.pool import Pooled
from midstream.agents.pool_turns import AgentOrigin, TurnReport
from midstream.agents.reuse_classification import RequestRelation
from midstream.agents.upstream_abilities import Abilities
from midstream.dialects import dialect_registry
from midstream.dialects.dialect import Dialect
from midstream.server.gateway_app import Gateway
from midstream.session.records import TranscriptAccepted, decode
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_upstream import ScriptedUpstream, Trouble
from tests.dialects.gateway_serving import asgi_client, make_gateway
from tests.dialects.rewriting_applications import RewritingApplication
from tests.lines import lines_run
from tests.search import with_long
from tests.spec import spec

CHARS = 9000
"""Characters of a message: a few messages exceed the caching limit."""
TURNS = 30


class ReportingPool(Pooled):
    """A pool that stores a report of each turn."""

    def __init__(self, upstream: ScriptedUpstream, store: MemoryStore) -> None:
        self.reports: list[TurnReport] = []
        super().__init__(upstream, store, on_turn=self.reports.append)


async def transcripts(app: Gateway) -> list[tuple[int, int]]:
    """Return, for each transcript of a session, how many entries it kept, and how many were journaled."""
    taken = []
    for sessions in (app._durable, app._private):
        store = sessions.host.store
        async for info in store.list():
            for stored in await store.read(info.session, after=0, limit=10_000):
                record = decode(stored.body)
                if isinstance(record, TranscriptAccepted):
                    taken.append((record.keep, len(record.tail)))
    return taken


class GatewaySide:
    """A gateway to a pool on its own upstream. With `is_forgetful` no key is reused."""

    def __init__(self, abilities: Abilities, *, is_forgetful: bool) -> None:
        self.upstream = ScriptedUpstream(abilities=abilities)
        store = MemoryStore()
        self.pool = ReportingPool(self.upstream, store)
        self.app = make_gateway(self.pool, store=store, token=None)
        self._is_forgetful = is_forgetful
        self._asked = 0

    async def ask(self, client: httpx2.AsyncClient, path: str, body: bytes, name: str) -> tuple[int, str]:
        """Send a request; return the status, and the words of the answer."""
        self._asked += 1
        headers = {"authorization": "", "x-api-key": str(self._asked if self._is_forgetful else "me")}
        headers |= {"content-type": "application/json"} | ({"x-midstream-session": name} if name else {})
        answer = await client.post(path, content=body, headers=headers)
        return answer.status_code, _words(answer.json())

    @property
    def turns(self) -> list[TurnReport]:
        """Return the report of each turn, without the names of conversations."""
        return [replace(report, session="") for report in self.pool.reports]


def _words(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item.get("content", ()))
    return "".join(block["text"] for block in answer.get("content", ()) if block["type"] == "text")


@pytest.mark.slow
@spec("REUSE-77")
@pytest.mark.parametrize("dialect", dialect_registry.DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("seed", with_long(range(6), 2))
async def test_the_upstream_receives_the_same_as_when_every_body_is_read_whole(
    dialect: Dialect, seed: int
) -> None:
    chance = random.Random(seed)
    host = RewritingApplication(chance, dialect, chars=CHARS, is_sound=seed % 2 == 0)
    name = chance.choice(["", "named"])
    abilities = Abilities(can_fork=seed % 3 == 0)
    fast, slow = (GatewaySide(abilities, is_forgetful=is_forgetful) for is_forgetful in (False, True))
    async with asgi_client(fast.app) as one, asgi_client(slow.app) as other:
        for _ in range(TURNS):
            body = host.body()
            if chance.random() < 0.1:
                for side in (fast, slow):
                    side.upstream.troubles.append(Trouble.GONE)
            response = await fast.ask(one, host.path, body, name)
            assert response == await slow.ask(other, host.path, body, name)
            host.take_answer(response[1])
        assert sorted(await transcripts(fast.app)) == sorted(await transcripts(slow.app))
        if seed % 2 == 0:
            assert any(keep > tail for keep, tail in await transcripts(fast.app))
    assert fast.upstream.memory.arrived == slow.upstream.memory.arrived
    assert fast.turns == slow.turns


def _body(known: int, *more: str) -> bytes:
    return _chat_body([*(f"{number}".ljust(200, "x") for number in range(known)), *more])


def _chat_body(words: Sequence[str]) -> bytes:
    messages = [{"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(words)]
    return msgspec.json.encode({"model": "m", "messages": messages})


@spec("REUSE-77")
async def test_the_work_from_the_bytes_to_the_upstream_depends_only_on_the_new_messages() -> None:
    work = []
    for known in (201, 801):
        upstream, store = ScriptedUpstream(), MemoryStore()
        pool = Pooled(upstream, store)
        async with asgi_client(make_gateway(pool, store=store)) as client:
            first = await client.post("/v1/chat/completions", content=_body(known), headers=JSON)
            body = _body(known, _words(first.json()), "more")
            with lines_run() as lines:
                assert (await client.post("/v1/chat/completions", content=body, headers=JSON)).is_success
        assert [len(talk.messages) for talk in upstream.memory.talks.values()] == [2]
        work.append(lines.count)
    assert work[1] < 1.1 * work[0]


JSON = {"content-type": "application/json"}


@spec("REUSE-77")
async def test_a_long_conversation_is_journaled_once() -> None:
    store = MemoryStore()
    app = make_gateway(Pooled(ScriptedUpstream(), store), store=store)
    async with asgi_client(app) as client:
        texts: list[str] = []
        for turn in range(20):
            texts.append(f"question {turn}")
            answer = await client.post("/v1/chat/completions", content=_chat_body(texts), headers=JSON)
            texts.append(_words(answer.json()))
        taken = await transcripts(app)
    assert taken == [(2 * turn, 1) for turn in range(20)]


@spec("REUSE-70")
async def test_a_repeated_body_is_recognized_after_its_prefix_was_cached() -> None:
    upstream, store = ScriptedUpstream(), MemoryStore()
    async with asgi_client(make_gateway(Pooled(upstream, store), store=store)) as client:
        headers = JSON | {"idempotency-key": "k"}
        answers = [
            await client.post("/v1/chat/completions", content=body, headers=headers)
            for body in (_body(201), _body(201), _body(203))
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 422]
    assert answers[0].content == answers[1].content
    assert len(upstream.sends) == 1


@spec("REUSE-77")
async def test_a_fresh_agent_receives_the_whole_body_that_was_read_in_part() -> None:
    upstream, store = ScriptedUpstream(), MemoryStore()
    pool = ReportingPool(upstream, store)
    async with asgi_client(make_gateway(pool, store=store)) as client:
        await client.post("/v1/chat/completions", content=_body(201), headers=JSON)
        upstream.memory.talks.clear()  # the upstream has lost its conversations
        answer = await client.post(
            "/v1/chat/completions", content=_body(201, "answer 1", "more"), headers=JSON
        )
    assert answer.is_success
    report = pool.reports[-1]
    assert (report.kind, report.way, report.replays) == (RequestRelation.CONTINUATION, AgentOrigin.FRESH, 1)
    (talk,) = upstream.memory.talks.values()
    assert talk.words.count("xxx ") + talk.words.count("xxx\n") >= 100
