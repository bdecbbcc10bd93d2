"""OpenAI's Responses API as an upstream, through the `openai` package.

There are two kinds of memory. Each response names the previous one (`previous_response_id`), so that every response can
be continued or forked; or a conversation object has them all. In background mode a response outlives its connection: a
new connection continues after the last event.

A server may omit the id of the continued response. Then it is tested once with an unknown id. A server that refuses it
has continued the named response. A server that accepts it may have dropped the response unnoticed.

Sources: platform documentation of `previous_response_id` (instructions and tools are not inherited from the previous
response, and stored responses are kept about 30 days), of the Conversations API (`conversation_locked` during another
response) and of background mode (`starting_after`).

Requests use paths, because the package lacks methods for some of them, and answers are plain JSON. The package's
methods would build their types with the first answer, on the event loop, and block all sessions for half a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, ClassVar, Literal
from urllib.parse import quote

import msgspec
from msgspec import Struct

from midstream.agents.agent_runs import SILENCE_MAX_S
from midstream.agents.single_flight import SingleFlight
from midstream.agents.upstreams import (
    Abilities,
    Marked,
    MessageTaken,
    Setup,
    UpstreamEvent,
    UpstreamMessage,
    doubtful,
    is_never_sent,
)
from midstream.environment import World
from midstream.errors import (
    ModelError,
    ModelStalledError,
    ModelUnavailableError,
    UpstreamBusyError,
    UpstreamFailedError,
    UpstreamGoneError,
)
from midstream.extras import extra
from midstream.history.messages import History, ToolResult
from midstream.history.rendering import render
from midstream.models.http_limits import WRITE_S, HttpLimits
from midstream.models.openai_responses_stream import ResponsesReader, render_tools
from midstream.models.provider_errors import error_of
from midstream.models.responses import Finished
from midstream.retries import RESPONSE_BACKOFF, RESPONSE_RECONNECTS_MAX, retry_after_s
from midstream.session.model_settings import (
    RESPONSES_GRANTS,
    RESPONSES_NAMES,
    responses_fields,
    select_granted,
)

with extra("openai"):
    import openai

Memory = Literal["responses", "conversation"]

SILENCE_S = SILENCE_MAX_S
"""Greatest silence of a connection without a limit: the limits of the pool and of the agent are shorter."""
Events = openai.AsyncStream[object]
"""The events of one connection, as plain values."""
_AS_OURSELVES: Any = {"security": {"bearer_auth": True}}  # Any: the package's type of it is private
"""Authentication with the client's key, and never with an organization administrator's."""
_GONE = {"previous_response_not_found", "conversation_not_found"}
_NAMED_BY = {"previous_response_id", "conversation"}
STOP_S = 5.0
"""Seconds to wait for the id of a background response that no task waits for."""
CHECK_TOKENS = 16
"""Greatest number of tokens in the answer to an unknown id; the connection is closed at the first byte."""
_PREFIXES: Mapping[Memory, str] = {"responses": "resp", "conversation": "conv"}
_NOT_FOUND = 404
_NOT_TAKEN = {409, 429, 503}
"""Statuses of a server that did not begin: a conflict, too many requests, no capacity."""


class _NameCheck:
    """Finds out whether a server refuses the id of an unknown conversation."""

    def __init__(self) -> None:
        self._is_refusing: bool | None = None

    async def refuses_unknown(self, endpoint: _Endpoint) -> bool:
        """Return the server's behaviour, after one request; False without an answer."""
        if self._is_refusing is None:
            try:
                async with await endpoint.openings.answer(self._ask(endpoint)):
                    self._is_refusing = False
            except openai.APIStatusError as error:
                self._is_refusing = isinstance(_refusal(error, now=endpoint.world.now()), UpstreamGoneError)
            except openai.OpenAIError:
                return False
        return self._is_refusing

    async def _ask(self, endpoint: _Endpoint) -> Events:
        body = {
            "model": endpoint.model,
            "input": "ping",
            "stream": True,
            "store": False,
            "max_output_tokens": CHECK_TOKENS,
            endpoint.named_by: f"{_PREFIXES[endpoint.memory]}_{_digest(endpoint.world.new_id('unknown'))}",
        }
        return await endpoint.client.post(
            "/responses", body=body, options=_AS_OURSELVES, cast_to=object, stream=True, stream_cls=Events
        )


