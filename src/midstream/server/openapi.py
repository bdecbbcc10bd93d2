"""What the server answers to, as an OpenAPI 3.1 description: made from the types that are really read and written.

Each operation names its route as the router has it, so that a test finds a route without a description, and a
description without a route. What is said over the stream itself stands in `docs/spec/stream.md`.
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

from midstream.core.frames import (
    HEARTBEAT_S,
    AbortPayload,
    Ack,
    AnswerPayload,
    Open,
    Payload,
    ResultPayload,
    ServerFrame,
    WithdrawPayload,
)
from midstream.core.records import Record
from midstream.core.server_stream import KEY_CHARS_MAX
from midstream.core.session import CHUNKS_MAX
from midstream.server.http import SESSIONS_PER_PAGE_MAX, QuestionPage, SessionPage
from midstream.server.probe import CHUNKS_MAX as CHUNKS_MAX_PROBED
from midstream.server.probe import EVERY_MS_MAX
from midstream.server.problems import MEDIA_TYPE, Problem
from midstream.server.snapshot import Snapshot
from midstream.version import __version__

Json = dict[str, Any]
PATH = "/v1/openapi.json"
JSON = "application/json"
LINES = "application/x-ndjson"
EVENTS = "text/event-stream"
BYTES = "application/octet-stream"
SESSION_ID = "^[A-Za-z0-9._:-]{1,128}$"
NUMBER_MAX = 2**53
"""The last number JavaScript counts to."""


class FirstChunk(Struct, frozen=True, tag="chunk", tag_field="type"):
    """The first chunk of a stream."""

    seqno: Annotated[int, Meta(ge=0, le=0)]
    payload: Payload


class NextChunk(Struct, frozen=True, tag="chunk", tag_field="type"):
    """A later one: a message, and the wish to go on with a turn, come first."""

    seqno: Annotated[int, Meta(ge=1, le=CHUNKS_MAX)]
    payload: ResultPayload | AbortPayload | AnswerPayload | WithdrawPayload


class Health(Struct, frozen=True):
    """That the process serves."""

    status: str
    version: str


class Readiness(Struct, frozen=True):
    """Whether new work should be sent here."""

    status: str
    failed: int = 0
    streams: int = 0
    recovering: dict[str, int] | None = None


class Told(Struct, frozen=True):
    """The newest event once a command was taken, and whether a turn runs."""

    event_id: str
    is_running: bool


class Line(Struct, frozen=True):
    """One record of a journal, or null where it cannot be read."""

    id: str
    record: Record | None


class Page(Struct, frozen=True):
    """The answer to a poll: the frames there are, and whether to ask on."""

    frames: list[ServerFrame]
    more: bool


class Probe(Struct, frozen=True):
    """One numbered chunk of a probe."""

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
        query: Numbers of the query, by their names, with the least and the most.
        bodies: The types the request's body may have; none for none.
        headers: Named headers of the request, and whether each must be there.
        also: Further good answers: a status and its type.
    """

    method: str
    path: str
    name: str
    summary: str
    answer: Any = None
    status: int = 200
    media: str = JSON
    errors: tuple[int, ...] = ()
    query: Mapping[str, tuple[int, int]] = {}
    bodies: tuple[Any, ...] = ()
    headers: Mapping[str, bool] = {}
    also: Mapping[int, Any] = {}


