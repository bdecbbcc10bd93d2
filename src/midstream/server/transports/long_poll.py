"""The stream protocol by long poll, for networks that let only whole answers through.

Each request is answered once, with the frames there are: at once where there are some, else with the first news,
else with a heartbeat when it is due. The next request shows the last event the client has, so that nothing is kept
for it here between two of them. The way up is `POST …/commands`, as for server-sent events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from midstream.engine.host import Host
from midstream.protocol.frames import HEARTBEAT_S, Number, ServerFrame, encode
from midstream.server.api.http_endpoints import opening_of
from midstream.server.api.request_bodies import decode_query
from midstream.server.auth.caller import visitor_of
from midstream.server.transports.connection import Connection, Connections, FrameTransport
from midstream.server.transports.stream_headers import connection_name_of

GAP_S = 10.0
"""Seconds in which a client asks again: an answer on a bad network, and the way of the next request."""
POLL_HEADERS = {"cache-control": "no-store, no-transform", "x-content-type-options": "nosniff"}


class PollQuery(Struct, frozen=True):
    """The number of a poll on its connection, and the seconds it may wait for an event."""

    n: Number = 0
    wait: Annotated[int, Meta(ge=1, le=int(HEARTBEAT_S))] | UnsetType = UNSET


class PollAnswer(Struct, frozen=True):
    """The frames that were there, and whether more follow."""

    frames: list[ServerFrame]
    more: bool


class PollTransport(FrameTransport):
    """The frames of one answer, which the first ones end."""

    gap_s = GAP_S

    def __init__(self, receive: Receive, *, ends_with_turn: bool) -> None:
        self.ends_with_turn = ends_with_turn
        self.frames: list[bytes] = []
        self._receive = receive

    @property
    @override
    def is_full(self) -> bool:
        return bool(self.frames)

    async def receive(self) -> bytes | None:
        """Wait until the client has gone: it sends nothing here."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        return None

    @override
    async def send(self, frames: Sequence[bytes]) -> None:
        self.frames += frames


class PollEndpoint:
    """Follow a session, or a stream, by long polling: return the frames there are, or the next ones."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one poll; `n` numbers those of a connection, and the first one, 0, opens it.

        `wait` is the seconds it may wait for an event, where a proxy has less patience than a heartbeat.

        Raises:
            MidstreamError: It is refused; an ordinary HTTP error.
        """
        request = Request(scope, receive)
        opening, query = await opening_of(request), decode_query(request, PollQuery)
        session_id, name = scope["path_params"]["session_id"], connection_name_of(request)
        settings = (
            self._connections.settings_of(session_id, name)
            if query.n
            else self._connections.choose_settings(session_id, name)
        )
        if query.wait is not UNSET:
            settings = replace(settings, heartbeat_s=query.wait)
        stream = self._connections.stream(self._host, settings=settings)
        transport = PollTransport(receive, ends_with_turn=bool(opening.stream))
        with Connection(
            self._host,
            session_id,
            stream,
            transport,
            self._connections,
            visitor_of(scope),
            name=name,
            is_continued=query.n > 0,
            request=request,
        ) as connection:
            await connection.admit(encode(opening))
            await connection.show_due()
            frames = stream.frames_to_send()
            if query.n:
                del frames[0]  # the welcome: a connection has one
            if not frames:
                failure = await connection.run()
                frames = transport.frames
                is_over = transport.ends_with_turn and connection.is_turn_over
                has_more = bool(frames) and failure is None and not is_over
            else:
                has_more = True
        await _answer(frames, has_more=has_more)(scope, receive, send)


def _answer(frames: Sequence[bytes], *, has_more: bool) -> Response:
    more = b"true" if has_more else b"false"
    body = b'{"frames":[%b],"more":%b}' % (b",".join(frames), more)
    return Response(body, headers=POLL_HEADERS, media_type="application/json")
