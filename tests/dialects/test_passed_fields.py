"""Fields that a stateless upstream supports reach it, and are returned in the answer of the unmodified SDKs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from midstream.agents import Pooled
from midstream.agents.upstream_abilities import Abilities
from midstream.models.anthropic_messages import AnthropicMessages
from midstream.models.model import Model
from midstream.models.openai_compatible import OpenAICompatible
from midstream.models.openai_responses import OpenAIResponses
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel
from midstream.testing.scripted_upstream import ScriptedUpstream
from tests.dialects.gateway_serving import ServedGateway, make_gateway, serving
from tests.models.chat_server import Answer, ChatServer, chat_server, delta, stream
from tests.models.responses_server import HELLO, responses_server

Json = dict[str, Any]
ASK: list[Any] = [{"role": "user", "content": "hi"}]


def events(*listed: Json) -> Answer:
    """Answer with events of Anthropic's Messages."""
    return Answer(
        [b"event: %b\ndata: %b\n\n" % (each["type"].encode(), json.dumps(each).encode()) for each in listed]
    )


def message(stop: Json) -> Answer:
    """Answer with a message that has this end."""
    head = {"id": "m1", "type": "message", "role": "assistant", "model": "m-1", "content": []}
    return events(
        {"type": "message_start", "message": {**head, "usage": {"input_tokens": 1, "output_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "one"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    )


@contextlib.asynccontextmanager
async def serve_before(model: Model) -> AsyncIterator[ServedGateway]:
    async with serving(make_gateway(model), ScriptedModel(())) as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def chat_upstream(*answers: Answer) -> AsyncIterator[tuple[ServedGateway, ChatServer]]:
    """Serve a gateway in front of chat completions."""
    async with chat_server(*answers) as server, serve_before(OpenAICompatible(server.url, "m")) as gateway:
        yield gateway, server


STOPPED: Json = {"stop_reason": "stop_sequence", "stop_sequence": "END"}


async def test_a_stop_sequence_reaches_a_provider_of_messages_and_is_in_the_answer() -> None:
    async with (
        chat_server(message(STOPPED), message(STOPPED), message(STOPPED), path="/v1/messages") as server,
        serve_before(AnthropicMessages(server.url, "m")) as gateway,
        gateway.anthropic(max_retries=0) as client,
    ):
        sent: Json = {"model": "m", "max_tokens": 9, "messages": ASK, "stop_sequences": ["END"]}
        whole = await client.messages.create(**sent)
        assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "END")
        async with client.messages.stream(**{**sent, "max_tokens": 8}) as streamed:
            last = await streamed.get_final_message()
        assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", "END")
        async with gateway.openai(max_retries=0) as other:
            answer = await other.chat.completions.create(model="m", messages=ASK, stop="END")
        assert answer.choices[0].finish_reason == "stop"
        assert [body["stop_sequences"] for body in server.bodies] == [["END"]] * 3


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"stop_reason": "END"}, ("stop_sequence", "END")),  # vLLM reports it
        ({"stop_reason": 128001}, ("end_turn", None)),
        ({}, ("end_turn", None)),
    ],
)
async def test_a_stop_sequence_reaches_a_provider_of_chat_completions(
    extra: Json, expected: tuple[str, str | None]
) -> None:
    end = delta("stop")
    end["choices"][0] |= extra
    answer = stream(delta(content="one"), end)
    async with chat_upstream(answer, answer) as (gateway, server):
        async with gateway.openai(max_retries=0) as client:
            chat = await client.chat.completions.create(model="m", messages=ASK, stop=["END"])
        async with gateway.anthropic(max_retries=0) as anthropic:
            whole = await anthropic.messages.create(
                model="m", max_tokens=9, messages=ASK, stop_sequences=["END"]
            )
        assert chat.choices[0].finish_reason == "stop"
        assert (whole.stop_reason, whole.stop_sequence) == expected
        assert [body["stop"] for body in server.bodies] == [["END"]] * 2


async def test_an_agent_does_not_support_stop_sequences() -> None:
    app = make_gateway(Pooled(ScriptedUpstream(), store := MemoryStore()), store=store)
    async with (
        serving(app, ScriptedModel(())) as gateway,
        gateway.openai(max_retries=0) as client,
        gateway.anthropic(max_retries=0) as other,
    ):
        chat = await client.chat.completions.with_raw_response.create(model="m", messages=ASK, stop="END")
        whole = await other.messages.with_raw_response.create(
            model="m", max_tokens=9, messages=ASK, stop_sequences=["END"]
        )
        assert chat.headers["x-midstream-ignored"] == "stop"
        assert whole.headers["x-midstream-ignored"] == "max_tokens,stop_sequences"


SCHEMA: Json = {
    "type": "object",
    "properties": {"at": {"type": "string"}},
    "required": ["at"],
    "additionalProperties": False,
}


def function(name: str, **more: object) -> Json:
    """Return a function of chat completions."""
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **more}}


def flat(name: str, **more: object) -> Any:  # noqa: ANN401 - a tool of the Responses API
    """Return a function of the Responses API."""
    return {"type": "function", "name": name, "parameters": SCHEMA, **more}


