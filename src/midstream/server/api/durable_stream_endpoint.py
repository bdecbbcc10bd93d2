"""Durable Streams over HTTP: clients create, append to and read plain streams, with the authentication of sessions.

The owner of a stream is the principal that created it. All state is in the journal, except the time of the last read of
a stream with a sliding lifetime. So any server of the store can serve any reader and producer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send
from typing_extensions import override

from midstream.dialects import durable_streams as wire
from midstream.dialects.durable_stream_state import (
    Appended,
    AppendRequest,
    Created,
    Forked,
    StreamAnswer,
    StreamRecord,
)
from midstream.dialects.request_fields import bad_field
from midstream.engine.host import Host
from midstream.errors import ConflictError, NotFoundError, UnavailableError
from midstream.server.api.event_body import EventBody
from midstream.server.api.plain_streams import (
    MAKING_S,
    KnownStream,
    PlainStreams,
    StreamGoneError,
)
from midstream.server.api.problems import problem_of_status, response_of
from midstream.server.api.request_bodies import body_of
from midstream.server.api.stream_names import CONTROL, SESSIONS, journal_of, require_no_locks
from midstream.server.api.stream_sweeping import StreamSweeper
from midstream.server.api.waiting_poll import ClientLeftError, WaitingPoll
from midstream.server.auth.caller import Caller, caller_of
from midstream.server.auth.principals import Action
from midstream.server.transports.connection import Connections

STREAM_PATH = "/v1/stream/"
"""Path prefix of streams; a fork refers to its source by path."""
RESERVED = frozenset({CONTROL, SESSIONS})
"""First path segments that streams of applications cannot have."""
APPEND_BYTES_MAX = 16 * 1024 * 1024
"""Greatest number of bytes of one request."""
TRIES_MAX = 8
"""Attempts to create a stream while other clients create and delete it."""
SAFE = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "cross-origin"}
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream"),  # clients compare the whole value
    (b"cache-control", b"no-store, no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
    *((name.lower().encode(), value.encode()) for name, value in SAFE.items()),
)
"""Headers of answers with server-sent events."""


class PlainStreamQuery(Struct, frozen=True):
    """A place in a stream, and how to wait for more: after `offset`, `-1` for the beginning, or `now` for the end."""

    offset: Annotated[str, Meta(pattern="^(-1|now|0{16}_[0-9]{16})$")] = "-1"
    live: Literal["long-poll", "sse"] | UnsetType = UNSET
    cursor: str = ""


class PlainStreamWriter:
    """Endpoints that create, append to and delete plain streams."""

    def __init__(self, host: Host, streams: PlainStreams, sweeper: StreamSweeper) -> None:
        self._host = host
        self._streams = streams
        self._sweeper = sweeper

    async def create_plain_stream(self, request: Request) -> Response:
        """Create a stream, or find an existing one with equal settings (Durable Streams)."""
        journal, caller = _name_in(self._host, request)
        fork, body = wire.read_fork(request.headers), await body_of(request, APPEND_BYTES_MAX)
        source = None if fork is None else _source_of(fork.source, caller)
        settings = wire.read_settings(request.headers)
        if source is not None:
            caller.set_session(source)
            await caller.require_existing(Action.READ)
        caller.set_session(journal)
        await caller.begin()
        made = _Made(self._host, self._streams, self._sweeper, journal, request.headers, body)
        for _ in range(TRIES_MAX):
            known = await _find(self._streams, journal, gone=409)
            inherited = None
            if source is not None:
                assert fork is not None, "a source is only set for a fork"
                inherited = await _find(self._streams, source, gone=None if known else 409)
                settings = _inherited_settings(settings, request.headers, inherited)
            if known is not None:
                return made.found(known, settings, source, fork)
            answer = await made.make(settings, inherited, source, fork)
            if answer is not None:
                answer.headers["Location"] = str(request.url)
                return answer
        raise UnavailableError(
            "other clients create and delete this stream at the same time: retry", retry_after_s=1.0
        )

    async def append_to_plain_stream(self, request: Request) -> Response:
        """Append to a stream, or close it; one request is one append (Durable Streams)."""
        journal, caller = _name_in(self._host, request)
        await caller.require_existing(Action.SEND)
        headers = request.headers
        append_request = AppendRequest(
            headers.get("content-type", ""),
            await body_of(request, APPEND_BYTES_MAX),
            wire.read_producer(headers),
            headers.get(wire.SEQUENCE),
            wire.asks_to_close(headers),
        )
        _require_existing(await _find(self._streams, journal))
        decided: list[Appended | StreamAnswer] = []

        async def decide(known: KnownStream | None) -> Sequence[StreamRecord]:
            found = _require_existing(known)
            if found.state.is_deleted:
                raise HTTPException(410, "this stream is gone")
            decision = found.state.decide(append_request)
            decided.append(decision)
            if not isinstance(decision, Appended):
                return []
            return [replace(decision, at=self._host.world.now())]

        known = _require_existing(await self._streams.write(journal, decide))
        [decision] = decided
        if isinstance(decision, Appended):
            return _answer(known.state.success(decision))
        await self._streams.note_use(known)
        return _answer(decision)

    async def delete_plain_stream(self, request: Request) -> Response:
        """Delete a stream; one with forks answers 410 until the last of them is deleted (Durable Streams)."""
        journal, caller = _name_in(self._host, request)
        await caller.require_existing(Action.OWN)
        try:
            is_done = await self._streams.delete(journal)
        except StreamGoneError as error:
            raise HTTPException(410, error.message) from error
        return Response(status_code=204 if is_done else 404, headers=SAFE)


class _Made:
    """A request to create a stream."""

    def __init__(
        self,
        host: Host,
        streams: PlainStreams,
        sweeper: StreamSweeper,
        journal: str,
        headers: wire.Headers,
        body: bytes,
    ) -> None:
        self._host = host
        self._streams = streams
        self._sweeper = sweeper
        self._journal = journal
        self._closes = wire.asks_to_close(headers)
        self._body = body

    def found(
        self,
        known: KnownStream,
        settings: wire.PlainStreamSettings,
        source: str | None,
        fork: wire.StreamFork | None,
    ) -> Response:
        """Return the answer for an existing stream."""
        is_equal = settings.matches(known.state.settings) and self._closes == known.state.is_closed
        if fork is not None:
            units = None if fork.units is None else fork.units + fork.further
            is_equal = is_equal and known.created.source == source
            is_equal = is_equal and units in (None, known.created.inherited)
        return _described(known, 200 if is_equal else 409)

    async def make(
        self,
        settings: wire.PlainStreamSettings,
        inherited: KnownStream | None,
        source: str | None,
        fork: wire.StreamFork | None,
    ) -> Response | None:
        """Create the stream and return the answer; None if the stream or its source has changed in between."""
        records = self._content(settings)  # refuse a malformed body before any change
        asked_at, units = self._host.world.monotonic(), 0
        if source is not None and fork is not None:
            found = _require_existing(inherited)
            units = await self._inherited_units(settings, found, fork)
            if not await self._register(source, found):
                return None
        created = Created(settings, source or "", units, self._host.world.now())
        is_made: list[bool] = []

        async def decide(known: KnownStream | None) -> Sequence[StreamRecord]:
            if known is not None:
                return []
            if self._host.world.monotonic() - asked_at > MAKING_S:
                raise UnavailableError(
                    "the source of this fork may have been deleted: retry", retry_after_s=0.1
                )
            is_made.append(True)
            return [created, *records]

        if (ends_at := settings.ends_at(created.at)) is not None:
            await self._sweeper.note(self._journal, ends_at)
        known = await self._streams.write(self._journal, decide)
        return _described(known, 201) if is_made and known is not None else None

    def _content(self, settings: wire.PlainStreamSettings) -> list[StreamRecord]:
        body, units = self._body, len(self._body)
        if body and settings.is_json:
            body, units = wire.read_messages(body, may_be_empty=True)
        if not units and not self._closes:
            return []
        return [Appended(body if units else b"", units, closes=self._closes, at=self._host.world.now())]

    async def _inherited_units(
        self, settings: wire.PlainStreamSettings, source: KnownStream, fork: wire.StreamFork
    ) -> int:
        if settings.media_type != source.state.settings.media_type:
            raise ConflictError("a fork must have the content type of its source")
        units = source.state.units if fork.units is None else fork.units
        if units > source.state.units:
            raise bad_field(wire.FORK_OFFSET, f"`{wire.FORK_OFFSET}` is after the end of the source")
        if fork.further:
            span = await self._streams.span_at(source, units)
            if span is None or span[0] != units or fork.further > span[1] - span[0]:
                raise bad_field(
                    wire.FORK_SUB_OFFSET, f"`{wire.FORK_SUB_OFFSET}` is after the end of that append"
                )
        return units + fork.further

    async def _register(self, source: str, found: KnownStream) -> bool:
        """Record the fork in its source; return whether the source is still the stream that was found."""
        is_kept: list[bool] = []

        async def decide(known: KnownStream | None) -> Sequence[StreamRecord]:
            if known is None or known.birth != found.birth or known.state.is_deleted:
                return []
            is_kept.append(True)
            return [Forked(self._journal, self._host.world.now())]

        await self._streams.write(source, decide)
        return bool(is_kept)


class PlainStreamReader:
    """Endpoint that reads plain streams."""

    def __init__(self, host: Host, streams: PlainStreams, connections: Connections) -> None:
        self._host = host
        self._streams = streams
        self._connections = connections

    async def read_plain_stream(self, request: Request, send: Send) -> None:
        """Read streams."""
        journal, caller = _name_in(self._host, request)
        await caller.require_existing(Action.READ)
        known = _require_existing(await _find(self._streams, journal))
        if request.method == "HEAD":
            await self._head(known)(request.scope, request.receive, send)
            return
        offset, live = place_in(request)
        await self._streams.note_use(known)
        units = known.state.units if offset == "now" else wire.units_at(offset or "-1")
        if live == "sse":
            events = PlainStreamEvents(
                self._host, self._connections, self._streams, known, caller, units, self._cursor(request)
            )
            await events.send_to(request.receive, send)
            return
        if live == "long-poll" and units >= known.state.units and not known.state.is_closed:
            poll: WaitingPoll[KnownStream] = WaitingPoll(self._host, self._connections, journal, caller)
            try:
                known = await poll.wait(self._more(known, units), request.receive) or known
            except ClientLeftError:
                return
        answer = await self._data(request, known, units, is_now=offset == "now", live=live)
        await answer(request.scope, request.receive, send)

    async def _more(self, known: KnownStream, units: int) -> KnownStream:
        """Wait until a stream has more than `units` units, or is closed.

        Raises:
            NotFoundError: The stream was deleted.
        """
        while units >= known.state.units and not known.state.is_closed:
            birth = known.birth
            known = _require_existing(await self._streams.wait(known))
            if known.birth != birth or known.state.is_deleted:
                raise NotFoundError("this stream was deleted")
        return known

    def _head(self, known: KnownStream) -> Response:
        settings = known.state.settings
        lifetime = {} if settings.ttl_s is None else {wire.TTL: str(settings.ttl_s)}
        if settings.expires_at:
            lifetime[wire.EXPIRES_AT] = settings.expires_at
        return _described(known, 200, {**lifetime, "Cache-Control": "no-store"})

    async def _data(
        self, request: Request, known: KnownStream, units: int, *, is_now: bool, live: str
    ) -> Response:
        state, cursor = known.state, self._cursor(request)
        if live and units >= state.units:
            more = {wire.UP_TO_DATE: "true", wire.CURSOR: cursor, "Cache-Control": "no-store"}
            return Response(status_code=204, headers={**SAFE, **state.headers(), **more})
        if is_now and not live:
            more = {wire.UP_TO_DATE: "true", "Cache-Control": "no-store"}
            return _described(known, 200, more, wire.body_of([], is_json=state.settings.is_json))
        end = state.units
        tag = f'"{known.birth}:{units}:{end}:{int(state.is_closed)}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={**SAFE, "ETag": tag})
        part = await self._streams.read(known, units)
        headers = {wire.NEXT_OFFSET: wire.offset_at(max(part.end, units)), wire.CURSOR: cursor, "ETag": tag}
        headers["Cache-Control"] = "no-store" if caller_of(request.scope).is_known else "no-cache"
        if part.end >= state.units:
            headers |= {wire.UP_TO_DATE: "true", **state.headers()}
        body = wire.body_of([each for each in part.bodies if each], is_json=state.settings.is_json)
        headers["Content-Type"] = state.settings.content_type
        return Response(body, 200, headers={**SAFE, **headers})

    def _cursor(self, request: Request) -> str:
        world = self._host.world
        return wire.next_cursor(request.query_params.get("cursor"), now=world.now(), chance=world.chance())


class PlainStreamEvents(EventBody):
    """Sends a stream to one client as server-sent events, until it is closed or deleted."""

    def __init__(
        self,
        host: Host,
        connections: Connections,
        streams: PlainStreams,
        known: KnownStream,
        caller: Caller,
        units: int,
        cursor: str,
    ) -> None:
        super().__init__(host, connections, known.journal, caller)
        self._streams = streams
        self._known = known
        self._units = units
        self._cursor = cursor
        more = {} if known.state.settings.is_text else {wire.DATA_ENCODING: "base64"}
        self.headers = (
            *EVENT_HEADERS,
            *((name.lower().encode(), text.encode()) for name, text in more.items()),
        )

    @override
    async def pump(self, send: Send) -> None:
        known: KnownStream | None = self._known
        is_first, was_closed = True, False
        while known is not None and not was_closed:
            part = await self._streams.read(known, self._units)
            self._units = max(self._units, part.end)
            is_up_to_date = self._units >= known.state.units
            was_closed = is_up_to_date and known.state.is_closed
            events = [wire.data_event(part.bodies, known.state.settings)] if any(part.bodies) else []
            if events or is_first or was_closed:
                control = wire.control_event(
                    offset=wire.offset_at(self._units),
                    cursor=self._cursor,
                    is_up_to_date=is_up_to_date,
                    is_closed=was_closed,
                )
                await self.write(send, [*events, control])
            is_first = False
            birth = known.birth
            if self._units >= known.state.units and not known.state.is_closed:
                known = await self._streams.wait(known)
            elif not part.bodies:
                known = await self._streams.refresh(known.journal)
            if known is not None and (known.birth != birth or known.state.is_deleted):
                return


def _name_in(host: Host, request: Request) -> tuple[str, Caller]:
    """Return the journal of the stream in a request's path, and the caller."""
    require_no_locks(host)
    caller = caller_of(request.scope)
    journal = _journal_of(request.path_params["stream"], caller)
    caller.set_session(journal)
    return journal, caller


