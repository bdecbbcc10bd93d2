"""Sessions as read-only streams: their events in the Durable Streams protocol.

An offset contains the epoch and the position of the last event that was read. So the server detects offsets of lost
records, and of a deleted session with the same name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send
from typing_extensions import override

from midstream.dialects import durable_streams as wire
from midstream.dialects.request_fields import bad_field
from midstream.engine.conversation import PAGE_RECORDS, follow_pages
from midstream.engine.host import Host
from midstream.engine.runner import Runner
from midstream.errors import SessionNotFoundError
from midstream.protocol.frames import START, EventId
from midstream.server.api.durable_stream_endpoint import EVENT_HEADERS, SAFE, place_in
from midstream.server.api.event_body import EventBody
from midstream.server.api.plain_streams import PAGE_BYTES
from midstream.server.api.session_snapshot import (
    SNAPSHOT_BYTES_MAX,
    SessionSnapshot,
    body_within,
    snapshot_of,
)
from midstream.server.api.stream_names import require_no_locks
from midstream.server.api.waiting_poll import ClientLeftError, WaitingPoll
from midstream.server.auth.caller import Caller, caller_of
from midstream.server.auth.principals import Action
from midstream.server.transports.connection import Connections
from midstream.session.records import Record
from midstream.store.contract import StoredRecord

PAGES_MAX = 64
"""Encoded pages in the cache."""
_OFFSET = re.compile(r"([0-9]{16})_([0-9]{16})", re.ASCII)
_JSON = wire.PlainStreamSettings(content_type=wire.JSON_TYPE)


class SessionStreamQuery(Struct, frozen=True):
    """A place in a session, and how to wait for more: after `offset`, `-1` for the beginning, or `now` for the end."""

    offset: Annotated[str, Meta(pattern="^(-1|now|[0-9]{16}_[0-9]{16})$")] = "-1"
    live: Literal["long-poll", "sse"] | UnsetType = UNSET
    cursor: str = ""


class SessionEvent(Struct, frozen=True):
    """One message: an event, or a snapshot that replaces pruned events."""

    id: str
    record: Record | UnsetType = UNSET
    snapshot: SessionSnapshot | UnsetType = UNSET


class SessionStreamReader:
    """Endpoint that reads sessions as streams."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections
        self._pages = _Pages()

    async def read_session_stream(self, request: Request, send: Send) -> None:
        """Read sessions as streams."""
        require_no_locks(self._host)
        caller = caller_of(request.scope)
        session = caller.stored_name(request.path_params["session_id"])
        caller.set_session(session)
        await caller.require_existing(Action.READ)
        runner = await self._host.session(session)
        if request.method == "HEAD":
            headers = {**SAFE, wire.NEXT_OFFSET: offset_of(runner.newest), "Cache-Control": "no-store"}
            await Response(headers=headers, media_type=wire.JSON_TYPE)(request.scope, request.receive, send)
            return
        offset, live = place_in(request)
        after = runner.newest if offset == "now" else event_id_at(offset or "-1")
        after, before = await _place_of(runner, caller.public_name(session), after)
        cursor = wire.next_cursor(
            request.query_params.get("cursor"), now=self._host.world.now(), chance=self._host.world.chance()
        )
        if live == "sse":
            events = SessionStreamEvents(
                self._host, self._connections, session, caller, after, cursor, self._pages, before
            )
            await events.send_to(request.receive, send)
            return
        headers = {**SAFE, "Cache-Control": "no-store", wire.CURSOR: cursor}
        if live and not before and after.position >= runner.newest.position:
            poll: WaitingPoll[bool] = WaitingPoll(self._host, self._connections, session, caller)
            try:
                await poll.wait(self._more(session, after), request.receive)
            except ClientLeftError:
                return
            except SessionNotFoundError:
                await Response(status_code=204, headers={**headers, **_closed(after)})(
                    request.scope, request.receive, send
                )
                return
        answer = await self._data(session, after, before, headers, is_live=bool(live))
        await answer(request.scope, request.receive, send)

    async def _more(self, session: str, after: EventId) -> bool:
        """Wait until a session has an event after `after`."""
        async with aclosing(follow_pages(self._host, session, after.position)) as pages:
            async for page in pages:
                if page:
                    return True
        return False

    async def _data(
        self, session: str, after: EventId, before: Sequence[bytes], headers: dict[str, str], *, is_live: bool
    ) -> Response:
        runner = await self._host.session(session)
        page = await _read(runner, after.position)
        last = EventId(page[-1].epoch, page[-1].position) if page else after
        headers = {**headers, wire.NEXT_OFFSET: offset_of(last)}
        if last.position >= runner.newest.position:
            headers[wire.UP_TO_DATE] = "true"
        if not page and not before and is_live:
            return Response(status_code=204, headers=headers)
        body = wire.body_of([*before, *_messages_of(page)], is_json=True)
        return Response(body, headers=headers, media_type=wire.JSON_TYPE)


