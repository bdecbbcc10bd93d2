"""HTTP errors as problem details (RFC 9457), and the mapping from errors to statuses.

A problem contains a description (`detail`), a stable `code`, whether and when to retry (`retry`, `retry_after_s`), and
the next step (`next`). It never contains text of a user or a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from midstream.errors import (
    AccessError,
    ConflictError,
    EventGoneError,
    FrameTooLargeError,
    InternalError,
    LimitReachedError,
    MidstreamError,
    ModelError,
    NotFoundError,
    ProtocolError,
    SeqnoGapError,
    StoreDamagedError,
    StreamReusedError,
    UnauthorizedError,
    UnavailableError,
    UsageError,
)
from midstream.retries import RETRY_AFTER_S

MEDIA_TYPE = "application/problem+json"

_STATUSES: dict[type[MidstreamError], int] = {
    UsageError: 400,
    ProtocolError: 400,
    UnauthorizedError: 401,
    AccessError: 403,
    NotFoundError: 404,
    ConflictError: 409,
    EventGoneError: 410,
    StreamReusedError: 422,
    FrameTooLargeError: 413,
    MidstreamError: 500,
    StoreDamagedError: 500,
    LimitReachedError: 429,
    ModelError: 502,
    UnavailableError: 503,
}

_NEXT = {
    "bad_request": "Use HTTP/1.1, and open a WebSocket as specified in RFC 6455.",
    "access": "Request access from the operator of this server.",
    "call_not_started": "Run the call when its `call_started` arrives, and send its outcome then.",
    "entry_damaged": "Contact the operator: another program changed the database.",
    "draining": "Reconnect: this server or another one continues where it stopped.",
    "event_gone": "Take the snapshot, here or of the session, and follow from its event id.",
    "events_lost": "Contact the operator: the missing records must be restored, or the session deleted.",
    "foreign_origin": "Ask the server's operator to allow your origin (--allow-origin) or host name (--allow-host).",
    "frame_too_large": "Send less in one command.",
    "internal": "Read the log of the server. The same request fails until the defect is fixed.",
    "key_missing": "Start the server with the key file that these sessions were written under.",
    "keys_unavailable": "Try again later. The operator must start the key endpoint, or renew its token.",
    "lease_held": "Another server process runs this session. Use that server, or try again later.",
    "limit_reached": "Send fewer requests, or retry after `retry_after_s`.",
    "malformed_frame": "Correct the request; the same one is refused again.",
    "method_not_allowed": "Use one of the methods in `Allow`.",
    "not_found": "Check the address.",
    "overloaded": "Try again later, or at another server.",
    "recovering": "Try again in a few seconds.",
    "request_header_fields_too_large": "Send fewer headers, or shorter ones: cookies are the usual reason.",
    "seqno_gap": "Play back your commands from number `expected`.",
    "seqno_reused": "Send another payload under the next number; the first payload stays in effect.",
    "agent_mismatch": "Serve that agent on this store, cancel the turn, or resume it with this agent.",
    "session_busy": "Wait for the end of the turn, or cancel it.",
    "question_closed": "Read the session again: the question was answered, or its turn has ended.",
    "answer_mismatch": "Read the question again, and answer with one of its choices and its digest.",
    "nothing_to_resume": "Send a message; it opens a new turn.",
    "other_login": "Log out first, or send the link again with `replace`.",
    "session_not_found": "Begin a session by sending its first message.",
    "store_busy": "The database is locked by another process, or cannot be reached. Try again in a few seconds.",
    "store_damaged": "Restore a copy of the database, or run `midstream doctor FILE --fix`.",
    "store_full": "Free some space on the server's disk and try again.",
    "stream_fenced": "A newer connection of this client has the stream; use that one.",
    "stream_not_found": "Open a new stream.",
    "stream_reused": "Open a new stream for another message; the first message stays in effect.",
    "unauthorized": "Send a credential: a bearer token, a cookie from `/v1/login`, or a fresh ticket.",
    "unsupported_media_type": "Send the body without a `Content-Encoding`.",
    "usage": "Correct the request; the same one is refused again.",
    "upgrade_required": "Open a WebSocket as specified in RFC 6455.",
    "uri_too_long": "Use a shorter address.",
    "wrong_secret": "Send the secret with which this stream was opened.",
}
_NEXT_BY_RETRY = {
    "never": "Do not repeat this request as it is.",
    "later": "Try again later.",
    "now": "Try again at once.",
    "ask": "Correct the problem in the message, then try again.",
}


class RecoveryProgress(Struct, frozen=True):
    """Number of recovered turns, of all turns that were interrupted before the start."""

    done: int
    total: int


class Problem(Struct, frozen=True, omit_defaults=True):
    """The body of an HTTP error."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    next: str
    retry: str = "never"
    retry_after_s: float | None = None
    expected: int | None = None
    """The next `seqno` to send, for the code `seqno_gap`."""
    oldest: int | None = None
    """Position of the oldest event that can be replayed, for the code `event_gone`."""
    recovering: RecoveryProgress | None = None
    """Progress, for the code `recovering`."""
    snapshot: msgspec.Raw | None = None
    """Snapshot that replaces older events, as in `GET` of the session; follow the session from its `event_id`."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers


def status_of(kind: type[MidstreamError]) -> int:
    """Return the HTTP status of a class of errors, from its nearest base class in the table."""
    return next(_STATUSES[base] for base in kind.__mro__ if base in _STATUSES)


def problem_of(error: MidstreamError) -> Problem:
    """Return the problem detail of an error."""
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.retry == "later":
        retry_after_s = RETRY_AFTER_S
    expected = error.expected if isinstance(error, SeqnoGapError) else None
    oldest = error.oldest if isinstance(error, EventGoneError) else None
    problem = _problem(
        status_of(type(error)), error.code, error.message, error.retry, retry_after_s, expected
    )
    return replace(problem, oldest=oldest) if oldest else problem


def problem_of_http(error: HTTPException) -> Problem:
    """Return the problem detail of an HTTP error of the router."""
    phrase = HTTPStatus(error.status_code).phrase
    if error.status_code == HTTPStatus.REQUEST_URI_TOO_LONG:
        phrase = "URI Too Long"  # the name in RFC 9110; Python before 3.13 has the old one
    code = phrase.lower().replace(" ", "_")
    detail = f"{phrase}." if error.detail == phrase else error.detail
    return _problem(error.status_code, code, detail)


def problem_of_status(status: int, detail: str) -> Problem:
    """Return the problem detail of a request that an endpoint refuses with a status of its protocol."""
    if status == HTTPStatus.BAD_REQUEST:
        return problem_of(UsageError(detail))  # `bad_request` is for faults of HTTP itself
    return problem_of_http(HTTPException(status, detail))


INTERNAL = "An internal error occurred in the server; the log contains the details."


def internal_problem() -> Problem:
    """Return the problem detail of a defect, without details."""
    return problem_of(InternalError(INTERNAL))


def _problem(
    status: int,
    code: str,
    detail: str,
    retry: str = "never",
    retry_after_s: float | None = None,
    expected: int | None = None,
) -> Problem:
    return Problem(
        type=f"urn:midstream:error:{code}",
        title=code.replace("_", " ").capitalize(),
        status=status,
        detail=detail,
        code=code,
        next=_NEXT.get(code) or _NEXT_BY_RETRY[retry],
        retry=retry,
        retry_after_s=retry_after_s,
        expected=expected,
    )


def response_of(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Return a problem as a complete HTTP response, with further headers."""
    body = msgspec.json.encode(problem)
    return Response(
        body, problem.status, headers={**problem.headers, **(headers or {})}, media_type=MEDIA_TYPE
    )


async def refuse(
    problem: Problem, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str] | None = None
) -> None:
    """Answer a request, or a WebSocket handshake before its acceptance, with a problem."""
    if scope["type"] == "http":
        await response_of(problem, headers)(scope, receive, send)
    elif "websocket.http.response" in scope.get("extensions", {}):
        raw_headers = [(name.encode(), value.encode()) for name, value in problem.headers.items()]
        raw_headers.append((b"content-type", MEDIA_TYPE.encode()))
        await send(
            {"type": "websocket.http.response.start", "status": problem.status, "headers": raw_headers}
        )
        await send({"type": "websocket.http.response.body", "body": msgspec.json.encode(problem)})
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": problem.code})
