"""HTTP connections to a model's provider: server-sent events, limits, refusals. Models are built on this."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import math
import ssl
import urllib.request
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from types import TracebackType
from typing import Protocol, Self

import aiohttp
import msgspec
from yarl import URL

from midstream.environment import Cancellable, World
from midstream.errors import (
    FrameTooLargeError,
    ModelError,
    ModelForgotError,
    ModelNotFoundError,
    ModelStalledError,
    ModelUnavailableError,
    UsageError,
)
from midstream.json_depth import require_shallow
from midstream.models.http_limits import HttpLimits
from midstream.models.network_log import NetworkLog
from midstream.models.provider_errors import error_of
from midstream.models.responses import KeepAlive, ModelEvent, PassedAnswer
from midstream.protocol.sse import ServerSentEvent, SseDecoder
from midstream.retries import retry_after_s
from midstream.timing import StallBudgets
from midstream.version import __version__

CLOSE_S = 1.0
CONTROL_S = 60.0
"""Greatest silence of an answer to a request without a response, such as a cancellation."""
ERROR_BYTES_MAX = 64 * 1024
"""Bytes of an error's body that are read; the reason is in the first ones."""

HEAD_BYTES_MAX = 64 * 1024
"""Bytes of a line in the head of an answer."""
IDLE_S = 5.0
"""Seconds that an idle connection is kept; servers close theirs after 5 s or more."""

_NO_STREAM = {"application/json", "text/html"}
"""Statuses instead of a stream, from a server that accepted the request behind a proxy that did not."""


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS settings, read once: reading the certificates takes longer than a connection."""
    import httpx2  # noqa: PLC0415 - only an address with TLS needs it

    return httpx2.create_ssl_context()  # with the system's certificates, also if OpenSSL finds none


class EventTranslator(Protocol):
    """Converter of a provider's events; each is for one API."""

    def read_json(self, data: bytes) -> list[ModelEvent]:
        """Process the data of one event; return the new model events."""

    def end(self) -> list[ModelEvent]:
        """Return the end of the response, after the last event."""


async def read_response(
    batches: AsyncGenerator[Sequence[ServerSentEvent], None], reader: EventTranslator
) -> AsyncGenerator[ModelEvent, None]:
    """Yield the events of one answer; bytes without an event are a `KeepAlive`.

    Raises the errors of `batches` and the reader, and closes `batches`.
    """
    async with contextlib.aclosing(batches) as pieces:
        async for received in pieces:
            has_events = False
            for each in received:
                for event in reader.read_json(each.data):
                    has_events = True
                    yield event
            if not has_events:
                yield KeepAlive()
    for event in reader.end():
        yield event


class _Connections:
    """The connections of one event loop to one server. Retired ones are closed with the last answer on them."""

    def __init__(self, session: aiohttp.ClientSession, closing: AsyncGenerator[object, None]) -> None:
        self.session = session
        self.closing = closing
        self.answers = 0
        """Number of unfinished answers."""
        self.is_retired = False


async def _session(
    proxy: str | None, connect_s: float, *, is_tls: bool
) -> AsyncGenerator[aiohttp.ClientSession, None]:
    """Yield a session, and close it with the generator, at the latest at the end of the loop."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, ssl=_tls() if is_tls else True),
        cookie_jar=aiohttp.DummyCookieJar(),  # an answer must not change later requests
        max_field_size=HEAD_BYTES_MAX,
        max_line_size=HEAD_BYTES_MAX,
        proxy=proxy,
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_s),
    )
    try:
        yield session
    finally:
        with contextlib.suppress(TimeoutError):  # an unreachable peer must not delay a cancellation
            async with asyncio.timeout(CLOSE_S):
                await session.close()


def _proxy_of(url: URL) -> str | None:
    """Return the proxy for an address in the environment."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(url.host or ""):
        return None
    scheme, _, _ = proxy.rpartition("://")
    if scheme not in {"", "http", "https"}:
        raise UsageError(
            f"the environment names a proxy by {scheme}, which is not supported: use one by http, "
            f"or name {url.host} in NO_PROXY"
        )
    return proxy if scheme else f"http://{proxy}"


