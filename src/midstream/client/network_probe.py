"""A probe of the network: numbered chunks over each transport, whose arrival times show the effect of proxies."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from enum import StrEnum
from itertools import pairwise

import httpx2
import msgspec
import websockets
from msgspec import Struct

from midstream.client.http_transport import http_client
from midstream.client.transport_selection import TransportKind
from midstream.client.transports import base_url, refusal_of, websocket_url
from midstream.environment import World
from midstream.errors import ConnectionLostError, MidstreamError, NotFoundError, ProtocolError
from midstream.local_keys import is_loopback
from midstream.protocol.sse import SseDecoder

POST = "post"
"""The further probe: POST requests, with which the transports other than WebSocket send frames."""
PATIENCE_S = 10.0
"""Seconds for a probe beyond the duration of its chunks."""
_REDIRECT = 300
_FAILURES = (httpx2.HTTPError, OSError, websockets.WebSocketException, MidstreamError)


CHUNKS = 5
"""Chunks of one probe."""


class Pace(Struct, frozen=True):
    """The requested interval of chunks, and the limit of their delay.

    Args:
        every_ms: Milliseconds between two chunks.
        late_s: Seconds after which the first chunk counts as buffered.
    """

    every_ms: int = 600
    late_s: float = 2.0

    @property
    def lasts_s(self) -> float:
        """Duration of the chunks of one probe."""
        return (CHUNKS - 1) * self.every_ms / 1000


PACE = Pace()
"""The pace of `midstream doctor`: three seconds in all."""


class ProbeOutcome(StrEnum):
    """Finding about one transport."""

    WORKS = "works"
    BUFFERED = "buffered"
    """The first chunk arrived late: a proxy buffers the answer."""
    AT_ONCE = "at once"
    """Only one chunk arrived, or all arrived in one piece: nothing is streamed."""
    INCOMPLETE = "incomplete"
    """Chunks are missing: a proxy cuts or drops."""
    REFUSED = "refused"
    """The answer is not from the probe."""
    NOTHING = "nothing"
    """No chunk arrived."""


DISTURBED = frozenset((ProbeOutcome.BUFFERED, ProbeOutcome.AT_ONCE, ProbeOutcome.INCOMPLETE))
"""Findings with data, but without a working stream."""


class Probed(Struct, frozen=True):
    """Result of one probe.

    Args:
        what: A transport, or `post`.
        finding: The finding.
        chunks: Number of received chunks.
        first_s: Seconds until the first chunk; None without one.
        detail: A sentence about the finding.
    """

    what: str
    finding: ProbeOutcome
    chunks: int = 0
    first_s: float | None = None
    detail: str = ""


class NetworkReport(Struct, frozen=True):
    """The findings about the network between this machine and a server.

    Args:
        probed: The results, best transport first.
        transport: The best undisturbed transport; None without one.
        via: Names of proxies in `Via` and `Server`.
    """

    url: str
    probed: tuple[Probed, ...]
    transport: TransportKind | None
    via: str = ""

    @property
    def is_clear(self) -> bool:
        """Whether all transports work."""
        return all(each.finding is ProbeOutcome.WORKS for each in self.probed)

    @property
    def lures(self) -> tuple[str, ...]:
        """Better transports than `transport` that deliver data late or incompletely.

        A client chooses by the first frame of a connection, so it may stay with one of these.
        """
        ways = [each for each in self.probed if each.what in set(TransportKind)]
        before = ways[: [each.what for each in ways].index(self.transport)] if self.transport else ()
        return tuple(each.what for each in before if each.finding in DISTURBED)


class Arrivals:
    """The received chunks of one probe, with their arrival times in seconds since the request."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.numbers: list[int] = []
        self.refusal = ""

    def take(self, body: bytes, at: float) -> None:
        """Note a chunk, or a refusal if it is not from the probe."""
        try:
            self.numbers.append(msgspec.json.decode(body, type=_Chunk).probe)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.refusal = self.refusal or "the answer is not from the probe"
        else:
            self.times.append(at)


class _Chunk(Struct, frozen=True):
    probe: int


def judge(what: str, arrivals: Arrivals, pace: Pace) -> Probed:
    """Return the finding about the chunks of a probe.

    In this order: a late first chunk means buffering; a single chunk, or all in one piece, means no streaming; missing
    chunks mean an incomplete stream.
    """
    times, count = arrivals.times, len(arrivals.times)
    first_s = round(times[0], 3) if times else None
    if first_s is None:
        finding = ProbeOutcome.REFUSED if arrivals.refusal else ProbeOutcome.NOTHING
        return Probed(what, finding, detail=arrivals.refusal or "no chunk came")
    if first_s > pace.late_s:
        detail = (
            f"the first chunk came after {first_s:.1f} s: a proxy buffers answers until they are complete"
        )
        return Probed(what, ProbeOutcome.BUFFERED, count, first_s, detail)
    if count == 1:
        return Probed(what, ProbeOutcome.AT_ONCE, count, first_s, "only one chunk came: nothing is streamed")
    if count < CHUNKS or arrivals.numbers != [*range(count)]:
        detail = f"{count} of {CHUNKS} chunks came: a proxy cuts answers short"
        return Probed(what, ProbeOutcome.INCOMPLETE, count, first_s, detail)
    pauses = [later - earlier for earlier, later in pairwise(times)]
    if max(pauses) < pace.every_ms / 4000:
        return Probed(
            what, ProbeOutcome.AT_ONCE, count, first_s, "all chunks came in one piece: nothing is streamed"
        )
    return Probed(what, ProbeOutcome.WORKS, count, first_s)


