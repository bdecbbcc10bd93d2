"""OpenAPI 3.1 document of the HTTP operations, generated from the types of requests and responses.

The document is the same for all servers, also for those without authentication routes or metrics. The frames of streams
are in `docs/spec/stream.md`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response

from midstream.server.api.problems import MEDIA_TYPE, Problem
from midstream.server.auth.authorizer import HOST_COOKIE
from midstream.server.auth.issued_credentials import ID_LENGTH
from midstream.server.auth.principals import ID_CHARS_MAX
from midstream.version import __version__

Json = dict[str, Any]
JSON = "application/json"
_SCHEMA_REFERENCE = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request, frame or id is invalid.",
    401: "The credential is missing or not valid.",
    403: "Not allowed: another secret, or a page of another site.",
    404: "Not found.",
    405: "The method is not available at this address, or needs other headers; see `Allow`.",
    409: "The state of the session or stream forbids it; see `code`.",
    410: "The records were pruned.",
    413: "The body is larger than a frame may be.",
    414: "The address is too long.",
    415: "The body is compressed.",
    422: "The stream key was used for another first message.",
    429: "The caller has reached a limit; try again after `Retry-After`.",
    431: "The headers are too large.",
    500: "The store is damaged, or the server has a bug.",
    503: "The server is not available now; try again after `Retry-After`.",
}
_ERRORS_OF_ALL = (400, 401, 403, 414, 429, 431, 500, 503)
_REFUSALS = (400, 404, 415)
_ERRORS_OF_SESSIONS = (404,)
_ERRORS_OF_BODIES = (413, 415)
_SECURITY: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A token that the application accepts."},
    "cookie": {
        "type": "apiKey",
        "in": "cookie",
        "name": HOST_COOKIE,
        "description": "The cookie of `POST /v1/login`; over plain HTTP its name is `midstream-` and the port.",
    },
}


class PathParameters(Struct):
    """The variable parts of paths."""

    session_id: Annotated[str, Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")]
    chat: Annotated[str, Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")]
    run: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}(~\d+\.\d+)?$")]
    stream: Annotated[str, Meta(pattern="^[A-Za-z0-9._:-]+(/[A-Za-z0-9._:-]+)*$", max_length=128)]
    subscription: Annotated[str, Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")]
    thread: Annotated[str, Meta(pattern="^[A-Za-z0-9._:-]{1,128}$")]
    run_id: Annotated[str, Meta(pattern="^[^/]{1,128}$")]
    task: Annotated[str, Meta(pattern="^[^/]{1,160}$")]
    assistant: Annotated[str, Meta(pattern="^[^/]{1,128}$")]
    digest: Annotated[str, Meta(min_length=1)]
    reader: Annotated[str, Meta(min_length=1, max_length=ID_CHARS_MAX, pattern="^[^/]*$")]
    credential: Annotated[str, Meta(pattern=f"^[0-9a-f]{{{ID_LENGTH}}}$")]


class Operation(Struct, frozen=True):
    """One row of the table. The signature of the handler contains the types of its query, body and answer.

    Args:
        name: Id of the operation in the document.
        method, path: Method and path of the route.
        handler: A method of an endpoint class, or `__call__` of an ASGI app. Its docstring is the summary. A method
            with the parameter `send` sends its answer itself.
        status: Status of a successful answer with a body.
        errors: Further error statuses, besides those of all operations, sessions or bodies.
        answer: Type of a successful answer's body, if the handler creates the response; a union with None permits 204.
        media: Media type of a successful answer.
        query, headers: Structs whose fields are the parameters.
        bodies: Possible types of the request's body, if the handler decodes it.
        refusal: Type of the bodies of 400, 404 and 415, for a dialect with its own errors.
        is_open: Whether the operation needs no authentication.
        is_ok_too: Whether a successful answer may also have the status 200: the resource already existed.
    """

    name: str
    method: str
    path: str
    handler: Callable[..., Any]
    status: int = 200
    errors: tuple[int, ...] = ()
    answer: Any = None
    media: str = JSON
    query: tuple[type[Struct], ...] = ()
    headers: tuple[type[Struct], ...] = ()
    bodies: tuple[Any, ...] = ()
    refusal: Any = None
    is_open: bool = False
    is_ok_too: bool = False

    def signature(self) -> Mapping[str, Any]:
        """Return the types of `query`, `body` and `return` in the handler's signature."""
        return _types_in_signature(self.handler) if inspect.isfunction(self.handler) else {}

    def answers(self) -> dict[int, Any]:
        """Return the types of successful answers by status; None means no body."""
        kind = self.answer or self.signature()["return"]
        kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        typed = tuple(each for each in kinds if each not in (Response, NoneType))
        if not typed:
            return {204: None}
        answers = {self.status: Union[typed]}  # noqa: UP007 - there may be one or several
        if self.is_ok_too:
            answers[200] = answers[self.status]
        return {**answers, 204: None} if NoneType in kinds else answers