class _SilenceError(Exception):
    """A silence that was longer than its limit."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"silence for {limit_s:g} s")
        self.limit_s = limit_s


class _Silence:
    """Limits the wait for the next piece of a body.

    One timer checks the waits for all pieces, because a timeout for each piece costs as much as reading it.
    """

    def __init__(self, body: aiohttp.StreamReader, world: World) -> None:
        self._body = body
        self._world = world
        self._limit_s = math.inf
        self._waiting_since: float | None = None
        self._timer: Cancellable | None = None

    async def piece(self, limit_s: float) -> bytes:
        """Return the next piece; nothing at the end of the body.

        Raises:
            _SilenceError: The wait exceeded the limit.
        """
        self._waiting_since = self._world.monotonic()
        if limit_s != self._limit_s:
            self.close()
            self._limit_s = limit_s
            self._timer = self._world.later(limit_s, self._look)
        piece = await self._body.readany()
        self._waiting_since = None
        return piece

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        since = self._waiting_since
        left_s = self._limit_s if since is None else since + self._limit_s - self._world.monotonic()
        if left_s > 0:
            self._timer = self._world.later(left_s, self._look)
        else:
            self._body.set_exception(_SilenceError(self._limit_s))


async def _pieces(
    response: aiohttp.ClientResponse, first_s: float, between_s: float, world: World
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a body, with limits for silence."""
    silence = _Silence(response.content, world)
    try:
        limit_s = first_s
        while piece := await silence.piece(limit_s):
            limit_s = between_s
            yield piece
    finally:
        silence.close()


