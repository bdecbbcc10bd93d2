"""Messages and steps, valid by construction.

A step has a result for each call: `Step` raises if a result is missing, surplus or out of order. So an open call is a
state of the turn (`session/turn/`), never of the history.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import InvalidHistoryError


def storable(text: str) -> str:
    """Return `text` with surrogate pairs joined, and U+FFFD for each lone surrogate; unchanged if there is none.

    A surrogate has no UTF-8 form and cannot be journaled. Their sources are servers that cut an emoji in two, and file
    names in error messages.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class TextJoiner:
    """Joins the pieces of one text: a character that was cut between two pieces arrives whole, with the second one.

    Servers in JavaScript cut texts between UTF-16 code units, so between the two surrogates of an emoji.
    """

    __slots__ = ("_half",)

    def __init__(self) -> None:
        self._half = ""

    def add(self, piece: str) -> str:
        """Return the storable text of the next piece; a high surrogate at its end waits."""
        if piece.isascii() and not self._half:
            return piece
        text, self._half = self._half + piece, ""
        if "\ud800" <= text[-1:] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return storable(text)

    def end(self) -> str:
        """Return what waited at the end of the text: U+FFFD, or nothing."""
        half, self._half = self._half, ""
        return storable(half)


class Text(Struct, frozen=True, gc=False, tag="text"):
    """Plain text."""

    text: str


class Thinking(Struct, frozen=True, gc=False, tag="thinking", omit_defaults=True):
    """Reasoning of a model. `signature` is the provider's, kept byte for byte.

    `is_redacted`: the provider withholds the text; `signature` contains it, readable only for the provider, and `text`
    is empty.
    """

    text: str
    signature: str | None = None
    is_redacted: bool = False


class File(Struct, frozen=True, gc=False, tag="file", omit_defaults=True):
    """An attachment.

    Args:
        media_type: The media type, such as `image/png`.
        data: Its content in base64; or null if `url` has its address.
        url: Its address; or null if `data` has its content.
        name: Its name for users.
        detail: The level of detail of an image in OpenAI's terms, such as `low`; null for the model's default.
    """

    media_type: str
    data: str | None = None
    url: str | None = None
    name: str | None = None
    detail: str | None = None


class ToolCall(Struct, frozen=True, gc=False, tag="call", omit_defaults=True):
    """A tool request.

    `id` is unique within its response; if the provider's id was missing or repeated, it was minted, and `provider_id`
    has the original. `arguments` is the JSON text exactly as the model wrote it, even if it is invalid. `signature` is
    the provider's over the call (Gemini's thought signature), kept byte for byte: the model that signed it requires it.
    """

    id: str
    name: str
    arguments: str = "{}"
    provider_id: str | None = None
    signature: str | None = None


UserPart = Text | File


