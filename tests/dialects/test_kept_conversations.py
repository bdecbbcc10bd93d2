"""Conversations stored by the gateway, as OpenAI's own client uses them."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from midstream.models.responses import ModelRequest
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.scripted_model import Response, ScriptedModel, calls, text
from tests.dialects.gateway_serving import make_gateway, served, serving
from tests.dialects.test_application_sessions import LaterWorld
from tests.dialects.test_live_responses import gated_response


def counting(request: ModelRequest) -> Response:
    return text(f"answer {len(request.history.entries)}")


def user(words: str) -> Any:  # noqa: ANN401 - a parameter of the SDK
    return {"type": "message", "role": "user", "content": words}


async def texts_in(client: openai.AsyncOpenAI, name: str) -> list[str]:
    items = client.conversations.items.list(name, order="asc")
    return [part.text async for item in items for part in getattr(item, "content", [])]


async def test_responses_continue_their_conversation_and_are_added_to_it() -> None:
    async with served(counting) as gateway, gateway.openai() as client:
        made = await client.conversations.create(items=[user("before")])
        first = await client.responses.create(model="m", input="one", conversation=made.id)
        assert (first.output_text, first.conversation and first.conversation.id) == ("answer 2", made.id)
        await client.conversations.items.create(made.id, items=[user("between")])
        second = await client.responses.create(model="m", input="two", conversation={"id": made.id})
        assert second.output_text == "answer 5"
        texts = ["before", "one", "answer 2", "between", "two", "answer 5"]
        assert await texts_in(client, made.id) == texts
        listed = [item async for item in client.conversations.items.list(made.id, order="asc")]
        await client.conversations.items.delete(listed[1].id or "", conversation_id=made.id)
        count = await client.responses.input_tokens.count(model="m", input="x" * 400, conversation=made.id)
        assert count.input_tokens > 100
        third = await client.responses.create(model="m", input="three", conversation=made.id)
        assert third.output_text == "answer 6"
        assert "'one'" not in str(gateway.model.requests[-1].history.entries)
        assert await texts_in(client, made.id) == [texts[0], *texts[2:], "three", "answer 6"]
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", input="x", conversation=made.id, store=False)


async def test_the_results_of_a_call_reach_it_in_its_conversation() -> None:
    tool: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}
    async with served([calls(("c1", "look", "{}")), text("seen")]) as gateway, gateway.openai() as client:
        made = await client.conversations.create()
        await client.responses.create(model="m", input="look", tools=[tool], conversation=made.id)
        output: Any = [{"type": "function_call_output", "call_id": "c1", "output": "rain"}]
        answer = await client.responses.create(model="m", input=output, tools=[tool], conversation=made.id)
        assert answer.output_text == "seen"
        kinds = [item.type async for item in client.conversations.items.list(made.id, order="asc")]
        assert kinds == ["message", "function_call", "function_call_output", "message"]
        assert len(gateway.model.requests[-1].history.entries) == 2


async def test_a_conversation_makes_one_response_at_a_time() -> None:
    may_continue = asyncio.Event()
    async with served([gated_response(may_continue)]) as gateway, gateway.openai(max_retries=0) as client:
        made = await client.conversations.create()
        running = await client.responses.create(model="m", input="hi", background=True, conversation=made.id)
        with pytest.raises(openai.ConflictError, match="another response"):
            await client.responses.create(model="m", input="more", conversation=made.id)
        may_continue.set()
        stream = await client.responses.retrieve(running.id, stream=True)
        assert [event.type async for event in stream][-1] == "response.completed"


async def test_a_conversation_survives_its_gateway() -> None:
    memory = Memory()
    for words in ("one", "two"):
        model = ScriptedModel(counting)
        async with (
            serving(make_gateway(model, store=MemoryStore(memory)), model) as gateway,
            gateway.openai() as client,
        ):
            if words == "one":
                made = await client.conversations.create()
            await client.responses.create(model="m", input=words, conversation=made.id)
            texts = await texts_in(client, made.id)
    assert texts == ["one", "answer 1", "two", "answer 3"]


async def test_a_conversation_keeps_its_items_when_a_response_is_deleted() -> None:
    async with served(counting) as gateway, gateway.openai() as client:
        made = await client.conversations.create()
        first = await client.responses.create(model="m", input="one", conversation=made.id)
        await client.conversations.items.create(made.id, items=[user("between")])
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        second = await client.responses.create(model="m", input="two", conversation=made.id)
        assert second.output_text == "answer 4"
        assert await texts_in(client, made.id) == ["one", "answer 1", "between", "two", "answer 4"]


async def test_a_conversation_ends_with_its_responses_although_items_were_added_later() -> None:
    """Otherwise the next request would get a conversation without them."""
    world = LaterWorld()
    async with served(counting, world=world, kept_s=100.0) as gateway, gateway.openai() as client:
        made = await client.conversations.create()
        await client.responses.create(model="m", input="one", conversation=made.id)
        world.ahead_s = 60.0
        await client.conversations.items.create(made.id, items=[user("between")])
        world.ahead_s = 120.0
        host = gateway.gateway._durable.host
        (info,) = [info async for info in host.store.list()]
        await host.put_to_sleep(info.session)
        await host.tidy(info.session)
        with pytest.raises(openai.NotFoundError, match="does not exist, or is too old"):
            await client.responses.create(model="m", input="two", conversation=made.id)
        assert len(gateway.model.requests) == 1


async def test_a_conversation_without_a_response_is_kept_after_its_last_change() -> None:
    world = LaterWorld()
    async with served(counting, world=world, kept_s=100.0) as gateway, gateway.openai() as client:
        made = await client.conversations.create()
        world.ahead_s = 60.0
        await client.conversations.items.create(made.id, items=[user("before")])
        world.ahead_s = 120.0
        answer = await client.responses.create(model="m", input="one", conversation=made.id)
        assert answer.output_text == "answer 2"
