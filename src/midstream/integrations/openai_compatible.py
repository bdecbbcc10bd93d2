"""Any server that speaks OpenAI's chat completions, by its address, without an SDK."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import math
import ssl
import weakref
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx2
import msgspec

from midstream.core.formats import openai_chat
from midstream.core.formats.openai_stream import ReplyReader, error_of
from midstream.core.profiles import profile_named
from midstream.core.rendering import render
from midstream.core.replies import ModelEvent, ModelRequest
from midstream.core.sse import SseDecoder
from midstream.errors import (
    FrameTooLargeError,
    ModelError,
    ModelStalledError,
    ModelUnavailableError,
    UsageError,
)
from midstream.world import World

CONNECT_S = 10.0
READ_S = 60.0
"""Seconds of silence inside a reply; also the wait for its first byte, so a slow prompt must begin by then."""
WRITE_S = 30.0
POOL_S = 5.0
CLOSE_S = 1.0
ERROR_BYTES_MAX = 64 * 1024
"""Bytes of an error's body that are read; the reason stands in the first few."""
RETRY_AFTER_MAX_S = 3600.0
"""A server that asks for a longer pause is taken at an hour."""

_TIMEOUT = httpx2.Timeout(connect=CONNECT_S, read=READ_S, write=WRITE_S, pool=POOL_S)

_NO_STREAM = {"application/json", "text/html"}
"""What a server that took the request and a proxy that did not pass it on answer instead of a stream."""


@functools.cache
def _tls() -> ssl.SSLContext:
    """Read the certificates once: it takes longer than a connection."""
    return httpx2.create_ssl_context()


