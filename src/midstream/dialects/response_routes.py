"""Routes of stored responses: return, follow, cancel, delete, and list inputs."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Send

from midstream.dialects.api_errors import ApiError
from midstream.dialects.application_sessions import ApplicationSessions
from midstream.dialects.gateway_bodies import Arrived, RefusedError
from midstream.dialects.item_pages import page_of, read_number
from midstream.dialects.live_responses import LiveResponse, LiveResponses
from midstream.dialects.openai_responses_api import list_items
from midstream.dialects.projection import Projection
from midstream.dialects.request_fields import bad_field
from midstream.dialects.response_inputs import ResponseInputs
from midstream.dialects.response_reader import ResponseReader, send_whole
from midstream.environment import World


class ResponseRoutes:
    """The routes below `/v1/responses/`."""

    def __init__(
        self,
        sessions: ApplicationSessions,
        responses: LiveResponses,
        inputs: ResponseInputs,
        world: World,
        *,
        shows_upstream_calls: bool,
    ) -> None:
        self._sessions = sessions
        self._inputs = inputs
        self._responses = responses
        self._world = world
        self._shows_upstream_calls = shows_upstream_calls

    async def answer(self, parts: list[str], arrived: Arrived, receive: Receive, send: Send) -> None:
        """Answer a request; `parts` are the segments of the path after `/responses`.

        Raises:
            RefusedError: The response or the address does not exist.
            MidstreamError: The request is invalid, or the store fails.
        """
        match arrived.method, parts:
            case "POST", ["compact"]:
                await self._inputs.compact(arrived, receive, send)
            case "POST", ["input_tokens"]:
                await self._inputs.count(arrived, send)
            case "GET", [response_id]:
                await self._show(response_id, arrived, receive, send)
            case "DELETE", [response_id]:
                await self._delete(response_id, arrived, send)
            case "POST", [response_id, "cancel"]:
                await self._cancel(response_id, arrived, send)
            case "GET", [response_id, "input_items"]:
                await self._items(response_id, arrived, send)
            case _:
                raise RefusedError(ApiError(404, "not_found", "no such address"))

    async def _show(self, response_id: str, arrived: Arrived, receive: Receive, send: Send) -> None:
        after = read_number(arrived, "starting_after", -1) + 1
        live = await self._live(response_id, arrived)
        if arrived.query.get("stream", "") not in ("true", "1"):
            await send_whole(send, (await self._project(live)).whole())
            return
        self._responses.join(live)
        reader = ResponseReader(
            live,
            self._responses,
            self._world,
            receive,
            send,
            form=live.found.form,
            shows_upstream_calls=self._shows_upstream_calls,
        )
        async with reader:
            await reader.stream({}, after=after)

    async def _delete(self, response_id: str, arrived: Arrived, send: Send) -> None:
        live = await self._live(response_id, arrived)
        await live.cancel()
        await self._sessions.delete(live.found)
        body = {"id": response_id, "object": "response", "deleted": True}
        await send_whole(send, msgspec.json.encode(body))

    async def _cancel(self, response_id: str, arrived: Arrived, send: Send) -> None:
        live = await self._live(response_id, arrived)
        if live.is_open and not live.found.form.is_background:
            raise bad_field(
                "response_id", "only a background response can be cancelled: close its connection"
            )
        if not live.found.form.is_background:
            raise bad_field("response_id", "only a background response can be cancelled")
        await live.cancel()
        await send_whole(send, (await self._project(live)).whole())

    async def _items(self, response_id: str, arrived: Arrived, send: Send) -> None:
        live = await self._live(response_id, arrived)
        items = list_items(live.found.request.input, response_id)
        await send_whole(send, msgspec.json.encode(page_of(items, arrived)))

    async def _live(self, response_id: str, arrived: Arrived) -> LiveResponse:
        found = await self._sessions.find(response_id)
        is_own = found is not None and found.request.principal == arrived.caller.principal
        if found is None or not (found.form.is_stored and is_own):
            message = "no such response: none was stored under this id, or it is too old"
            raise RefusedError(ApiError(404, "response_not_found", message))
        return self._responses.add(self._sessions, found, None)

    async def _project(self, live: LiveResponse) -> Projection:
        projection = live.projection(live.found.form, shows_upstream_calls=self._shows_upstream_calls)
        runner = await self._sessions.host.session(live.found.session)
        async for _, record in self._sessions.records(runner, after=live.found.response.position):
            projection.take(record)
            if projection.is_over:
                break
        return projection
