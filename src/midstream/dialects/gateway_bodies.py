"""Requests over HTTP: headers, credentials and bodies, within limits."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Mapping

from msgspec import Struct
from starlette.types import Message, Receive, Scope

from midstream.dialects.api_callers import ANYONE, ApiCaller
from midstream.dialects.api_errors import ApiError, refusal_of
from midstream.dialects.request_fields import BadFieldError
from midstream.errors import MidstreamError
from midstream.local_keys import is_loopback

BODY_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of one request: Anthropic's limit, ten times the context window of a model."""
BODY_S = 60.0
"""Seconds for the body of one request over a slow network."""
BEARER = "bearer "
_PASSED_ON = ("forwarded", "via", "x-forwarded-for", "x-real-ip")


class RefusedError(Exception):
    """A request was refused before it was read."""

    def __init__(self, refusal: ApiError) -> None:
        super().__init__(refusal.code)
        self.refusal = refusal


def refusal_in(error: RefusedError | MidstreamError) -> ApiError:
    """Return the refusal for the error of a request."""
    if isinstance(error, RefusedError):
        return error.refusal
    if isinstance(error, BadFieldError):
        return ApiError(400, error.code, error.message, param=error.param)
    return refusal_of(error)


class GoneError(Exception):
    """The client disconnected before the body was complete."""


class Arrived(Struct, frozen=True):
    """One request. Header names are lower case; the first of several headers with one name counts.

    Args:
        is_local: Whether it came from this machine without a proxy.
        caller: Sender of the request.
    """

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    is_local: bool = False
    caller: ApiCaller = ANYONE


def is_local(scope: Scope, headers: Mapping[str, str]) -> bool:
    """Return whether a request came from this machine, and has no header of a proxy."""
    client = scope.get("client")
    return client is not None and is_loopback(client[0]) and headers.keys().isdisjoint(_PASSED_ON)


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers of a request."""
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def check_token(headers: Mapping[str, str], token: str) -> None:
    """Require the token in a request, in the header of OpenAI's or Anthropic's clients.

    Raises:
        RefusedError: The token is missing or wrong.
    """
    wanted = token.encode()
    if not any(hmac.compare_digest(each.encode("utf-8", "replace"), wanted) for each in keys_in(headers)):
        message = "this gateway needs its own key; send it as `Authorization: Bearer …` or `x-api-key: …`"
        raise RefusedError(ApiError(401, "invalid_api_key", message))


def keys_in(headers: Mapping[str, str]) -> list[str]:
    """Return the keys in a request, from the headers of OpenAI's and Anthropic's clients."""
    shown = [headers.get("x-api-key", "").strip()]
    authorization = headers.get("authorization", "")
    if authorization[: len(BEARER)].lower() == BEARER:
        shown.append(authorization[len(BEARER) :].strip())
    return [each for each in shown if each]


def digest_key(headers: Mapping[str, str]) -> bytes:
    """Return a digest of a request's key, valid or not or missing."""
    shown = "\0".join(headers.get(name, "") for name in ("authorization", "x-api-key"))
    return hashlib.blake2b(shown.encode("utf-8", "replace"), digest_size=32).digest()


async def body_of(headers: Mapping[str, str], receive: Receive) -> bytes:
    """Read the body of a request.

    Raises:
        RefusedError: The body is too long, takes too long, or is not JSON.
        GoneError: The client disconnected.
    """
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise RefusedError(ApiError(415, "unsupported_media_type", "send `Content-Type: application/json`"))
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise RefusedError(ApiError(415, "unsupported_media_type", "send the body without content encoding"))
    announced = headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > BODY_BYTES_MAX:
        raise _too_large()
    try:
        async with asyncio.timeout(BODY_S):
            return await _read(receive)
    except TimeoutError:
        message = f"the body of this request was not complete within {BODY_S:.0f} s"
        raise RefusedError(ApiError(408, "request_timeout", message, is_final=False)) from None


async def _read(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise GoneError
        piece = message.get("body", b"")
        size += len(piece)
        if size > BODY_BYTES_MAX:
            raise _too_large()
        pieces.append(piece)
        if not message.get("more_body"):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large() -> RefusedError:
    return RefusedError(
        ApiError(
            413, "request_too_large", f"a request may have at most {BODY_BYTES_MAX} bytes", is_final=True
        )
    )


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client of a request disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
