"""OpenAI's Responses API as an upstream, with the real package and a scripted server."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from midstream.agents.openai_conversation import Memory, OpenAIChain, OpenAIConversation
from midstream.agents.upstreams import MessageTaken, Setup, UpstreamAgent, UpstreamEvent, UpstreamMessage
from midstream.errors import ModelError, ModelUnavailableError, UpstreamBusyError, UpstreamFailedError
from midstream.history.messages import ToolResult, ToolSpec, UserMessage
from midstream.models.responses import TextDelta, ToolCallRequested
from midstream.retries import RETRY_AFTER_MAX_S
from midstream.session.model_settings import ModelSettings
from midstream.testing.pool_contract import PoolContract
from midstream.testing.upstream_contract import UpstreamContract
from tests.agents.openai_memory import OpenAIMemory, openai_memory
from tests.agents.part_of_pool import PartOfPoolContract

WAIT_S = 60.0


class TestChainedResponses(UpstreamContract):
    """Runs the suite that every upstream passes."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("responses") as server:
            yield server


class TestConversations(UpstreamContract):
    """Runs the suite that every upstream passes."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("conversation") as server:
            yield server


class TestBackground(UpstreamContract):
    """Runs the suite that every upstream passes."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("responses", is_background=True) as server:
            yield server


@pytest.mark.slow
class TestChainedResponsesPooled(PoolContract):
    """Runs every situation with every fault."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("responses") as server:
            yield server


@pytest.mark.slow
class TestConversationsPooled(PartOfPoolContract):
    """Runs each fault, and each situation."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("conversation") as server:
            yield server


@pytest.mark.slow
class TestBackgroundPooled(PartOfPoolContract):
    """Runs each fault, and each situation."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("responses", is_background=True) as server:
            yield server


async def _send(agent: UpstreamAgent, message: UpstreamMessage) -> list[UpstreamEvent]:
    return [event async for event in agent.send(message, key="k")]


async def _failure(upstream: OpenAIChain | OpenAIConversation) -> type[ModelError]:
    with pytest.raises(ModelError) as raised:
        await _send(await upstream.open(Setup()), UpstreamMessage(UserMessage.of("one")))
    await upstream.aclose()
    return type(raised.value)


@pytest.mark.parametrize(
    ("memory", "expected"), [("responses", ModelUnavailableError), ("conversation", UpstreamFailedError)]
)
async def test_a_message_that_a_broken_connection_may_have_delivered_is_not_sent_again(
    memory: Memory, expected: type[ModelError]
) -> None:
    async with openai_memory(memory) as server:
        server.die_unopened()
        assert await _failure(server.upstream()) is expected
        assert len(server.messages()) == 1


@pytest.mark.parametrize("memory", ["responses", "conversation"])
async def test_a_message_that_was_never_sent_is_sent_again(memory: Memory) -> None:
    async with openai_memory(memory) as server:
        upstream = server.upstream()
    assert await _failure(upstream) is ModelUnavailableError  # the server is closed


@pytest.mark.parametrize(
    ("status", "expected"),
    [(500, UpstreamFailedError), (429, ModelUnavailableError), (503, ModelUnavailableError)],
)
async def test_a_failing_server_may_have_taken_the_message_and_an_overloaded_one_has_not(
    status: int, expected: type[ModelError]
) -> None:
    async with openai_memory("conversation") as server:
        server.fails_with = status
        assert await _failure(server.upstream()) is expected


async def test_an_overloaded_server_may_request_a_pause_until_a_date() -> None:
    async with openai_memory("responses") as server, contextlib.aclosing(server.upstream()) as upstream:
        server.fails_with, server.retry_after = 429, "Thu, 31 Dec 2099 23:59:59 GMT"
        with pytest.raises(ModelUnavailableError) as raised:
            await _send(await upstream.open(Setup()), UpstreamMessage(UserMessage.of("one")))
    assert (raised.value.retry_after_s or 0.0) > RETRY_AFTER_MAX_S


async def test_a_request_has_the_settings_that_its_model_supports() -> None:
    settings = ModelSettings(
        temperature=0.0, tokens_max=9, stop=("END",), response_format={"type": "json_object"}
    )
    for model, expected in (("gpt-4o", {"temperature": 0.0}), ("gpt-5", {})):
        async with openai_memory("responses") as server:
            async with contextlib.aclosing(
                OpenAIChain(model, api_key="key-1", base_url=server.url)
            ) as upstream:
                await _send(
                    await upstream.open(Setup()), UpstreamMessage(UserMessage.of("one"), settings=settings)
                )
            body = server.requests[-1][2]
        found = {
            name: body[name] for name in ("temperature", "max_output_tokens", "text", "stop") if name in body
        }
        assert found == {"max_output_tokens": 9, "text": {"format": {"type": "json_object"}}, **expected}


async def test_a_background_response_continues_over_new_connections() -> None:
    async with openai_memory("responses", is_background=True) as server:
        upstream = server.upstream()
        server.cuts = 2
        agent = await upstream.open(Setup())
        events = await _send(agent, UpstreamMessage(UserMessage.of("a first message of many words")))
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        await upstream.aclose()
    assert text == "a first message of many words"
    assert [(method, path) for method, path, _ in server.requests] == [
        ("POST", "/responses"),
        ("GET", "/responses/resp_1"),
        ("GET", "/responses/resp_1"),
    ]
    assert len(server.messages()) == 1


async def test_tools_of_the_client_application_are_requested_and_answered_in_the_chain() -> None:
    tool = ToolSpec("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
    async with openai_memory("responses") as server:
        upstream = server.upstream()
        server.asks = {"id": "call_7", "name": "read", "arguments": '{"path": "a"}'}
        agent = await upstream.open(Setup("be brief", (tool,)))
        first = await _send(agent, UpstreamMessage(UserMessage.of("one")))
        opened = next(event for event in first if isinstance(event, MessageTaken))
        resumed = await upstream.open(Setup("be brief", (tool,)), resume=opened.agent)
        await _send(resumed, UpstreamMessage(UserMessage(()), (ToolResult("call_7", "what stands in a"),)))
        await upstream.aclose()
    assert ToolCallRequested("call_7", "read", '{"path": "a"}') in first
    assert server.outputs == [
        {"type": "function_call_output", "call_id": "call_7", "output": "what stands in a"}
    ]
    bodies = [body for _, _, body in server.requests]
    assert [body.get("previous_response_id") for body in bodies] == [None, opened.agent]
    assert [body["instructions"] for body in bodies] == ["be brief", "be brief"]
    assert [len(body["input"]) for body in bodies] == [1, 1]
    assert bodies[0]["tools"] == bodies[1]["tools"]


async def test_a_conversation_with_another_running_response_is_busy() -> None:
    async with openai_memory("conversation") as server:
        upstream = server.upstream()
        server.locked = 1
        agent = await upstream.open(Setup())
        with pytest.raises(UpstreamBusyError):
            await _send(agent, UpstreamMessage(UserMessage.of("one")))
        await _send(agent, UpstreamMessage(UserMessage.of("one")))
        await upstream.aclose()
    assert [received.text for received in server.messages()] == ["one"]


async def _send_first(agent: UpstreamAgent, word: str) -> tuple[MessageTaken, str]:
    """Send a message, and return the `MessageTaken` and the answer."""
    events = await _send(agent, UpstreamMessage(UserMessage.of(word)))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return next(event for event in events if isinstance(event, MessageTaken)), text


@pytest.mark.parametrize("memory", ["responses", "conversation"])
async def test_a_server_that_omits_the_continued_id_is_checked_once(memory: Memory) -> None:
    async with openai_memory(memory) as server, contextlib.aclosing(server.upstream()) as upstream:
        first, _ = await _send_first(await upstream.open(Setup()), "one")
        server.is_silent = True
        agent = await upstream.open(Setup(), resume=first.agent)
        second, _ = await _send_first(agent, "two")
        third, answer = await _send_first(agent, "three")
        assert (second.resumed, third.resumed) == (first.agent, second.agent)
        assert answer == "one | two | three"
    checks = [body for _, path, body in server.requests if path == "/responses" and body["input"] == "ping"]
    assert len(checks) == 1


@pytest.mark.parametrize("memory", ["responses", "conversation"])
async def test_a_server_that_ignores_the_continued_id_resumes_nothing(memory: Memory) -> None:
    async with openai_memory(memory) as server, contextlib.aclosing(server.upstream()) as upstream:
        first, _ = await _send_first(await upstream.open(Setup()), "one")
        server.is_silent = server.ignores_names = True
        opened, answer = await _send_first(await upstream.open(Setup(), resume=first.agent), "two")
        assert (opened.resumed, answer) == ("", "two")


ANSWERING = """
import asyncio
from pydantic import BaseModel
from midstream.history.messages import UserMessage
from midstream.agents.upstreams import UpstreamMessage, Setup
from tests.agents.openai_memory import openai_memory

