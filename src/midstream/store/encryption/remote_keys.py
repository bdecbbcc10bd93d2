"""The operator's keys behind an endpoint of the application: content is encrypted in this process, and the operator's
keys stay at the endpoint.

POST {url}/wrap      {"keys": [{"key": base64, "context": base64}]}
                     -> {"keys": [{"key": base64} or {"code": text, "message": text}], "generation": text}
POST {url}/unwrap    the same; a key of the request is wrapped, and one of the answer is plain

An answer has the keys in the order of the request; a code is that of an error, of this key only.
"""

from __future__ import annotations

import asyncio
import http.client
import re
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct
from typing_extensions import override

from midstream.errors import (
    KeyMissingError,
    KeysUnavailableError,
    MidstreamError,
    StoreDamagedError,
    UsageError,
)
from midstream.local_keys import is_loopback
from midstream.store.encryption.ciphers import OperatorKeys, UnwrapsMany

REQUESTS_MAX = 4
"""Concurrent requests; further ones wait, within their time limit."""
ANSWER_S = 10.0
"""Seconds that one request may take."""
KEYS_MAX = 64
"""Keys of one request."""
MESSAGE_BYTES_MAX = 64 * 1024
"""Bytes of one request or answer."""
RETRY_AFTER_S = 1.0
REASON_CHARS_MAX = 200

_TOKEN = re.compile(r"[!-~]*")
_REFUSALS: dict[str, type[MidstreamError]] = {
    each.code: each for each in (KeyMissingError, StoreDamagedError)
}


class BoundKey(Struct, frozen=True):
    """A key to wrap or to unwrap, and the context that the wrap is bound to."""

    key: bytes
    context: bytes


class KeyResult(Struct, frozen=True, omit_defaults=True):
    """The wrapped or unwrapped key, or the code and message of an error."""

    key: bytes = b""
    code: str = ""
    message: str = ""


class KeyRequest(Struct, frozen=True):
    """Keys of one request."""

    keys: Annotated[list[BoundKey], Meta(max_length=KEYS_MAX)]


class KeyAnswer(Struct, frozen=True):
    """One result for each key of the request, and the name of the current wrapping key."""

    keys: list[KeyResult]
    generation: str = ""


class RemoteKeys(OperatorKeys, UnwrapsMany):
    """The operator's keys behind an endpoint of the application, such as `midstream.server.key_app`.

    Each request takes 10 s at most, and follows no redirect.

    Args:
        url: An `https` URL; `http` only to this machine.
        token: Sent as a bearer token with each request; "" sends none.

    Raises:
        UsageError: The URL is not permitted, or has a user, a query or a fragment; or the token has a space or a
            character outside of ASCII.
    """

    def __init__(self, url: str, *, token: str = "") -> None:
        self._address = _checked(url)
        self.url = url.rstrip("/")
        if not _TOKEN.fullmatch(token):
            raise UsageError("the token of the key endpoint has a space or a character outside of ASCII")
        self._headers = {"content-type": "application/json", "connection": "close"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self.generation = ""
        # Own threads: an endpoint that does not answer blocks no other work of the process.
        self._threads = ThreadPoolExecutor(REQUESTS_MAX, "midstream-keys")

    @override
    async def wrap(self, key: bytes, *, context: bytes) -> bytes:
        [result] = await self._request("wrap", [BoundKey(key, context)])
        return self._key_of(result)

    @override
    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        """See `OperatorKeys.unwrap`.

        Raises:
            KeysUnavailableError: The endpoint did not answer, or refused the token. The same call may be tried again.
        """
        [result] = await self._request("unwrap", [BoundKey(wrapped, context)])
        return self._key_of(result)

    @override
    async def unwrap_many(self, wrapped: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        keys = [BoundKey(key, context) for key, context in wrapped]
        results: list[KeyResult] = []
        for begin in range(0, len(keys), KEYS_MAX):
            results += await self._request("unwrap", keys[begin : begin + KEYS_MAX])
        return [None if each.code else each.key for each in results]

    def _key_of(self, result: KeyResult) -> bytes:
        if not result.code:
            return result.key
        kind = _REFUSALS.get(result.code, KeysUnavailableError)
        raise kind(f"the key endpoint {self.url} refused: {result.message[:REASON_CHARS_MAX]}")

    async def _request(self, action: str, keys: list[BoundKey]) -> list[KeyResult]:
        loop, body = asyncio.get_running_loop(), msgspec.json.encode(KeyRequest(keys))
        try:
            async with asyncio.timeout(ANSWER_S):
                status, answered = await loop.run_in_executor(self._threads, self._post, action, body)
        except ssl.SSLCertVerificationError as error:
            message = f"the certificate of the key endpoint {self.url} was refused ({error.verify_message}); "
            advice = "SSL_CERT_FILE can name a file with its authority"
            raise KeysUnavailableError(message + advice, retry_after_s=RETRY_AFTER_S) from error
        except (OSError, http.client.HTTPException) as error:  # a TimeoutError is an OSError
            raise self._away(type(error).__name__) from error
        if status != http.client.OK:
            raise self._refused(status)
        try:
            answer = msgspec.json.decode(answered, type=KeyAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{self.url} is not a key endpoint: its answer cannot be decoded") from error
        if len(answer.keys) != len(keys) or not all(each.key or each.code for each in answer.keys):
            raise UsageError(f"{self.url} is not a key endpoint: its answer has another number of keys")
        self.generation = answer.generation
        return answer.keys

    def _post(self, action: str, body: bytes) -> tuple[int, bytes]:
        is_tls, host, port, path = self._address
        kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
        connection = kind(host, port, timeout=ANSWER_S)
        try:
            connection.request("POST", f"{path}/{action}", body=body, headers=self._headers)
            response = connection.getresponse()
            return response.status, response.read(MESSAGE_BYTES_MAX)
        finally:
            connection.close()

    def _refused(self, status: int) -> MidstreamError:
        if status in {http.client.UNAUTHORIZED, http.client.FORBIDDEN}:
            # Not `unauthorized`: that is the error for clients without a right.
            message = f"the key endpoint {self.url} refused the token ({status}); set MIDSTREAM_KEY_TOKEN"
            return KeysUnavailableError(message, retry_after_s=RETRY_AFTER_S)
        if status >= http.client.INTERNAL_SERVER_ERROR or status == http.client.TOO_MANY_REQUESTS:
            return self._away(f"status {status}")
        return UsageError(f"{self.url} is not a key endpoint: it answered with status {status}")

    def _away(self, reason: str) -> KeysUnavailableError:
        message = f"the key endpoint {self.url} did not answer ({reason}); try again when it runs"
        return KeysUnavailableError(message, retry_after_s=RETRY_AFTER_S)


def _checked(url: str) -> tuple[bool, str, int | None, str]:
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise UsageError("the URL of the key endpoint has a port that does not exist") from error
    host = parts.hostname or ""
    if not host or parts.scheme not in {"http", "https"}:
        raise UsageError(f"the key endpoint {url!r} needs a URL that begins with https://")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError("the URL of the key endpoint may have no user, query or fragment")
    if parts.scheme == "http" and not is_loopback(host):
        raise UsageError(f"the key endpoint {url!r} is on another machine; use https")
    return parts.scheme == "https", host, port, parts.path.rstrip("/")