class _Endpoint(Struct, frozen=True):
    """Settings and connections that an upstream and its agents share."""

    name: str
    model: str
    client: openai.AsyncOpenAI
    memory: Memory
    is_background: bool
    extra: Mapping[str, object]
    grants: frozenset[str]
    world: World
    running: set[str]
    """Background responses that have a reader here."""
    openings: SingleFlight
    names: _NameCheck

    @property
    def named_by(self) -> str:
        """Return the field with the id of the continued response or conversation."""
        return "conversation" if self.memory == "conversation" else "previous_response_id"

    async def stop(self, response: str) -> None:
        """Cancel a background response without a reader."""
        if response in self.running and not self.client.is_closed():
            self.running.discard(response)
            await self.world.finish(
                self._cancel_response(response), name="openai: end of a background response"
            )

    async def _cancel_response(self, response: str) -> None:
        with contextlib.suppress(openai.OpenAIError):
            path = f"/responses/{_quote(response)}/cancel"
            await self.client.post(path, options=_AS_OURSELVES, cast_to=object)


def _timeout(limits: HttpLimits) -> openai.Timeout:
    """Return limits in the package's form: it has one limit for all silences, so the longer one is used."""
    read_s = max(limits.first_byte_s or SILENCE_S, limits.between_bytes_s or SILENCE_S)
    return openai.Timeout(read_s, connect=limits.connect_s, write=WRITE_S, pool=limits.acquire_s)


