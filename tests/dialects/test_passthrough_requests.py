"""Embeddings and legacy completions of the unmodified SDK, through a gateway to a server that has them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from midstream.agents import Pooled
from midstream.dialects.passthrough_requests import HELD_BYTES_MAX
from midstream.dialects.usage_ledger import read_usage
from midstream.history.messages import Usage
from midstream.models.anthropic_messages import AnthropicMessages
from midstream.models.http_limits import HttpLimits
from midstream.models.model import Model
from midstream.models.openai_compatible import OpenAICompatible
from midstream.models.openai_responses import OpenAIResponses
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import ScriptedModel
from midstream.testing.scripted_upstream import ScriptedUpstream
from tests.dialects.gateway_serving import WAIT_S, ServedGateway, chat_request, make_gateway, serving
from tests.models.chat_server import Answer, ChatServer, chat_server, refusal, silence, stream

Json = dict[str, Any]
VECTORS: Json = {
    "object": "list",
    "model": "e-1",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.25]}],
    "usage": {"prompt_tokens": 2, "total_tokens": 2},
}
UPSTREAM_KEY = "key-of-the-upstream"


def whole(body: Json, *, pieces: int = 1) -> Answer:
    """Answer with a JSON body, in this many pieces."""
    written = json.dumps(body).encode()
    size = -(-len(written) // pieces)
    return Answer(
        [written[at : at + size] for at in range(0, len(written), size)], content_type="application/json"
    )


def completion(text: str, finish: str | None = None) -> Json:
    """Return a legacy completion, or a chunk of one."""
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "c-1", "choices": [choice]}


@contextlib.asynccontextmanager
async def serve_before(model: Model, **options: Any) -> AsyncIterator[ServedGateway]:  # noqa: ANN401 - the gateway's own
    async with serving(make_gateway(model, **options), ScriptedModel(())) as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def upstream_of(
    *answers: Answer, path: str = "/v1/completions", limits: HttpLimits | None = None
) -> AsyncIterator[tuple[ServedGateway, ChatServer]]:
    """Serve a gateway in front of a server with one path."""
    async with chat_server(*answers, path=path) as server:
        model = OpenAICompatible(server.url, "m", UPSTREAM_KEY, limits=limits)
        async with serve_before(model) as gateway:
            yield gateway, server


@pytest.mark.parametrize("kind", [OpenAICompatible, OpenAIResponses])
async def test_embeddings_are_passed_on_and_nothing_is_stored(
    kind: type[OpenAICompatible | OpenAIResponses],
) -> None:
    async with chat_server(whole(VECTORS, pieces=3), path="/v1/embeddings") as server:
        model = kind(server.url, "m", UPSTREAM_KEY)
        async with (
            serve_before(model, store=(store := MemoryStore())) as gateway,
            gateway.openai(max_retries=0) as client,
        ):
            made = await client.embeddings.create(
                model="e-1", input=["hi"], dimensions=2, encoding_format="float"
            )
            assert (made.data[0].embedding, made.model, made.usage.total_tokens) == ([0.5, -1.25], "e-1", 2)
            assert server.bodies == [
                {"model": "e-1", "input": ["hi"], "dimensions": 2, "encoding_format": "float"}
            ]
            assert server.headers[0]["authorization"] == f"Bearer {UPSTREAM_KEY}"
            assert gateway.gateway.open_streams == 0
            assert [each async for each in store.list()] == []
            chat = await gateway.http.post("/v1/chat/completions", json=chat_request("hi"))
            assert chat.is_error  # this server has no chat completions, but a chat is stored
            assert [each async for each in store.list()]


async def test_a_legacy_completion_is_passed_on_whole_and_as_a_stream() -> None:
    gate = asyncio.Event()
    streamed = stream(completion("one"), completion(" two", "stop"))
    streamed.gate = gate
    async with (
        upstream_of(whole(completion("one two", "stop")), streamed) as (gateway, server),
        gateway.openai(max_retries=0) as client,
    ):
        answer = await client.completions.create(model="c-1", prompt="say", suffix="!", n=1, logprobs=2)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one two", "stop")
        assert server.bodies[0] == {"model": "c-1", "prompt": "say", "suffix": "!", "n": 1, "logprobs": 2}
        texts = []
        async for chunk in await client.completions.create(model="c-1", prompt="say", stream=True):
            texts.append(chunk.choices[0].text)
            gate.set()  # the server sends its last piece only when the first ones have arrived
        assert texts == ["one", " two"]


async def test_the_tokens_of_passed_on_requests_are_those_of_the_server() -> None:
    counted = {
        "prompt_tokens": 30,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 20, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    answers = [
        whole({**completion('"usage": {', "stop"), "usage": counted}, pieces=9),
        stream(completion("one", "stop"), {**completion(""), "choices": [], "usage": counted}),
        whole(completion('"usage": {"prompt_tokens": 7}', "stop")),  # the text of a model is not a count
        refusal(500),
    ]
    store = MemoryStore()
    async with chat_server(*answers, path="/v1/completions") as server:
        model = OpenAICompatible(server.url, "m", UPSTREAM_KEY)
        async with serve_before(model, store=store) as gateway, gateway.openai(max_retries=0) as client:
            await client.completions.create(model="c", prompt="say")
            async for _ in await client.completions.create(model="c", prompt="say", stream=True):
                pass
            await client.completions.create(model="c", prompt="say")
            with pytest.raises(openai.InternalServerError):
                await client.completions.create(model="c", prompt="say")
            entries = (await read_usage(store)).entries.values()
    expected = [Usage(30, 4, 20), Usage(30, 4, 20), Usage(), Usage()]
    assert [each.usage for each in sorted(entries, key=lambda each: each.at)] == expected
    assert all(each.is_ended for each in entries)


async def test_the_bytes_of_a_stream_are_those_of_the_server() -> None:
    """Cut within events and within characters, with an event above the buffering limit."""
    words = json.dumps(completion("é" * HELD_BYTES_MAX), ensure_ascii=False)
    body = f": ping\n\ndata: {words}\n\ndata: {words}\r\n\r\ndata: [DONE]\n\n".encode() + b"data: rest"
    cuts = [0, 3, 7, 8, 9, 40, 1_000_001, len(body) - 25, len(body) - 4, len(body)]
    answer = Answer([body[start:end] for start, end in itertools.pairwise(cuts)])
    async with (
        upstream_of(answer) as (gateway, _),
        gateway.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as raw,
    ):
        assert raw.headers["content-type"] == "text/event-stream"
        assert b"".join([piece async for piece in raw.aiter_bytes()]) == body


async def test_a_stream_that_breaks_off_ends_with_an_error_event() -> None:
    half = json.dumps(completion("lost")).encode()[:30]
    answer = stream(completion("one"), b"data: " + half, ending="cut")
    async with upstream_of(answer) as (gateway, _), gateway.openai(max_retries=0) as client:
        chunks = aiter(await client.completions.create(model="c-1", prompt="say", stream=True))
        assert (await anext(chunks)).choices[0].text == "one"
        with pytest.raises(openai.APIError, match="the connection to openai-compatible:m failed"):
            await anext(chunks)


async def test_an_incomplete_whole_answer_is_an_error() -> None:
    answer = whole(VECTORS, pieces=2)
    answer.pieces.pop()
    answer.ending = "cut"
    async with (
        upstream_of(answer, path="/v1/embeddings") as (gateway, _),
        gateway.openai(max_retries=0) as client,
    ):
        with pytest.raises((openai.APIConnectionError, openai.APIStatusError)):
            await client.embeddings.create(model="e-1", input="hi")


@pytest.mark.parametrize(
    ("answer", "status", "code"),
    [
        (refusal(404), 404, "model_not_found"),
        (refusal(405), 404, "model_not_found"),
        (refusal(404, {"code": "model_not_found", "message": "no"}), 404, "model_not_found"),
        (refusal(401, {"code": "invalid_api_key", "message": "no"}), 403, "model_access"),
        (refusal(400, {"message": "too many inputs"}), 400, "model_rejected"),
        (refusal(429, **{"retry-after": "7"}), 429, "rate_limit_exceeded"),
        (refusal(503), 503, "model_overloaded"),
    ],
)
async def test_a_refusal_of_the_server_is_one_of_the_gateway(answer: Answer, status: int, code: str) -> None:
    async with (
        upstream_of(answer, path="/v1/embeddings") as (gateway, _),
        gateway.openai(max_retries=0) as client,
    ):
        with pytest.raises(openai.APIStatusError) as met:
            await client.embeddings.create(model="e-1", input="hi")
        assert (met.value.status_code, met.value.code) == (status, code)
        assert UPSTREAM_KEY not in met.value.message


async def test_a_silent_server_is_abandoned() -> None:
    limits = HttpLimits(connect_s=0.5, first_byte_s=0.25)
    async with upstream_of(silence(), limits=limits) as (gateway, _), gateway.openai(max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as met:
            await client.completions.create(model="c-1", prompt="say")
        assert met.value.status_code == 504


async def test_a_disconnecting_client_ends_the_request_at_the_server() -> None:
    answer = stream(completion("one"), ending="hang")
    async with upstream_of(answer) as (gateway, server), gateway.openai(max_retries=0) as client:
        streamed = await client.completions.create(model="c-1", prompt="say", stream=True)
        assert (await anext(aiter(streamed))).choices[0].text == "one"
        assert gateway.gateway.open_streams == 1
        await streamed.close()
        await asyncio.wait_for(server.left.wait(), WAIT_S)


@pytest.mark.parametrize("name", ["embeddings", "completions"])
async def test_an_upstream_without_these_apis_is_reported(name: str) -> None:
    pooled = Pooled(ScriptedUpstream(), store := MemoryStore())
    for model in (pooled, AnthropicMessages("http://127.0.0.1:9/v1", "m")):
        async with serve_before(model, store=store if model is pooled else None) as gateway:
            answer = await gateway.http.post(f"/v1/{name}", json={"model": "m", "input": "a"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "not_found")
            assert error["message"] == f"the upstream of this gateway does not support {name}"


async def test_keys_and_models_are_checked_as_for_every_request() -> None:
    async with chat_server(path="/v1/embeddings") as server:
        async with serve_before(OpenAICompatible(server.url, "m"), names=["e-1"]) as gateway:
            post = gateway.http.post
            strange = await post(
                "/v1/embeddings", json={"model": "e-1"}, headers={"authorization": "Bearer x"}
            )
            other = await post("/v1/embeddings", json={"model": "other"})
            no_json = await post("/v1/embeddings", content=b"[", headers={"content-type": "application/json"})
            read = await gateway.http.get("/v1/embeddings")
            gateway.gateway.drain()
            late = await post("/v1/embeddings", json={"model": "e-1"})
        answers = (strange, other, no_json, read, late)
        assert [each.status_code for each in answers] == [401, 404, 400, 405, 503]
        assert server.bodies == []
