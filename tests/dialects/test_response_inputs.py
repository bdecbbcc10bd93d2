"""Compaction and token counts, as OpenAI's own client requests them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from midstream.dialects.compacted_items import SUMMARY
from midstream.errors import ModelRejectedError
from midstream.history.messages import Text, UserMessage
from midstream.models.responses import ModelRequest
from midstream.testing.scripted_model import Response, text
from tests.dialects.gateway_serving import served

PIXEL = "data:image/png;base64,iVBORw0KGgo="
TALK: Any = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "We launch on Tuesday."},
            {"type": "input_image", "image_url": PIXEL, "detail": "auto"},
        ],
    },
    {"role": "assistant", "content": "On Tuesday, then."},
]


def summing(request: ModelRequest) -> Response:
    return text("launch: Tuesday" if "summary" in request.instructions else "going on")


async def test_a_compacted_conversation_continues_from_its_summary() -> None:
    async with served(summing) as gateway, gateway.openai() as client:
        compacted = await client.responses.compact(model="m", input=TALK)
        user, item = [each.to_dict(warnings=False) for each in compacted.output]
        assert (user["content"], item["type"]) == (TALK[0]["content"], "compaction")
        assert "We launch on Tuesday." in str(gateway.model.requests[0].history.entries)
        following: Any = [user, item, {"role": "user", "content": "And then?"}]
        response = await client.responses.create(model="m", input=following)
        assert response.output_text == "going on"
        *_, summary, newest = gateway.model.requests[-1].history.entries
        assert summary == UserMessage((Text(f"{SUMMARY}launch: Tuesday"),))
        assert "And then?" in str(newest)
        listed = await client.responses.input_items.list(response.id, order="asc")
        assert [each.to_dict() async for each in listed][1] == item
        again = await client.responses.compact(model="m", previous_response_id=response.id)
        texts = [each.to_dict(warnings=False).get("content") for each in again.output]
        assert texts[1:] == [[{"type": "input_text", "text": "And then?"}], None]


async def test_a_conversation_that_cannot_be_compacted_is_refused() -> None:
    async with served(summing) as gateway, gateway.openai() as client:
        with pytest.raises(openai.BadRequestError, match="model"):
            await client.post("/responses/compact", body={"input": "hi"}, cast_to=object)
        foreign: Any = [
            {"type": "compaction", "encrypted_content": "gAAAAA"},
            {"role": "user", "content": "hi"},
        ]
        with pytest.raises(openai.BadRequestError, match="compaction"):
            await client.responses.create(model="m", input=foreign)
        assert gateway.model.requests == []


async def test_the_failure_of_a_summary_is_that_of_the_request() -> None:
    async with served([[ModelRejectedError("no")]]) as gateway, gateway.openai(max_retries=0) as client:
        with pytest.raises(openai.BadRequestError):
            await client.responses.compact(model="m", input=TALK)


async def test_tokens_of_an_input_are_estimated_by_its_length() -> None:
    async with served(summing) as gateway, gateway.openai() as client:
        short = await client.responses.input_tokens.count(model="m", input="x" * 400)
        assert (short.input_tokens, short.object) == (100, "response.input_tokens")
        image = await client.responses.input_tokens.count(model="m", input=TALK)
        assert 1000 < image.input_tokens < 1100
        stored = await client.responses.create(model="m", input="x" * 4000)
        behind = await client.responses.input_tokens.count(
            model="m", input="x" * 400, previous_response_id=stored.id
        )
        assert 1100 <= behind.input_tokens < 1200
        assert len(gateway.model.requests) == 1