class _ResponsesUpstream:
    """An upstream behind the Responses API.

    Args:
        model: The model's name at the server.
        client: Your own `openai.AsyncOpenAI`, which you close; by default one is created from `api_key` and `base_url`,
            or from the environment like the package does.
        is_background: Whether responses outlive their connection.
        extra: Fields for each request's body (such as `reasoning`), which replace defaults; None omits a field.
        limits: Time limits for HTTP; of the two silences the longer one applies.

    Raises:
        openai.OpenAIError: There is no key.
    """

    _memory: ClassVar[Memory]

    def __init__(
        self,
        model: str,
        *,
        client: openai.AsyncOpenAI | None = None,
        api_key: str | None = None,
        base_url: str | None = None,
        is_background: bool = False,
        extra: Mapping[str, object] | None = None,
        limits: HttpLimits | None = None,
        world: World = World(),
    ) -> None:
        self.name = f"openai:{model}"
        # The provider stores conversation objects and background responses.
        is_kept = is_background or self._memory == "conversation"
        wishes = RESPONSES_GRANTS - {"store"} if is_kept else RESPONSES_GRANTS
        grants = select_granted(wishes, model, extra or {}, RESPONSES_NAMES)
        self.abilities = Abilities(
            takes_tools=True,
            takes_history=True,
            takes_files=True,
            can_reinstruct=True,
            can_retool=True,
            can_fork=self._memory == "responses",
            grants=grants,
        )
        self._is_ours = client is None
        self._endpoint = _Endpoint(
            name=self.name,
            model=model,
            # The pool decides about retries: a retry by the package would send a message twice.
            client=(client or openai.AsyncOpenAI(api_key=api_key, base_url=base_url)).with_options(
                max_retries=0, timeout=_timeout(limits or HttpLimits())
            ),
            memory=self._memory,
            is_background=is_background,
            extra=dict(extra or {}),
            grants=grants,
            world=world,
            running=set(),
            openings=SingleFlight(self.name, world),
            names=_NameCheck(),
        )

    @property
    def identity(self) -> Mapping[str, str]:
        """The model, the address, the account, and the kind of memory."""
        return {
            "model": self._endpoint.model,
            "base_url": str(self._endpoint.client.base_url),
            "account": _digest(self._endpoint.client.api_key),
            "organization": self._endpoint.client.organization or "",
            "project": self._endpoint.client.project or "",
            "memory": self._endpoint.memory,
        }

    async def open(self, setup: Setup, *, resume: str = "") -> OpenAIAgent:
        """Open a fresh conversation, or the one that `resume` names; the first request is made by `send`."""
        return OpenAIAgent(self._endpoint, setup, came_from=resume, names=resume)

    async def verify(self) -> bool:
        """Request the model by name: a wrong key is refused for any name."""
        try:
            path = f"/models/{_quote(self._endpoint.model)}"
            await self._endpoint.client.get(path, options=_AS_OURSELVES, cast_to=object)
        except (openai.AuthenticationError, openai.PermissionDeniedError):
            return False
        except openai.APIStatusError as error:
            if error.status_code != _NOT_FOUND:
                raise _refusal(error, now=self._endpoint.world.now()) from error
        except openai.APIConnectionError as error:
            raise _no_connection(self.name, error) from error
        return True

    async def delete(self, agent: str) -> None:
        """Delete the conversation at the server, or its newest response."""
        kind = "conversations" if self._endpoint.memory == "conversation" else "responses"
        with contextlib.suppress(openai.OpenAIError):
            path = f"/{kind}/{_quote(agent)}"
            await self._endpoint.client.delete(path, options=_AS_OURSELVES, cast_to=object)

    async def aclose(self) -> None:
        """Stop background responses, and close the connections unless the client is the user's.

        This continues if the caller is cancelled.
        """
        self._endpoint.openings.close()
        await self._endpoint.world.finish(self._close(), name="openai: end of an upstream")

    async def _close(self) -> None:
        for response in [*self._endpoint.running]:
            await self._endpoint.stop(response)
        if self._is_ours:
            await self._endpoint.client.close()


class OpenAIChain(_ResponsesUpstream):
    """Each response names the one before it (`previous_response_id`); a conversation can be forked from any of them.

    The id of the conversation is that of its newest response.
    """

    _memory = "responses"

    async def fork(self, setup: Setup, *, agent: str, mark: str) -> OpenAIAgent:
        """Continue from an earlier response (`mark`); later ones stay unchanged."""
        return OpenAIAgent(self._endpoint, setup, came_from=mark, names=agent)


class OpenAIConversation(_ResponsesUpstream):
    """A conversation object holds all messages; it cannot be forked."""

    _memory = "conversation"


