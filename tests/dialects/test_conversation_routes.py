"""Conversations by their id, as OpenAI's own client uses them."""

from __future__ import annotations

import openai
import pytest

from tests.dialects.gateway_serving import served
from tests.dialects.test_kept_conversations import counting, texts_in, user


async def test_a_conversation_is_created_changed_and_deleted() -> None:
    async with served(counting) as gateway, gateway.openai() as client:
        made = await client.conversations.create(metadata={"topic": "a"}, items=[user("one")])
        assert (await client.conversations.retrieve(made.id)) == made
        changed = await client.conversations.update(made.id, metadata={"topic": "b"})
        assert (changed.id, changed.metadata) == (made.id, {"topic": "b"})
        added = await client.conversations.items.create(made.id, items=[user("two"), user("three")])
        assert await texts_in(client, made.id) == ["one", "two", "three"]
        item = await client.conversations.items.retrieve(added.data[0].id or "", conversation_id=made.id)
        assert item == added.data[0]
        await client.conversations.items.delete(item.id or "", conversation_id=made.id)
        assert await texts_in(client, made.id) == ["one", "three"]
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="m", input="hi", conversation=made.id)


async def test_an_invalid_conversation_request_is_refused() -> None:
    async with served(counting) as gateway, gateway.openai() as client:
        made = await client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="items"):
            await client.conversations.items.create(made.id, items=[user("x")] * 21)
        with pytest.raises(openai.BadRequestError, match="metadata"):
            await client.conversations.create(metadata={str(number): "x" for number in range(17)})
        for path in (f"/v1/conversations/{made.id}/items/none", f"/v1/conversations/{made.id}/elsewhere"):
            assert (await gateway.http.get(path)).status_code == 404
