"""OpenAI's Responses API over HTTP, without an SDK: responses that outlive the connection and the process."""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from midstream.environment import World
from midstream.errors import ModelCutError, ModelStalledError, ModelUnavailableError
from midstream.history.rendering import render
from midstream.models.http_limits import HttpLimits
from midstream.models.openai_responses_stream import ResponsesReader, render_tools
from midstream.models.prompt_prefix import cache_key_of, canonical_tools, takes_cache_key
from midstream.models.provider_http import OpenAIServerModel, Provider
from midstream.models.responses import KeepAlive, ModelEvent, ModelRequest, Resumable
from midstream.protocol.sse import ServerSentEvent
from midstream.retries import ATTEMPT_PAUSE_MAX_S, RESPONSE_BACKOFF, RESPONSE_RECONNECTS_MAX
from midstream.session.model_settings import (
    RESPONSES_GRANTS,
    RESPONSES_NAMES,
    responses_fields,
    select_granted,
)

GONE = (400, 404, 410)
"""Statuses of a server that has lost or never stored a response."""


class OpenAIResponses(OpenAIServerModel):
    """A model behind `POST {base_url}/responses`.

    In background mode the provider completes the response without a connection. A lost connection is replaced, and the
    stream continues after the last event; the next node of the session resumes the response of a killed process.
    Background mode needs the provider to store the response; without it (`is_background=False`) nothing is stored, and
    a cut response is requested again.

    Args:
        base_url: Up to and including the version, such as `http://127.0.0.1:8000/v1`.
        model: The model's name at the server.
        api_key: Sent as a bearer token; None for none.
        is_background: Whether responses outlive their connection.
        extra: Fields for each request's body (such as `reasoning`), which replace defaults; None omits a field.
        headers: More headers for each request.
        has_cache_key: Whether requests of a session have `prompt_cache_key`, which routes them to a machine with their
            beginning in its cache. None: only for servers known to accept it.
        limits: Time limits for connecting, for the first byte and between bytes.

    Close the connections with `aclose`, or use the model as an async context.

    Raises:
        UsageError: The address is not an http or https URL.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        is_background: bool = True,
        extra: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
        has_cache_key: bool | None = None,
        limits: HttpLimits | None = None,
        world: World = World(),
    ) -> None:
        self.name = f"openai-responses:{model}"
        self._provider = Provider(base_url, self.name, api_key, headers, limits=limits, world=world)
        self._model = model
        self._is_background = is_background
        self._extra = dict(extra or {})
        self._has_cache_key = takes_cache_key(self._provider.host) if has_cache_key is None else has_cache_key
        self._world = world
        # The provider stores background responses.
        grants = RESPONSES_GRANTS - {"store"} if is_background else RESPONSES_GRANTS
        self.grants = select_granted(grants, model, self._extra, RESPONSES_NAMES)
        """Names of the accepted settings."""

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent, None]:
        """Answer `request`, or stream the response of `request.resume` from its beginning.

        Closing the iterator closes the connection. In background mode the provider continues: see `stop`.

        Raises:
            ModelCutError: The connection and its replacements were lost; the provider may continue.
            ModelForgotError: The provider no longer has the response.
            ModelStalledError: Silence beyond `limits`, also on every new connection.
            ModelUnavailableError: No connection, 408, 409, 425, 429, 5xx, or a response that failed at the provider.
            ModelRejectedError: The server will never accept this request as it is.
            ModelAccessError: The server refuses the key, the account or the model's name.
            ModelFilteredError: The content filter withheld the whole response.
            ContextOverflowError: The conversation is longer than the model can read.
        """
        reader = ResponsesReader()
        kept, failures = request.resume, 0
        while True:
            known = reader.sequence
            batches = self._resume(kept, request, after=known) if kept else self._request(request)
            trouble: ModelUnavailableError | ModelStalledError
            try:
                async with contextlib.aclosing(_read(reader, batches)) as events:
                    async for event in events:
                        if self._is_background and reader.response_id and not kept:
                            kept = reader.response_id
                            yield Resumable(kept)
                        yield event
                trouble = ModelCutError(f"the stream of {self.name} broke off")
            except (ModelUnavailableError, ModelStalledError) as error:
                trouble = error
            if reader.is_ended:
                break
            failures = 1 if reader.sequence > known else failures + 1
            await self._before_next(kept, reader, trouble, failures)
        if reader.failure is not None:
            raise reader.failure

    async def stop(self, token: str) -> None:
        """Stop a response at the provider.

        Raises:
            ModelUnavailableError: The request failed.
        """
        await self._provider.post(f"/responses/{_quote(token)}/cancel")

    def _request(self, request: ModelRequest) -> AsyncGenerator[Sequence[ServerSentEvent], None]:
        # Another attempt needs another response, so it must not repeat the key of the first one.
        headers = {"Idempotency-Key": f"{request.key}/{request.attempt}"} if request.key else {}
        return self._provider.events(
            "POST", "/responses", self._body(request), headers=headers, stalls=request.stalls
        )

    def _resume(
        self, kept: str, request: ModelRequest, *, after: int
    ) -> AsyncGenerator[Sequence[ServerSentEvent], None]:
        query = {"stream": "true"} | ({"starting_after": str(after)} if after >= 0 else {})
        path = f"/responses/{_quote(kept)}?{urllib.parse.urlencode(query)}"
        return self._provider.events("GET", path, gone=GONE, stalls=request.stalls)

    async def _before_next(
        self,
        kept: str,
        reader: ResponsesReader,
        trouble: ModelUnavailableError | ModelStalledError,
        failures: int,
    ) -> None:
        """Wait before the next connection, or raise the typed error."""
        if not kept:
            # A response without an id cannot be resumed: only the next attempt remains.
            raise ModelUnavailableError(trouble.message) if isinstance(trouble, ModelCutError) else trouble
        is_unnumbered = bool(reader.response_id) and reader.sequence < 0
        retry_after_s = trouble.retry_after_s or 0.0
        if failures > RESPONSE_RECONNECTS_MAX or is_unnumbered or retry_after_s > ATTEMPT_PAUSE_MAX_S:
            if isinstance(trouble, ModelStalledError):
                raise trouble
            raise ModelCutError(trouble.message, retry_after_s=trouble.retry_after_s) from trouble
        wait_s = RESPONSE_BACKOFF.wait_s(failures - 1, chance=self._world.chance())
        await self._world.sleep(max(wait_s, retry_after_s))

    def _body(self, request: ModelRequest) -> bytes:
        sent = render(request.history, request.instructions, "responses", form="openai-responses")
        body: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "background": True if self._is_background else None,
            "store": self._is_background,
        }
        if request.tools:
            body["tools"] = render_tools(canonical_tools(request.tools))
        if self._has_cache_key and request.session and not request.is_ephemeral:
            body["prompt_cache_key"] = cache_key_of(request.session)
        # The input comes last, so that the body of the next turn begins with the bytes of this one.
        body |= responses_fields(request.settings.only(self.grants))
        body = body | self._extra | {"input": self._extra.get("input", sent.messages)}
        return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


async def _read(
    reader: ResponsesReader, batches: AsyncGenerator[Sequence[ServerSentEvent], None]
) -> AsyncGenerator[ModelEvent, None]:
    """Yield the events of one connection, until its end or that of the response."""
    async with contextlib.aclosing(batches) as pieces:
        async for received in pieces:
            for each in received:
                for event in reader.read_json(each.data):
                    yield event
            if not received:
                yield KeepAlive()
            if reader.is_ended:
                return


def _quote(token: str) -> str:
    return urllib.parse.quote(token, safe="")
