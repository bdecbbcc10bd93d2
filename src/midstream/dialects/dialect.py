"""A foreign API over sessions: its address, its requests, its events and errors.

One file each; `dialect_registry.DIALECTS` lists them. A dialect reads `Asked` from a request, and its `Writer` turns
the events of one response into whole server-sent events. The part of the request that a writer needs is its `Form`,
which is journaled with the request, so that any process can write the response from the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from midstream.dialects.answer_options import AnswerOptions
from midstream.dialects.api_errors import ApiError
from midstream.dialects.client_histories import Transcript, transcript_of
from midstream.dialects.fields import Fields
from midstream.history.codecs.codec_spec import Value
from midstream.history.messages import ToolSpec
from midstream.models.responses import ModelEvent

COMMENT = b": waiting\n\n"
"""A comment in a stream of server-sent events: it keeps the connection alive and means nothing."""


class Form(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of a request that a dialect needs to write its response.

    Args:
        dialect: The name of the dialect.
        id, model, created_at: How the response is called, its model's name for the application, and when it was
            requested (seconds since 1970).
        is_stream: It is answered with a stream of events.
        includes_usage: A stream of chunks ends with the tokens counted.
        shows_thinking: The application requests the thinking.
        is_background: The response is made whether or not a client reads it, and requested later.
        is_stored: The response can be requested by its id.
        echo: Fields that this API repeats in its response.
        other_tools: Tools for which functions stand, by the names of these: their kind, namespace and name.
        ignored: Fields that could not be granted, for the response to name.
    """

    dialect: str
    id: str
    model: str
    created_at: int
    is_stream: bool = False
    includes_usage: bool = False
    shows_thinking: bool = True
    is_background: bool = False
    is_stored: bool = False
    echo: Mapping[str, Any] = {}
    other_tools: Mapping[str, tuple[str, str, str]] = {}
    ignored: tuple[str, ...] = ()


class Writer(Protocol):
    """Writes one response. `begin` first, then `write` for each event; `fail` or `cancel` instead of the last one.

    `whole` is the response in one piece, as it stands.
    """

    def begin(self) -> list[bytes]:
        """Return the events that open a stream."""

    def write(self, event: ModelEvent) -> list[bytes]:
        """Return the events that show one of the model's; after `Finished` the stream is at its end."""

    def end_at(self, at: float) -> None:
        """Take the time of the end, in seconds since 1970, before the event that ends the stream.

        An API without a field for it needs no such method.
        """
        del at

    def fail(self, refusal: ApiError) -> list[bytes]:
        """Return the events that end a stream which failed."""

    def cancel(self, refusal: ApiError) -> list[bytes]:
        """Return the events that end a stream which was stopped."""

    def whole(self) -> bytes:
        """Return the response in one piece."""


class Dialect(Struct, frozen=True, kw_only=True, eq=False):
    """Description of one API that is served.

    Args:
        name: Its name in journals.
        path: Where it is requested with POST, without the version.
        format: The format of its messages (`midstream.history.codecs`).
        messages: The field of a request that holds the conversation.
        id_prefix: What the ids of its responses begin with.
        read: Reads a request from its fields, behind so many known messages.
        writer: Makes the writer of a response.
        error: Returns a refusal as the object that this API has for errors.
        status: Returns the HTTP status of a refusal.
        keep_alive: An event that keeps an open stream alive.
        in_functions: Returns messages, one for one, with calls of functions in the place of those of other tools.
        is_retrievable: Responses can be requested by their id.
        streamed_codes: Codes of refusals that a stream has as an event even before its first text: its clients look
            for them there only.
    """

    name: str
    path: tuple[str, ...]
    format: str
    messages: str
    id_prefix: str
    read: Callable[[Fields, int], Asked]
    writer: Callable[[Form], Writer]
    error: Callable[[ApiError], Mapping[str, Any]]
    status: Callable[[ApiError], int] = lambda refusal: refusal.status
    keep_alive: bytes = COMMENT
    in_functions: Callable[[Sequence[Value]], list[Value]] = list
    is_retrievable: bool = False
    streamed_codes: frozenset[str] = frozenset()

    def error_body(self, refusal: ApiError) -> bytes:
        """Return a refusal as the body of a whole response."""
        return msgspec.json.encode(self.error(refusal))


class Asked(Struct, frozen=True, kw_only=True):
    """One request of a client application, decoded.

    Args:
        dialect: The API it came by.
        model: The model's name for the application.
        messages: As they came; `transcript` reads them. Of a request that was read behind known ones only the others.
        instructions: The system prompt that came beside them.
        tools: What the application will run.
        is_stream, includes_usage, shows_thinking, is_background, is_stored, echo, other_tools, ignored: See
            `Form`.
        is_private: Nothing of it may be kept on disk (`store: false`).
        previous: The id of a stored response that this goes on from, or "".
        conversation: The id of a conversation that the gateway keeps, which this goes on with, or "".
        metadata: The application's own notes that are texts.
        user, cache_key: What the application calls its user, and the requests that begin alike.
        wished: The settings of the response.
    """

    dialect: Dialect
    model: str
    messages: list[Value]
    instructions: str = ""
    tools: tuple[ToolSpec, ...] = ()
    is_stream: bool = False
    includes_usage: bool = False
    shows_thinking: bool = True
    is_background: bool = False
    is_stored: bool = False
    is_private: bool = False
    previous: str = ""
    conversation: str = ""
    metadata: Mapping[str, str] = {}
    user: str = ""
    cache_key: str = ""
    echo: Mapping[str, Any] = {}
    other_tools: Mapping[str, tuple[str, str, str]] = {}
    wished: AnswerOptions = AnswerOptions()
    ignored: tuple[str, ...] = ()

    def transcript(self, before: Sequence[Value] = ()) -> Transcript:
        """Read the messages, behind others where there are some."""
        messages = self.dialect.in_functions([*before, *self.messages])
        return transcript_of(messages, self.dialect.format, self.instructions)

    def form(self, response_id: str, model: str, created_at: int) -> Form:
        """Return what is journaled for the response."""
        return Form(
            dialect=self.dialect.name,
            id=response_id,
            model=self.model or model,
            created_at=created_at,
            is_stream=self.is_stream,
            includes_usage=self.includes_usage,
            shows_thinking=self.shows_thinking,
            is_background=self.is_background,
            is_stored=self.is_stored,
            echo=self.echo,
            other_tools=self.other_tools,
            ignored=self.ignored,
        )