class Provider:
    """A server of models, by its address.

    Connections are kept between responses. After a cut response (a cancellation, silence, a fault) no later request
    uses any of them, because their state is unknown.

    Args:
        base_url: Up to and including the version.
        name: Its name in errors.
        api_key: Sent as a bearer token; None for none.
        headers: More headers for each request.
        limits: Its time limits.

    Raises:
        UsageError: The address is no http(s) URL, a header cannot be sent, or the environment's proxy is unknown.
    """

    def __init__(
        self,
        base_url: str,
        name: str,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        limits: HttpLimits | None = None,
        world: World,
    ) -> None:
        try:
            url = URL(base_url)
            login = aiohttp.encode_basic_auth(url.user or "", url.password or "")
        except ValueError as error:
            raise UsageError(f"{base_url!r} is not the address of a model: {error}") from error
        if url.scheme not in {"http", "https"} or not url.host:
            raise UsageError(
                f"{base_url!r} is not the address of a model: it must begin with http:// or https://"
            )
        self.name = name
        self.host = url.host
        """The server's name."""
        self._base_url = str(url.with_user(None)).rstrip("/")
        self._proxy = _proxy_of(url)
        self._headers = {
            "accept": "text/event-stream",
            "accept-encoding": "identity",  # with compression, a server delays text
            "content-type": "application/json",
            "user-agent": f"midstream/{__version__}",
        }
        if url.user or url.password:
            self._headers["authorization"] = login
        self._headers |= {header.lower(): value for header, value in (headers or {}).items()}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        for header, value in self._headers.items():
            if not f"{header}{value}".isprintable():
                raise UsageError(f"the header {header!r} for {name} has a character that no header can carry")
        self._limits = limits or HttpLimits()
        secrets = [word for value in (headers or {}).values() for word in (value, *value.split())]
        self._network = NetworkLog(name, [*secrets, api_key or "", url.password or ""])
        self._world = world
        # A connection belongs to the event loop that opened it.
        self._connections: dict[asyncio.AbstractEventLoop, _Connections] = {}

    async def events(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        gone: Collection[int] = (),
        stalls: StallBudgets | None = None,
    ) -> AsyncGenerator[Sequence[ServerSentEvent], None]:
        """Send a request, and yield the events of the answer; closing the iterator closes the connection.

        An empty sequence means bytes without a complete event, such as a ping.

        Args:
            gone: Statuses for a missing response.
            stalls: The budgets of the agent that sends the request.

        Raises:
            ModelUnavailableError: No connection, a temporary status, or an incomplete answer.
            ModelStalledError: Silence beyond the limits.
            ModelForgotError: One of the statuses `gone`.
            ModelError: Another refusal: see `midstream.models.provider_errors`.
        """
        silences = self._limits.silences(stalls)
        self._network.log_request(method, path, body or b"")
        with self._typed_errors():
            async with (
                self._answer(method, path, body, headers or {}, first_s=silences[0]) as response,
                contextlib.aclosing(_pieces(response, *silences, self._world)) as pieces,
            ):
                self._network.log_status(response.status)
                media_type = _media_type_of(response)
                if response.status in gone:
                    raise ModelForgotError(f"{self.name} no longer has the response")
                if response.status != HTTPStatus.OK or media_type in _NO_STREAM:
                    raise await self._refusal(response, media_type, pieces)
                decoder = SseDecoder()
                async for piece in pieces:
                    self._network.log_piece(piece)
                    yield decoder.feed(piece)

    @contextlib.asynccontextmanager
    async def passed(self, path: str, body: bytes) -> AsyncGenerator[PassedAnswer, None]:
        """Send a body unchanged, and stream the answer; leaving the context closes the connection of an incomplete one.

        Raises:
            ModelNotFoundError: The server does not have this path or this model.
            ModelError: As `events`; also during reading.
        """
        silences = self._limits.silences(None)
        self._network.log_request("POST", path, body)
        with self._typed_errors():
            async with (
                self._answer("POST", path, body, {"accept": "*/*"}, first_s=silences[0]) as response,
                contextlib.aclosing(_pieces(response, *silences, self._world)) as pieces,
            ):
                self._network.log_status(response.status)
                if response.status != HTTPStatus.OK:
                    error = await self._refusal(response, _media_type_of(response), pieces)
                    is_missing = response.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)
                    raise ModelNotFoundError(error.message) if is_missing else error
                content_type = response.headers.get("content-type", "application/json")
                try:
                    async with contextlib.aclosing(self._logged(pieces)) as logged:
                        yield PassedAnswer(content_type, logged)
                finally:
                    if not response.content.at_eof():
                        self._retire_here()

    async def _logged(self, pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        with self._typed_errors():
            async for piece in pieces:
                self._network.log_piece(piece)
                yield piece

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Raise faults of a connection as errors of the model."""
        try:
            yield
        except FrameTooLargeError as error:
            raise ModelUnavailableError(f"{self.name} sent an event above the limit") from error
        except _SilenceError as error:
            self._network.log_failure(error)
            raise ModelStalledError(f"{self.name} sent nothing for {error.limit_s:g} s") from error
        except aiohttp.ClientError as error:
            self._network.log_failure(error)
            # Only the kind: the text of such an error may contain the address and sent content.
            message = f"the connection to {self.name} failed: {type(error).__name__}"
            raise ModelUnavailableError(message) from error

    async def post(self, path: str) -> int:
        """Send a request without a body and return the status of the answer.

        Raises:
            ModelUnavailableError: There was no answer.
        """
        try:
            async with self._answer("POST", path, None, {}, first_s=CONTROL_S) as response:
                async for _ in _pieces(response, CONTROL_S, CONTROL_S, self._world):
                    pass
        except (aiohttp.ClientError, _SilenceError) as error:
            raise ModelUnavailableError(f"the connection to {self.name} failed") from error
        return response.status

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], *, first_s: float
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Send a request and yield the answer after its head. The connection of an unread body is closed.

        Args:
            first_s: Seconds of silence before the head.
        """
        connections = await self._connections_here()
        connections.answers += 1
        limit_s = self._limits.connect_s + first_s
        try:
            try:
                async with asyncio.timeout(limit_s) as limit:
                    response = await connections.session.request(
                        method,
                        URL(self._base_url + path, encoded=True),
                        data=None if body is None else io.BytesIO(body),
                        headers={**self._headers, **{name.lower(): value for name, value in headers.items()}},
                        allow_redirects=False,  # the key is only for this server
                    )
            except TimeoutError as error:
                if limit.expired():
                    raise _SilenceError(limit_s) from error
                raise
            try:
                yield response
            finally:
                response.close()  # the connection of a complete answer was already returned
        except ModelError:
            raise
        except BaseException:
            self._retire(connections)
            raise
        finally:
            connections.answers -= 1
            await _close_unused(connections)

    async def aclose(self) -> None:
        """Close the connections of the running loop. A later request opens new ones."""
        if (connections := self._retire_here()) is not None:
            await _close_unused(connections)

    def _retire_here(self) -> _Connections | None:
        """Retire the connections of the running loop, and return them, or None."""
        connections = self._connections.get(asyncio.get_running_loop())
        if connections is not None:
            self._retire(connections)
        return connections

    async def _connections_here(self) -> _Connections:
        loop = asyncio.get_running_loop()
        found = self._connections.get(loop)
        if found is None:
            is_tls = self._base_url.startswith("https:")
            closing = _session(self._proxy, self._limits.connect_s, is_tls=is_tls)
            found = _Connections(await anext(closing), closing)
            for over in [each for each in self._connections if each.is_closed()]:
                del self._connections[over]
            self._connections[loop] = found
        return found

    def _retire(self, connections: _Connections) -> None:
        """Let no later request use these connections; other responses on them continue."""
        connections.is_retired = True
        loop = asyncio.get_running_loop()
        if self._connections.get(loop) is connections:
            del self._connections[loop]

    async def _refusal(
        self, response: aiohttp.ClientResponse, media_type: str, pieces: AsyncGenerator[bytes, None]
    ) -> ModelError:
        body = bytearray()
        async for piece in pieces:
            body += piece
            if len(body) > ERROR_BYTES_MAX:
                break
        self._network.log_piece(bytes(body))
        try:
            parsed = msgspec.json.decode(bytes(body))
            require_shallow(parsed)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            parsed = None  # a proxy's page: the status is sufficient
        error = parsed.get("error", parsed) if isinstance(parsed, dict) else None
        if response.status == HTTPStatus.OK:
            if isinstance(parsed, dict) and "error" in parsed:
                return error_of(error)
            return ModelUnavailableError(f"{self.name} answered with {media_type} instead of a stream")
        wait_s = retry_after_s(response.headers.get("retry-after", ""), now=self._world.now())
        return error_of(error, status=response.status, retry_after_s=wait_s)


def _media_type_of(response: aiohttp.ClientResponse) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip()


async def _close_unused(connections: _Connections) -> None:
    """Close retired connections without an unfinished answer."""
    if connections.is_retired and not connections.answers:
        await connections.closing.aclose()


class ProvidedModel:
    """Shared parts of models with a provider: close them with `aclose`, or use them as a context."""

    _provider: Provider

    async def aclose(self) -> None:
        """Close the connections of the running loop. A later request opens new ones."""
        await self._provider.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class OpenAIServerModel(ProvidedModel):
    """A model of a server with other endpoints of OpenAI's API: see `PassingModel`."""

    def pass_on(self, path: str, body: bytes) -> AbstractAsyncContextManager[PassedAnswer]:
        """Send a request unchanged, and stream the answer.

        Raises:
            ModelError: The server refused, was silent, or sent an incomplete answer.
        """
        return self._provider.passed(path, body)
