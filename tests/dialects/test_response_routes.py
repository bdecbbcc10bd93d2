"""Responses by their id, as OpenAI's client requests them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from midstream.dialects import live_responses
from midstream.errors import ModelRejectedError
from midstream.models.responses import TextDelta
from midstream.store.memory import Memory, MemoryStore
from midstream.testing.scripted_model import Gate, text
from tests.dialects.gateway_serving import asgi_client, make_gateway, served
from tests.dialects.test_live_responses import WORDS, gated_response, until
from tests.spec import spec


async def await_end(client: openai.AsyncOpenAI, response_id: str) -> Any:  # noqa: ANN401 - the SDK's own
    """Retrieve a response until it has ended."""
    async with asyncio.timeout(60):
        while True:
            response = await client.responses.retrieve(response_id)
            if response.status not in ("queued", "in_progress"):
                return response


@spec("REUSE-75")
async def test_a_background_answer_completes_without_readers() -> None:
    may_continue = asyncio.Event()
    async with served([gated_response(may_continue)], grace_s=0.0) as gateway, gateway.openai() as client:
        response = await client.responses.create(model="m", input="hi", background=True)
        assert (response.status, response.background) == ("in_progress", True)
        may_continue.set()
        whole = await await_end(client, response.id)
        assert (whole.status, whole.output_text) == ("completed", WORDS)
        assert (response.completed_at, whole.completed_at is not None) == (None, True)
        stream = await client.responses.retrieve(response.id, stream=True)
        last: Any = [event async for event in stream][-1]
        assert last.response == whole


@spec("REUSE-75")
async def test_a_stream_continues_after_the_last_received_event() -> None:
    may_continue = asyncio.Event()
    async with served([gated_response(may_continue)]) as gateway, gateway.openai() as client:
        seen: list[Any] = []
        stream = await client.responses.create(model="m", input="hi", background=True, stream=True)
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        may_continue.set()
        rest = await client.responses.retrieve(
            seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
        )
        seen += [event async for event in rest]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        assert "".join(e.delta for e in seen if e.type == "response.output_text.delta") == WORDS
        assert seen[-1].type == "response.completed"


@spec("REUSE-75")
async def test_a_stream_can_be_replayed_after_its_run_was_removed_from_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served([text(WORDS)]) as gateway, gateway.openai() as client:
        first = await client.responses.create(model="m", input="hi", stream=True)
        live = [event async for event in first]
        response_id: str = live[0].response.id  # type: ignore[union-attr]  # the first one is `created`
        monkeypatch.setattr(live_responses, "KEPT_S", -1.0)
        await client.responses.create(model="m", input="another")
        assert gateway.gateway.responses.get(response_id) is None
        again = [event async for event in await client.responses.retrieve(response_id, stream=True)]
        assert again == live
        rest = await client.responses.retrieve(response_id, stream=True, starting_after=3)
        assert [event async for event in rest] == live[4:]
        assert (await client.responses.retrieve(response_id)).output_text == WORDS


@spec("REUSE-75")
async def test_a_background_answer_is_cancelled_on_request() -> None:
    async with served([gated_response(asyncio.Event())]) as gateway, gateway.openai() as client:
        stream = await client.responses.create(model="m", input="hi", background=True, stream=True)
        first = await anext(aiter(stream))
        response_id: str = first.response.id  # type: ignore[union-attr]  # the first one is `created`
        await until(lambda: len(gateway.model.requests) == 1)
        assert (await client.responses.cancel(response_id)).status == "cancelled"
        assert (await client.responses.retrieve(response_id)).status == "cancelled"
        assert (await client.responses.cancel(response_id)).status == "cancelled"


async def test_only_a_background_answer_can_be_cancelled() -> None:
    async with served([text(WORDS)]) as gateway, gateway.openai() as client:
        response = await client.responses.create(model="m", input="hi")
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(response.id)


async def test_a_failed_background_response_has_its_error() -> None:
    async with served([[ModelRejectedError("never")]]) as gateway, gateway.openai() as client:
        response = await client.responses.create(model="m", input="hi", background=True)
        failed = await await_end(client, response.id)
        assert (failed.status, failed.error.code) == ("failed", "model_rejected")


@pytest.mark.slow
@spec("REUSE-75")
async def test_a_deleted_response_is_gone() -> None:
    async with served([gated_response(asyncio.Event())]) as gateway, gateway.openai() as client:
        response = await client.responses.create(model="m", input="hi", background=True)
        await client.responses.delete(response.id)
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await ask(response.id)


async def test_an_unstored_response_cannot_be_retrieved() -> None:
    async with served([text(WORDS)]) as gateway, gateway.openai() as client:
        response = await client.responses.create(model="m", input="hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)
        chat = await gateway.http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}
        )
        assert (await gateway.http.get(f"/v1/responses/{chat.json()['id']}")).status_code == 404


async def test_the_items_of_a_response_are_its_own_and_not_earlier_ones() -> None:
    may_continue = asyncio.Event()
    async with served([gated_response(may_continue)]) as gateway, gateway.openai() as client:
        first = await client.responses.create(model="m", input="one", background=True)
        assert len((await client.responses.input_items.list(first.id)).data) == 1
        may_continue.set()
        await await_end(client, first.id)
        second = await client.responses.create(model="m", input="two", previous_response_id=first.id)
        listed = (await client.responses.input_items.list(second.id)).data
        assert [item.model_dump()["content"][0]["text"] for item in listed] == ["two"]


async def test_items_are_listed_in_pages() -> None:
    async with served([text(WORDS)]) as gateway, gateway.openai() as client:
        sent: Any = [{"role": "user", "content": f"{number}"} for number in range(5)]
        response = await client.responses.create(model="m", input=sent)
        pages = client.responses.input_items.list(response.id, limit=2, order="asc")
        words = [json.loads(item.model_dump_json())["content"][0]["text"] async for item in pages]
        assert words == ["0", "1", "2", "3", "4"]
        newest = await client.responses.input_items.list(response.id, limit=1)
        assert (newest.data[0].id, newest.has_more) == (
            (await client.responses.input_items.list(response.id)).data[0].id,
            True,
        )
        answer = await gateway.http.get(f"/v1/responses/{response.id}/input_items?limit=many")
        assert answer.status_code == 400
        assert (await gateway.http.get(f"/v1/responses/{response.id}/elsewhere")).status_code == 404


@spec("REUSE-75")
async def test_a_response_survives_its_gateway() -> None:
    memory = Memory()
    responses = {"hi": text(WORDS)}
    async with asgi_client(make_gateway(_AnswersByWords(responses), store=MemoryStore(memory))) as client:
        made = (await client.post("/v1/responses", json={"input": "hi", "model": "m"})).json()
    async with asgi_client(make_gateway(_AnswersByWords(responses), store=MemoryStore(memory))) as client:
        assert (await client.get(f"/v1/responses/{made['id']}")).json() == made
        following = {"input": "more", "model": "m", "previous_response_id": made["id"]}
        assert (await client.post("/v1/responses", json=following)).status_code == 200


async def test_an_unstored_response_after_a_stored_one_has_its_own_id() -> None:
    async with served([text("one")]) as gateway, gateway.openai() as client:
        stored = await client.responses.create(model="m", input="hi")
        following = await client.responses.create(
            model="m", input="more", previous_response_id=stored.id, store=False
        )
        assert following.id != stored.id
        assert len(gateway.model.requests[-1].history.entries) == 3
        assert (await client.responses.retrieve(stored.id)).previous_response_id is None


@spec("REUSE-75")
async def test_a_response_of_one_process_is_read_and_cancelled_at_another() -> None:
    memory = Memory()
    first = make_gateway(
        _AnswersByWords({"hi": [TextDelta("half"), Gate(asyncio.Event())]}), store=MemoryStore(memory)
    )
    second = make_gateway(_AnswersByWords({}), store=MemoryStore(memory))
    async with asgi_client(first) as ours, asgi_client(second) as theirs:
        made = (await ours.post("/v1/responses", json={"input": "hi", "background": True})).json()
        path = f"/v1/responses/{made['id']}"
        assert (await theirs.get(path)).json()["status"] == "in_progress"
        following = {"input": "more", "previous_response_id": made["id"]}
        assert (await theirs.post("/v1/responses", json=following)).status_code == 400
        reading = asyncio.create_task(theirs.get(f"{path}?stream=true"))
        await until(lambda: any(live.readers for live in second.responses.all()))
        assert (await theirs.post(f"{path}/cancel")).json()["status"] == "cancelled"
        assert "response.cancelled" in (await reading).text
        assert (await ours.get(path)).json()["status"] == "cancelled"


class _AnswersByWords:
    """Answers by the first words of a user."""

    name = "told"

    def __init__(self, responses: dict[str, Any]) -> None:
        self._responses = responses

    async def stream(self, request: Any) -> Any:  # noqa: ANN401 - a fake
        words = request.history.entries[-1].parts[0].text
        for step in self._responses.get(words, text("done")):
            if isinstance(step, Gate):
                await step.event.wait()
            else:
                yield step
