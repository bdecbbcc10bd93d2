"""The routes of `/v1/conversations`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.types import Send

from midstream.dialects.api_errors import ApiError
from midstream.dialects.gateway_bodies import Arrived, RefusedError
from midstream.dialects.item_pages import page_of
from midstream.dialects.kept_conversations import KeptConversation, KeptConversations
from midstream.dialects.request_fields import Fields, bad_field, field, fields_of, texts_of
from midstream.dialects.response_reader import send_whole
from midstream.history.codecs.codec_spec import Json, Value

ITEMS_MAX, NOTES_MAX = 20, 16
"""Items of one request, and entries of the metadata: limits of the API's documentation."""


class ConversationRoutes:
    """Creates, returns, changes and deletes conversations and their items."""

    def __init__(self, kept: KeptConversations) -> None:
        self._kept = kept

    async def answer(self, parts: list[str], arrived: Arrived, send: Send) -> None:
        """Answer a request; `parts` are the segments of the path after `/conversations`.

        Raises:
            RefusedError: The conversation, item or address does not exist.
            MidstreamError: The request is invalid, or the store fails.
        """
        body = await self._body_for(parts, arrived)
        await send_whole(send, msgspec.json.encode(body))

    async def _body_for(self, parts: list[str], arrived: Arrived) -> Json:
        kept = self._kept
        if parts:
            await kept.require(parts[0], arrived.caller.principal)
        match arrived.method, parts:
            case "POST", []:
                fields = fields_of(arrived.body or b"{}")
                principal = arrived.caller.principal
                return _shown(await kept.create(_metadata(fields), _items(fields), principal))
            case "GET", [name]:
                return _shown(await kept.find(name))
            case "POST", [name]:
                metadata = _metadata(fields_of(arrived.body))
                return _shown(await kept.change(name, lambda entry: replace(entry, metadata=metadata)))
            case "DELETE", [name]:
                await kept.delete(name)
                return {"id": name, "object": "conversation.deleted", "deleted": True}
            case "GET", [name, "items"]:
                return page_of(await kept.items(await kept.find(name)), arrived)
            case "POST", [name, "items"]:
                items = await kept.add(name, _items(fields_of(arrived.body)))
                ids = [item["id"] for item in items]
                ends = {"first_id": ids[0] if ids else "", "last_id": ids[-1] if ids else ""}
                return {"object": "list", "data": items, **ends, "has_more": False}
            case "GET", [name, "items", item_id]:
                return await self._item(name, item_id)
            case "DELETE", [name, "items", item_id]:
                await self._item(name, item_id)
                return _shown(await kept.remove(name, item_id))
            case _:
                raise RefusedError(ApiError(404, "not_found", "no such address"))

    async def _item(self, name: str, item_id: str) -> Json:
        items = await self._kept.items(await self._kept.find(name))
        found = next((item for item in items if item["id"] == item_id), None)
        if found is None:
            raise RefusedError(ApiError(404, "item_not_found", "this conversation has no such item"))
        return found


def _shown(entry: KeptConversation) -> Json:
    return {
        "id": entry.id,
        "object": "conversation",
        "created_at": entry.created_at,
        "metadata": entry.metadata,
    }


def _metadata(fields: Fields) -> dict[str, str]:
    metadata = texts_of(fields, "metadata")
    if len(metadata) > NOTES_MAX:
        raise bad_field("metadata", f"`metadata` may have at most {NOTES_MAX} entries")
    return metadata


def _items(fields: Fields) -> list[Value]:
    items = field(fields, "items", list[Any]) or []
    if len(items) > ITEMS_MAX:
        raise bad_field("items", f"`items` may have at most {ITEMS_MAX} items")
    return items
