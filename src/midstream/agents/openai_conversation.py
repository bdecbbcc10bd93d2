"""OpenAI's Responses API as an upstream that remembers, through the `openai` package.

Two ways to remember: each response names the one before it (`previous_response_id`), so that every response is a point
to go on or to fork from; or a conversation object holds them all. In background mode a response outlives its
connection: a broken one is made again and goes on after the last event.

A server may leave out what a response continues. Then it is asked once whether it refuses a name that it does not have:
one that does has continued what was named, and one that does not may have dropped it without a sign.

Sources: platform documentation of `previous_response_id` (instructions and tools are not taken over from the response
before, and stored responses are kept about 30 days), of the Conversations API (`conversation_locked` while another
response is being made) and of background mode (`starting_after`).

The server is asked by paths, as the package has no methods for them yet, and its answers are taken as they are. The
types that its methods make of them are worked out with the first answer, on the event loop: for half a second no
other session would be served.
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
"""Seconds of silence that the connection allows where no limit is set: the pool and the agent's budgets cut before."""
Events = openai.AsyncStream[object]
"""The events of one connection, as plain values."""
_AS_OURSELVES: Any = {"security": {"bearer_auth": True}}  # Any: the package's type of it is private
"""With the key of the client, and never with that of an organization's administrator."""
_GONE = {"previous_response_not_found", "conversation_not_found"}
_NAMED_BY = {"previous_response_id", "conversation"}
STOP_S = 5.0
"""Seconds a background response has to send its name, when no task waits for it any more."""
CHECK_TOKENS = 16
"""Tokens at most that a server may make where it does not refuse an unknown name; it is left at its first byte."""
_PREFIXES: Mapping[Memory, str] = {"responses": "resp", "conversation": "conv"}
_NOT_FOUND = 404
_NOT_TAKEN = {409, 429, 503}
"""Statuses of a server that did not begin: a conflict, too many requests, no room."""


class _NameCheck:
    """Finds out whether a server refuses the name of a conversation that it does not have."""

    def __init__(self) -> None:
        self._is_refusing: bool | None = None

    async def refuses_unknown(self, way: _Way) -> bool:
        """Ask the server, until it has answered once. Without an answer nothing is certain: False."""
        if self._is_refusing is None:
            try:
                async with await way.openings.answer(self._ask(way)):
                    self._is_refusing = False
            except openai.APIStatusError as error:
                self._is_refusing = isinstance(_refusal(error, now=way.world.now()), UpstreamGoneError)
            except openai.OpenAIError:
                return False
        return self._is_refusing

    async def _ask(self, way: _Way) -> Events:
        body = {
            "model": way.model,
            "input": "ping",
            "stream": True,
            "store": False,
            "max_output_tokens": CHECK_TOKENS,
            way.named_by: f"{_PREFIXES[way.memory]}_{_digest(way.world.new_id('unknown'))}",
        }
        return await way.client.post(
            "/responses", body=body, options=_AS_OURSELVES, cast_to=object, stream=True, stream_cls=Events
        )


class _Way(Struct, frozen=True):
    """How the server is asked; what an upstream and its agents share."""

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
        """Return the field that names what a response continues."""
        return "conversation" if self.memory == "conversation" else "previous_response_id"

    async def stop(self, response: str) -> None:
        """Stop a background response that is not read any more."""
        if response in self.running and not self.client.is_closed():
            self.running.discard(response)
            stopping = self.world.spawn(
                self._cancel_response(response), name="openai: end of a background response"
            )
            await asyncio.shield(stopping)  # it is stopped even where who waits for that is cancelled

    async def _cancel_response(self, response: str) -> None:
        with contextlib.suppress(openai.OpenAIError):
            path = f"/responses/{_quote(response)}/cancel"
            await self.client.post(path, options=_AS_OURSELVES, cast_to=object)


def _timeout(limits: HttpLimits) -> openai.Timeout:
    """Return limits as the package takes them: it has one for every silence, which is the longer of ours."""
    read_s = max(limits.first_byte_s or SILENCE_S, limits.between_bytes_s or SILENCE_S)
    return openai.Timeout(read_s, connect=limits.connect_s, write=WRITE_S, pool=limits.acquire_s)