def worked_out(kind):
    here = {kind.__name__} if kind.__pydantic_complete__ and kind.__module__.startswith("openai.types") else set()
    return here.union(*map(worked_out, kind.__subclasses__()))

async def answered():
    for memory, is_background in (("responses", False), ("responses", True), ("conversation", False)):
        async with openai_memory(memory, is_background=is_background) as server:
            upstream = server.upstream()
            agent = await upstream.open(Setup())
            server.cuts = 1 if is_background else 0
            said = [each async for each in agent.send(UpstreamMessage(UserMessage.of("one")), key="k")]
            assert len(said) > 2, said
            await upstream.delete("resp_1")
            await upstream.aclose()

before = worked_out(BaseModel)
asyncio.run(answered())
print(sorted(worked_out(BaseModel) - before))
"""


def test_the_packages_types_are_resolved_outside_the_event_loop() -> None:
    # In its own process: another test may have resolved them.
    done = subprocess.run(
        [sys.executable, "-c", ANSWERING], capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


async def test_a_conversation_without_an_id_is_not_continued() -> None:
    async with openai_memory("conversation") as server:
        server.is_nameless = True
        assert await _failure(server.upstream()) is UpstreamFailedError
        assert server.messages() == []


async def test_all_background_responses_are_stopped_even_if_the_caller_that_closes_is_cancelled() -> None:
    stopped: set[str] = set()
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer(request: httpx2.Request) -> httpx2.Response:
        asked.set()
        await may_answer.wait()
        stopped.add(request.url.path)
        return httpx2.Response(200, json={})

    client = openai.AsyncOpenAI(
        api_key="k", http_client=httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    )
    upstream = OpenAIChain("m", client=client, is_background=True)
    upstream._endpoint.running.update(("one", "two"))
    closing = asyncio.create_task(upstream.aclose())
    async with asyncio.timeout(WAIT_S):
        await asked.wait()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        may_answer.set()
        while len(stopped) < 2:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0)
    assert stopped == {"/v1/responses/one/cancel", "/v1/responses/two/cancel"}
    await client.close()
