"""Responses by their id: asked for, followed, stopped, removed, and what was asked."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Send

from midstream.core.dialects.fields import bad_field
from midstream.core.dialects.refusals import Dialect, Refusal
from midstream.core.dialects.responses import ResponsesWriter, listed_items
from midstream.server.gateway.answers import EVENT_STREAM, Reading, encoded, send_whole
from midstream.server.gateway.bodies import Arrived, RefusedError
from midstream.server.gateway.runs import Run, Runs
from midstream.server.gateway.stored import Entry, StoredResponses
from midstream.world import World

ITEMS_MAX, ITEMS = 100, 20
"""Items of one page, at most and where nobody says."""


class ResponseRoutes:
    """Everything below `/v1/responses/{id}`."""

    def __init__(self, runs: Runs, responses: StoredResponses, world: World) -> None:
        self._runs = runs
        self._responses = responses
        self._world = world

    async def answer(self, parts: list[str], arrived: Arrived, receive: Receive, send: Send) -> None:
        """Answer a request; `parts` is the path behind `/responses`, in pieces.

        Raises:
            RefusedError: There is no such response or no such address.
            MidstreamError: The request has another form, or the store refuses.
        """
        match arrived.method, parts:
            case "GET", [response_id]:
                await self._show(response_id, arrived, receive, send)
            case "DELETE", [response_id]:
                await self._delete(response_id, send)
            case "POST", [response_id, "cancel"]:
                await self._cancel(response_id, send)
            case "GET", [response_id, "input_items"]:
                await self._items(response_id, arrived, send)
            case _:
                raise RefusedError(Refusal(404, "not_found", "there is no such address"))

    async def _show(self, response_id: str, arrived: Arrived, receive: Receive, send: Send) -> None:
        is_stream = arrived.query.get("stream", "") in ("true", "1")
        after = _number(arrived, "starting_after", -1) + 1
        run = self._run(response_id)
        if run is not None and is_stream:
            async with Reading(run, self._runs, self._world, receive, send) as reading:
                await reading.stream({}, after=after)
            return
        entry = None if run is not None else await self._entry(response_id)
        if not is_stream:
            body = _written(run) if run is not None else msgspec.json.encode(_found(entry).response)
            await send_whole(send, body)
            return
        await self._play(response_id, _found(entry), after, send)

    async def _play(self, response_id: str, entry: Entry, after: int, send: Send) -> None:
        """Play a stored response back; of one whose events are gone only its end."""
        if entry.is_open:
            message = "another process is at this response: ask there, or for the whole once it is complete"
            raise RefusedError(Refusal(409, "response_elsewhere", message, is_final=False, retry_after_s=2.0))
        pieces = (await self._responses.events(response_id))[after:]
        if not pieces:
            kind = f"response.{entry.response.get('status')}"
            body = {"type": kind, "sequence_number": after, "response": entry.response}
            pieces = [b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))]
        await send({"type": "http.response.start", "status": 200, "headers": encoded(EVENT_STREAM)})
        await send({"type": "http.response.body", "body": b"".join(pieces)})

    async def _delete(self, response_id: str, send: Send) -> None:
        run = self._run(response_id)
        if run is None:
            await self._entry(response_id)
        else:
            await self._stopped(run)
            self._runs.forget(run)
        await self._responses.delete(response_id)
        told = {"id": response_id, "object": "response", "deleted": True}
        await send_whole(send, msgspec.json.encode(told))

    async def _cancel(self, response_id: str, send: Send) -> None:
        run = self._run(response_id)
        if run is None:
            entry = await self._entry(response_id)
            if entry.is_open:
                message = "another process is at this response: it is stopped there"
                raise RefusedError(Refusal(409, "response_elsewhere", message))
            await send_whole(send, msgspec.json.encode(entry.response))
            return
        if not run.asked.is_background:
            raise bad_field(
                "response_id", "only a background response can be cancelled: close its connection"
            )
        await self._stopped(run)
        await send_whole(send, _written(run))

    async def _items(self, response_id: str, arrived: Arrived, send: Send) -> None:
        run = self._run(response_id)
        if run is None or run.is_ended:
            entry = await self._entry(response_id)
            asked = entry.items[len(entry.items) - entry.own :]
        else:
            asked = run.asked.messages
        items = listed_items(asked, response_id)
        if arrived.query.get("order", "desc") != "asc":
            items.reverse()
        if after := arrived.query.get("after"):
            ids = [item["id"] for item in items]
            items = items[ids.index(after) + 1 :] if after in ids else []
        limit = min(max(1, _number(arrived, "limit", ITEMS)), ITEMS_MAX)
        page = items[:limit]
        told = {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": len(items) > limit,
        }
        await send_whole(send, msgspec.json.encode(told))

    async def _stopped(self, run: Run) -> None:
        """Stop a run, and wait until it has ended."""
        self._runs.cancel(run)
        while not run.is_ended:
            await run.news()

    def _run(self, response_id: str) -> Run | None:
        """Return the run of a response; one that is not stored has no name to others."""
        run = self._runs.named(response_id)
        is_shown = run is not None and run.asked.dialect is Dialect.RESPONSES and run.asked.is_stored
        return run if is_shown else None

    async def _entry(self, response_id: str) -> Entry:
        return _found(await self._responses.find(response_id))


def _found(entry: Entry | None) -> Entry:
    if entry is None:
        message = "there is no such response: none was stored under this id, or it is too old"
        raise RefusedError(Refusal(404, "response_not_found", message))
    return entry


def _written(run: Run) -> bytes:
    assert isinstance(run.writer, ResponsesWriter)  # no other API asks for an answer by its id
    return run.writer.whole()


def _number(arrived: Arrived, name: str, otherwise: int) -> int:
    text = arrived.query.get(name)
    if text is None:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) <= 9):  # noqa: PLR2004 - nine digits fit any count
        raise bad_field(name, f"`{name}` is a whole number")
    return int(text)
