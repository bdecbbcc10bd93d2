"""End to end: a third-party client, the gateway, the pool, an upstream's real package, and a scripted provider."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from midstream.agents.pool import Pooled
from midstream.agents.upstreams import Upstream, UpstreamEvent
from midstream.models.responses import Finished, TextDelta, UpstreamCallEnded, UpstreamCallStarted
from midstream.store.sqlite import SQLiteStore
from midstream.testing.scripted_upstream import AgentConversation, ScriptedUpstream, UpstreamMemory, words_of
from midstream.testing.upstream_contract import SEPARATOR
from tests.agents.openai_memory import OpenAIMemory, openai_memory
from tests.cli.test_gateway import start
from tests.dialects.gateway_serving import TOKEN, WAIT_S, Json, ServedGateway, make_gateway, serving
from tests.dialects.test_killed import files_with
from tests.spec import spec

TURNS = 50
SLACK_BYTES = 40
"""The allowed difference of bodies of equal messages: numbers have more digits, names are longer than none."""
NAMED = {"x-midstream-session": "s1"}
needs_cursor = pytest.mark.skipif(
    importlib.util.find_spec("cursor_sdk") is None,
    reason="Cursor's package is not installed here (make clients)",
)


@contextlib.asynccontextmanager
async def serve_pooled(upstream: Upstream, folder: Path) -> AsyncIterator[ServedGateway]:
    """Serve a gateway to a pooled upstream, with a store in a file."""
    store = SQLiteStore(folder / "gateway.db")
    pool: Any = Pooled(upstream, store)
    async with serving(make_gateway(pool, store=store), pool) as gateway:
        yield gateway


@pytest.fixture
async def peer() -> AsyncIterator[OpenAIMemory]:
    async with openai_memory("responses") as server:
        yield server


class ResendingApplication:
    """Resends its whole transcript each turn, as client applications do."""

    def __init__(self, client: openai.AsyncOpenAI, **headers: str) -> None:
        self.messages: list[Any] = []
        self.store: bool | None = None
        self._client = client
        self._headers = headers

    async def ask(self, words: str) -> str:
        """Send a message, read the stream to its end, and append the answer."""
        self.messages.append({"role": "user", "content": words})
        answer = await self._client.chat.completions.create(
            model="m",
            messages=self.messages,
            stream=True,
            store=self.store,
            extra_headers=self._headers,
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices]
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        return "".join(pieces)


def answer_requests(peer: OpenAIMemory) -> list[Json]:
    """Return the bodies of all requests for an answer."""
    return [body for method, path, body in peer.requests if (method, path) == ("POST", "/responses")]


def texts(peer: OpenAIMemory) -> list[str]:
    return [received.text for received in peer.messages()]


@pytest.mark.parametrize("headers", [{}, NAMED], ids=["known by its words", "named"])
@pytest.mark.slow
@spec("REUSE-73")
async def test_a_clean_conversation_reaches_openai_once_at_a_constant_size(
    headers: dict[str, str], peer: OpenAIMemory, tmp_path: Path
) -> None:
    questions = [f"question {number} ".ljust(200, "x") for number in range(TURNS)]
    async with serve_pooled(peer.upstream(), tmp_path) as gateway, gateway.openai() as client:
        host = ResendingApplication(client, **headers)
        for number, question in enumerate(questions, start=1):
            assert await host.ask(question) == SEPARATOR.join(questions[:number])
    assert texts(peer) == questions
    sizes = [len(json.dumps(body)) for body in answer_requests(peer)]
    assert len(sizes) == TURNS
    assert max(sizes) - min(sizes) <= SLACK_BYTES


@needs_cursor
@pytest.mark.slow
@spec("REUSE-73")
async def test_a_clean_conversation_of_an_anthropic_client_reaches_cursor_once_at_a_constant_size(
    tmp_path: Path,
) -> None:
    from tests.agents.cursor_bridge import cursor_bridge

    questions = [f"question {number} ".ljust(200, "x") for number in range(TURNS)]
    messages: list[Any] = []
    async with cursor_bridge(tmp_path) as bridge:
        async with serve_pooled(bridge.upstream(), tmp_path) as gateway, gateway.anthropic() as client:
            for number, question in enumerate(questions, start=1):
                messages.append({"role": "user", "content": question})
                async with client.messages.stream(model="m", max_tokens=99, messages=messages) as stream:
                    answer = await stream.get_final_text()
                assert answer == SEPARATOR.join(questions[:number])
                messages.append({"role": "assistant", "content": answer})
        sends = [message for method, message in bridge.requests if method == "Send"]
        made = [message for method, message in bridge.requests if method == "CreateAgent"]
        assert [received.text for received in bridge.messages()] == questions
    sizes = [len(json.dumps(message)) for message in sends]
    assert (len(sizes), len(made)) == (TURNS, 1)
    assert max(sizes) - min(sizes) <= SLACK_BYTES


@spec("REUSE-74")
async def test_a_title_request_in_between_is_not_part_of_the_conversation(
    peer: OpenAIMemory, tmp_path: Path
) -> None:
    title: list[Any] = [
        {"role": "system", "content": "You are a title generator. You output ONLY a thread title."},
        {"role": "user", "content": "one"},
    ]
    async with serve_pooled(peer.upstream(), tmp_path) as gateway, gateway.openai() as client:
        host = ResendingApplication(client, **NAMED)
        await host.ask("one")
        answer = await client.chat.completions.create(model="m", messages=title, extra_headers=NAMED)
        assert answer.choices[0].message.content == "one"
        assert await host.ask("two") == "one | two"
    assert texts(peer) == ["one", "one", "two"]
    first, _, third = answer_requests(peer)
    assert third["previous_response_id"] == peer.messages()[0].agent
    assert len(json.dumps(third)) - len(json.dumps(first)) <= SLACK_BYTES


@spec("REUSE-73")
async def test_an_edit_continues_from_the_common_prefix(peer: OpenAIMemory, tmp_path: Path) -> None:
    async with serve_pooled(peer.upstream(), tmp_path) as gateway, gateway.openai() as client:
        host = ResendingApplication(client, **NAMED)
        for words in ("one", "two", "three"):
            await host.ask(words)
        del host.messages[2:]
        assert await host.ask("other") == "one | other"
        assert await host.ask("more") == "one | other | more"
    assert texts(peer) == ["one", "two", "three", "other", "more"]
    assert answer_requests(peer)[3]["previous_response_id"] == peer.messages()[0].agent


@spec("REUSE-73")
async def test_two_concurrent_clients_of_one_conversation_get_answers_to_their_own_messages(
    peer: OpenAIMemory, tmp_path: Path
) -> None:
    """Neither gets its answer from an agent that received the other's; this may cost full transcripts."""
    async with (
        serve_pooled(peer.upstream(), tmp_path) as gateway,
        gateway.openai() as client,
        gateway.openai() as another,
    ):
        hosts = [ResendingApplication(client, **NAMED), ResendingApplication(another, **NAMED)]
        await hosts[0].ask("one")
        hosts[1].messages += hosts[0].messages
        both = await asyncio.gather(hosts[0].ask("left"), hosts[1].ask("right"))
        assert sorted(both) == ["one | left", "one | right"]
        for host, words in zip(hosts, both, strict=True):
            assert await host.ask("more") == f"{words} | more"


