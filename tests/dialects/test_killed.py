"""`midstream gateway` is killed while it answers, and restarted: the response continues, each word once."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import websockets

from tests.cli.test_gateway import key_of, start, stop
from tests.dialects.gateway_serving import WAIT_S
from tests.fault.stored import use_postgres
from tests.forked import Forked
from tests.models.chat_server import Answer, ChatServer, call, chat_server, delta
from tests.models.chat_server import stream as streamed
from tests.spec import spec

FIRST, REST = "one two ", "three four"
ASK: list[Any] = [{"role": "user", "content": "hi"}]
CUT = streamed(delta(content=FIRST), ending="hang")
CONTINUATION = streamed(delta(content=REST), delta("stop"))


class KillableGateway:
    """A gateway in its own process in front of a scripted server, which survives it."""

    def __init__(self, home: Path, upstream: ChatServer, options: tuple[str, ...]) -> None:
        self.upstream = upstream
        self._home = home
        self._options = options
        self._process: Forked | None = None
        self.url = self.token = ""

    def start(self) -> None:
        url = f"openai-compatible:{self.upstream.url}"
        self._process, ready = start(self._home, "--upstream", url, "--model", "m", *self._options)
        self.url, self.token = ready["url"], key_of(ready)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=WAIT_S)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            stop(self._process)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.token, timeout=WAIT_S, max_retries=0
        )

    def anthropic(self) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=self.token, timeout=WAIT_S, max_retries=0)


@contextlib.asynccontextmanager
async def run_killable(
    home: Path, *answers: Answer, options: tuple[str, ...] = ()
) -> AsyncIterator[KillableGateway]:
    """Run a gateway to a scripted server until the end of the block."""
    async with chat_server(*answers) as upstream:
        gateway = KillableGateway(home, upstream, options)
        try:
            await asyncio.to_thread(gateway.start)
            yield gateway
        finally:
            await asyncio.to_thread(gateway.stop)


async def restart(gateway: KillableGateway) -> None:
    await asyncio.to_thread(gateway.kill)
    await asyncio.to_thread(gateway.start)


async def chat(gateway: KillableGateway) -> AsyncIterator[str]:
    async with gateway.openai() as client:
        async for chunk in await client.chat.completions.create(model="m", messages=ASK, stream=True):
            if chunk.choices:
                yield chunk.choices[0].delta.content or ""


async def responses(gateway: KillableGateway) -> AsyncIterator[str]:
    async with gateway.openai() as client:
        async for event in await client.responses.create(model="m", input="hi", stream=True):
            if event.type == "response.output_text.delta":
                yield event.delta


async def messages(gateway: KillableGateway) -> AsyncIterator[str]:
    async with (
        gateway.anthropic() as client,
        client.messages.stream(model="m", max_tokens=99, messages=ASK) as events,
    ):
        async for words in events.text_stream:
            yield words


async def read_until(words: AsyncIterator[str], wanted: str) -> None:
    text = ""
    async with asyncio.timeout(WAIT_S):
        while text != wanted:
            text += await anext(words)


def files_with(folder: Path, secret: bytes) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if secret in path.read_bytes()]


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    """Return the options of a gateway for its store."""
    if request.param == "sqlite":
        return ()
    return ("--store", use_postgres(tmp_path, request.getfixturevalue("engine")))


@spec("REUSE-70")
@pytest.mark.parametrize(
    ("ask", "store"),
    [
        pytest.param(chat, "sqlite", marks=pytest.mark.long),
        (responses, "postgresql"),
        pytest.param(messages, "sqlite", marks=pytest.mark.long),
    ],
    indirect=["store"],
    ids=["chat", "responses", "messages"],
)
async def test_a_gateway_killed_in_mid_answer_finishes_it(
    ask: Callable[[KillableGateway], AsyncIterator[str]], store: tuple[str, ...], tmp_path: Path
) -> None:
    async with run_killable(tmp_path, CUT, CONTINUATION, options=store) as gateway:
        words = ask(gateway)
        await read_until(words, FIRST)
        await asyncio.to_thread(gateway.kill)
        with contextlib.suppress(
            openai.OpenAIError, anthropic.AnthropicError, httpx2.HTTPError, StopAsyncIteration
        ):
            await anext(words)
        await asyncio.to_thread(gateway.start)
        async with asyncio.timeout(WAIT_S):
            assert "".join([piece async for piece in ask(gateway)]) == FIRST + REST
    asked = [body["messages"] for body in gateway.upstream.bodies]
    assert [each["content"] for each in asked[0]] == ["hi"]
    assert [each["content"] for each in asked[1]][:2] == ["hi", FIRST]  # it continues after its own words
    assert len(asked) == 2


@spec("REUSE-75")
@pytest.mark.parametrize("store", ["postgresql"], indirect=True)
async def test_a_background_response_survives_and_its_stream_continues_after_the_last_event(
    store: tuple[str, ...], tmp_path: Path
) -> None:
    async with run_killable(tmp_path, CUT, CONTINUATION, options=store) as gateway:
        seen: list[Any] = []
        async with gateway.openai() as client, asyncio.timeout(WAIT_S):
            kept = await client.conversations.create()
            stream = await client.responses.create(
                model="m", input="hi", background=True, stream=True, conversation=kept.id
            )
            async for event in stream:
                seen.append(event)
                if event.type == "response.output_text.delta":
                    break
            await asyncio.to_thread(gateway.kill)
            await stream.close()
        await asyncio.to_thread(gateway.start)
        name = seen[0].response.id
        async with gateway.openai() as client, asyncio.timeout(WAIT_S):
            rest = await client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
            seen += [event async for event in rest]
            whole = await client.responses.retrieve(name)
            listed: list[Any] = [item async for item in client.conversations.items.list(kept.id, order="asc")]
        assert [item.content[0].text for item in listed] == ["hi", FIRST + REST]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text == FIRST + REST
        assert (whole.status, seen[-1].response) == ("completed", whole)


@spec("REUSE-70")
@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_a_request_of_a_killed_socket_is_finished_on_the_next_one(
    store: tuple[str, ...], tmp_path: Path
) -> None:
    async with run_killable(tmp_path, CUT, CONTINUATION, options=store) as gateway:

        async def events() -> AsyncIterator[Any]:
            async with gateway.openai() as client, client.responses.connect(max_retries=0) as connection:
                await connection.response.create(model="m", input="hi")
                async for event in connection:
                    yield event
                    if event.type == "response.completed":
                        return

        seen: list[Any] = []
        with contextlib.suppress(websockets.ConnectionClosed):
            async with asyncio.timeout(WAIT_S):
                async for event in events():
                    seen.append(event)
                    if event.type == "response.output_text.delta":
                        await asyncio.to_thread(gateway.kill)
        assert seen[-1].type == "response.output_text.delta"
        await asyncio.to_thread(gateway.start)
        async with asyncio.timeout(WAIT_S):
            again = [event async for event in events()]
        assert (again[0].response.id, again[-1].response.output_text) == (seen[0].response.id, FIRST + REST)
        assert len(gateway.upstream.bodies) == 2


@spec("REUSE-73")
@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_the_results_of_a_call_reach_the_turn_of_a_gateway_that_was_killed_meanwhile(
    store: tuple[str, ...], tmp_path: Path
) -> None:
    asks = streamed(delta(tool_calls=[call(0, "{}", "call_7", "look")]), delta("tool_calls"))
    look: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    async with run_killable(tmp_path, asks, CONTINUATION, options=store) as gateway, asyncio.timeout(WAIT_S):
        async with gateway.openai() as client:
            first = await client.responses.create(model="m", input="hi", tools=[look])
        await restart(gateway)
        result: Any = {"type": "function_call_output", "call_id": "call_7", "output": "a tree"}
        async with gateway.openai() as client:
            second = await client.responses.create(
                model="m", previous_response_id=first.id, input=[result], tools=[look]
            )
        assert second.output_text == REST
    roles = [each["role"] for each in gateway.upstream.bodies[1]["messages"]]
    assert roles == ["user", "assistant", "tool"]


@spec("REUSE-75")
async def test_an_unstored_response_leaves_no_text_on_disk(tmp_path: Path) -> None:
    secret = "a-word-that-is-nowhere-else"
    spoken = streamed(delta(content=f"{secret}-said"), delta("stop"))
    async with run_killable(tmp_path, spoken) as gateway, asyncio.timeout(WAIT_S):
        async with gateway.openai() as client:
            answer = await client.responses.create(model="m", input=f"{secret}-asked", store=False)
        assert answer.output_text == f"{secret}-said"
        await asyncio.to_thread(gateway.kill)
        holding = await asyncio.to_thread(files_with, tmp_path, secret.encode())
        assert holding == []


@spec("REUSE-70")
async def test_an_encrypted_gateway_finishes_its_response_too_and_stores_no_plain_text(
    tmp_path: Path,
) -> None:
    home, keys = tmp_path / "home", tmp_path / "keys"
    home.mkdir()
    async with run_killable(home, CUT, CONTINUATION, options=("--key-file", str(keys))) as gateway:
        words = chat(gateway)
        await read_until(words, FIRST)
        await restart(gateway)
        async with asyncio.timeout(WAIT_S):
            assert "".join([piece async for piece in chat(gateway)]) == FIRST + REST
        assert await asyncio.to_thread(files_with, home, FIRST.strip().encode()) == []
