"""A host's request, in no particular dialect, and the writing of its answer.

`Asked` is read from a request; a `Writer` turns the events of a model into the words of the same API. A writer's pieces
are whole server-sent events: what a reader has missed is played back to it byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from midstream.core.dialects.refusals import Dialect, Refusal
from midstream.core.dialects.transcripts import Transcript, transcript_of
from midstream.core.dialects.wishing import Wished
from midstream.core.formats.parts import Value
from midstream.core.messages import ToolSpec
from midstream.core.replies import ModelEvent

FORMS = {
    Dialect.CHAT: "openai-chat",
    Dialect.RESPONSES: "openai-responses",
    Dialect.MESSAGES: "anthropic",
}
"""In which format of `midstream.core.formats` each API's messages come."""


class Asked(Struct, frozen=True, kw_only=True):
    """One request.

    Args:
        dialect: The API it came by.
        model: The model's name, as the host knows it.
        messages: As they came; `transcript` reads them. Of a request that was read behind known ones only the others.
        instructions: The system prompt that came beside them.
        tools: What the host will run.
        is_stream: It is answered with a stream of events.
        includes_usage: A stream of chunks ends with the tokens counted.
        shows_thinking: The host wants to see what the model thinks.
        is_background: The answer is made whoever listens, and asked for later.
        is_stored: The answer can be asked for by its id.
        previous: The id of a stored answer that this goes on from, or "".
        metadata: The host's own notes that are texts.
        user, cache_key: What the host calls its user, and the requests that begin alike.
        echo: Fields that this API repeats in its answer.
        wished: How it wants the answer made.
        ignored: Fields that nobody could grant, for the answer to name.
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
    previous: str = ""
    metadata: Mapping[str, str] = {}
    user: str = ""
    cache_key: str = ""
    echo: Mapping[str, Any] = {}
    wished: Wished = Wished()
    ignored: tuple[str, ...] = ()

    def transcript(self, before: Sequence[Value] = ()) -> Transcript:
        """Read the messages, behind those of an earlier answer where there are some."""
        return transcript_of([*before, *self.messages], FORMS[self.dialect], self.instructions)


class Named(Struct, frozen=True):
    """Name of an answer: its id, the model's name as the host knows it, and when it was begun."""

    id: str
    model: str
    created_at: int


class Writer(Protocol):
    """Writes one answer. `begin` first, then `write` for each event; `fail` instead of the last one.

    `whole` is the answer in one piece, once the event `Finished` was written.
    """

    def begin(self) -> list[bytes]:
        """Return what a stream opens with."""

    def write(self, event: ModelEvent) -> list[bytes]:
        """Return what a stream says of an event; after `Finished` the stream is at its end."""

    def fail(self, refusal: Refusal) -> list[bytes]:
        """Return how a stream ends that cannot go on."""

    def whole(self) -> bytes:
        """Return the answer in one piece."""