@pytest.mark.parametrize(
    ("headers", "ways"),
    [({}, (signal.SIGINT, signal.SIGKILL)), (NAMED, (signal.SIGKILL, signal.SIGINT))],
    ids=["known by its words", "named"],
)
@pytest.mark.slow
@spec("REUSE-73")
async def test_a_restart_of_the_gateway_between_two_turns_costs_no_full_transcript(
    headers: dict[str, str],
    ways: tuple[signal.Signals, signal.Signals],
    peer: OpenAIMemory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{peer.url}")
    monkeypatch.setenv("OPENAI_API_KEY", "key-1")
    messages: list[Any] = []
    for number, (words, way) in enumerate(zip(("one", "two", "three"), (*ways, signal.SIGKILL), strict=True)):
        options = ("--upstream", "openai:gpt-5", "--token", TOKEN)
        process, ready = await asyncio.to_thread(start, tmp_path, *options)
        try:
            async with openai.AsyncOpenAI(
                base_url=f"{ready['url']}/v1", api_key=TOKEN, timeout=WAIT_S
            ) as client:
                host = ResendingApplication(client, **headers)
                host.messages = messages
                assert await host.ask(words) == SEPARATOR.join(("one", "two", "three")[: number + 1])
        finally:
            process.send_signal(way)
            await asyncio.to_thread(process.communicate, timeout=WAIT_S)
    assert texts(peer) == ["one", "two", "three"]
    before = [body.get("previous_response_id") for body in answer_requests(peer)]
    assert before == [None, *(ready.agent for ready in peer.messages()[:2])]


def _paying(talk: AgentConversation) -> list[UpstreamEvent]:
    """Run the agent's own tool between two pieces of text, once."""
    if len(talk.messages) > 1 or "of shell" in talk.words:
        return [TextDelta("Yes."), Finished()]
    call = UpstreamCallStarted("call-1", "shell", '{"command": "pay 3"}')
    return [
        TextDelta("I pay. "),
        call,
        UpstreamCallEnded("call-1", "receipt 77"),
        TextDelta("Paid."),
        Finished(),
    ]


@spec("REUSE-80")
@pytest.mark.parametrize("shows_upstream_calls", [True, False], ids=["shown", "hidden"])
async def test_a_full_transcript_contains_the_agents_tool_calls(
    tmp_path: Path, *, shows_upstream_calls: bool
) -> None:
    memory = UpstreamMemory()
    host: ResendingApplication | None = None
    for words in ("pay", "was it paid?"):  # the gateway and the agent's memory are lost between the two
        memory.talks.clear()
        pool: Any = Pooled(ScriptedUpstream(memory, answer=_paying))
        store = SQLiteStore(tmp_path / "gateway.db")
        app = make_gateway(pool, store=store, shows_upstream_calls=shows_upstream_calls)
        async with serving(app, pool) as gateway:
            client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=TOKEN)
            before = [] if host is None else host.messages
            host = ResendingApplication(client, **NAMED)
            host.messages = before
            answer = await host.ask(words)
            await client.close()
    assert answer == "Yes."
    received = words_of(memory.arrived[-1][1])
    places = [received.index(part) for part in ("I pay.", '"pay 3"', "receipt 77", "Paid.", "was it paid?")]
    assert places == sorted(places)
    assert received.count("receipt 77") == 1


@spec("REUSE-75", "REUSE-80")
async def test_the_agents_tool_calls_of_an_unstored_conversation_are_in_memory_only(tmp_path: Path) -> None:
    memory = UpstreamMemory()
    pool: Any = Pooled(ScriptedUpstream(memory, answer=_paying))
    store = SQLiteStore(tmp_path / "gateway.db")
    app = make_gateway(pool, store=store, shows_upstream_calls=False)
    async with (
        serving(app, pool) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=TOKEN) as client,
    ):
        host = ResendingApplication(client, **NAMED)
        host.store = False
        assert await host.ask("pay") == "I pay. Paid."
        assert await asyncio.to_thread(files_with, tmp_path, b"receipt 77") == []
        memory.talks.clear()
        assert await host.ask("was it paid?") == "Yes."
    assert words_of(memory.arrived[-1][1]).count("receipt 77") == 1
    assert files_with(tmp_path, b"receipt 77") == []