def _journal_of(name: str, caller: Caller) -> str:
    if name.partition("/")[0] in RESERVED:
        raise NotFoundError("a stream of an application cannot have this address")
    return journal_of(name, caller)


def _source_of(path: str, caller: Caller) -> str:
    _, found, name = path.partition(STREAM_PATH)
    if not found:
        raise NotFoundError("the source of a fork must be a stream of this server")
    return _journal_of(name, caller)


async def _find(streams: PlainStreams, journal: str, *, gone: int | None = 410) -> KnownStream | None:
    """Return a stream or None. `gone` is the error status of a deleted stream with forks; with None, return None."""
    try:
        return await streams.find(journal)
    except StreamGoneError as error:
        if gone is None:
            return None
        raise HTTPException(gone, error.message) from error


def _require_existing(known: KnownStream | None) -> KnownStream:
    if known is None:
        raise NotFoundError("there is no such stream")
    return known


def place_in(request: Request) -> tuple[str | None, str]:
    """Return the offset of a request, and its mode of waiting.

    Raises:
        BadFieldError: A parameter is malformed.
    """
    query = request.query_params
    offset, live = query.get("offset"), query.get("live", "")
    if len(query.getlist("offset")) > 1 or offset == "":
        raise bad_field("offset", "send `offset` once, and not empty")
    if live not in ("", "long-poll", "sse"):
        raise bad_field("live", "`live` must be `long-poll` or `sse`")
    if live and offset is None:
        raise bad_field("offset", "`live` needs `offset`")
    return offset, live


def _inherited_settings(
    settings: wire.PlainStreamSettings, headers: wire.Headers, source: KnownStream | None
) -> wire.PlainStreamSettings:
    """Return the settings of a fork; those that its request omits are copied from its source."""
    if source is None:
        return settings
    of_source = source.state.settings
    if "content-type" not in headers:
        settings = replace(settings, content_type=of_source.content_type)
    if settings.ttl_s is None and not settings.expires_at:
        settings = replace(settings, ttl_s=of_source.ttl_s, expires_at=of_source.expires_at)
    return settings


def _described(
    known: KnownStream, status: int, more: Mapping[str, str] | None = None, body: bytes = b""
) -> Response:
    headers = {
        **SAFE,
        **known.state.headers(),
        "Content-Type": known.state.settings.content_type,
        **(more or {}),
    }
    return Response(body, status, headers=headers)


def _answer(answer: StreamAnswer) -> Response:
    headers = {**SAFE, **answer.headers}
    if answer.problem:
        return response_of(problem_of_status(answer.status, answer.problem), headers)
    return Response(status_code=answer.status, headers=headers)
