"""OpenAPI 3.1 description of the server: made from the types that are really read and written.

Each operation names its route as the router has it, so that a test finds a route without a description, and a
description without a route. The frames of streams are in `docs/spec/stream.md`. It is the same for a server without
authentication, which has no routes of access, and for one without metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from midstream.protocol.frames import (
    COALESCE_S_MAX,
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    Ack,
    AnswerPayload,
    CancelPayload,
    Close,
    HeartbeatFrame,
    Payload,
    Ping,
    ResultPayload,
    ServerFrame,
    SnapshotWhen,
    WithdrawPayload,
)
from midstream.protocol.open_fields import CANCEL_AFTER_S_MAX, KEY_CHARS_MAX, NUMBER_MAX
from midstream.server.api.http_endpoints import CURSOR, SESSIONS_PER_PAGE_MAX, QuestionPage, SessionPage
from midstream.server.api.probe_endpoint import CHUNKS_MAX as PIECES_MAX_PROBED
from midstream.server.api.probe_endpoint import EVERY_MS_MAX
from midstream.server.api.problems import MEDIA_TYPE, Problem
from midstream.server.api.session_snapshot import SessionSnapshot
from midstream.server.auth.access_routes import CallerDescription, Issued, LoginRequest, Owned, TicketRequest
from midstream.server.auth.authorizer import HOST_COOKIE
from midstream.server.auth.principals import ID_CHARS_MAX
from midstream.server.auth.viewer_routes import ViewerRequest
from midstream.session.records import Record
from midstream.session.session import COMMANDS_MAX
from midstream.version import __version__

Json = dict[str, Any]
PATH = "/v1/openapi.json"
JSON = "application/json"
LINES = "application/x-ndjson"
EVENTS = "text/event-stream"
BYTES = "application/octet-stream"
TEXT = "text/plain"
SESSION_ID = "^[A-Za-z0-9._:-]{1,128}$"
EVENT_ID = "^(0|[0-9]{1,18}-[0-9]{1,18})$"
WORD = "^[!-~]([ -~]*[!-~])?$"
"""A stream key or a secret."""
WORD_OR_NONE = f"{WORD}|^$"
EVENT: Json = {
    "type": "object",
    "description": "One event of the stream: `data` is a frame, or a record.",
    "properties": {
        "event": {"type": "string"},
        "id": {"type": "string"},
        "data": {"type": "string", "contentMediaType": JSON},
    },
    "required": ["event", "data"],
}
"""What a stream of events has many of: the standard has a type for the whole of a body alone."""


_Number = Annotated[int, Meta(ge=0, le=NUMBER_MAX)]
_Word = Annotated[str, Meta(min_length=1, max_length=KEY_CHARS_MAX, pattern=WORD)]
_WordOrNone = Annotated[str, Meta(max_length=KEY_CHARS_MAX, pattern=WORD_OR_NONE)]


class FirstCommand(Struct, frozen=True, tag="command", tag_field="type"):
    """The first command of a stream."""

    seqno: Annotated[int, Meta(ge=0, le=0)]
    payload: Payload


class NextCommand(Struct, frozen=True, tag="command", tag_field="type"):
    """A later one: a message, and the wish to go on with a turn, come first."""

    seqno: Annotated[int, Meta(ge=1, le=COMMANDS_MAX)]
    payload: ResultPayload | CancelPayload | AnswerPayload | WithdrawPayload


class _Opening(Struct, frozen=True, kw_only=True):
    event_id: Annotated[str, Meta(pattern=EVENT_ID)] | None = None
    next_seqno: _Number = 0
    connection: _Number = 0
    cancel_after_s: Annotated[float, Meta(ge=0, le=CANCEL_AFTER_S_MAX)] | None = None
    version: Annotated[int, Meta(ge=1)] = PROTOCOL_VERSION
    snapshots: SnapshotWhen = SnapshotWhen.NEVER
    coalesce_s: Annotated[float, Meta(ge=0, le=COALESCE_S_MAX)] = 0.0
    old_secret: _WordOrNone = ""


class ReaderOpen(_Opening, frozen=True, kw_only=True, tag="open", tag_field="type"):
    """The `open` of a reader, who has no stream."""

    stream: Annotated[str, Meta(max_length=0)] = ""
    secret: _WordOrNone = ""


class StreamOpen(_Opening, frozen=True, kw_only=True, tag="open", tag_field="type"):
    """The `open` of a stream."""

    stream: _Word
    secret: _Word


class Health(Struct, frozen=True):
    """Report that the process serves."""

    status: str
    version: str


class Readiness(Struct, frozen=True):
    """Whether new work should be sent here."""

    status: str
    failed: int = 0
    streams: int = 0


class CommandAnswer(Struct, frozen=True):
    """The newest event once a command was taken, and whether a turn runs."""

    event_id: str
    is_running: bool


class JournalLine(Struct, frozen=True):
    """One record of a journal, or null where it cannot be read."""

    id: str
    record: Record | None


class PollAnswer(Struct, frozen=True):
    """The answer to a poll: the frames there are, and whether to ask on."""

    frames: list[ServerFrame]
    more: bool


class Probe(Struct, frozen=True):
    """One numbered command of a probe."""

    probe: int


class Operation(Struct, frozen=True):
    """One way to ask.

    Args:
        method, path: Of the route.
        name: Its identifier.
        summary: What it does, as a sentence.
        answer: The type of a good answer's body; None for one without, or with text.
        status: Of a good answer.
        media: Of a good answer with a body.
        errors: Statuses of problems, besides those of every operation.
        query: Parameters of the query, by their names.
        bodies: The types the request's body may have; none for none.
        is_body_needed: Whether a request without a body has another form.
        is_open: Whether strangers may ask where a server asks who comes.
        headers: Named headers of the request.
        also: Further good answers: a status and its type; None for one without a body.
    """

    method: str
    path: str
    name: str
    summary: str
    answer: Any = None
    status: int = 200
    media: str = JSON
    errors: tuple[int, ...] = ()
    query: Mapping[str, Json] = {}
    bodies: tuple[Any, ...] = ()
    is_body_needed: bool = True
    is_open: bool = False
    headers: Mapping[str, Json] = {}
    also: Mapping[int, Any] = {}


def _whole(least: int, most: int) -> Json:
    return {"type": "integer", "minimum": least, "maximum": most}


def _command(name: str, summary: str, *, of: str) -> Operation:
    """Return an operation that sends a command to a session; `?of=` names the only turn or message it is meant for."""
    path, query = f"{_ONE}/{name}", {of: _ANY}
    return Operation("POST", path, name, summary, CommandAnswer, 202, errors=_COMMAND, query=query)


_ONE = "/v1/sessions/{session_id}"
_COMMAND = (404, 409)
_BODY = (413, 415)
_READERS = "/readers/{reader}"
_ANY = _whole(0, NUMBER_MAX)
_KEY: Json = {"type": "string", "minLength": 1, "maxLength": KEY_CHARS_MAX, "pattern": WORD}
_KEY_OR_NONE: Json = {"type": "string", "maxLength": KEY_CHARS_MAX, "pattern": WORD_OR_NONE}
_NAME: Json = {"type": "string", "maxLength": KEY_CHARS_MAX}
_SEEN: Json = {"type": "string", "format": "event-id", "pattern": f"{EVENT_ID}|^$"}
_CANCEL_AFTER = _whole(0, int(CANCEL_AFTER_S_MAX))
_COMMAND_HEADERS: Mapping[str, Json] = {
    "x-idempotency-key": _KEY,
    "x-idempotent-encryption-key": _KEY,
    "x-midstream-connection": _NAME,
    "x-idempotency-connection": _ANY,
    "x-idempotency-cancel-after": _CANCEL_AFTER,
}
_READER: Mapping[str, Json] = {
    "x-idempotency-key": _KEY_OR_NONE,
    "x-idempotent-encryption-key": _KEY_OR_NONE,
    "x-midstream-connection": _NAME,
    "x-idempotency-event-id": _SEEN,
    "last-event-id": _SEEN,
    "x-idempotency-next-seqno": _ANY,
    "x-idempotency-connection": _ANY,
    "x-idempotency-cancel-after": _CANCEL_AFTER,
}
_FOLLOWING: Mapping[str, Json] = {
    "after": _SEEN,
    "snapshots": {"type": "string", "enum": [*map(str, SnapshotWhen)]},
    "coalesce_ms": _whole(0, int(1000 * COALESCE_S_MAX)),
}
_POLLING: Mapping[str, Json] = {"n": _ANY, "wait": _whole(1, int(HEARTBEAT_S))}
OPERATIONS = (
    Operation("GET", "/health", "health", "Report that the process serves.", Health, is_open=True),
    Operation(
        "GET",
        "/ready",
        "ready",
        "Report whether new work should be sent here.",
        Readiness,
        is_open=True,
    ),
    Operation("GET", PATH, "openapi", "Describe the requests of this server.", Json),
    Operation(
        "GET",
        "/v1/questions",
        "questions",
        "List open questions to people.",
        QuestionPage,
        query={"session": {"type": "string"}},
    ),
    Operation(
        "GET",
        "/v1/sessions",
        "sessions",
        "List sessions, last changed first.",
        SessionPage,
        query={
            "limit": _whole(1, SESSIONS_PER_PAGE_MAX),
            "q": {"type": "string"},
            "children": _whole(0, 1),
            "after": {"type": "string", "pattern": f"^{CURSOR}$"},
        },
    ),
    Operation("GET", _ONE, "show", "Return a session's transcript.", SessionSnapshot, errors=(404,)),
    Operation("DELETE", _ONE, "delete", "Delete an idle session permanently.", status=204, errors=_COMMAND),
    Operation(
        "GET",
        f"{_ONE}/records",
        "records",
        "Export a session's records, a line each.",
        JournalLine,
        media=LINES,
        errors=(404, 410),
        query={"after": _ANY, "limit": _ANY},
    ),
    Operation(
        "GET",
        f"{_ONE}/blobs/{{digest}}",
        "blob",
        "Return the whole of a large result.",
        media=TEXT,
        errors=(404,),
    ),
    _command("cancel", "Stop the running turn, if there is one.", of="turn"),
    Operation(
        "POST",
        f"{_ONE}/answer",
        "answer",
        "Answer an open question of a call.",
        CommandAnswer,
        202,
        errors=(*_COMMAND, *_BODY),
        bodies=(AnswerPayload,),
    ),
    _command("resume", "Resume the last turn, which was interrupted or failed.", of="turn"),
    _command("withdraw", "Withdraw a queued message, or all of them.", of="number"),
    Operation(
        "POST",
        f"{_ONE}/commands",
        "commands",
        "Accept one frame of a client: a command, which shows its stream's key and secret, is answered with its ack;"
        " a ping with a heartbeat.",
        Ack | HeartbeatFrame,
        errors=(*_COMMAND, *_BODY, 422),
        bodies=(FirstCommand, NextCommand, Ping, Close),
        headers=_COMMAND_HEADERS,
        also={204: None},
    ),
    Operation(
        "GET",
        f"{_ONE}/events",
        "events",
        "Follow a session, or a stream, by server-sent events.",
        media=EVENTS,
        errors=_COMMAND,
        query=_FOLLOWING,
        headers=_READER,
    ),
    Operation(
        "POST",
        f"{_ONE}/events",
        "open_events",
        "Follow a session, or a stream, by server-sent events; the body is the `open`.",
        media=EVENTS,
        errors=(*_COMMAND, *_BODY),
        bodies=(ReaderOpen, StreamOpen),
    ),
    Operation(
        "GET",
        f"{_ONE}/poll",
        "poll",
        "Return the available frames, or wait for the next ones.",
        PollAnswer,
        errors=_COMMAND,
        query={**_POLLING, **_FOLLOWING},
        headers=_READER,
    ),
    Operation(
        "POST",
        f"{_ONE}/poll",
        "open_poll",
        "Return the available frames, or wait for the next ones; the body is the `open`.",
        PollAnswer,
        errors=(*_COMMAND, *_BODY),
        query=_POLLING,
        bodies=(ReaderOpen, StreamOpen),
    ),
    Operation(
        "GET",
        "/v1/probe/events",
        "probe_events",
        "Send numbered commands at intervals.",
        media=EVENTS,
        query={"commands": _whole(1, PIECES_MAX_PROBED), "every_ms": _whole(1, EVERY_MS_MAX)},
    ),
    Operation(
        "GET",
        "/v1/probe/poll",
        "probe_poll",
        "Send one numbered command.",
        Probe,
        query={"n": _whole(0, PIECES_MAX_PROBED), "every_ms": _whole(1, EVERY_MS_MAX)},
    ),
    Operation(
        "POST",
        "/v1/probe/chunks",
        "probe_chunks",
        "Return the posted body.",
        media=BYTES,
        errors=_BODY,
    ),
    Operation("GET", "/v1/me", "me", "Return the principal of the caller.", CallerDescription),
    Operation(
        "POST",
        "/v1/login",
        "login",
        "Set a cookie, for a login link or any other credential.",
        CallerDescription,
        errors=_BODY,
        bodies=(LoginRequest,),
        is_body_needed=False,
        is_open=True,
    ),
    Operation(
        "POST", "/v1/login-links", "login_link", "Create a one-time login word for a browser.", Issued, 201
    ),
    Operation("POST", "/v1/logout", "logout", "Invalidate the cookie, and end its connections.", status=204),
    Operation(
        "POST",
        f"{_ONE}/tickets",
        "ticket",
        "Create a ticket for one connection of the calling page to this session.",
        Issued,
        201,
        errors=(404, *_BODY),
        bodies=(TicketRequest,),
        is_body_needed=False,
    ),
    Operation(
        "POST",
        f"{_ONE}/viewers",
        "viewer",
        "Create a pass that permits reading this session for a limited time.",
        Issued,
        201,
        errors=(404, *_BODY),
        bodies=(ViewerRequest,),
        is_body_needed=False,
    ),
    Operation(
        "DELETE",
        f"{_ONE}/viewers",
        "withdraw_viewers",
        "Invalidate all passes of this session.",
        status=204,
        errors=(404,),
    ),
    Operation("GET", f"{_ONE}/owner", "owner", "Return the owner of a session.", Owned, errors=(404,)),
    Operation(
        "PUT",
        f"{_ONE}{_READERS}",
        "add_reader",
        "Permit a principal to read this session.",
        Owned,
        errors=_COMMAND,
    ),
    Operation(
        "DELETE",
        f"{_ONE}{_READERS}",
        "remove_reader",
        "Withdraw the permission to read this session.",
        Owned,
        errors=_COMMAND,
    ),
    Operation("GET", "/metrics", "metrics", "Return metrics for Prometheus.", media=TEXT),
)
NO_CONTENT = 204
_EVERYWHERE = (400, 401, 403, 414, 429, 431, 500, 503)
_MEANINGS = {
    200: "Done.",
    201: "Created.",
    202: "It is in the journal.",
    204: "Done, without content.",
    400: "A malformed request, frame or id.",
    401: "No credential, or no valid one.",
    403: "Not allowed: another secret, or a page of another site.",
    404: "Not found.",
    409: "A conflict with another client or with a rule of the stream; see `code`.",
    410: "Records that are no longer kept.",
    413: "Larger than a frame may be.",
    414: "The address is too long.",
    415: "A body that is compressed.",
    422: "The stream key was used for another first message.",
    429: "A limit for one caller was reached: try again after `Retry-After`.",
    431: "The headers are too large.",
    500: "The store is damaged, or the server has a defect.",
    503: "Nothing is wrong with the request: try again after `Retry-After`.",
}


_SHOWN: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A token that the application accepts."},
    "cookie": {
        "type": "apiKey",
        "in": "cookie",
        "name": HOST_COOKIE,
        "description": "Of `POST /v1/login`; over plain HTTP its name is `midstream-` and the port.",
    },
}
"""What a server that asks who comes takes for an answer."""


@cache
def description() -> Json:
    """Return the description as an object; the same for every server of this version."""
    _, components = _schemas()
    paths: dict[str, Json] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "midstream",
            "version": __version__,
            "summary": "Durable AI-agent sessions",
        },
        "paths": paths,
        "components": {"schemas": dict(sorted(components.items())), "securitySchemes": _SHOWN},
        "security": [{"bearer": []}, {"cookie": []}],
    }


def openapi_route() -> Route:
    """Return the route that serves the description."""
    return Route(PATH, _serve, methods=["GET"])


async def _serve(_: Request) -> Response:
    return Response(
        msgspec.json.encode(description()), media_type=JSON, headers={"cache-control": "no-cache"}
    )


def _types_of(operation: Operation) -> Iterable[Any]:
    kinds = (operation.answer, *operation.bodies, *operation.also.values())
    return [kind for kind in kinds if kind is not None and kind is not Json]


def _operation(operation: Operation) -> Json:
    good: Json = {"description": _MEANINGS[operation.status]}
    if operation.status != NO_CONTENT:
        good["content"] = {operation.media: {"schema": _schema_of_answer(operation)}}
    answers = {str(operation.status): good}
    for status in (*_EVERYWHERE, *operation.errors):
        answers[str(status)] = _answer(status, Problem, MEDIA_TYPE)
    for status, kind in operation.also.items():
        answers[str(status)] = _answer(status, kind, JSON)
    told: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": dict(sorted(answers.items())),
    }
    if operation.is_open:
        told["security"] = []
    if operation.bodies:
        schemas = [_schema(kind) for kind in operation.bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        told["requestBody"] = {"required": operation.is_body_needed, "content": {JSON: {"schema": schema}}}
    return told


def _answer(status: int, kind: Any, media: str) -> Json:  # noqa: ANN401 - a type
    answer: Json = {"description": _MEANINGS[status]}
    return answer if kind is None else {**answer, "content": {media: {"schema": _schema(kind)}}}


def _schema_of_answer(operation: Operation) -> Json:
    if operation.media == EVENTS:
        return EVENT
    return _schema(operation.answer) if operation.media in (JSON, LINES) else {"type": "string"}


def _schema(kind: Any) -> Json:  # noqa: ANN401 - a type
    return {"type": "object"} if kind is Json else _schemas()[0][kind]


@cache
def _schemas() -> tuple[dict[Any, Json], Json]:
    """Return each type's schema and what they refer to, made at once, so that types of one name are distinguished."""
    kinds = [*dict.fromkeys([Problem, *(kind for each in OPERATIONS for kind in _types_of(each))])]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return dict(zip(kinds, schemas, strict=True)), components


def _parameters(operation: Operation) -> list[Json]:
    told: list[Json] = []
    for name, schema in _IN_PATHS.items():
        if f"{{{name}}}" in operation.path:
            told.append(_parameter(name, "path", schema))
    told += [_parameter(name, "query", schema) for name, schema in operation.query.items()]
    told += [_parameter(name, "header", schema) for name, schema in operation.headers.items()]
    return told


_IN_PATHS: Mapping[str, Json] = {
    "session_id": {"type": "string", "pattern": SESSION_ID},
    "digest": {"type": "string", "minLength": 1},
    "reader": {"type": "string", "minLength": 1, "maxLength": ID_CHARS_MAX, "pattern": "^[^/]*$"},
}


def _parameter(name: str, place: str, schema: Json) -> Json:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}