async def test_strict_functions_reach_a_provider_of_chat_completions() -> None:
    answer = stream(delta(content="one"), delta("stop"))
    tools: list[Any] = [function("a", strict=True), function("b", strict=False), function("c")]
    async with chat_upstream(answer, answer) as (gateway, server), gateway.openai(max_retries=0) as client:
        chat = await client.chat.completions.with_raw_response.create(model="m", messages=ASK, tools=tools)
        assert "x-midstream-ignored" not in chat.headers
        sent: list[Any] = [flat("a", strict=True), flat("b", strict=False), flat("c")]
        response = await client.responses.create(model="m", input="hi", tools=sent)
        assert [each.model_dump()["strict"] for each in response.tools] == [True, False, None]
        listed = [[each["function"].get("strict", "-") for each in body["tools"]] for body in server.bodies]
        assert listed == [[True, False, "-"]] * 2


async def test_strict_functions_reach_a_provider_of_responses() -> None:
    async with (
        responses_server(HELLO, HELLO) as server,
        serve_before(OpenAIResponses(server.url, "m")) as gateway,
        gateway.openai(max_retries=0) as client,
    ):
        sent: list[Any] = [flat("a", strict=True), flat("b", strict=False)]
        response = await client.responses.create(model="m", input="hi", tools=sent)
        assert [each.model_dump()["strict"] for each in response.tools] == [True, False]
        tools: list[Any] = [function("a", strict=True), function("b")]
        await client.chat.completions.create(model="m", messages=ASK, tools=tools)
        assert [[each["strict"] for each in body["tools"]] for body in server.bodies] == [[True, False]] * 2


@pytest.mark.parametrize(("model", "is_granted"), [("claude-sonnet-4-5", True), ("claude-sonnet-4-0", False)])
async def test_strict_functions_reach_anthropic_models_that_support_them(
    model: str, *, is_granted: bool
) -> None:
    ended = message({"stop_reason": "end_turn", "stop_sequence": None})
    async with (
        chat_server(ended, path="/v1/messages") as server,
        serve_before(AnthropicMessages(server.url, model)) as gateway,
        gateway.anthropic(max_retries=0) as client,
    ):
        answer = await client.messages.with_raw_response.create(
            model="m",
            max_tokens=9,
            messages=ASK,
            tools=[{"name": "a", "input_schema": SCHEMA, "strict": True}],
        )
        assert server.bodies[0]["tools"][0].get("strict", False) is is_granted
        assert answer.headers.get("x-midstream-ignored") == (None if is_granted else "tools.strict")


async def test_an_agent_does_not_support_strict_functions() -> None:
    upstream = ScriptedUpstream(abilities=Abilities(takes_tools=True))
    app = make_gateway(Pooled(upstream, store := MemoryStore()), store=store)
    async with serving(app, ScriptedModel(())) as gateway, gateway.openai(max_retries=0) as client:
        raw = await client.responses.with_raw_response.create(
            model="m", input="hi", tools=[flat("a", strict=True)]
        )
        assert raw.headers["x-midstream-ignored"] == "tools.strict"
        assert raw.parse().tools[0].model_dump()["strict"] is None


PNG = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize("is_responses", [False, True])
async def test_the_detail_of_an_image_reaches_the_provider(*, is_responses: bool) -> None:
    """From each API of OpenAI to each, with one image of each detail in one message."""
    details = ["low", "high", "auto", None]
    in_chat = [
        {"type": "image_url", "image_url": {"url": PNG} | ({"detail": each} if each else {})}
        for each in details
    ]
    in_responses = [
        {"type": "input_image", "image_url": PNG} | ({"detail": each} if each else {}) for each in details
    ]
    response = stream(delta(content="one"), delta("stop"))
    async with (
        chat_server(response, response) as chat_upstream,
        responses_server(HELLO, HELLO) as other,
        serve_before(
            OpenAIResponses(other.url, "m") if is_responses else OpenAICompatible(chat_upstream.url, "m")
        ) as gateway,
        gateway.openai(max_retries=0) as client,
    ):
        chat: list[Any] = [{"role": "user", "content": in_chat}]
        await client.chat.completions.create(model="m", messages=chat)
        items: list[Any] = [{"role": "user", "content": in_responses}]
        await client.responses.create(model="m", input=items)
        if is_responses:
            sent = [[part["detail"] for part in body["input"][0]["content"]] for body in other.bodies]
            assert sent == [["low", "high", "auto", "auto"]] * 2
        else:
            listed = [body["messages"][0]["content"] for body in chat_upstream.bodies]
            images = [[part["image_url"].get("detail") for part in parts] for parts in listed]
            assert images == [["low", "high", None, None]] * 2


@pytest.mark.parametrize("n", [0, 2, 3])
async def test_a_request_for_several_answers_is_refused(n: int) -> None:
    async with chat_upstream() as (gateway, server), gateway.openai(max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as met:
            await client.chat.completions.create(model="m", messages=ASK, n=n)
        body: Any = met.value.body
        assert (met.value.param, body["message"]) == ("n", "one answer a request: `n` is 1")
        assert server.bodies == []


async def test_probabilities_of_tokens_are_reported_as_ignored() -> None:
    answer = stream(delta(content="one"), delta("stop"))
    async with chat_upstream(answer, answer) as (gateway, server), gateway.openai(max_retries=0) as client:
        chat = await client.chat.completions.with_raw_response.create(
            model="m", messages=ASK, n=1, logprobs=True, top_logprobs=2
        )
        assert chat.headers["x-midstream-ignored"] == "logprobs,top_logprobs"
        assert chat.parse().choices[0].logprobs is None
        response = await client.responses.with_raw_response.create(
            model="m", input="hi", top_logprobs=2, include=["message.output_text.logprobs"]
        )
        assert response.headers["x-midstream-ignored"] == "include,top_logprobs"
        assert response.parse().top_logprobs == 0
        assert all({"n", "logprobs", "top_logprobs"}.isdisjoint(body) for body in server.bodies)
