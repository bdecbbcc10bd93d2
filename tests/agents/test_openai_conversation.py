"""OpenAI's Responses API as an upstream, with the real package and a scripted server."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator

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
    """The suite that every upstream passes."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("responses") as server:
            yield server


class TestConversations(UpstreamContract):
    """The suite that every upstream passes."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("conversation") as server:
            yield server


class TestBackground(UpstreamContract):
    """The suite that every upstream passes."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("responses", is_background=True) as server:
            yield server


@pytest.mark.slow
class TestChainedResponsesPooled(PoolContract):
    """Every situation with every fault."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("responses") as server:
            yield server


@pytest.mark.slow
class TestConversationsPooled(PartOfPoolContract):
    """Each fault, and each situation."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("conversation") as server:
            yield server


@pytest.mark.slow
class TestBackgroundPooled(PartOfPoolContract):
    """Each fault, and each situation."""

    @pytest.fixture
    async def peer(self) -> AsyncIterator[OpenAIMemory]:
        async with openai_memory("responses", is_background=True) as server:
            yield server


async def _said(agent: UpstreamAgent, said: UpstreamMessage) -> list[UpstreamEvent]:
    return [event async for event in agent.send(said, key="k")]


async def _failure(upstream: OpenAIChain | OpenAIConversation) -> type[ModelError]:
    with pytest.raises(ModelError) as raised:
        await _said(await upstream.open(Setup()), UpstreamMessage(UserMessage.of("one")))
    await upstream.aclose()
    return type(raised.value)


@pytest.mark.parametrize(
    ("memory", "expected"), [("responses", ModelUnavailableError), ("conversation", UpstreamFailedError)]
)
async def test_what_a_broken_connection_may_have_left_in_a_conversation_is_not_said_again(
    memory: Memory, expected: type[ModelError]
) -> None:
    async with openai_memory(memory) as server:
        server.die_unopened()
        assert await _failure(server.upstream()) is expected
        assert len(server.messages()) == 1


@pytest.mark.parametrize("memory", ["responses", "conversation"])
async def test_what_was_never_sent_is_said_again(memory: Memory) -> None:
    async with openai_memory(memory) as server:
        upstream = server.upstream()
    assert await _failure(upstream) is ModelUnavailableError  # nobody is there any more


@pytest.mark.parametrize(
    ("status", "expected"),
    [(500, UpstreamFailedError), (429, ModelUnavailableError), (503, ModelUnavailableError)],
)
async def test_a_server_that_fails_may_have_begun_and_one_that_is_full_has_not(
    status: int, expected: type[ModelError]
) -> None:
    async with openai_memory("conversation") as server:
        server.fails_with = status
        assert await _failure(server.upstream()) is expected


async def test_a_server_that_is_full_may_ask_for_a_pause_until_a_date() -> None:
    async with openai_memory("responses") as server, contextlib.aclosing(server.upstream()) as upstream:
        server.fails_with, server.retry_after = 429, "Thu, 31 Dec 2099 23:59:59 GMT"
        with pytest.raises(ModelUnavailableError) as raised:
            await _said(await upstream.open(Setup()), UpstreamMessage(UserMessage.of("one")))
    assert (raised.value.retry_after_s or 0.0) > RETRY_AFTER_MAX_S


async def test_an_answer_is_made_as_it_was_wished() -> None:
    settings = ModelSettings(
        temperature=0.0, tokens_max=9, stop=("END",), response_format={"type": "json_object"}
    )
    for model, expected in (("gpt-4o", {"temperature": 0.0}), ("gpt-5", {})):
        async with openai_memory("responses") as server:
            async with contextlib.aclosing(
                OpenAIChain(model, api_key="key-1", base_url=server.url)
            ) as upstream:
                await _said(
                    await upstream.open(Setup()), UpstreamMessage(UserMessage.of("one"), settings=settings)
                )
            body = server.requests[-1][2]
        told = {
            name: body[name] for name in ("temperature", "max_output_tokens", "text", "stop") if name in body
        }
        assert told == {"max_output_tokens": 9, "text": {"format": {"type": "json_object"}}, **expected}