class OpenAIAgent:
    """One conversation, created by the `open` of its upstream."""

    def __init__(self, endpoint: _Endpoint, setup: Setup, *, came_from: str, names: str) -> None:
        self._endpoint = endpoint
        self._setup = setup
        self._came_from = came_from
        """The id of the response to continue; "" for a new conversation."""
        self._names = names
        """The digest of that id, for `MessageTaken.resumed`."""
        self._is_requested = False
        """Whether a response was requested: a failure before that has no events."""

    async def send(
        self,
        outgoing: UpstreamMessage,
        *,
        key: str,
        is_forced: bool = False,  # noqa: ARG002 - the server names no run that could be ended
    ) -> AsyncGenerator[UpstreamEvent, None]:
        """Send a message; see `midstream.agents.upstreams` for the order of the events and the errors.

        Closing the iterator closes the connection, which stops the server, or cancels a background response.
        """
        reader = ResponsesReader()
        try:
            async with contextlib.aclosing(self._read(reader, outgoing, key)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        if self._endpoint.memory == "responses":
                            self._came_from = reader.response_id
                            yield Marked(reader.response_id)
                        self._names = self._came_from
                    yield event
        finally:
            if reader.is_ended:
                self._endpoint.running.discard(reader.response_id)
            await self._endpoint.stop(reader.response_id)
        if reader.failure is not None:
            raise reader.failure

    async def aclose(self) -> None:
        """Do nothing: the agent has no resources."""

    async def _read(
        self, reader: ResponsesReader, outgoing: UpstreamMessage, key: str
    ) -> AsyncGenerator[UpstreamEvent, None]:
        """Read one response over one or several connections."""
        failures, is_opened = 0, False
        while True:
            known = reader.sequence
            trouble: ModelUnavailableError | ModelStalledError
            try:
                async with contextlib.aclosing(self._connection(reader, outgoing, key)) as pieces:
                    async for piece in pieces:
                        events = reader.read_json(piece)
                        if reader.response_id and not is_opened:
                            is_opened = True
                            if self._endpoint.is_background:
                                self._endpoint.running.add(reader.response_id)
                            yield await self._message_taken_of(piece)
                        for event in events:
                            yield event
                trouble = ModelUnavailableError(f"the stream of {self._endpoint.name} broke off")
            except (ModelUnavailableError, ModelStalledError) as error:
                trouble = error
            if not is_opened and self._is_in_doubt(trouble):
                raise doubtful(trouble) from trouble.__cause__
            if reader.is_ended:
                return
            failures = 1 if reader.sequence > known else failures + 1
            if not (self._endpoint.is_background and is_opened) or failures > RESPONSE_RECONNECTS_MAX:
                # The fault is of the connection, not of the provider.
                raise doubtful(trouble) if is_opened else trouble
            world = self._endpoint.world
            await world.sleep(RESPONSE_BACKOFF.wait_s(failures - 1, chance=world.chance()))

    def _is_in_doubt(self, trouble: ModelError) -> bool:
        """Whether the message may be in the conversation without a confirmation; a retry would send it twice.

        A failed message does not change a chain: the next response names the same previous one.
        """
        cause = trouble.__cause__
        if self._endpoint.memory == "responses" or not self._is_requested:
            return False
        if isinstance(cause, openai.APIStatusError):
            return cause.status_code not in _NOT_TAKEN
        return not is_never_sent(cause.__cause__ if cause is not None else None)

    async def _connection(
        self, reader: ResponsesReader, outgoing: UpstreamMessage, key: str
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of one connection as JSON: of a new response, or of one whose id is known."""
        opening = self._resume_response(reader) if reader.response_id else self._begin_response(outgoing, key)
        try:
            async with await self._endpoint.openings.answer(
                opening, functools.partial(self._leave, reader)
            ) as events:
                async for event in events:
                    yield msgspec.json.encode(event)
        except openai.APIStatusError as error:
            raise _refusal(error, now=self._endpoint.world.now()) from error
        except openai.APIConnectionError as error:
            raise _no_connection(self._endpoint.name, error) from error
        except openai.APIError as error:
            raise _classify_error(error.body, error_of(error.body)) from error

    async def _leave(self, reader: ResponsesReader, events: Events) -> None:
        """Drop a response without a reader; cancel one in the background."""
        async with events:
            if self._endpoint.is_background:
                with contextlib.suppress(openai.APIError, TimeoutError):
                    async with asyncio.timeout(STOP_S):
                        await self._name(reader, events)

    async def _name(self, reader: ResponsesReader, events: Events) -> None:
        async for event in events:
            reader.read_json(msgspec.json.encode(event))
            if reader.response_id:
                self._endpoint.running.add(reader.response_id)
                return

    async def _resume_response(self, reader: ResponsesReader) -> Events:
        path = f"/responses/{_quote(reader.response_id)}"
        after = {"params": {"stream": "true", "starting_after": max(reader.sequence, 0)}}
        return await self._endpoint.client.get(
            path, options=_AS_OURSELVES | after, cast_to=object, stream=True, stream_cls=Events
        )

    async def _begin_response(self, outgoing: UpstreamMessage, key: str) -> Events:
        self._is_requested = False
        body = await self._body(outgoing)
        self._is_requested = True
        key_header = {"headers": {"Idempotency-Key": _digest(key)}}
        return await self._endpoint.client.post(
            "/responses",
            body=body,
            options=_AS_OURSELVES | key_header,
            cast_to=object,
            stream=True,
            stream_cls=Events,
        )

    async def _body(self, outgoing: UpstreamMessage) -> dict[str, Any]:
        endpoint = self._endpoint
        if endpoint.memory == "conversation" and not self._came_from:
            made = await endpoint.client.post(
                "/conversations", body={}, options=_AS_OURSELVES, cast_to=object
            )
            if not isinstance(made, dict) or not isinstance(name := made.get("id"), str) or not name:
                raise UpstreamFailedError(f"{endpoint.name} made a conversation that has no name")
            self._came_from = name
        before = outgoing.before or History()
        history = before.then(outgoing.message) if outgoing.message.parts else before
        words = render(history, "", "responses", form="openai-responses").messages
        body: dict[str, Any] = {
            "model": endpoint.model,
            "input": [*(_output(result) for result in outgoing.results), *words],
            "instructions": self._setup.instructions or None,
            "tools": render_tools(self._setup.tools) or None,
            "stream": True,
            "store": outgoing.settings.only(endpoint.grants).store is not False,
            "background": endpoint.is_background or None,
            endpoint.named_by: self._came_from or None,
        }
        body |= responses_fields(outgoing.settings.only(endpoint.grants))
        body |= endpoint.extra
        return {name: value for name, value in body.items() if value is not None}

    async def _message_taken_of(self, piece: bytes) -> MessageTaken:
        """Return the conversation that the server continued; this shows an unnoticed new beginning."""
        response = msgspec.json.decode(piece).get("response") or {}
        is_unnamed = self._came_from and self._endpoint.named_by not in response
        if is_unnamed and await self._endpoint.names.refuses_unknown(self._endpoint):
            response[self._endpoint.named_by] = self._came_from
        if self._endpoint.memory == "conversation":
            conversation = response.get("conversation")
            echoed = conversation.get("id") if isinstance(conversation, dict) else conversation
            agent = str(echoed or "")
        else:
            agent, echoed = str(response.get("id") or ""), response.get("previous_response_id")
        went_on_from = str(echoed or "")
        return MessageTaken(agent, self._names if went_on_from == self._came_from else went_on_from)


def _quote(name: str) -> str:
    """Return a name as one segment of a path, with all characters escaped."""
    return quote(name, safe="")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _output(result: ToolResult) -> dict[str, str]:
    # The server has the call, so only its id is sent.
    return {"type": "function_call_output", "call_id": result.call_id, "output": result.content}


def _refusal(error: openai.APIStatusError, *, now: float) -> ModelError:
    wait_s = retry_after_s(error.response.headers.get("retry-after", ""), now=now)
    return _classify_error(error.body, error_of(error.body, status=error.status_code, retry_after_s=wait_s))


def _classify_error(body: object, error: ModelError) -> ModelError:
    """Return the error class of a refusal that concerns the memory, else `error`."""
    fields = body if isinstance(body, dict) else {}
    if fields.get("code") in _GONE or fields.get("param") in _NAMED_BY:
        return UpstreamGoneError(error.message)
    if fields.get("code") == "conversation_locked":
        return UpstreamBusyError(error.message, retry_after_s=error.retry_after_s)
    return error


def _no_connection(name: str, error: openai.APIConnectionError) -> ModelError:
    if isinstance(error, openai.APITimeoutError) and not is_never_sent(error.__cause__):
        return ModelStalledError(f"{name} sent nothing for longer than its limits allow")
    # Only the kind: the text of such an error may contain the address and sent content.
    return ModelUnavailableError(
        f"the connection to {name} failed: {type(error.__cause__ or error).__name__}"
    )