class _ResponsesUpstream:
    """An upstream behind the Responses API.

    Args:
        model: The model's name at the server.
        client: An `openai.AsyncOpenAI` of yours, which you close; without one it is made from `api_key` and
            `base_url`, or from the environment as that package does.
        is_background: Whether responses outlive their connection.
        extra: More fields for the body of each request (such as `reasoning`), over those made here; a field whose value
            is None is left out.
        limits: How long the server may take over HTTP; of the two silences the longer one holds.

    Raises:
        openai.OpenAIError: There is no key anywhere.
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
        # A conversation object, and what is made in the background, are stored by the provider.
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
        self._way = _Way(
            name=self.name,
            model=model,
            # The pool decides what is repeated: a repeat by the package would send it twice.
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
        """The model, the address, whose account, and the way to remember."""
        return {
            "model": self._way.model,
            "base_url": str(self._way.client.base_url),
            "account": _digest(self._way.client.api_key),
            "organization": self._way.client.organization or "",
            "project": self._way.client.project or "",
            "memory": self._way.memory,
        }

    async def open(self, setup: Setup, *, resume: str = "") -> OpenAIAgent:
        """Open a fresh conversation, or the one that `resume` names; the server is asked with the first `send`."""
        return OpenAIAgent(self._way, setup, came_from=resume, names=resume)

    async def verify(self) -> bool:
        """Ask for the model by name: a key that is not accepted is refused whatever the name."""
        try:
            path = f"/models/{_quote(self._way.model)}"
            await self._way.client.get(path, options=_AS_OURSELVES, cast_to=object)
        except (openai.AuthenticationError, openai.PermissionDeniedError):
            return False
        except openai.APIStatusError as error:
            if error.status_code != _NOT_FOUND:
                raise _refusal(error, now=self._way.world.now()) from error
        except openai.APIConnectionError as error:
            raise _no_connection(self.name, error) from error
        return True

    async def delete(self, agent: str) -> None:
        """Delete what the server keeps of it: the conversation, or its newest response."""
        kind = "conversations" if self._way.memory == "conversation" else "responses"
        with contextlib.suppress(openai.OpenAIError):
            path = f"/{kind}/{_quote(agent)}"
            await self._way.client.delete(path, options=_AS_OURSELVES, cast_to=object)

    async def aclose(self) -> None:
        """Stop what is read in the background, and close the connections, unless the client is yours."""
        self._way.openings.close()
        for response in [*self._way.running]:
            await self._way.stop(response)
        if self._is_ours:
            await self._way.client.close()


class OpenAIChain(_ResponsesUpstream):
    """Each response names the one before it (`previous_response_id`); a conversation can be forked from any of them.

    A response is known by its own id, so each answer brings a new one to go on from.
    """

    _memory = "responses"

    async def fork(self, setup: Setup, *, agent: str, mark: str) -> OpenAIAgent:
        """Go on from an earlier response (`mark`); later ones are left as they are."""
        return OpenAIAgent(self._way, setup, came_from=mark, names=agent)


class OpenAIConversation(_ResponsesUpstream):
    """A conversation object holds all messages; it cannot be forked."""

    _memory = "conversation"


class OpenAIAgent:
    """One conversation. Made by the `open` of its upstream."""

    def __init__(self, way: _Way, setup: Setup, *, came_from: str, names: str) -> None:
        self._way = way
        self._setup = setup
        self._came_from = came_from
        """The response that the server is to go on from; "" begins anew."""
        self._names = names
        """What a reader of `MessageTaken.resumed` knows that by."""
        self._is_asked = False
        """Whether a response was asked for: what failed before that has shown no event."""

    async def send(
        self,
        said: UpstreamMessage,
        *,
        key: str,
        is_forced: bool = False,  # noqa: ARG002 - the server names no run that could be ended
    ) -> AsyncGenerator[UpstreamEvent, None]:
        """Send a message; see `midstream.agents.upstreams` for the order of the events and the errors.

        Closing the iterator closes the connection, on which the server stops, or lets it stop a background response.
        """
        reader = ResponsesReader()
        try:
            async with contextlib.aclosing(self._read(reader, said, key)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        if self._way.memory == "responses":
                            self._came_from = reader.response_id
                            yield Marked(reader.response_id)
                        self._names = self._came_from
                    yield event
        finally:
            if reader.is_ended:
                self._way.running.discard(reader.response_id)
            await self._way.stop(reader.response_id)
        if reader.failure is not None:
            raise reader.failure

    async def aclose(self) -> None:
        """Nothing is held."""

    async def _read(
        self, reader: ResponsesReader, said: UpstreamMessage, key: str
    ) -> AsyncGenerator[UpstreamEvent, None]:
        """Read one response over as many connections as it takes."""
        failures, is_opened = 0, False
        while True:
            known = reader.sequence
            trouble: ModelUnavailableError | ModelStalledError
            try:
                async with contextlib.aclosing(self._connection(reader, said, key)) as pieces:
                    async for piece in pieces:
                        events = reader.read_json(piece)
                        if reader.response_id and not is_opened:
                            is_opened = True
                            if self._way.is_background:
                                self._way.running.add(reader.response_id)
                            yield await self._message_taken_of(piece)
                        for event in events:
                            yield event
                trouble = ModelUnavailableError(f"the stream of {self._way.name} broke off")
            except (ModelUnavailableError, ModelStalledError) as error:
                trouble = error
            if not is_opened and self._is_in_doubt(trouble):
                raise doubtful(trouble) from trouble.__cause__
            if reader.is_ended:
                return
            failures = 1 if reader.sequence > known else failures + 1
            if not (self._way.is_background and is_opened) or failures > RESPONSE_RECONNECTS_MAX:
                # It is the connection's fault, and not the provider's.
                raise doubtful(trouble) if is_opened else trouble
            world = self._way.world
            await world.sleep(RESPONSE_BACKOFF.wait_s(failures - 1, chance=world.chance()))

    def _is_in_doubt(self, trouble: ModelError) -> bool:
        """Whether the message may be in the conversation without a confirmation; sent again, it would be there twice.

        A chain is not changed by a failed message: the next response names the same one before it.
        """
        cause = trouble.__cause__
        if self._way.memory == "responses" or not self._is_asked:
            return False
        if isinstance(cause, openai.APIStatusError):
            return cause.status_code not in _NOT_TAKEN
        return not is_never_sent(cause.__cause__ if cause is not None else None)

    async def _connection(
        self, reader: ResponsesReader, said: UpstreamMessage, key: str
    ) -> AsyncGenerator[bytes, None]:
        """Give the events of one connection as JSON: of a new response, or of one whose name is known."""
        asked = self._resume_response(reader) if reader.response_id else self._begin_response(said, key)
        try:
            async with await self._way.openings.answer(
                asked, functools.partial(self._leave, reader)
            ) as events:
                async for event in events:
                    yield msgspec.json.encode(event)
        except openai.APIStatusError as error:
            raise _refusal(error, now=self._way.world.now()) from error
        except openai.APIConnectionError as error:
            raise _no_connection(self._way.name, error) from error
        except openai.APIError as error:
            raise _classify_error(error.body, error_of(error.body)) from error

    async def _leave(self, reader: ResponsesReader, events: Events) -> None:
        """Drop a response that is not awaited any more; one in the background must be known to be stopped."""
        async with events:
            if self._way.is_background:
                with contextlib.suppress(openai.APIError, TimeoutError):
                    async with asyncio.timeout(STOP_S):
                        await self._name(reader, events)

    async def _name(self, reader: ResponsesReader, events: Events) -> None:
        async for event in events:
            reader.read_json(msgspec.json.encode(event))
            if reader.response_id:
                self._way.running.add(reader.response_id)
                return

    async def _resume_response(self, reader: ResponsesReader) -> Events:
        path = f"/responses/{_quote(reader.response_id)}"
        after = {"params": {"stream": "true", "starting_after": max(reader.sequence, 0)}}
        return await self._way.client.get(
            path, options=_AS_OURSELVES | after, cast_to=object, stream=True, stream_cls=Events
        )

    async def _begin_response(self, said: UpstreamMessage, key: str) -> Events:
        self._is_asked = False
        body = await self._body(said)
        self._is_asked = True
        key_told = {"headers": {"Idempotency-Key": _digest(key)}}
        return await self._way.client.post(
            "/responses",
            body=body,
            options=_AS_OURSELVES | key_told,
            cast_to=object,
            stream=True,
            stream_cls=Events,
        )

    async def _body(self, said: UpstreamMessage) -> dict[str, Any]:
        way = self._way
        if way.memory == "conversation" and not self._came_from:
            made = await way.client.post("/conversations", body={}, options=_AS_OURSELVES, cast_to=object)
            if not isinstance(made, dict) or not isinstance(name := made.get("id"), str) or not name:
                raise UpstreamFailedError(f"{way.name} made a conversation that has no name")
            self._came_from = name
        before = said.before or History()
        history = before.then(said.message) if said.message.parts else before
        words = render(history, "", "responses", form="openai-responses").messages
        body: dict[str, Any] = {
            "model": way.model,
            "input": [*(_output(result) for result in said.results), *words],
            "instructions": self._setup.instructions or None,
            "tools": render_tools(self._setup.tools) or None,
            "stream": True,
            "store": said.settings.only(way.grants).store is not False,
            "background": way.is_background or None,
            way.named_by: self._came_from or None,
        }
        body |= responses_fields(said.settings.only(way.grants))
        body |= way.extra
        return {name: value for name, value in body.items() if value is not None}

    async def _message_taken_of(self, piece: bytes) -> MessageTaken:
        """Return the conversation that the server continued: a silent new beginning shows here."""
        response = msgspec.json.decode(piece).get("response") or {}
        is_unnamed = self._came_from and self._way.named_by not in response
        if is_unnamed and await self._way.names.refuses_unknown(self._way):
            response[self._way.named_by] = self._came_from
        if self._way.memory == "conversation":
            conversation = response.get("conversation")
            echoed = conversation.get("id") if isinstance(conversation, dict) else conversation
            agent = str(echoed or "")
        else:
            agent, echoed = str(response.get("id") or ""), response.get("previous_response_id")
        went_on_from = str(echoed or "")
        return MessageTaken(agent, self._names if went_on_from == self._came_from else went_on_from)


def _quote(name: str) -> str:
    """Return a name as one segment of a path, whatever is in it."""
    return quote(name, safe="")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _output(result: ToolResult) -> dict[str, str]:
    # The call lives at the server: it is named, not repeated.
    return {"type": "function_call_output", "call_id": result.call_id, "output": result.content}


def _refusal(error: openai.APIStatusError, *, now: float) -> ModelError:
    wait_s = retry_after_s(error.response.headers.get("retry-after", ""), now=now)
    return _classify_error(error.body, error_of(error.body, status=error.status_code, retry_after_s=wait_s))


def _classify_error(body: object, error: ModelError) -> ModelError:
    """Return what a refusal means where memory is at stake, else `error`."""
    fields = body if isinstance(body, dict) else {}
    if fields.get("code") in _GONE or fields.get("param") in _NAMED_BY:
        return UpstreamGoneError(error.message)
    if fields.get("code") == "conversation_locked":
        return UpstreamBusyError(error.message, retry_after_s=error.retry_after_s)
    return error


def _no_connection(name: str, error: openai.APIConnectionError) -> ModelError:
    if isinstance(error, openai.APITimeoutError) and not is_never_sent(error.__cause__):
        return ModelStalledError(f"{name} sent nothing for longer than its limits allow")
    # Only the kind: the text of such an error may hold the address and what is in it.
    return ModelUnavailableError(
        f"the connection to {name} failed: {type(error.__cause__ or error).__name__}"
    )