async def test_a_background_response_goes_on_over_new_connections() -> None:
    async with openai_memory("responses", is_background=True) as server:
        upstream = server.upstream()
        server.cuts = 2
        agent = await upstream.open(Setup())
        events = await _said(agent, UpstreamMessage(UserMessage.of("a first message of many words")))
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        await upstream.aclose()
    assert text == "a first message of many words"
    assert [(method, path) for method, path, _ in server.requests] == [
        ("POST", "/responses"),
        ("GET", "/responses/resp_1"),
        ("GET", "/responses/resp_1"),
    ]
    assert len(server.messages()) == 1


async def test_tools_of_the_host_are_asked_for_and_answered_in_the_chain() -> None:
    tool = ToolSpec("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
    async with openai_memory("responses") as server:
        upstream = server.upstream()
        server.asks = {"id": "call_7", "name": "read", "arguments": '{"path": "a"}'}
        agent = await upstream.open(Setup("be brief", (tool,)))
        first = await _said(agent, UpstreamMessage(UserMessage.of("one")))
        opened = next(event for event in first if isinstance(event, MessageTaken))
        resumed = await upstream.open(Setup("be brief", (tool,)), resume=opened.agent)
        await _said(resumed, UpstreamMessage(UserMessage(()), (ToolResult("call_7", "what stands in a"),)))
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


async def test_a_conversation_in_which_another_response_is_made_is_busy() -> None:
    async with openai_memory("conversation") as server:
        upstream = server.upstream()
        server.locked = 1
        agent = await upstream.open(Setup())
        with pytest.raises(UpstreamBusyError):
            await _said(agent, UpstreamMessage(UserMessage.of("one")))
        await _said(agent, UpstreamMessage(UserMessage.of("one")))
        await upstream.aclose()
    assert [told.text for told in server.messages()] == ["one"]


async def _opened(agent: UpstreamAgent, word: str) -> tuple[MessageTaken, str]:
    """Send a message, and return how it was taken and the answer."""
    events = await _said(agent, UpstreamMessage(UserMessage.of(word)))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return next(event for event in events if isinstance(event, MessageTaken)), text


@pytest.mark.parametrize("memory", ["responses", "conversation"])
async def test_a_server_that_does_not_name_what_it_continues_is_checked_once(memory: Memory) -> None:
    async with openai_memory(memory) as server, contextlib.aclosing(server.upstream()) as upstream:
        first, _ = await _opened(await upstream.open(Setup()), "one")
        server.is_silent = True
        agent = await upstream.open(Setup(), resume=first.agent)
        second, _ = await _opened(agent, "two")
        third, answer = await _opened(agent, "three")
        assert (second.resumed, third.resumed) == (first.agent, second.agent)
        assert answer == "one | two | three"
    checks = [body for _, path, body in server.requests if path == "/responses" and body["input"] == "ping"]
    assert len(checks) == 1


@pytest.mark.parametrize("memory", ["responses", "conversation"])
async def test_a_server_that_ignores_names_continues_nothing(memory: Memory) -> None:
    async with openai_memory(memory) as server, contextlib.aclosing(server.upstream()) as upstream:
        first, _ = await _opened(await upstream.open(Setup()), "one")
        server.is_silent = server.ignores_names = True
        opened, answer = await _opened(await upstream.open(Setup(), resume=first.agent), "two")
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


def test_no_types_of_the_package_are_worked_out_while_others_wait_for_the_loop() -> None:
    # In a process of its own: another test may have worked them out.
    done = subprocess.run(
        [sys.executable, "-c", ANSWERING], capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


async def test_a_conversation_without_a_name_is_not_gone_on_with() -> None:
    async with openai_memory("conversation") as server:
        server.is_nameless = True
        assert await _failure(server.upstream()) is UpstreamFailedError
        assert server.messages() == []