_ONE = "/v1/sessions/{session_id}"
_COMMAND = (404, 409)
_STREAM = {"x-idempotency-key": True, "x-idempotent-encryption-key": True}
_POLLING = {"n": (0, NUMBER_MAX), "wait": (1, int(HEARTBEAT_S))}
_READER = {
    "x-idempotency-key": False,
    "x-idempotent-encryption-key": False,
    "x-idempotency-event-id": False,
    "last-event-id": False,
}
OPERATIONS = (
    Operation("GET", "/health", "health", "Say that the process serves.", Health),
    Operation(
        "GET",
        "/ready",
        "ready",
        "Say whether new work should be sent here.",
        Readiness,
        also={503: Readiness},
    ),
    Operation("GET", PATH, "openapi", "Describe what this server answers to.", Json),
    Operation("GET", "/v1/questions", "questions", "List what waits for a person.", QuestionPage),
    Operation(
        "GET",
        "/v1/sessions",
        "sessions",
        "List sessions, last changed first.",
        SessionPage,
        query={"limit": (1, SESSIONS_PER_PAGE_MAX), "offset": (0, NUMBER_MAX)},
    ),
    Operation("GET", _ONE, "show", "Return a session's transcript.", Snapshot, errors=(404,)),
    Operation("DELETE", _ONE, "delete", "Remove an idle session for good.", status=204, errors=_COMMAND),
    Operation(
        "GET",
        f"{_ONE}/records",
        "records",
        "Export a session's records, a line each.",
        Line,
        media=LINES,
        errors=(404, 410),
        query={"after": (0, NUMBER_MAX), "limit": (0, NUMBER_MAX)},
    ),
    Operation(
        "GET",
        f"{_ONE}/blobs/{{digest}}",
        "blob",
        "Return the whole of a large result.",
        media="text/plain",
        errors=(404,),
    ),
    Operation(
        "POST",
        f"{_ONE}/cancel",
        "cancel",
        "Stop the running turn, if there is one.",
        Told,
        202,
        errors=_COMMAND,
        query={"turn": (0, NUMBER_MAX)},
    ),
    Operation(
        "POST",
        f"{_ONE}/answer",
        "answer",
        "Answer an open question of a call.",
        Told,
        202,
        errors=(*_COMMAND, 413),
        bodies=(AnswerPayload,),
    ),
    Operation(
        "POST",
        f"{_ONE}/resume",
        "resume",
        "Go on with the last turn, which was interrupted or failed.",
        Told,
        202,
        errors=_COMMAND,
        query={"turn": (0, NUMBER_MAX)},
    ),
    Operation(
        "POST",
        f"{_ONE}/withdraw",
        "withdraw",
        "Take back a queued message, or all that wait.",
        Told,
        202,
        errors=_COMMAND,
        query={"number": (0, NUMBER_MAX)},
    ),
    Operation(
        "POST",
        f"{_ONE}/chunks",
        "chunks",
        "Take one chunk of a stream; the answer is its ack.",
        Ack,
        errors=(*_COMMAND, 413, 422),
        bodies=(FirstChunk, NextChunk),
        headers=_STREAM,
    ),
    Operation(
        "GET",
        f"{_ONE}/events",
        "events",
        "Follow a session, or a stream, by server-sent events.",
        media=EVENTS,
        errors=_COMMAND,
        headers=_READER,
    ),
    Operation(
        "POST",
        f"{_ONE}/events",
        "open_events",
        "Follow a session, or a stream, by server-sent events; the body is the `open`.",
        media=EVENTS,
        errors=(*_COMMAND, 413),
        bodies=(Open,),
    ),
    Operation(
        "GET",
        f"{_ONE}/poll",
        "poll",
        "Answer with the frames there are, or with the next ones.",
        Page,
        errors=_COMMAND,
        query=_POLLING,
        headers=_READER,
    ),
    Operation(
        "POST",
        f"{_ONE}/poll",
        "open_poll",
        "Answer with the frames there are, or with the next ones; the body is the `open`.",
        Page,
        errors=(*_COMMAND, 413),
        query=_POLLING,
        bodies=(Open,),
    ),
    Operation(
        "GET",
        "/v1/probe/events",
        "probe_events",
        "Say numbered chunks, some time apart.",
        media=EVENTS,
        query={"chunks": (1, CHUNKS_MAX_PROBED), "every_ms": (1, EVERY_MS_MAX)},
    ),
    Operation(
        "GET",
        "/v1/probe/poll",
        "probe_poll",
        "Say one numbered chunk.",
        Probe,
        query={"n": (0, CHUNKS_MAX_PROBED), "every_ms": (1, EVERY_MS_MAX)},
    ),
    Operation(
        "POST",
        "/v1/probe/chunks",
        "probe_chunks",
        "Give back what was posted.",
        media=BYTES,
        errors=(413,),
    ),
)
NO_CONTENT = 204
_EVERYWHERE = (400, 401, 403, 429, 431, 500, 503)
_MEANINGS = {
    200: "Done.",
    202: "It is in the journal.",
    204: "Done; there is nothing to say.",
    400: "A request, frame or id of another form.",
    401: "No credential, or none that is good.",
    403: "Not allowed: another secret, or a page of another site.",
    404: "There is no such thing.",
    409: "Somebody else was first, or a rule of the stream forbids it; see `code`.",
    410: "Records that are not kept any more.",
    413: "More than a frame may have.",
    422: "The stream key was used for another first message.",
    429: "As much as one caller may: try again after `Retry-After`.",
    431: "More headers than a request may have.",
    500: "The store is damaged, or a bug.",
    503: "Nothing is wrong with the request: try again after `Retry-After`.",
}


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
            "summary": "AI-agent sessions that survive anything",
        },
        "paths": paths,
        "components": {"schemas": dict(sorted(components.items()))},
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
        schema = _schema(operation.answer) if operation.media in (JSON, LINES) else {"type": "string"}
        good["content"] = {operation.media: {"schema": schema}}
    answers = {str(operation.status): good}
    for status in (*_EVERYWHERE, *operation.errors):
        kind = operation.also.get(status, Problem)
        media = MEDIA_TYPE if kind is Problem else JSON
        answers[str(status)] = {
            "description": _MEANINGS[status],
            "content": {media: {"schema": _schema(kind)}},
        }
    told: Json = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": dict(sorted(answers.items())),
    }
    if operation.bodies:
        schemas = [_schema(kind) for kind in operation.bodies]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return told


def _schema(kind: Any) -> Json:  # noqa: ANN401 - a type
    return {"type": "object"} if kind is Json else _schemas()[0][kind]


@cache
def _schemas() -> tuple[dict[Any, Json], Json]:
    """Return each type's schema and what they refer to, made at once, so that types of one name are told apart."""
    kinds = [*dict.fromkeys([Problem, *(kind for each in OPERATIONS for kind in _types_of(each))])]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return dict(zip(kinds, schemas, strict=True)), components


def _parameters(operation: Operation) -> list[Json]:
    told: list[Json] = []
    if "{session_id}" in operation.path:
        told.append(
            _parameter("session_id", "path", {"type": "string", "pattern": SESSION_ID}, is_required=True)
        )
    if "{digest}" in operation.path:
        told.append(_parameter("digest", "path", {"type": "string", "minLength": 1}, is_required=True))
    for name, (least, most) in operation.query.items():
        told.append(_parameter(name, "query", {"type": "integer", "minimum": least, "maximum": most}))
    if operation.name == "questions":
        told.append(_parameter("session", "query", {"type": "string"}))
    for name, is_required in operation.headers.items():
        text = {"type": "string", "minLength": 1, "maxLength": KEY_CHARS_MAX}
        told.append(_parameter(name, "header", text, is_required=is_required))
    return told


def _parameter(name: str, place: str, schema: Json, *, is_required: bool = False) -> Json:
    return {"name": name, "in": place, "required": is_required, "schema": schema}