class _Client:
    """The connections of one loop, and how many replies are on their way over them."""

    def __init__(self, http: httpx2.AsyncClient) -> None:
        self.http = http
        self.replies = 0
        self.is_retired = False

    async def aclose(self) -> None:
        """Close them, within `CLOSE_S`: a peer that is gone must not hold up a cancel."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.http.aclose()


class OpenAICompatible:
    """A model behind `POST {base_url}/chat/completions`: OpenAI, vLLM, llama.cpp, Ollama, OpenRouter, and so on.

    Args:
        base_url: Up to and including the version, such as `http://127.0.0.1:11434/v1`.
        model: The name the server knows the model by.
        api_key: Sent as a bearer token; None sends none.
        extra: More fields for the body of each request (such as `temperature`), over those made here; a field whose
            value is None is left out, for servers that refuse `stream_options`.
        headers: More headers for each request.
        profile: Whose rules the messages are written by (`midstream.core.profiles.PROFILES`): `openai-chat`,
            `deepseek`, `kimi`, `minimax`, `mistral`; `strict-template` for a server that puts them through the
            chat template of a model, `portable` for what everybody takes.

    Connections are kept between replies. After a reply that was cut (a cancel, silence, a fault) no later request
    uses any of them: who knows what state they are in. Close them with `aclose`, or use the model as an async context.

    Raises:
        UsageError: The address is no http or https URL, or nobody knows the profile.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        extra: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        profile: str = "openai-chat",
        world: World = World(),
    ) -> None:
        try:
            url = httpx2.URL(base_url)
        except httpx2.InvalidURL as error:
            raise UsageError(f"{base_url!r} is no address of a model: {error}") from error
        if url.scheme not in {"http", "https"} or not url.host:
            raise UsageError(f"{base_url!r} is no address of a model: it begins with http:// or https://")
        self.name = f"openai-compatible:{model}"
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._model = model
        self._profile = profile_named(profile).name
        self._extra = dict(extra or {})
        self._headers = {"Accept": "text/event-stream", "Content-Type": "application/json", **(headers or {})}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._world = world
        # A connection belongs to the loop it was made in.
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Client] = (
            weakref.WeakKeyDictionary()
        )

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Answer `request`; closing the iterator closes the connection, on which servers stop.

        Raises:
            ModelUnavailableError: No connection, 408, 409, 425, 429, 5xx, or a reply that broke off.
            ModelStalledError: Silence for `READ_S` seconds.
            ModelRejectedError: The server will never accept this request.
            ContextOverflowError: It is longer than the model can read.
        """
        headers = {**self._headers, "Idempotency-Key": request.key} if request.key else self._headers
        client = self._client()
        client.replies += 1
        try:
            async with client.http.stream(
                "POST", self._url, content=self._body(request), headers=headers
            ) as response:
                media_type = response.headers.get("content-type", "").partition(";")[0].strip()
                if response.status_code != httpx2.codes.OK or media_type in _NO_STREAM:
                    raise await self._refusal(response, media_type)
                async with contextlib.aclosing(self._events(response)) as events:
                    async for event in events:
                        yield event
        except (asyncio.CancelledError, GeneratorExit):
            self._retire(client)
            raise
        except httpx2.ReadTimeout as error:
            self._retire(client)
            raise ModelStalledError(f"{self.name} said nothing for {READ_S:g} s") from error
        except httpx2.HTTPError as error:
            self._retire(client)
            # Only the kind: the text of such an error may hold the address and what is in it.
            message = f"the connection to {self.name} failed: {type(error).__name__}"
            raise ModelUnavailableError(message) from error
        finally:
            client.replies -= 1
            if client.is_retired and not client.replies:
                await client.aclose()

    async def aclose(self) -> None:
        """Close the connections of the running loop. A later request opens new ones."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _client(self) -> _Client:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = _Client(httpx2.AsyncClient(timeout=_TIMEOUT, verify=_tls()))
        return self._clients[loop]

    def _retire(self, client: _Client) -> None:
        """Let no later request use these connections; other replies on them go on, the last one closes them."""
        client.is_retired = True
        loop = asyncio.get_running_loop()
        if self._clients.get(loop) is client:
            del self._clients[loop]

    def _body(self, request: ModelRequest) -> bytes:
        sent = render(
            request.history, request.instructions, self._profile, form="openai-chat", model=self._model
        )
        body: dict[str, Any] = {
            "model": self._model,
            "messages": sent.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.tools:
            body["tools"] = openai_chat.render_tools(request.tools)
        body |= self._extra
        return msgspec.json.encode({name: value for name, value in body.items() if value is not None})

    async def _events(self, response: httpx2.Response) -> AsyncGenerator[ModelEvent, None]:
        reader, decoder = ReplyReader(), SseDecoder()
        async for piece in response.aiter_bytes():
            try:
                received = decoder.feed(piece)
            except FrameTooLargeError as error:
                raise ModelUnavailableError(f"{self.name} sent an event above the limit") from error
            for each in received:
                for event in reader.read_json(each.data):
                    yield event
        for event in reader.end():
            yield event

    async def _refusal(self, response: httpx2.Response, media_type: str) -> ModelError:
        body = bytearray()
        async for piece in response.aiter_bytes():
            body += piece
            if len(body) > ERROR_BYTES_MAX:
                break
        try:
            parsed = msgspec.json.decode(bytes(body))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            parsed = None  # a proxy's page: the status says enough
        error = parsed.get("error", parsed) if isinstance(parsed, dict) else None
        if response.status_code == httpx2.codes.OK:
            if isinstance(parsed, dict) and "error" in parsed:
                return error_of(error)
            return ModelUnavailableError(f"{self.name} answered with {media_type} instead of a stream")
        wait_s = self._retry_after_s(response.headers)
        return error_of(error, status=response.status_code, retry_after_s=wait_s)

    def _retry_after_s(self, headers: Mapping[str, str]) -> float | None:
        """Read `Retry-After`: seconds, or an HTTP date."""
        said = headers.get("retry-after", "")
        try:
            seconds = float(said)
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(said).timestamp() - self._world.now()
            except (ValueError, OverflowError):
                return None
        return min(max(seconds, 0.0), RETRY_AFTER_MAX_S) if math.isfinite(seconds) else None