@cache
def _types_in_signature(handler: Callable[..., Any]) -> Mapping[str, Any]:
    return get_type_hints(handler)


def document(operations: Sequence[Operation]) -> Json:
    """Return the OpenAPI document of these operations."""
    kinds = [*dict.fromkeys([Problem, *(kind for each in operations for kind in _types_of(each))])]
    # One call for all types, so that types with equal names are distinguished.
    found, components = msgspec.json.schema_components(kinds, ref_template=_SCHEMA_REFERENCE)
    schemas = dict(zip(kinds, found, strict=True))
    paths: dict[str, Json] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = _description(each, schemas)
    content = {MEDIA_TYPE: {"schema": schemas[Problem]}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "midstream",
            "version": __version__,
            "summary": "Durable AI-agent sessions",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "responses": {
                str(status): {"description": text, "content": content} for status, text in _ERRORS.items()
            },
            "securitySchemes": _SECURITY,
        },
        "security": [{name: []} for name in _SECURITY],
    }


def _types_of(operation: Operation) -> list[Any]:
    kinds = (*operation.answers().values(), *_bodies_of(operation), operation.refusal)
    return [kind for kind in kinds if kind is not None]


def _bodies_of(operation: Operation) -> tuple[Any, ...]:
    return operation.bodies or tuple(kind for name, kind in operation.signature().items() if name == "body")


def _description(operation: Operation, schemas: dict[Any, Json]) -> Json:
    bodies = _bodies_of(operation)
    responses: dict[str, Json] = {}
    for status, kind in operation.answers().items():
        responses[str(status)] = {"description": HTTPStatus(status).phrase}
        if kind is not None:
            responses[str(status)]["content"] = {operation.media: {"schema": schemas[kind]}}
    of_session = _ERRORS_OF_SESSIONS if "{session_id}" in operation.path else ()
    of_body = _ERRORS_OF_BODIES if bodies else ()
    for status in sorted({*_ERRORS_OF_ALL, *of_session, *of_body, *operation.errors}):
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
        if operation.refusal is not None and status in _REFUSALS:
            kinds_of = {JSON: operation.refusal, MEDIA_TYPE: Problem}
            content = {media: {"schema": schemas[kind]} for media, kind in kinds_of.items()}
            responses[str(status)] = {"description": _ERRORS[status], "content": content}
    described: Json = {
        "operationId": operation.name,
        "summary": (inspect.getdoc(operation.handler) or "").partition("\n\n")[0].replace("\n", " "),
        "parameters": _parameters(operation),
        "responses": responses,
    }
    if operation.is_open:
        described["security"] = []
    if bodies:
        schema = schemas[bodies[0]] if len(bodies) == 1 else {"anyOf": [schemas[kind] for kind in bodies]}
        is_needed = any(_component(kind)["required"] for kind in bodies)
        described["requestBody"] = {"required": is_needed, "content": {JSON: {"schema": schema}}}
    return described


def _parameters(operation: Operation) -> list[Json]:
    queries = operation.query or [kind for name, kind in operation.signature().items() if name == "query"]
    return [
        *(each for each in _fields("path", PathParameters) if f"{{{each['name']}}}" in operation.path),
        *(each for kind in queries for each in _fields("query", kind)),
        *(each for kind in operation.headers for each in _fields("header", kind)),
    ]


def _fields(place: str, kind: type[Struct]) -> list[Json]:
    return [
        {"name": name, "in": place, "required": place == "path", "schema": schema}
        for name, schema in _component(kind)["properties"].items()
    ]


def _component(kind: type[Struct]) -> Json:
    _, components = msgspec.json.schema_components([kind], ref_template=_SCHEMA_REFERENCE)
    component: Json = components[kind.__name__]
    return component