class SessionStreamEvents(EventBody):
    """Sends a session to one client as server-sent events, until it is deleted."""

    headers = EVENT_HEADERS

    def __init__(
        self,
        host: Host,
        connections: Connections,
        session: str,
        caller: Caller,
        after: EventId,
        cursor: str,
        pages: _Pages,
        before: Sequence[bytes],
    ) -> None:
        super().__init__(host, connections, session, caller)
        self._after = after
        self._cursor = cursor
        self._pages = pages
        self._before = before

    @override
    async def pump(self, send: Send) -> None:
        is_offset_sent = False
        if self._before:
            await self.write(send, [wire.data_event(self._before, _JSON), self._control(())])
            is_offset_sent = True
        with suppress(SessionNotFoundError):
            async with aclosing(follow_pages(self._host, self._session, self._after.position)) as pages:
                async for page in pages:
                    if page:
                        self._after = EventId(page[-1].epoch, page[-1].position)
                        await self.write(send, [self._pages.event(self._session, page), self._control(page)])
                        is_offset_sent = True
                    elif not is_offset_sent:  # at the end: report the offset once
                        await self.write(send, [self._control(page)])
                        is_offset_sent = True
        await self.write(
            send,
            [
                wire.control_event(
                    offset=offset_of(self._after), cursor=self._cursor, is_up_to_date=True, is_closed=True
                )
            ],
        )

    def _control(self, page: Sequence[StoredRecord]) -> bytes:
        is_up_to_date = len(page) < PAGE_RECORDS
        return wire.control_event(
            offset=offset_of(self._after), cursor=self._cursor, is_up_to_date=is_up_to_date, is_closed=False
        )


class _Pages:
    """Cache of encoded events for readers at the same place."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int, int, int], bytes] = {}

    def event(self, session: str, page: Sequence[StoredRecord]) -> bytes:
        """Return the event with these records."""
        key = session, page[-1].epoch, page[0].position, page[-1].position
        found = self._last.get(key)
        if found is None:
            found = wire.data_event(_messages_of(page), _JSON)
            if len(self._last) >= PAGES_MAX:
                del self._last[next(iter(self._last))]
            self._last[key] = found
        return found


def offset_of(event_id: EventId) -> str:
    """Return the offset after an event."""
    return f"{event_id.epoch:016d}_{event_id.position:016d}"


def event_id_at(offset: str) -> EventId:
    """Return the event before an offset.

    Raises:
        BadFieldError: The offset is invalid.
    """
    if offset == "-1":
        return START
    found = _OFFSET.fullmatch(offset)
    if found is None:
        raise bad_field(
            "offset", f"{offset[:40]!r} is not an offset of a session; send one from an answer, or -1"
        )
    return EventId(int(found[1]), int(found[2]))


async def _place_of(runner: Runner, name: str, after: EventId) -> tuple[EventId, list[bytes]]:
    """Return the event after which to read, and messages that replace pruned events before it.

    Args:
        name: The client's name of the session.

    Raises:
        HTTPException: 410: later events were pruned, or the event is not one of this session.
    """
    if after == START:
        first, state = await runner.events.beginning()
        if first == START:
            return START, []
        snapshot = body_within(snapshot_of(name, state, str(first)), SNAPSHOT_BYTES_MAX)
        return first, [b'{"id":"%b","snapshot":%b}' % (str(first).encode(), snapshot)]
    if await runner.events.epoch_at(after.position) != after.epoch:
        raise HTTPException(410, "the events after this offset are no longer kept; read from -1")
    return after, []


async def _read(runner: Runner, after: int) -> list[StoredRecord]:
    found: list[StoredRecord] = []
    size = 0
    while size < PAGE_BYTES:
        page = await runner.read(after=after, limit=PAGE_RECORDS)
        if not page:
            break
        for stored in page:
            found.append(stored)
            after = stored.position
            size += len(stored.body)
            if size >= PAGE_BYTES:
                break
    return found


def _messages_of(page: Sequence[StoredRecord]) -> list[bytes]:
    return [b'{"id":"%d-%d","record":%b}' % (each.epoch, each.position, each.body) for each in page]


def _closed(after: EventId) -> dict[str, str]:
    return {wire.NEXT_OFFSET: offset_of(after), wire.UP_TO_DATE: "true", wire.CLOSED: "true"}
