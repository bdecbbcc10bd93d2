"""Requests that are forwarded unchanged to a server of OpenAI's API: embeddings and legacy completions.

They belong to no conversation, are not stored, and other requests do not join them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import Struct
from starlette.types import Message, Receive, Send

from midstream.dialects.api_callers import Admission
from midstream.dialects.api_errors import NOT_FOUND, ApiError, openai_error, refusal_of
from midstream.dialects.gateway_bodies import Arrived, RefusedError, wait_for_disconnect
from midstream.dialects.response_reader import EVENT_STREAM, encode_headers
from midstream.dialects.usage_ledger import UsageLedger
from midstream.environment import World
from midstream.errors import ModelError
from midstream.history.messages import Usage
from midstream.models.model import Model, PassingModel
from midstream.models.routed_models import Route, route_of

PASSED = {"embeddings": "/embeddings", "completions": "/completions"}
"""Path at the upstream for each path of the gateway."""
TAIL_BYTES = 4096
"""Bytes at the end of an answer that are searched for its usage."""
_USAGE = re.compile(rb'"usage"\s*:\s*(\{(?:[^{}]|\{[^{}]*\})*\})')
"""The usage object; its members may be flat objects."""
HELD_BYTES_MAX = 1024 * 1024
"""Greatest number of bytes of an incomplete event."""
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")


class PassedRequests:
    """Forwards requests to the server of the model.

    Args:
        ledger: Counts the usage.
        admission: Decides whether a caller may send another request.
    """

    def __init__(self, model: Model, ledger: UsageLedger, admission: Admission, world: World) -> None:
        self._model = model
        self._ledger = ledger
        self._admission = admission
        self._world = world
        self.open = 0
        """Number of requests in progress."""

    async def answer(
        self,
        name: str,
        arrived: Arrived,
        receive: Receive,
        send: Send,
        *,
        model: str = "",
        counted_model: str = "",
    ) -> None:
        """Forward a request and its answer; cancel it if the client disconnects.

        Args:
            name: One of `PASSED`.
            model: The requested model.
            counted_model: The name under which its usage is counted.

        Raises:
            RefusedError: The upstream does not have this API, or a limit of the caller is reached.
            ModelError: The server refused the request, or its answer broke off.
        """
        route = route_of(self._model, model)
        if not isinstance(route.model, PassingModel):
            message = f"the upstream of this gateway does not support {name}"
            raise RefusedError(ApiError(NOT_FOUND, "not_found", message))
        body = _body_for(route, arrived.body)
        with self._admission.admit(arrived.caller):
            entry = await self._ledger.begin(arrived.caller.principal, counted_model, "")
            counting = _UsageReader()
            try:
                await self._relay(route.model, name, body, receive, counting.sending(send))
            finally:
                await self._ledger.end(entry, counting.usage, at=self._world.now())

    async def _relay(self, model: PassingModel, name: str, body: bytes, receive: Receive, send: Send) -> None:
        passing = self._world.spawn(self._pass(model, name, body, send), name=f"passed {name}")
        leaving = self._world.spawn(wait_for_disconnect(receive), name=f"the client of passed {name}")
        tasks = {passing, leaving}
        self.open += 1
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.open -= 1
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not passing.cancelled():
            passing.result()

    async def _pass(self, model: PassingModel, name: str, body: bytes, send: Send) -> None:
        async with model.pass_on(PASSED[name], body) as answer:
            is_stream = answer.content_type.startswith("text/event-stream")
            headers = EVENT_STREAM if is_stream else {"cache-control": "no-store"}
            headers = {**headers, "content-type": answer.content_type, "x-content-type-options": "nosniff"}
            await send({"type": "http.response.start", "status": 200, "headers": encode_headers(headers)})
            try:
                async with aclosing(_whole_events(answer.pieces) if is_stream else answer.pieces) as pieces:
                    async for piece in pieces:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
            except ModelError as error:
                if not is_stream:
                    raise  # cut the connection: an incomplete body must not look complete
                failed = b"data: " + msgspec.json.encode(openai_error(refusal_of(error))) + b"\n\n"
                await send({"type": "http.response.body", "body": failed, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


class _UsageReader:
    """Finds the usage in a forwarded answer: servers write it at the end."""

    def __init__(self) -> None:
        self._tail = b""

    def sending(self, send: Send) -> Send:
        """Return a `send` that also reads the bodies."""

        async def read_and_send(message: Message) -> None:
            self._tail = (self._tail + message.get("body", b""))[-TAIL_BYTES:]
            await send(message)

        return read_and_send

    @property
    def usage(self) -> Usage | None:
        """The reported usage; None without one."""
        for found in reversed([*_USAGE.finditer(self._tail)]):
            try:
                counted = msgspec.json.decode(found[1], type=_Counted)
            except msgspec.MsgspecError:
                continue
            details = counted.prompt_tokens_details
            return Usage(
                counted.prompt_tokens, counted.completion_tokens, details.cached_tokens if details else 0
            )
        return None


class _Details(Struct):
    cached_tokens: int = 0


class _Counted(Struct):
    """Usage in the form of OpenAI's API."""

    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


def _body_for(route: Route, body: bytes) -> bytes:
    """Return a request with the upstream's name of the model; all other fields are unchanged."""
    if not route.own_name:
        return body
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": route.own_name})


async def _whole_events(pieces: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a stream in complete events, so that an error can follow each piece."""
    held = b""
    async for piece in pieces:
        held += piece
        end = max(held.rfind(mark) + len(mark) if mark in held else 0 for mark in _EVENT_ENDS)
        if len(held) > HELD_BYTES_MAX:
            end = len(held)
        if end:
            yield held[:end]
            held = held[end:]
    if held:
        yield held
