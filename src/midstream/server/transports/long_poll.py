"""The stream protocol over long polling, for networks that buffer whole answers.

A request is answered with the available frames, else with the next event, else with a heartbeat when it is due. The
next request contains the client's last event id, so the server keeps no state between two requests. The client sends
frames with `POST …/commands`, as with server-sent events.
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
from midstream.server.auth.caller import caller_of
from midstream.server.transports.connection import Connection, Connections, FrameTransport
from midstream.server.transports.stream_headers import connection_name_of

GAP_S = 10.0
"""Seconds from one poll to the next, for an answer and a request on a bad network."""
POLL_HEADERS = {"cache-control": "no-store, no-transform", "x-content-type-options": "nosniff"}


class PollQuery(Struct, frozen=True):
    """Query of a poll: its number on its connection, and the seconds that it may wait for an event."""

    n: Number = 0
    wait: Annotated[int, Meta(ge=1, le=int(HEARTBEAT_S))] | UnsetType = UNSET


class PollAnswer(Struct, frozen=True):
    """The available frames, and whether more follow."""

    frames: list[ServerFrame]
    more: bool


class PollTransport(FrameTransport):
    """Transport of one answer, which ends with its first frames."""

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
        """Wait until the client disconnects; it sends no frames here."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        return None

    @override
    async def send(self, frames: Sequence[bytes]) -> None:
        self.frames += frames


class PollEndpoint:
    """Endpoint of long polling for a session or a stream."""

    def __init__(self, host: Host, connections: Connections) -> None:
        self._host = host
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one poll. `n` is its number on the connection; poll 0 opens the connection.

        `wait` is the time limit in seconds, for proxies whose timeout is shorter than a heartbeat.

        Raises:
            MidstreamError: The poll is refused, with an ordinary HTTP error.
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
            caller_of(scope),
            name=name,
            is_continued=query.n > 0,
            request=request,
        ) as connection:
            await connection.admit(encode(opening))
            await connection.show_due()
            frames = stream.frames_to_send()
            if query.n:
                del frames[0]  # the welcome belongs to the first answer of a connection
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