class Outcome(StrEnum):
    """The end of a call."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    """It never started, or was stopped on request."""
    DENIED = "denied"
    """A person declined it; it never started."""
    UNKNOWN = "unknown"
    """It started, and whether it took effect is unknown."""


class UpstreamCall(Struct, frozen=True, gc=False, tag="upstream_call", omit_defaults=True):
    """A tool call that the upstream ran itself. It is shown and stored; it never runs here and needs no result.

    Args:
        id: Unique among the upstream's calls of its response.
        name: The upstream's name of the tool; "" if it has none.
        arguments: The upstream's arguments, usually JSON text; cut at 16,384 characters, with a mark.
        content: Its result for the upstream, cut likewise.
        outcome: Its outcome; None only while it runs, never in a step.
    """

    id: str
    name: str
    arguments: str = "{}"
    content: str = ""
    outcome: Outcome | None = None


UPSTREAM_CHARS_MAX = 16 * 1024
"""Stored characters of the arguments and of the content of an upstream call; the upstream has the rest."""
UPSTREAM_CUT = "The agent that ran this tool did not say how it ended."
"""The content of an upstream call that was still open when the response ended."""

ResponsePart = Text | Thinking | ToolCall | UpstreamCall


class ToolResult(Struct, frozen=True, gc=False, omit_defaults=True):
    """The answer to one call. `content` is plain text or JSON text for the model.

    A large one is stored once for each session (`session/blobs.py`). Then `content` is only its beginning, `blob` the
    digest of the whole, and `size` its UTF-8 bytes.
    """

    call_id: str
    content: str
    outcome: Outcome = Outcome.OK
    blob: str = ""
    size: int = 0


class Usage(Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens, as the provider counted them.

    Args:
        input_tokens: All input tokens, including those read from or written to a cache.
        output_tokens: All output tokens.
        cached_tokens: The input tokens from a cache.
        cache_write_tokens: The input tokens written to a cache.
        reasoning_tokens: The output tokens of thinking, if the provider counts them.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        """Return the sum."""
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def __sub__(self, other: Usage) -> Usage:
        """Return the tokens in excess of `other`."""
        return Usage(
            self.input_tokens - other.input_tokens,
            self.output_tokens - other.output_tokens,
            self.cached_tokens - other.cached_tokens,
            self.cache_write_tokens - other.cache_write_tokens,
            self.reasoning_tokens - other.reasoning_tokens,
        )


class Finish(StrEnum):
    """The reason for the end of a response."""

    STOP = "stop"
    CALLS = "calls"
    LENGTH = "length"
    """The output limit cut it."""
    FILTER = "filter"
    INTERRUPTED = "interrupted"
    """midstream stopped reading: after a cancellation, or the death of a node. The text so far was kept."""


class UserMessage(Struct, frozen=True, gc=False, tag="user"):
    """A message of a user, or of the host for a user."""

    parts: tuple[UserPart, ...]

    @classmethod
    def of(cls, text: str) -> UserMessage:
        """Create a message of one text."""
        return cls((Text(text),))


class Response(Struct, frozen=True, gc=False, omit_defaults=True):
    """One complete answer of a model. Its calls have distinct ids.

    `stop_sequence` is the requested text before which the answer ended, if the provider returns it.
    """

    parts: tuple[ResponsePart, ...]
    finish: Finish = Finish.STOP
    model: str = ""
    usage: Usage | None = None
    stop_sequence: str = ""

    def __post_init__(self) -> None:
        ids = [part.id for part in self.parts if isinstance(part, ToolCall)]
        if len(set(ids)) != len(ids) or "" in ids:
            raise InvalidHistoryError(f"the calls of one response need distinct, non-empty ids, got {ids!r}")

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool requests, in the model's order, without those that the upstream ran itself."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))

    @property
    def text(self) -> str:
        """The text for the reader, without thinking and calls."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))


class Step(Struct, frozen=True, gc=False, tag="step", omit_defaults=True):
    """A response with the results of all its calls, in the calls' order: the unit of history.

    Raises:
        InvalidHistoryError: A result is missing, surplus or out of order, or a call that ran upstream has not ended.
    """

    response: Response
    results: tuple[ToolResult, ...] = ()

    def __post_init__(self) -> None:
        requested = [call.id for call in self.response.calls]
        answered = [result.call_id for result in self.results]
        if requested != answered:
            raise InvalidHistoryError(f"calls {requested!r} do not match results {answered!r}")
        if any(isinstance(part, UpstreamCall) and part.outcome is None for part in self.response.parts):
            raise InvalidHistoryError(
                "a call that ran upstream needs an outcome before its response is history"
            )


Entry = UserMessage | Step


class History(Struct, frozen=True, gc=False):
    """A conversation that is valid for every model: user messages and complete steps."""

    entries: tuple[Entry, ...] = ()

    def then(self, entry: Entry) -> History:
        """Return this history with one more entry."""
        return History((*self.entries, entry))


class ToolSpec(Struct, frozen=True, gc=False, omit_defaults=True):
    """Description of a tool for a model. `parameters` is a JSON schema of an object.

    `strict`: whether the provider must enforce the schema of arguments; None for the default of the provider's adapter.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    strict: bool | None = None


def with_distinct_ids(parts: tuple[ResponsePart, ...], *, response_no: int) -> tuple[ResponsePart, ...]:
    """Mint an id for each call without one, or with a repeated one in this response.

    Providers send empty ids (MiniMax) and repeat them. A minted id follows from the place of the call, so that it is
    the same each time the response is parsed.
    """
    taken = {part.id for part in parts if isinstance(part, ToolCall)}
    seen: set[str] = set()
    distinct: list[ResponsePart] = []
    for index, part in enumerate(parts):
        if isinstance(part, ToolCall):
            if not part.id or part.id in seen:
                minted = f"call-{response_no}-{index}"
                while minted in taken:  # models copy ids they have seen
                    minted += "'"
                taken.add(minted)
                part = replace(part, id=minted, provider_id=part.id)
            seen.add(part.id)
        distinct.append(part)
    return tuple(distinct)
