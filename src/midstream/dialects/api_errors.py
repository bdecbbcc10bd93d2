"""How a request is refused, in the words of the API it came by.

Statuses are chosen by what a client application's SDK does with them: it repeats 408, 409, 429 and 5xx by
itself, so a final error has none of these, or has `x-should-retry: false`, which the SDKs of OpenAI and Anthropic obey.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import (
    AccessError,
    ConflictError,
    ContextOverflowError,
    FrameTooLargeError,
    MidstreamError,
    ModelAccessError,
    ModelError,
    ModelFilteredError,
    ModelMissingError,
    ModelRejectedError,
    ModelStalledError,
    ModelUnavailableError,
    NotFoundError,
    ProtocolError,
    UnavailableError,
    UpstreamBusyError,
    UsageError,
    error_of,
)
from midstream.retries import RETRY_AFTER_S
from midstream.session.records import TurnEnded, TurnStatus

BAD_REQUEST, UNAUTHORIZED, CONFLICT, RATE_LIMITED, OVERLOADED = 400, 401, 409, 429, 503
BAD_GATEWAY = 502
SERVER_FAULTS = 500
"""Statuses from here on mean that the fault is the server's."""


class ApiError(Struct, frozen=True):
    """An error for client applications.

    Args:
        status: The HTTP status.
        code: Stable; ours, or the API's own where client applications act on it.
        message: What happened. It never carries what a user or a model wrote.
        param: The field of the request that is at fault, or "".
        is_final: The same request will be refused again.
        retry_after_s: Seconds to wait before repeating it, or None.
    """

    status: int
    code: str
    message: str
    param: str = ""
    is_final: bool = True
    retry_after_s: float | None = None

    def headers(self) -> dict[str, str]:
        """Return what a whole answer needs besides its body."""
        headers = {"cache-control": "no-store", "x-should-retry": "false" if self.is_final else "true"}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after_s)))
        return headers


_STATUSES: dict[type[MidstreamError], int] = {
    UsageError: 400,
    ProtocolError: 400,
    FrameTooLargeError: 413,
    NotFoundError: 404,
    ConflictError: 409,
    AccessError: 403,
    UnavailableError: 503,
    MidstreamError: 500,
    ModelError: 502,
    ModelUnavailableError: 503,
    UpstreamBusyError: 409,
    ModelStalledError: 504,
    ModelRejectedError: 400,
    ModelAccessError: 403,
    ModelMissingError: 500,
}
_CODES: dict[type[MidstreamError], str] = {
    ContextOverflowError: "context_length_exceeded",
    ModelFilteredError: "content_filter",
}
"""The codes of the APIs by which client applications decide to shorten a conversation, or to inform their user."""
_OVERFLOW = "prompt is too long: it exceeds the maximum context length of the upstream's model"
"""Hosts of Anthropic's look for the first words, client applications of OpenAI's for the rest or for the code."""


BUG = ApiError(
    500, "internal", "something went wrong in the gateway; its log has the details", is_final=False
)
CANCELLED = ApiError(499, "cancelled", "this answer was stopped before its end")


def refusal_of_end(ended: TurnEnded, *, retry_after_s: float | None = None) -> ApiError:
    """Return the error of a turn that ended without success."""
    if ended.status is TurnStatus.CANCELLED:
        return CANCELLED
    if ended.code in ("", ModelError.code):  # interrupted, or a defect of the model's software
        return BUG if ended.code else refusal_of(UnavailableError("this response was interrupted"))
    return refusal_of(error_of(ended.code, ended.message, retry_after_s))


def refusal_of(error: MidstreamError) -> ApiError:
    """Return the error for a client application."""
    kind = type(error)
    status = next(_STATUSES[base] for base in kind.__mro__ if base in _STATUSES)
    code = next((_CODES[base] for base in kind.__mro__ if base in _CODES), error.code)
    message = _OVERFLOW if code == _CODES[ContextOverflowError] else error.message
    is_final = error.retry in ("never", "ask")
    retry_after_s = error.retry_after_s
    if status == OVERLOADED and isinstance(error, ModelUnavailableError) and retry_after_s is not None:
        status = RATE_LIMITED  # a time to retry after means a rate limit
    if retry_after_s is None and error.retry == "later" and status in (CONFLICT, OVERLOADED):
        retry_after_s = RETRY_AFTER_S
    return ApiError(status, code, message, is_final=is_final, retry_after_s=retry_after_s)


def final(refusal: ApiError) -> ApiError:
    """Return the refusal of an answer that had begun: a repetition could run the upstream's tools a second time.

    A status that invites one (409, 429, 503) becomes 502, and no time to wait is named.
    """
    invites = refusal.status in (CONFLICT, RATE_LIMITED, OVERLOADED)
    status = BAD_GATEWAY if invites else refusal.status
    return replace(refusal, status=status, is_final=True, retry_after_s=None)


_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


def openai_error(refusal: ApiError) -> dict[str, Any]:
    """Return a refusal as the object that both of OpenAI's APIs have for errors, whole and in a stream alike."""
    fault = "server_error" if refusal.status >= SERVER_FAULTS else "invalid_request_error"
    kind = _OPENAI_TYPES.get(refusal.status, fault)
    fields = {"message": refusal.message, "type": kind, "param": refusal.param or None, "code": refusal.code}
    return {"error": fields}
