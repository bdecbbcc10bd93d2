"""An endpoint that wraps and unwraps the keys of encrypted stores, for an application to mount.

The operator's keys stay in the application's process, which authorizes the token of each request.
`midstream.store.RemoteKeys` is the caller. See `docs/guides/encryption.md`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from midstream.errors import MidstreamError, StoreDamagedError
from midstream.store.encryption.ciphers import OperatorKeys
from midstream.store.encryption.remote_keys import MESSAGE_BYTES_MAX, KeyAnswer, KeyRequest, KeyResult

Authorize = Callable[[str], Awaitable[bool]]

_log = logging.getLogger(__name__)


class KeyService:
    """The two routes of a key endpoint.

    Args:
        keys: The operator's keys.
        authorize: Decides about the bearer token of each request, or about "" without a token.
    """

    def __init__(self, keys: OperatorKeys, authorize: Authorize) -> None:
        self._keys = keys
        self._authorize = authorize

    async def wrap(self, request: Request) -> Response:
        """Wrap a key."""
        return await self._answer(request, self._keys.wrap)

    async def unwrap(self, request: Request) -> Response:
        """Unwrap a key."""
        return await self._answer(request, self._keys.unwrap)

    async def _answer(self, request: Request, work: Callable[..., Awaitable[bytes]]) -> Response:
        if not await self._authorize(_token_of(request)):  # before the body is read
            return _refuse(401, "unauthorized", "the token was not accepted")
        body = await _read_bounded(request)
        if body is None:
            return _refuse(413, "malformed", f"a request has at most {MESSAGE_BYTES_MAX} bytes")
        try:
            keys = msgspec.json.decode(body, type=KeyRequest).keys
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return _refuse(400, "malformed", 'a request is {"keys": [{"key": base64, "context": base64}]}')
        try:
            results = [await _result_of(work(each.key, context=each.context)) for each in keys]
        except MidstreamError as error:
            _log.error("the keys cannot be used: %s", error.message)
            return _refuse(503, error.code, error.message)
        return _reply(200, KeyAnswer(results, str(getattr(self._keys, "generation", ""))))


def key_app(keys: OperatorKeys, *, authorize: Authorize) -> Starlette:
    """Return an ASGI app that wraps and unwraps keys of encrypted stores, for `midstream.store.RemoteKeys`.

    A person with an accepted token and a copy of the store can read the store. Serve the app over TLS.

    Args:
        keys: The operator's keys, such as `FileKeys`. They do not leave this process.
        authorize: Receives the bearer token of each request ("" without one), and returns whether it is accepted.
    """
    service = KeyService(keys, authorize)
    return Starlette(
        routes=[
            Route("/wrap", service.wrap, methods=["POST"]),
            Route("/unwrap", service.unwrap, methods=["POST"]),
        ]
    )


async def _result_of(work: Awaitable[bytes]) -> KeyResult:
    try:
        return KeyResult(await work)
    except StoreDamagedError as error:  # `KeyMissingError` is one
        return KeyResult(code=error.code, message=error.message)


def _token_of(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _read_bounded(request: Request) -> bytes | None:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MESSAGE_BYTES_MAX:
            return None
    return bytes(body)


def _refuse(status: int, code: str, message: str) -> Response:
    return _reply(status, KeyResult(code=code, message=message))


def _reply(status: int, value: KeyAnswer | KeyResult) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
