"""The HTTP side of a model's provider: connections, server-sent events, refusals. Models are built on it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
import weakref
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, Self, cast

import httpx2
import msgspec

from midstream.core.provider_errors import error_of
from midstream.core.replies import Heartbeat, ModelEvent
from midstream.core.sse import ServerSentEvent, SseDecoder
from midstream.core.timing import StallBudgets, retry_after_s
from midstream.errors import (
    FrameTooLargeError,
    ModelError,
    ModelForgotError,
    ModelStalledError,
    ModelUnavailableError,
    UsageError,
)
from midstream.integrations.http_limits import WRITE_S, HttpLimits
from midstream.integrations.network_log import NetworkLog
from midstream.integrations.plain_http import PlainAnswer, PlainClient, is_plain
from midstream.world import World

CLOSE_S = 1.0
CONTROL_S = 60.0
"""Seconds of silence in the answer to a request that asks for no reply of a model, such as one that stops it."""
ERROR_BYTES_MAX = 64 * 1024
"""Bytes of an error's body that are read; the reason stands in the first few."""

KEPT_CONNECTIONS_MAX = 100
"""Idle connections that are kept for later replies."""

_Client = httpx2.AsyncClient | PlainClient
"""One connection at a time."""

_NO_STREAM = {"application/json", "text/html"}
"""What a server that took the request and a proxy that did not pass it on answer instead of a stream."""


@functools.cache
def _tls() -> ssl.SSLContext:
    """Read the certificates once: it takes longer than a connection."""
    return httpx2.create_ssl_context()


class Reader(Protocol):
    """Translation of a provider's events into ours; each is written for one API."""

    def read_json(self, data: bytes) -> list[ModelEvent]:
        """Take the data of one event; return what a reader may be shown at once."""

    def end(self) -> list[ModelEvent]:
        """Return the end of the reply, after the last event."""


async def read_reply(
    asked: AsyncGenerator[Sequence[ServerSentEvent], None], reader: Reader
) -> AsyncGenerator[ModelEvent, None]:
    """Give a reply that is one answer, from its first byte to its last; what says nothing is a `Heartbeat`.

    Raises whatever `asked` and the reader do, and closes `asked`.
    """
    async with contextlib.aclosing(asked) as pieces:
        async for received in pieces:
            has_said = False
            for each in received:
                for event in reader.read_json(each.data):
                    has_said = True
                    yield event
            if not has_said:
                yield Heartbeat()
    for event in reader.end():
        yield event


class _Connections:
    """The connections of one loop: a client for each reply that is on its way, and those that wait for the next one.

    A client has one connection at a time. One client for all would look at every connection it has for each request,
    and would let the hundred-and-first reply wait.
    """

    def __init__(self, url: httpx2.URL, timeout: httpx2.Timeout) -> None:
        self._is_plain = is_plain(url)
        self._timeout = timeout
        self._idle: list[_Client] = []
        self._is_retired = False

    def take(self) -> _Client:
        """Return a client for one reply: the one that was used last, or a new one."""
        if self._idle:
            return self._idle.pop()
        if self._is_plain:
            return PlainClient(self._timeout)
        return httpx2.AsyncClient(timeout=self._timeout, verify=_tls())

    async def give_back(self, client: _Client) -> None:
        """Take a client back whose reply is over."""
        if self._is_retired or len(self._idle) >= KEPT_CONNECTIONS_MAX:
            await _close(client)
        else:
            self._idle.append(client)

    async def retire(self) -> None:
        """Let no later request use any of them: those of other replies are closed when these are over."""
        self._is_retired = True
        idle, self._idle = self._idle, []
        if idle:
            await asyncio.gather(*map(_close, idle))


def _timeout(limits: HttpLimits, read_s: float) -> httpx2.Timeout:
    """Return limits as a client takes them."""
    return httpx2.Timeout(connect=limits.connect_s, read=read_s, write=WRITE_S, pool=limits.acquire_s)


class _SilenceError(httpx2.ReadTimeout):
    """A silence that was longer than its limit, with that limit."""

    def __init__(self, limit_s: float) -> None:
        super().__init__("the server was silent for too long")
        self.limit_s = limit_s


def _limit_in(error: httpx2.ReadTimeout, silences: tuple[float, float]) -> float:
    return error.limit_s if isinstance(error, _SilenceError) else max(silences)


@contextlib.asynccontextmanager
async def _answer(
    asked: AbstractAsyncContextManager[httpx2.Response | PlainAnswer], limit_s: float
) -> AsyncGenerator[httpx2.Response | PlainAnswer, None]:
    """Send a request and wait for the head of its answer, for `limit_s` seconds at most."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(limit_s):
                response = await stack.enter_async_context(asked)
        except TimeoutError as error:
            raise _SilenceError(limit_s) from error
        yield response


async def _pieces(
    response: httpx2.Response | PlainAnswer, first_s: float, between_s: float
) -> AsyncGenerator[bytes, None]:
    """Give the body as it comes. The client itself cuts a silence at the longer of the two limits.

    A timer is set only where the shorter limit holds: for each piece it would cost more than the piece.
    """
    limit_s, longest_s = first_s, max(first_s, between_s)
    pieces = cast("AsyncGenerator[bytes, None]", response.aiter_bytes())
    async with contextlib.aclosing(pieces):
        while True:
            try:
                async with asyncio.timeout(limit_s if limit_s < longest_s else None):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise _SilenceError(limit_s) from error
            limit_s = between_s
            yield piece


async def _close(client: _Client) -> None:
    """Close a client within `CLOSE_S`: a peer that is gone must not hold up a cancel."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await client.aclose()