class NetworkProbe:
    """Probes one server over each transport.

    Raises:
        UsageError: `url` is not the URL of a server.
    """

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, pace: Pace = PACE) -> None:
        self._base = base_url(url)
        self._headers = dict(headers or {})
        self._pace, self._query = pace, f"every_ms={pace.every_ms}"
        self._world = World()
        self._via = ""

    async def run(self) -> NetworkReport:
        """Probe all transports concurrently; it takes a few seconds.

        Raises:
            ConnectionLostError: No server answers, or its certificate is not trusted.
            AccessError: The server requires authentication, or refuses the credential.
            NotFoundError: The server has no probe.
        """
        async with http_client(self._base) as client:
            await self._greet(client)
            found = await asyncio.gather(
                self._probe(TransportKind.WEBSOCKET, self._messages()),
                self._probe(TransportKind.SSE, self._events(client)),
                self._probe(TransportKind.POLL, self._polls(client)),
                self._probe_post(client),
            )
        works = {each.what for each in found if each.finding is ProbeOutcome.WORKS}
        usable = [
            way for way in TransportKind if way in works and (way is TransportKind.WEBSOCKET or POST in works)
        ]
        return NetworkReport(self._base, tuple(found), usable[0] if usable else None, self._via)

    async def _greet(self, client: httpx2.AsyncClient) -> None:
        """Request one chunk, which works in any network."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                response = await client.get(f"{self._base}/v1/probe/poll", headers=self._headers)
        except (httpx2.HTTPError, TimeoutError) as error:
            raise ConnectionLostError(_explain_silence(self._base, error)) from error
        server_headers = (response.headers.get("via", ""), response.headers.get("server", ""))
        self._via = ", ".join(filter(None, server_headers))
        arrivals = Arrivals()
        arrivals.take(response.content, 0.0)
        if response.status_code < _REDIRECT and not arrivals.refusal:
            return
        if response.status_code >= _REDIRECT:
            refusal = refusal_of(response.status_code, response.content)
            if not isinstance(refusal, NotFoundError | ProtocolError):
                raise refusal
        raise NotFoundError(
            f"{self._base} answers {response.status_code} and has no probe; check that it is a midstream server"
        )

    async def _probe(self, way: TransportKind, chunks: AsyncIterator[bytes]) -> Probed:
        arrivals, began = Arrivals(), self._world.monotonic()
        try:
            async with asyncio.timeout(self._pace.lasts_s + PATIENCE_S):
                async for chunk in chunks:
                    arrivals.take(chunk, self._world.monotonic() - began)
        except TimeoutError:
            pass  # evaluate the chunks until then
        except _FAILURES as error:
            arrivals.refusal = _reason(error)
        return judge(way, arrivals, self._pace)

    async def _messages(self) -> AsyncIterator[bytes]:
        connecting = websockets.connect(
            f"{websocket_url(self._base)}/v1/probe/stream?{self._query}",
            additional_headers=self._headers,
            compression=None,
            proxy=None if is_loopback(httpx2.URL(self._base).host) else True,
        )
        async with connecting as socket:
            async for message in socket:
                yield message.encode() if isinstance(message, str) else message

    async def _events(self, client: httpx2.AsyncClient) -> AsyncIterator[bytes]:
        decoder = SseDecoder()
        headers = {**self._headers, "accept-encoding": "identity"}
        url = f"{self._base}/v1/probe/events?{self._query}"
        async with client.stream("GET", url, headers=headers) as response:
            response.raise_for_status()
            async for piece in response.aiter_raw():
                for event in decoder.feed(piece):
                    yield event.data

    async def _polls(self, client: httpx2.AsyncClient) -> AsyncIterator[bytes]:
        for number in range(CHUNKS):
            url = f"{self._base}/v1/probe/poll?n={number}&{self._query}"
            response = await client.get(url, headers=self._headers)
            yield response.raise_for_status().content

    async def _probe_post(self, client: httpx2.AsyncClient) -> Probed:
        body, url = b"x" * 4096, f"{self._base}/v1/probe/chunks"
        began = self._world.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                response = await client.post(url, content=body, headers=self._headers)
            response.raise_for_status()
        except httpx2.HTTPStatusError as error:
            return Probed(POST, ProbeOutcome.REFUSED, detail=_reason(error))
        except (httpx2.HTTPError, TimeoutError) as error:
            return Probed(POST, ProbeOutcome.NOTHING, detail=_reason(error))
        first_s = round(self._world.monotonic() - began, 3)
        if response.content != body:
            return Probed(POST, ProbeOutcome.INCOMPLETE, 1, first_s, "the returned data is not the sent data")
        return Probed(POST, ProbeOutcome.WORKS, 1, first_s)


def _reason(error: Exception) -> str:
    match error:
        case websockets.InvalidStatus() | httpx2.HTTPStatusError():
            return f"it was answered with HTTP status {error.response.status_code}"
        case _:
            return f"the connection was lost ({type(error).__name__})"


def _explain_silence(base: str, error: BaseException) -> str:
    """Describe a missing answer by the root cause of an error of the HTTP client."""
    while (deeper := error.__cause__ or error.__context__) is not None:
        error = deeper
    match error:
        case ssl.SSLCertVerificationError():
            return f"the certificate of {base} is not trusted: {error.verify_message}"
        case ssl.SSLError():
            return f"the server at {base} does not use TLS ({error.reason})"
        case _:
            return f"no answer from {base} ({type(error).__name__})"
