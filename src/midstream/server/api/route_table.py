"""The HTTP operations: one table, which the router serves and the OpenAPI document describes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache, partial
from http import HTTPStatus
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from midstream.protocol import frames
from midstream.server.api import openapi
from midstream.server.api.http_endpoints import (
    NO_STORE,
    EventsEndpoint,
    HttpEndpoints,
    JournalLine,
    StreamEvent,
    json_response,
)
from midstream.server.api.metrics import Metrics
from midstream.server.api.nodes_endpoint import NodesEndpoint
from midstream.server.api.openapi import Operation
from midstream.server.api.probe_endpoint import ProbeChunk, ProbeEndpoints
from midstream.server.api.request_bodies import decode_body, decode_query
from midstream.server.auth.access_routes import AccessRoutes, CallerDescription
from midstream.server.auth.viewer_routes import ViewerRoutes
from midstream.server.transports.http_commands import CommandsEndpoint
from midstream.server.transports.long_poll import PollAnswer, PollEndpoint, PollQuery
from midstream.server.transports.stream_headers import FollowerHeaders, FollowQuery, FrameSender
from midstream.session.session import COMMANDS_MAX

TEXT, BYTES = "text/plain", "application/octet-stream"
LINES, EVENTS = "application/x-ndjson", "text/event-stream"
_Key = Annotated[frames.Word, Meta(min_length=1)]


class FirstCommand(Struct, tag="command"):
    """The first command of a stream."""

    seqno: Annotated[int, Meta(ge=0, le=0)]
    payload: frames.Payload


class NextCommand(Struct, tag="command"):
    """A later command; a message, or the request to resume a turn, is always the first one."""

    seqno: Annotated[int, Meta(ge=1, le=COMMANDS_MAX)]
    payload: frames.ResultPayload | frames.CancelPayload | frames.AnswerPayload | frames.WithdrawPayload


class ReaderOpen(frames.Open, frozen=True, kw_only=True, tag="open"):
    """The `open` of a reader, which has no stream."""

    stream: Annotated[str, Meta(max_length=0)] = ""


class StreamOpen(frames.Open, frozen=True, kw_only=True, tag="open"):
    """The `open` of a stream."""

    stream: _Key
    secret: _Key


class OpenApiEndpoint:
    """The endpoint of the document."""

    async def show(self, _: Request) -> openapi.Json:
        """Return the OpenAPI document of this server."""
        return document()


_ONE = "/v1/sessions/{session_id}"
_READER = f"{_ONE}/readers/{{reader}}"
_OPENS = (ReaderOpen, StreamOpen)
_FOLLOWER = (FollowerHeaders,)
# The columns of the endpoints that are ASGI apps.
_COMMAND: openapi.Json = {
    "errors": (409, 422),
    "answer": frames.Ack | frames.HeartbeatFrame | None,
    "headers": (FrameSender,),
    "bodies": (FirstCommand, NextCommand, frames.Ping, frames.Close),
}
_EVENTS: openapi.Json = {"errors": (409,), "answer": StreamEvent, "media": EVENTS}
_POLL: openapi.Json = {"errors": (409,), "answer": PollAnswer}
OPERATIONS = (
    Operation("health", "GET", "/health", HttpEndpoints.health, is_open=True),
    Operation("ready", "GET", "/ready", HttpEndpoints.ready, is_open=True),
    Operation("openapi", "GET", "/v1/openapi.json", OpenApiEndpoint.show),
    Operation("questions", "GET", "/v1/questions", HttpEndpoints.questions),
    Operation("sessions", "GET", "/v1/sessions", HttpEndpoints.sessions),
    Operation("show", "GET", _ONE, HttpEndpoints.show),
    Operation("delete", "DELETE", _ONE, HttpEndpoints.delete, errors=(409,)),
    Operation("records", "GET", f"{_ONE}/records", HttpEndpoints.records, 200, (410,), JournalLine, LINES),
    Operation("blob", "GET", f"{_ONE}/blobs/{{digest}}", HttpEndpoints.blob, answer=str, media=TEXT),
    Operation("cancel", "POST", f"{_ONE}/cancel", HttpEndpoints.cancel, 202, (409,)),
    Operation("answer", "POST", f"{_ONE}/answer", HttpEndpoints.answer, 202, (409,)),
    Operation("resume", "POST", f"{_ONE}/resume", HttpEndpoints.resume, 202, (409,)),
    Operation("withdraw", "POST", f"{_ONE}/withdraw", HttpEndpoints.withdraw, 202, (409,)),
    Operation("commands", "POST", f"{_ONE}/commands", CommandsEndpoint, **_COMMAND),
    Operation(
        "events", "GET", f"{_ONE}/events", EventsEndpoint, **_EVENTS, query=(FollowQuery,), headers=_FOLLOWER
    ),
    Operation("open_events", "POST", f"{_ONE}/events", EventsEndpoint, **_EVENTS, bodies=_OPENS),
    Operation(
        "poll",
        "GET",
        f"{_ONE}/poll",
        PollEndpoint,
        **_POLL,
        query=(PollQuery, FollowQuery),
        headers=_FOLLOWER,
    ),
    Operation("open_poll", "POST", f"{_ONE}/poll", PollEndpoint, **_POLL, query=(PollQuery,), bodies=_OPENS),
    Operation("probe_events", "GET", "/v1/probe/events", ProbeEndpoints.events, 200, (), StreamEvent, EVENTS),
    Operation("probe_poll", "GET", "/v1/probe/poll", ProbeEndpoints.poll, answer=ProbeChunk),
    Operation("probe_chunks", "POST", "/v1/probe/chunks", ProbeEndpoints.chunks, 200, (413, 415), str, BYTES),
    Operation("me", "GET", "/v1/me", AccessRoutes.me),
    Operation("challenge", "POST", "/v1/challenge", AccessRoutes.challenge, errors=(404,), is_open=True),
    Operation("login", "POST", "/v1/login", AccessRoutes.login, 200, (409,), CallerDescription, is_open=True),
    Operation("login_link", "POST", "/v1/login-links", AccessRoutes.login_link, 201),
    Operation("logout", "POST", "/v1/logout", AccessRoutes.logout),
    Operation("credentials", "GET", "/v1/access", AccessRoutes.credentials),
    Operation("revoke_all", "DELETE", "/v1/access", AccessRoutes.revoke_all),
    Operation("revoke", "DELETE", "/v1/access/{credential}", AccessRoutes.revoke, errors=(404,)),
    Operation("ticket", "POST", f"{_ONE}/tickets", AccessRoutes.ticket, 201),
    Operation("viewer", "POST", f"{_ONE}/viewers", ViewerRoutes.issue_view, 201),
    Operation("withdraw_viewers", "DELETE", f"{_ONE}/viewers", ViewerRoutes.withdraw),
    Operation("owner", "GET", f"{_ONE}/owner", AccessRoutes.owner),
    Operation("add_reader", "PUT", _READER, AccessRoutes.add_reader, errors=(409,)),
    Operation("remove_reader", "DELETE", _READER, AccessRoutes.remove_reader, errors=(409,)),
    Operation("nodes", "GET", "/v1/nodes", NodesEndpoint.nodes),
    Operation("metrics", "GET", "/metrics", Metrics.show, answer=str, media=TEXT),
)


@cache
def document() -> openapi.Json:
    """Return the OpenAPI document; the same for every server of this version."""
    return openapi.document(OPERATIONS)


def routes_of(endpoint: Any) -> list[Route]:  # noqa: ANN401 - any class of endpoints
    """Return the routes that an endpoint serves: as an ASGI app, or by its methods."""
    routes = []
    for each in OPERATIONS:
        handler = getattr(endpoint, each.handler.__name__, None)
        if each.handler is type(endpoint):
            routes.append(Route(each.path, endpoint, methods=[each.method]))
        elif handler is not None and getattr(handler, "__func__", None) is each.handler:
            call = partial(_respond, each.status, handler, each.signature())
            routes.append(Route(each.path, call, methods=[each.method]))
    return routes


async def _respond(
    status: int, handler: Callable[..., Awaitable[Any]], signature: dict[str, Any], request: Request
) -> Response:
    arguments: dict[str, Any] = {}
    if "query" in signature:
        arguments["query"] = decode_query(request, signature["query"])
    if "body" in signature:
        arguments["body"] = await decode_body(request, signature["body"])
    answer = await handler(request, **arguments)
    if isinstance(answer, Response):
        return answer
    if answer is None:
        return Response(status_code=HTTPStatus.NO_CONTENT, headers=NO_STORE)
    return json_response(answer, status=status)
