"""Events of a model's stream, and the response that is built from them.

The order of parts is that of their starts: text after a call is a new part, and an upstream call has its start's place.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import ModelForgotError, ModelUnavailableError
from midstream.history.messages import (
    Finish,
    History,
    Outcome,
    Response,
    ResponsePart,
    Text,
    TextJoiner,
    Thinking,
    ToolCall,
    ToolSpec,
    UpstreamCall,
    Usage,
    storable,
    with_distinct_ids,
)
from midstream.history.upstream_calls import Words, close_call, end_call, start_call
from midstream.session.call_references import AttemptRef
from midstream.session.model_settings import DEFAULT_SETTINGS, ModelSettings
from midstream.session.permissions import Person
from midstream.session.records import Delta, ReuseDecision
from midstream.timing import StallBudgets

RESPONSE_CHARS_MAX = 32 * 1024 * 1024
"""Characters of a response to a client application; 128,000 tokens are a sixtieth of it."""
DELTA_CHARS_MAX = 64 * 1024
"""Characters of one `Delta`; a longer piece is split, so that a record fits into a frame."""


class ModelRequest(Struct, frozen=True):
    """A request to a model.

    Args:
        instructions: The system prompt, or "".
        history: All messages so far; the last entry must be answered.
        tools: The tools that may be called.
        attempt: Number of the attempt at this response, from 1.
        key: Equal for all attempts at one response; for a provider's idempotency header.
        resume: The token of a `Resumable` of this attempt, to resume that response; "" for a new one.
        session: The name of the conversation for an upstream's memory; "" for none.
        is_ephemeral: Whether it is a side call, such as one for a title, without a trace in the conversation.
        settings: Settings for the answer; those that the model does not accept are ignored.
        person: The receiver of an upstream agent's permission requests; None if there is none.
        stalls: The agent's limits for silence; None without an agent.
        model: The name of one of several models (`RoutedModels`); "" for the only or first one.
        is_resent: Whether a client application sent the history: tools that an agent ran itself may be missing.
        is_private: Whether none of its content may be stored on disk.
    """

    instructions: str
    history: History
    tools: tuple[ToolSpec, ...] = ()
    attempt: int = 1
    key: str = ""
    resume: str = ""
    session: str = ""
    is_ephemeral: bool = False
    settings: ModelSettings = DEFAULT_SETTINGS
    person: Person | None = None
    stalls: StallBudgets | None = None
    is_resent: bool = False
    model: str = ""
    is_private: bool = False


class PassedAnswer(Struct, frozen=True):
    """Answer to a request that was passed on: its media type, and its bytes."""

    content_type: str
    pieces: AsyncGenerator[bytes, None]


class TextDelta(Struct, frozen=True):
    """A piece of text for the reader."""

    text: str


class ThinkingDelta(Struct, frozen=True):
    """A piece of thinking; a `signature` of the provider ends the part.

    `is_redacted`: a part of its own whose text the provider withholds; `signature` contains it encrypted.
    """

    text: str
    signature: str | None = None
    is_redacted: bool = False


class ToolCallRequested(Struct, frozen=True):
    """A complete tool request. `arguments` is JSON text exactly as the model wrote it; `id` may be empty.

    `signature` is the provider's for this call, if it must be sent back (Gemini's thought signature).
    """

    id: str
    name: str
    arguments: str
    signature: str | None = None


class UpstreamCallStarted(Struct, frozen=True):
    """The upstream runs one of its own tools. For display only. `id` is unique within the response.

    A repetition with the id of a running call has its current arguments.
    """

    id: str
    name: str
    arguments: str


class UpstreamCallEnded(Struct, frozen=True):
    """The end of an upstream's own tool. `content` is its result as text."""

    id: str
    content: str
    outcome: Outcome = Outcome.OK


class Working(Struct, frozen=True):
    """The model produces output that cannot be shown yet, such as the arguments of a call. It counts as progress."""

    what: str = ""


class KeepAlive(Struct, frozen=True):
    """The connection is alive (a ping, an empty piece). It is not output of the model, and no progress."""


class ReuseReported(Struct, frozen=True):
    """A pool decided whether its upstream agent has the conversation, before it sends a message. It is no progress."""

    judgement: ReuseDecision


class Resumable(Struct, frozen=True):
    """The provider keeps this response for a while, without a connection; `token` is for a later request's `resume`.

    Such a request is answered with the same events from the beginning of the response. Sent before the first text.
    """

    token: str


class Finished(Struct, frozen=True):
    """The response is complete. No event may follow.

    `stop_sequence` is the requested text before which it ended, if the provider returns it.
    """

    finish: Finish = Finish.STOP
    model: str = ""
    usage: Usage | None = None
    stop_sequence: str = ""


ModelEvent = (
    TextDelta
    | ThinkingDelta
    | ToolCallRequested
    | UpstreamCallStarted
    | UpstreamCallEnded
    | Working
    | KeepAlive
    | ReuseReported
    | Resumable
    | Finished
)


