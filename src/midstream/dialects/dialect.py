"""The contract of an API that the gateway serves: path, requests, events and errors.

Each dialect is one file; `dialect_registry.DIALECTS` lists them. A dialect reads a request as `Asked`. Its `Writer`
converts the events of a response to server-sent events. The writer needs only the `Form` of the request, which is
journaled, so that any process can write the response from the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from midstream.dialects.answer_options import AnswerOptions
from midstream.dialects.api_errors import ApiError
from midstream.dialects.client_histories import Transcript, transcript_of
from midstream.dialects.request_fields import Fields
from midstream.history.codecs.codec_spec import Value
from midstream.history.messages import ToolSpec
from midstream.models.responses import ModelEvent

COMMENT = b": waiting\n\n"
"""A comment of server-sent events, which keeps the connection alive."""


class Form(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts of a request that a dialect needs to write its response.

    Args:
        dialect: Name of the dialect.
        id, model, created_at: Id of the response, the application's name of the model, and time of the request (seconds
            since 1970).
        is_stream: Whether the answer is a stream of events.
        includes_usage: Whether a stream of chunks ends with the usage.
        shows_thinking: Whether the application requests thinking.
        is_background: Whether the response continues without a reader, and can be requested later.
        is_stored: Whether the response can be requested by its id.
        echo: Fields that the API repeats in its response.
        other_tools: Kind, namespace and name of tools that functions replace, by function name.
        ignored: Fields without effect, which the response lists.
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
    """Writes one response: `begin`, then `write` for each event; `fail` or `cancel` instead of the last one."""

    def begin(self) -> list[bytes]:
        """Return the first events of a stream."""

    def write(self, event: ModelEvent) -> list[bytes]:
        """Convert an event of the model; `Finished` ends the stream."""

    def end_at(self, at: float) -> None:
        """Set the time of the end, in seconds since 1970, before the last event.

        A dialect without such a field does not implement it.
        """
        del at

    def fail(self, refusal: ApiError) -> list[bytes]:
        """Return the last events of a failed response."""

    def cancel(self, refusal: ApiError) -> list[bytes]:
        """Return the last events of a cancelled response."""

    def whole(self) -> bytes:
        """Return the response so far as one body."""


class Dialect(Struct, frozen=True, kw_only=True, eq=False):
    """Description of one API that is served.

    Args:
        name: Name in journals.
        path: Path of the POST, without the version.
        format: Format of its messages (`midstream.history.codecs`).
        messages: Field of a request with the conversation.
        id_prefix: Prefix of the ids of responses.
        read: Reads a request from its fields, after a number of known messages.
        writer: Creates the writer of a response.
        error: Converts a refusal to an error object of the API.
        status: Returns the HTTP status of a refusal.
        keep_alive: Event that keeps an open stream alive.
        in_functions: Replaces calls of other tools in messages by calls of functions, one for one.
        is_retrievable: Whether responses can be requested by id.
        streamed_codes: Codes of refusals that are always sent as events of the stream, where clients expect them.
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
        """Return a refusal as the body of a response."""
        return msgspec.json.encode(self.error(refusal))


class Asked(Struct, frozen=True, kw_only=True):
    """One request of a client application, decoded.

    Args:
        dialect: The API of the request.
        model: The application's name of the model.
        messages: The received messages, without known ones; `transcript` reads them.
        instructions: The separate system prompt.
        tools: Tools of the application.
        is_stream, includes_usage, shows_thinking, is_background, is_stored, echo, other_tools, ignored: See `Form`.
        is_private: Whether nothing may be stored on disk (`store: false`).
        previous: Id of the stored response that the request continues, or "".
        conversation: Id of a conversation of `/v1/conversations`, or "".
        metadata: The texts of the application's metadata.
        user, cache_key: The application's ids of its user, and of requests with equal beginnings.
        wished: The requested options of the response.
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
        """Read the messages, after the messages `before`."""
        messages = self.dialect.in_functions([*before, *self.messages])
        return transcript_of(messages, self.dialect.format, self.instructions)

    def form(self, response_id: str, model: str, created_at: int) -> Form:
        """Return the form of the response, for the journal."""
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