class Provider:
    """A server of models, by its address.

    Connections are kept between replies. After a reply that was cut (a cancel, silence, a fault) no later request
    uses any of them: who knows what state they are in.

    Args:
        base_url: Up to and including the version.
        name: What errors call it.
        api_key: Sent as a bearer token; None sends none.
        headers: More headers for each request.
        limits: How long it may take.

    Raises:
        UsageError: The address is no http or https URL.
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
            url = httpx2.URL(base_url)
        except httpx2.InvalidURL as error:
            raise UsageError(f"{base_url!r} is no address of a model: {error}") from error
        if url.scheme not in {"http", "https"} or not url.host:
            raise UsageError(f"{base_url!r} is no address of a model: it begins with http:// or https://")
        self.name = name
        self.host = url.host
        """The server's name."""
        self._url = url
        self._base_url = base_url.rstrip("/")
        self._headers = {
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            **(headers or {}),
        }
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._limits = limits or HttpLimits()
        secrets = [word for value in (headers or {}).values() for word in (value, *value.split())]
        self._network = NetworkLog(name, [*secrets, api_key or "", url.password])
        self._world = world
        # A connection belongs to the loop it was made in.
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Connections] = (
            weakref.WeakKeyDictionary()
        )

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
        """Ask, and give the events of the answer as they come; closing the iterator closes the connection.

        An empty sequence says that something came which is no event yet, or never will be: a ping.

        Args:
            gone: The statuses that say that what was asked for is not there (any more).
            stalls: The budgets of the agent that sends the request.

        Raises:
            ModelUnavailableError: No connection, a status that may pass, or an answer that broke off.
            ModelStalledError: Silence for longer than the limits allow.
            ModelForgotError: One of the statuses `gone`.
            ModelError: Another refusal: see `midstream.core.provider_errors`.
        """
        connections = self._connections_here()
        client = connections.take()
        silences = self._limits.silences(stalls)
        self._network.sent(method, path, body or b"")
        try:
            async with _answer(
                client.stream(
                    method,
                    self._base_url + path,
                    content=body,
                    headers={**self._headers, **(headers or {})},
                    timeout=_timeout(self._limits, max(silences)),
                ),
                self._limits.connect_s + silences[0],
            ) as response:
                self._network.answered(response.status_code)
                media_type = response.headers.get("content-type", "").partition(";")[0].strip()
                if response.status_code in gone:
                    raise ModelForgotError(f"{self.name} has the reply no longer")
                if response.status_code != httpx2.codes.OK or media_type in _NO_STREAM:
                    raise await self._refusal(response, media_type)
                decoder = SseDecoder()
                async with contextlib.aclosing(_pieces(response, *silences)) as pieces:
                    async for piece in pieces:
                        self._network.received(piece)
                        yield decoder.feed(piece)
        except FrameTooLargeError as error:
            self._retire(connections)
            raise ModelUnavailableError(f"{self.name} sent an event above the limit") from error
        except (asyncio.CancelledError, GeneratorExit):
            self._retire(connections)
            raise
        except httpx2.ReadTimeout as error:
            self._retire(connections)
            self._network.failed(error)
            raise ModelStalledError(
                f"{self.name} sent nothing for {_limit_in(error, silences):g} s"
            ) from error
        except httpx2.HTTPError as error:
            self._retire(connections)
            self._network.failed(error)
            # Only the kind: the text of such an error may hold the address and what is in it.
            message = f"the connection to {self.name} failed: {type(error).__name__}"
            raise ModelUnavailableError(message) from error
        finally:
            if self._is_retired(connections):
                await connections.retire()
            await connections.give_back(client)

    async def post(self, path: str) -> int:
        """Send a request without a body and return the status of the answer.

        Raises:
            ModelUnavailableError: There was no answer.
        """
        connections = self._connections_here()
        client = connections.take()
        try:
            async with client.stream("POST", self._base_url + path, headers=self._headers) as answer:
                async for _ in answer.aiter_bytes():
                    pass
        except httpx2.HTTPError as error:
            raise ModelUnavailableError(f"the connection to {self.name} failed") from error
        finally:
            await connections.give_back(client)
        return answer.status_code

    async def aclose(self) -> None:
        """Close the connections of the running loop. A later request opens new ones."""
        connections = self._connections.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            await connections.retire()

    def _connections_here(self) -> _Connections:
        loop = asyncio.get_running_loop()
        found = self._connections.get(loop)
        if found is None:
            found = self._connections[loop] = _Connections(self._url, _timeout(self._limits, CONTROL_S))
        return found

    def _retire(self, connections: _Connections) -> None:
        """Let no later request use these connections; other replies on them go on."""
        loop = asyncio.get_running_loop()
        if self._connections.get(loop) is connections:
            del self._connections[loop]

    def _is_retired(self, connections: _Connections) -> bool:
        return self._connections.get(asyncio.get_running_loop()) is not connections

    async def _refusal(self, response: httpx2.Response | PlainAnswer, media_type: str) -> ModelError:
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > ERROR_BYTES_MAX:
                break
        self._network.received(bytes(body))
        try:
            parsed = msgspec.json.decode(bytes(body))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            parsed = None  # a proxy's page: the status says enough
        error = parsed.get("error", parsed) if isinstance(parsed, dict) else None
        if response.status_code == httpx2.codes.OK:
            if isinstance(parsed, dict) and "error" in parsed:
                return error_of(error)
            return ModelUnavailableError(f"{self.name} answered with {media_type} instead of a stream")
        wait_s = retry_after_s(response.headers.get("retry-after", ""), now=self._world.now())
        return error_of(error, status=response.status_code, retry_after_s=wait_s)


class ProvidedModel:
    """Shared parts of a provider's models: they hold its connections; close them, or use it as a context."""

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