def is_progress(event: ModelEvent) -> bool:
    """Whether an event is progress: pings and empty pieces are not."""
    match event:
        case TextDelta():
            return bool(event.text)
        case ThinkingDelta():
            return bool(event.text or event.signature)
        case Working() | ToolCallRequested() | UpstreamCallStarted() | UpstreamCallEnded() | Finished():
            return True
        case KeepAlive() | ReuseReported() | Resumable():
            return False


class ResponseBuilder:
    """Collects a model's events: `add` returns the deltas to journal, `response` the complete response.

    Args:
        ref: The attempt.
        shown: The parts of a resumed attempt that readers have: the model sends all of them again, and they are not
            journaled again.
        is_announcing: Whether calls, signatures and a first sign of work have deltas of their own, for the APIs of
            client applications.
    """

    def __init__(
        self,
        ref: AttemptRef,
        shown: Mapping[int, Words] | None = None,
        *,
        is_announcing: bool = False,
    ) -> None:
        self.is_announcing = is_announcing
        self._has_begun = False
        self._chars = 0
        self._ids = (ref.turn, ref.response_no, ref.attempt)
        self._shown = dict(shown or {})
        """Text that the model must still repeat."""
        self._parts: list[ResponsePart] = []
        self._texts: list[str] = []
        self._joiner = TextJoiner()
        self._kind: Literal["text", "thinking"] | None = None
        self._open: dict[str, int] = {}
        """Places of the upstream's running calls, by id."""
        self._finished: Finished | None = None

    def add(self, event: ModelEvent) -> Sequence[Delta]:
        """Process one event; return its deltas for readers.

        Raises:
            ModelForgotError: A resumed response has another text than readers have.
        """
        match event:
            case TextDelta():
                return self._add_text("text", event.text)
            case ThinkingDelta(is_redacted=True):
                ending = self._close_part()
                self._parts.append(Thinking("", storable(event.signature or ""), is_redacted=True))
                return ending
            case ThinkingDelta():
                deltas = self._add_text("thinking", event.text)
                if event.signature is not None:
                    part, signature = len(self._parts), storable(event.signature)
                    ending = self._close_part(signature)
                    return (*deltas, *ending, *self._announce(part, signature=signature))
                return deltas
            case ToolCallRequested():
                ending = self._close_part()
                named = (storable(event.id), storable(event.name), storable(event.arguments))
                call = ToolCall(
                    *named, signature=None if event.signature is None else storable(event.signature)
                )
                self._parts.append(call)
                return (*ending, *self._announce(len(self._parts) - 1, requested=call))
            case UpstreamCallStarted():
                return self._start(start_call(event.id, event.name, event.arguments))
            case UpstreamCallEnded():
                return self._end(event)
            case Finished():
                return self._finish(event)
            case Working() if not self._has_begun:
                return self._announce(len(self._parts))
            case Working() | KeepAlive() | ReuseReported() | Resumable():
                pass
        return ()

    def _announce(
        self, part: int, *, requested: ToolCall | None = None, signature: str = ""
    ) -> Sequence[Delta]:
        self._has_begun = True
        if not self.is_announcing:
            return ()
        return (
            Delta(
                *self._ids,
                part,
                "thinking",
                "",
                requested=requested,
                signature=signature,
            ),
        )

    def response(self) -> Response | None:
        """Return the complete response, or None if the model has not finished or its output is empty.

        For a client application, an empty response is valid.
        """
        if self._finished is None:
            return None
        self._close_part()
        parts = with_distinct_ids(tuple(self._parts), response_no=self._ids[1])
        has_content = any(isinstance(part, ToolCall | UpstreamCall) or part.text.strip() for part in parts)
        if not (has_content or self.is_announcing):
            return None
        end = self._finished
        return Response(parts, end.finish, storable(end.model), end.usage, storable(end.stop_sequence))

    @property
    def is_running_upstream(self) -> bool:
        """Whether the upstream is running a tool of its own; its silence is that of a tool."""
        return bool(self._open)

    @property
    def is_finished(self) -> bool:
        """Whether the model has marked its response as complete."""
        return self._finished is not None

    def _add_text(self, kind: Literal["text", "thinking"], piece: str) -> Sequence[Delta]:
        ending: Sequence[Delta] = ()
        if self._kind != kind:
            ending = self._close_part()
            self._kind = kind
        text = self._joiner.add(piece)
        return (*ending, *self._show_text(kind, text)) if ending else self._show_text(kind, text)

    def _show_text(self, kind: Literal["text", "thinking"], text: str) -> Sequence[Delta]:
        if not text:
            return ()
        self._has_begun = True
        self._chars += len(text)
        if self.is_announcing and self._chars > RESPONSE_CHARS_MAX:
            raise ModelUnavailableError(f"the response is longer than {RESPONSE_CHARS_MAX} characters")
        self._texts.append(text)
        part = len(self._parts)
        if self._shown:
            text = self._unshown(part, kind, text)
        if 0 < len(text) <= DELTA_CHARS_MAX:
            return (Delta(*self._ids, part, kind, text),)
        pieces = (text[at : at + DELTA_CHARS_MAX] for at in range(0, len(text), DELTA_CHARS_MAX))
        return [Delta(*self._ids, part, kind, piece) for piece in pieces]

    def _start(self, call: UpstreamCall) -> Sequence[Delta]:
        if (part := self._open.get(call.id)) is not None:
            begun = self._parts[part]
            assert isinstance(begun, UpstreamCall)
            if begun.arguments == call.arguments:
                return ()
            self._parts[part] = call = replace(begun, arguments=call.arguments)
            return self._show_call(part, call)
        ending = self._close_part()
        part = self._open[call.id] = len(self._parts)
        self._parts.append(call)
        return (*ending, *self._show_call(part, call))

    def _end(self, event: UpstreamCallEnded) -> Sequence[Delta]:
        part = self._open.pop(event.id, None)
        if part is not None:
            call = self._parts[part]
            assert isinstance(call, UpstreamCall)
            self._parts[part] = call = end_call(call, event.content, event.outcome)
            return self._show_call(part, call)
        is_known = any(isinstance(each, UpstreamCall) and each.id == event.id for each in self._parts)
        if is_known:
            return ()  # a call has one outcome: the first
        ending = self._close_part()
        call = end_call(start_call(event.id, "", ""), event.content, event.outcome)
        self._parts.append(call)
        return (*ending, *self._show_call(len(self._parts) - 1, call))

    def _finish(self, event: Finished) -> Sequence[Delta]:
        deltas = [*self._close_part()]
        for part in self._open.values():
            call = self._parts[part]
            assert isinstance(call, UpstreamCall)
            self._parts[part] = call = close_call(call)
            deltas += self._show_call(part, call)
        self._open.clear()
        if self._shown:
            raise _changed_text_error()
        self._finished = event
        return deltas

    def _show_call(self, part: int, call: UpstreamCall) -> Sequence[Delta]:
        """Return the delta of a call for readers, once."""
        shown = self._shown.get(part)
        if shown is None:
            return [Delta(*self._ids, part, "thinking", "", call)]
        if not isinstance(shown, UpstreamCall) or (shown.id, shown.name) != (call.id, call.name):
            raise _changed_text_error()
        if shown.outcome is None or call.outcome is not None:
            del self._shown[part]
        is_shown = shown.outcome is not None or call.outcome is None
        return () if is_shown else [Delta(*self._ids, part, "thinking", "", call)]

    def _unshown(self, part: int, kind: Literal["text", "thinking"], text: str) -> str:
        """Return the part of `text` that readers do not have."""
        known_words = self._shown.get(part, (kind, ""))
        if isinstance(known_words, UpstreamCall):
            raise _changed_text_error()
        shown_kind, shown = known_words
        if not shown:
            return text
        known = shown[: len(text)]
        if kind != shown_kind or not text.startswith(known):
            raise _changed_text_error()
        if len(shown) > len(text):
            self._shown[part] = (kind, shown[len(text) :])
        else:
            del self._shown[part]
        return text[len(known) :]

    def _close_part(self, signature: str | None = None) -> Sequence[Delta]:
        """Close the open part; return the deltas of half a character at its end, which is not completed any more."""
        ending = () if self._kind is None else self._show_text(self._kind, self._joiner.end())
        text = "".join(self._texts)
        if self._kind == "text" and text:
            self._parts.append(Text(text))
        elif self._kind == "thinking" and (text or signature):
            self._parts.append(Thinking(text, signature))
        self._texts.clear()
        self._kind = None
        return ending


def _changed_text_error() -> ModelForgotError:
    return ModelForgotError("the resumed response has another text than before")


def is_plain(delta: Delta) -> bool:
    """Whether a delta has only text."""
    return delta.call is None and delta.requested is None and not delta.signature


def merge_deltas(deltas: Sequence[Delta]) -> tuple[Delta, ...]:
    """Join neighbouring pieces of the same part, up to `DELTA_CHARS_MAX` characters each."""
    merged: list[Delta] = []
    texts: list[str] = []
    length = 0
    for delta in deltas:
        last = merged[-1] if merged else None
        is_same = last is not None and (last.part, last.kind) == (delta.part, delta.kind)
        is_same = is_same and is_plain(delta) and is_plain(merged[-1])
        if is_same and length + len(delta.text) <= DELTA_CHARS_MAX:
            texts.append(delta.text)
            length += len(delta.text)
            continue
        if last is not None:
            merged[-1] = replace(last, text="".join(texts))
        merged.append(delta)
        texts, length = [delta.text], len(delta.text)
    if merged:
        merged[-1] = replace(merged[-1], text="".join(texts))
    return tuple(merged)
