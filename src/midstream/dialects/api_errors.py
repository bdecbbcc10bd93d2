"""Errors of the gateway, in the format of the API that was called.

SDKs of client applications automatically retry after 408, 409, 429 and 5xx. So a final error has another status, or the
header `x-should-retry: false`, which the SDKs of OpenAI and Anthropic follow.
"""

from __future__ import annotations

import re
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
    ModelNotFoundError,
    ModelOverloadedError,
    ModelQuotaError,
    ModelRateLimitedError,
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
NOT_FOUND = 404
BAD_GATEWAY = 502
SERVER_FAULTS = 500
"""First status of server errors."""


class ApiError(Struct, frozen=True):
    """An error for client applications.

    Args:
        status: The HTTP status.
        code: Stable code: midstream's, or the API's if client applications depend on it.
        message: Description, without text of a user or a model.
        param: The invalid field of the request, or "".
        is_final: Whether the same request will be refused again.
        retry_after_s: Seconds to wait before a retry, or None.
    """

    status: int
    code: str
    message: str
    param: str = ""
    is_final: bool = True
    retry_after_s: float | None = None

    def headers(self) -> dict[str, str]:
        """Return the headers of an error response."""
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
    ModelUnavailableError: 500,
    ModelOverloadedError: 503,
    ModelRateLimitedError: 429,
    UpstreamBusyError: 409,
    ModelStalledError: 504,
    ModelRejectedError: 400,
    ModelAccessError: 403,
    ModelQuotaError: 429,
    ModelNotFoundError: 404,
    ModelMissingError: 500,
}
CONTEXT_LENGTH_EXCEEDED, INSUFFICIENT_QUOTA = "context_length_exceeded", "insufficient_quota"
RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
_CODES: dict[type[MidstreamError], str] = {
    ContextOverflowError: CONTEXT_LENGTH_EXCEEDED,
    ModelFilteredError: "content_filter",
    ModelQuotaError: INSUFFICIENT_QUOTA,
    ModelRateLimitedError: RATE_LIMIT_EXCEEDED,
}
"""Codes of the APIs to which client applications react: they shorten a conversation, wait, or inform their user."""
_OVERFLOW = "prompt is too long{counts}: it exceeds the context window. This model's maximum context length is {limit}."
"""Text that clients search for: Claude Code and LiteLLM (Messages) for "prompt is too long", LiteLLM (chat completions
and Responses) for "this model's maximum context length is", opencode for "exceeds the context window"."""
_ROOM = re.compile(r"input length and `max_tokens` exceed context limit: \d+ \+ \d+ > \d+")
"""Anthropic's refusal of a `max_tokens` that does not fit after the prompt; Claude Code parses these counts."""
_COUNTS = re.compile(
    r"(\d+) tokens > (\d+) maximum|context length (?:is|of) (\d+) tokens?.*?(\d+) tokens", re.DOTALL
)
"""Tokens of the prompt and limit of the model, in messages of Anthropic and OpenAI."""


BUG = ApiError(
    500, "internal", "an internal error occurred in the gateway; its log contains the details", is_final=False
)
CANCELLED = ApiError(499, "cancelled", "this answer was stopped before its end")


def refusal_of_end(ended: TurnEnded, *, retry_after_s: float | None = None) -> ApiError:
    """Return the error of a turn that ended without success."""
    if ended.status is TurnStatus.CANCELLED:
        return CANCELLED
    if ended.code in ("", ModelError.code):  # interrupted, or a defect in the model's code
        return BUG if ended.code else refusal_of(UnavailableError("this response was interrupted"))
    return refusal_of(error_of(ended.code, ended.message, retry_after_s))


def refusal_of(error: MidstreamError) -> ApiError:
    """Return the error for a client application."""
    kind = type(error)
    status = next(_STATUSES[base] for base in kind.__mro__ if base in _STATUSES)
    code = next((_CODES[base] for base in kind.__mro__ if base in _CODES), error.code)
    message = _overflow_of(error.message) if code == CONTEXT_LENGTH_EXCEEDED else error.message
    is_final = error.retry in ("never", "ask")
    retry_after_s = error.retry_after_s
    if kind is ModelUnavailableError and retry_after_s is not None:
        status = RATE_LIMITED  # a time to retry after means a rate limit
    if status == RATE_LIMITED and retry_after_s is not None:
        message = f"{message}; try again in {max(1, round(retry_after_s))} s"  # Codex reads the pause here
    if retry_after_s is None and error.retry == "later" and status in (CONFLICT, OVERLOADED):
        retry_after_s = RETRY_AFTER_S
    return ApiError(status, code, message, is_final=is_final, retry_after_s=retry_after_s)


def _overflow_of(words: str) -> str:
    """Return the message about a conversation that is too long, with the upstream's token counts if known."""
    if found := _ROOM.search(words):
        return found[0]
    counts = _COUNTS.search(words)
    if counts is None:
        return _OVERFLOW.format(counts="", limit="exceeded")
    tokens, limit, other_limit, other_tokens = counts.groups()
    tokens, limit = tokens or other_tokens, limit or other_limit
    return _OVERFLOW.format(counts=f": {tokens} tokens > {limit} maximum", limit=f"{limit} tokens")


def final(refusal: ApiError) -> ApiError:
    """Return the error of an answer that had begun: a retry could run the upstream's tools a second time.

    A status that causes retries (409, 429, 503) becomes 502, without a time of a retry.
    """
    invites = refusal.status in (CONFLICT, RATE_LIMITED, OVERLOADED)
    status = BAD_GATEWAY if invites else refusal.status
    return replace(refusal, status=status, is_final=True, retry_after_s=None)


_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
"""Other statuses have the type "invalid_request_error" or "server_error", like at OpenAI. Clients recognize an unknown
model by the former with the code `model_not_found`."""


def openai_error(refusal: ApiError) -> dict[str, Any]:
    """Return a refusal as an error object of OpenAI's APIs, for bodies and streams."""
    fault = "server_error" if refusal.status >= SERVER_FAULTS else "invalid_request_error"
    kind = _OPENAI_TYPES.get(refusal.status, fault)
    if refusal.code == INSUFFICIENT_QUOTA:
        kind = INSUFFICIENT_QUOTA
    fields = {"message": refusal.message, "type": kind, "param": refusal.param or None, "code": refusal.code}
    return {"error": fields}
