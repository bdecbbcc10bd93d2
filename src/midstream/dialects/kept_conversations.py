"""Conversations that the gateway stores for applications (`/v1/conversations`), and their items.

A conversation is one session. The items of its responses are read from the journal, so that a killed process loses
none. An entry in the store has the items that the application added and removed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.dialects.api_errors import ApiError
from midstream.dialects.application_sessions import KEPT_CONVERSATIONS, ApplicationSessions
from midstream.dialects.conversation_index import kept_name
from midstream.dialects.dialect import Form
from midstream.dialects.dialect_registry import find_dialect
from midstream.dialects.gateway_bodies import RefusedError
from midstream.dialects.openai_responses_api import list_items
from midstream.dialects.projection import Projection
from midstream.dialects.request_fields import bad_field
from midstream.engine.runner import Runner
from midstream.environment import World
from midstream.errors import EntryMovedError, SessionNotFoundError, UnavailableError
from midstream.history.codecs.codec_spec import Json, Value
from midstream.session.applications import ApplicationResponse
from midstream.session.records import TranscriptAccepted
from midstream.store.contract import KeyValueEntry

ADDED_MAX = 1000
"""Items that an application may add to a conversation, and ids that it may remove."""
TRIES_MAX = 8
"""Attempts to change an entry that other requests change."""


class AddedItem(Struct, frozen=True, array_like=True):
    """An added item; `after` is the number of responses before it."""

    after: int
    item: dict[str, Any]


class KeptConversation(Struct, frozen=True, omit_defaults=True):
    """The stored entry of a conversation."""

    id: str
    created_at: int
    metadata: Mapping[str, str] = {}
    added: tuple[AddedItem, ...] = ()
    removed: tuple[str, ...] = ()
    """Ids of removed items."""
    principal: str = ""
    """The owner, see `ApiCaller`."""

    def added_after(self, count: int) -> list[Json]:
        """Return the items that were added after `count` responses, without removed ones."""
        return [
            each.item for each in self.added if each.after == count and each.item["id"] not in self.removed
        ]


_entry = msgspec.json.Decoder(KeptConversation).decode


class KeptConversations:
    """The stored conversations of one store.

    Args:
        kept_s: Seconds for which a conversation is kept before its first response and after its last one.
    """

    def __init__(self, sessions: ApplicationSessions, world: World, *, kept_s: float) -> None:
        self._sessions = sessions
        self._world = world
        self._kept_s = kept_s

    async def create(
        self, metadata: Mapping[str, str], items: list[Value], principal: str = ""
    ) -> KeptConversation:
        """Store a new conversation with these items.

        Args:
            principal: The owner, see `ApiCaller`.

        Raises:
            MidstreamError: The store fails.
        """
        name = f"conv_{self._world.new_id('conversation').replace('-', '')}"
        now = int(self._world.now())
        made = KeptConversation(name, now, metadata, self._place(items, 0), principal=principal)
        await self._put(made, 0, at=self._world.now())
        return made

    async def find(self, name: str) -> KeptConversation:
        """Return a conversation.

        Raises:
            RefusedError: The conversation does not exist, or is too old.
        """
        return _entry((await self._read(name)).body)

    async def require(self, name: str, principal: str) -> None:
        """Require that a conversation belongs to a principal.

        Raises:
            RefusedError: The conversation does not exist, or belongs to another principal.
        """
        if (await self.find(name)).principal != principal:
            raise _no_conversation()

    async def change(
        self, name: str, changed: Callable[[KeptConversation], KeptConversation]
    ) -> KeptConversation:
        """Replace the entry of a conversation. Until its first response, this renews its lifetime.

        Raises:
            RefusedError: The conversation does not exist.
            UnavailableError: Other requests keep changing it.
        """
        has_responses = await self._runner(name) is not None
        for _ in range(TRIES_MAX):
            kept = await self._read(name)
            entry = changed(_entry(kept.body))
            try:
                # From the first response on, the entry lives as long as its session, which has the responses.
                await self._put(entry, kept.version, at=kept.at if has_responses else self._world.now())
            except EntryMovedError:
                continue
            return entry
        raise UnavailableError("other requests change this conversation: retry", retry_after_s=1.0)

    async def add(self, name: str, items: list[Value]) -> list[Json]:
        """Add items at the end, and return them.

        Raises:
            MidstreamError: There are too many.
        """
        placed = self._place(items, await self._count(name))

        def extended(entry: KeptConversation) -> KeptConversation:
            if len(entry.added) + len(placed) > ADDED_MAX:
                raise bad_field(
                    "items",
                    f"a conversation may have at most {ADDED_MAX} items besides those of its responses",
                )
            return replace(entry, added=(*entry.added, *placed))

        await self.change(name, extended)
        return [each.item for each in placed]

    async def remove(self, name: str, item_id: str) -> KeptConversation:
        """Remove an item.

        Raises:
            MidstreamError: Too many items were removed.
        """

        def without(entry: KeptConversation) -> KeptConversation:
            if len(entry.removed) >= ADDED_MAX:
                raise bad_field(
                    "item_id",
                    f"{ADDED_MAX} items of this conversation were removed, the limit: begin another conversation",
                )
            return replace(entry, removed=(*entry.removed, item_id))

        return await self.change(name, without)

    async def delete(self, name: str) -> None:
        """Delete a conversation; its responses stay.

        Raises:
            RefusedError: The conversation does not exist.
        """
        kept = await self._read(name)
        await self._sessions.host.store.kv_delete(KEPT_CONVERSATIONS, name, expected=kept.version)

    async def items(self, entry: KeptConversation) -> list[Json]:
        """Return all items in order: those of the responses, and added ones."""
        items = entry.added_after(0)
        number, projection = 0, None
        runner = await self._runner(entry.id)
        if runner is not None:
            async for _, record in self._sessions.records(runner, after=0):
                if isinstance(record, TranscriptAccepted):
                    if projection is not None:
                        items += [*_output(projection), *entry.added_after(number)]
                    number += 1
                    form = msgspec.convert(record.request.form, Form)
                    place = ApplicationResponse(
                        number, form.id, "", record.turn, record.response, 0, 0, record.at
                    )
                    projection = Projection(find_dialect(form.dialect), form, place)
                    items += list_items(record.request.input, form.id)
                elif projection is not None:
                    projection.take(record)
        if projection is not None:
            items += [*_output(projection), *entry.added_after(number)]
        return [item for item in items if item["id"] not in entry.removed]

    def _place(self, items: list[Value], count: int) -> tuple[AddedItem, ...]:
        listed = list_items(items, self._world.new_id("item").replace("-", ""))
        for item in listed:
            if item["type"] == "message":
                item.setdefault("status", "completed")
        return tuple(AddedItem(count, item) for item in listed)

    async def _count(self, name: str) -> int:
        runner = await self._runner(name)
        return 0 if runner is None else runner.state.application.count

    async def _runner(self, name: str) -> Runner | None:
        try:
            return await self._sessions.host.session(self._sessions.name_of(kept_name(name)))
        except SessionNotFoundError:
            return None

    async def _read(self, name: str) -> KeyValueEntry:
        kept = await self._sessions.host.store.kv_get(KEPT_CONVERSATIONS, name)
        if kept is None:
            raise _no_conversation()
        if kept.at < self._world.now() - self._kept_s and await self._runner(name) is None:
            raise _no_conversation()  # its session was deleted, and the entry is deleted soon
        return kept

    async def _put(self, entry: KeptConversation, version: int, *, at: float) -> None:
        body = msgspec.json.encode(entry)
        await self._sessions.host.store.kv_put(KEPT_CONVERSATIONS, entry.id, body, expected=version, at=at)


def _no_conversation() -> RefusedError:
    return RefusedError(
        ApiError(404, "conversation_not_found", "the conversation does not exist, or is too old")
    )


def _output(projection: Projection) -> list[Json]:
    output: list[Json] = msgspec.json.decode(projection.whole())["output"]
    return output
