"""Webhooks: signed requests to URLs that clients register.

A client must not reach internal hosts through this server. So a request goes to a public address over TLS, or to an
origin that the operator allows. A host name is resolved once for each request, and the connection uses the address that
was checked.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Struct

from midstream.agents.attachments import is_public_address, resolve
from midstream.environment import World
from midstream.errors import EntryMovedError, UsageError
from midstream.extras import extra
from midstream.server.auth.origins import require_origins
from midstream.store.contract import KeyValue

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEYS = "webhook-keys"
"""Namespace of the key that signs the requests of all servers of a store."""
_KEY = "ed25519"
ANSWER_S = 30.0
"""Time limit of a request with its answer."""
ANSWER_BYTES_MAX = 64 * 1024
"""Greatest number of bytes that are read of an answer."""
SENDING_MAX = 64
"""Concurrent requests."""
_SCHEMES = frozenset({"http", "https"})


class WebhookUrlError(UsageError):
    """The URL of a webhook is not allowed."""

    code = "webhook_url_rejected"


class SigningKey:
    """An Ed25519 key for signatures.

    Args:
        secret: The 32 bytes of the private key.

    Raises:
        MissingExtraError: The package of the extra `crypto` is not installed.
    """

    def __init__(self, secret: bytes) -> None:
        with extra("crypto"):
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
        self._key: Ed25519PrivateKey = Ed25519PrivateKey.from_private_bytes(secret)

    @cached_property
    def _public(self) -> str:
        return _base64url(self._key.public_key().public_bytes_raw())

    @cached_property
    def kid(self) -> str:
        """Key id: the thumbprint of the key (RFC 7638)."""
        members = f'{{"crv":"Ed25519","kty":"OKP","x":"{self._public}"}}'
        return f"ds_{_base64url(hashlib.sha256(members.encode()).digest())}"

    def public_jwk(self) -> dict[str, str]:
        """Return the public key as a JSON Web Key."""
        fixed = {"kty": "OKP", "crv": "Ed25519", "use": "sig", "alg": "EdDSA"}
        return {**fixed, "kid": self.kid, "x": self._public}

    def signature(self, body: bytes, *, now: float) -> str:
        """Return the value of the header `Webhook-Signature` for a body."""
        signed = self._key.sign(f"{int(now)}.".encode() + body)
        return f"t={int(now)},kid={self.kid},ed25519={_base64url(signed)}"


class WebhookReply(Struct, frozen=True):
    """Answer to a request: its status (0 without an answer) and its body."""

    status: int
    body: bytes = b""

    @property
    def is_good(self) -> bool:
        """Whether the request was accepted."""
        return 200 <= self.status < 300  # noqa: PLR2004 - HTTP's


class Webhooks:
    """Sends signed requests.

    Args:
        kv: Stores the key.
        allowed_origins: Allowed origins in any network, such as `http://127.0.0.1:9000`; without a port, all ports of
            that host.

    Raises:
        UsageError: An entry of `allowed_origins` is not an origin.
    """

    def __init__(self, kv: KeyValue, world: World, allowed_origins: Collection[str] = ()) -> None:
        self._kv = kv
        self._world = world
        self._allowed = frozenset(each.rstrip("/").lower() for each in allowed_origins)
        require_origins(self._allowed)
        self._key: SigningKey | None = None
        self._sending = asyncio.Semaphore(SENDING_MAX)

    async def key(self) -> SigningKey:
        """Return the key of this store; the first call creates it.

        Raises:
            MissingExtraError: The package of the extra `crypto` is not installed.
            MidstreamError: The store cannot be used.
        """
        if self._key is None:
            kept = await self._kv.kv_get(KEYS, _KEY)
            if kept is None:
                secret = hashlib.sha256(self._world.new_secret().encode()).digest()
                SigningKey(secret)  # raises before the key is stored
                try:
                    await self._kv.kv_put(
                        KEYS, _KEY, msgspec.json.encode(secret), expected=0, at=self._world.now()
                    )
                except EntryMovedError:
                    return await self.key()
            else:
                secret = msgspec.json.decode(kept.body, type=bytes)
            self._key = SigningKey(secret)
        return self._key

    async def check(self, url: str) -> None:
        """Require that a URL is allowed.

        Raises:
            WebhookUrlError: The URL is not allowed; see the module's docstring.
        """
        parts = _parts_of(url)
        if not self._is_allowed(parts):
            await self._addresses_of(parts)

    async def send(self, url: str, body: bytes) -> WebhookReply:
        """Send a JSON body; redirects are not followed.

        Raises:
            WebhookUrlError: The URL is not allowed, perhaps since a change of its host's address.
        """
        parts = _parts_of(url)
        addresses = await self._addresses_of(parts)
        key = await self.key()
        headers = {
            "content-type": "application/json",
            "host": parts.netloc,
            "webhook-signature": key.signature(body, now=self._world.now()),
        }
        host = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        place = host if parts.port is None else f"{host}:{parts.port}"
        target = parts._replace(netloc=place, fragment="").geturl()
        async with self._sending:
            return await _post(target, body, headers, name=parts.hostname or "")

    async def _addresses_of(self, parts: SplitResult) -> Sequence[str]:
        """Return the addresses of a host if all of them are allowed."""
        host = parts.hostname or ""
        try:
            found = await resolve(host)
        except (OSError, UnicodeError) as error:
            raise WebhookUrlError(f"the host of the webhook {host[:80]!r} has no address") from error
        if self._is_allowed(parts):
            return found
        if parts.scheme != "https":
            raise WebhookUrlError("the URL of a webhook must begin with https://")
        if not found or not all(map(is_public_address, found)):
            raise WebhookUrlError(
                f"the webhook's host {host[:80]!r} has no public address. The operator can allow its origin "
                "(--allow-webhook)"
            )
        return found

    def _is_allowed(self, parts: SplitResult) -> bool:
        name = parts.hostname or ""
        host = f"{parts.scheme}://[{name}]" if ":" in name else f"{parts.scheme}://{name}"
        return host in self._allowed or f"{host}:{parts.port or _port_of(parts.scheme)}" in self._allowed


async def _post(target: str, body: bytes, headers: dict[str, str], *, name: str) -> WebhookReply:
    import httpx2  # noqa: PLC0415 - most servers send no such request

    tls = {"sni_hostname": name}  # the certificate must match the host name
    found = bytearray()
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            httpx2.AsyncClient(follow_redirects=False, trust_env=False, timeout=ANSWER_S) as client,
            client.stream("POST", target, content=body, headers=headers, extensions=tls) as answer,
        ):
            async for piece in answer.aiter_bytes():
                found += piece
                if len(found) > ANSWER_BYTES_MAX:
                    return WebhookReply(answer.status_code)
            return WebhookReply(answer.status_code, bytes(found))
    except (httpx2.HTTPError, httpx2.StreamError, OSError):  # a TimeoutError is an OSError
        return WebhookReply(0)


def _parts_of(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_sound = bool(parts.hostname) and parts.port != 0 and url.isascii() and url.isprintable()
    except ValueError:
        is_sound = False
    if not is_sound or "\\" in url or " " in url or parts.scheme not in _SCHEMES:
        raise WebhookUrlError("the address of the webhook is not an http(s) URL")
    if parts.username is not None or parts.password is not None:
        raise WebhookUrlError("the address of the webhook has a user name; remove it")
    return parts


def _port_of(scheme: str) -> int:
    return 443 if scheme == "https" else 80


def _base64url(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
