"""Calls that an agent ran itself, stored for a client application that does not resend them.

A client application resends texts and the calls that it ran itself. Calls of the agent's own tools are in none of its
messages, so a fresh agent would not get them. They are stored beside the record of the conversation, under the place of
the answer (the user messages before it, and the results since the last of them), and inserted into the history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.agents.prior_transcript import ARGUMENTS_CHARS_MAX, RESULT_CHARS_MAX, without_base64
from midstream.history.messages import (
    Entry,
    Finish,
    History,
    Response,
    ResponsePart,
    Step,
    Text,
    TextJoiner,
    ToolCall,
    UpstreamCall,
)
from midstream.history.upstream_calls import close_call, end_call, start_call
from midstream.models.fingerprint import LINK_BYTES, ConversationDigest
from midstream.models.responses import ModelEvent, TextDelta, UpstreamCallEnded, UpstreamCallStarted

KEPT_CHARS_MAX = 256 * 1024
"""Stored characters of one conversation: those of the newest answers."""
_MARK_CHARS = 32
"""Room for the mark of omitted text."""


class OwnCall(Struct, frozen=True, array_like=True):
    """A call, and the number of characters of the answer's text before it."""

    at: int
    call: UpstreamCall


class AnswerCalls(Struct, frozen=True, array_like=True):
    """The calls of one answer.

    Args:
        place: The place of the answer: see `place_of`.
        calls: In order; a running one has no outcome.
        text: The text of an incomplete answer, up to its last call.
        is_whole: Whether the answer is complete, so that the client application has its text.
    """

    place: bytes
    calls: tuple[OwnCall, ...] = ()
    text: str = ""
    is_whole: bool = False

    @property
    def size(self) -> int:
        """Its number of characters."""
        calls = (own.call for own in self.calls)
        return len(self.text) + sum(len(call.arguments) + len(call.content) for call in calls)

    @property
    def link(self) -> bytes:
        """The link of the user message that it answers."""
        return self.place[:LINK_BYTES]

    @property
    def step(self) -> Step:
        """An incomplete answer, as an entry of the history."""
        return Step(Response(_parts((Text(self.text),), self), Finish.INTERRUPTED))


class OwnCalls:
    """Collects the calls of one answer from its events."""

    def __init__(self, place: bytes) -> None:
        self._place = place
        self._texts: list[str] = []
        self._joiner = TextJoiner()
        self._chars = 0
        self._calls: list[OwnCall] = []

    def __bool__(self) -> bool:
        """Whether the agent ran anything."""
        return bool(self._calls)

    def add(self, event: ModelEvent) -> bool:
        """Process an event; return whether the calls changed."""
        match event:
            case TextDelta():
                self._add_text(self._joiner.add(event.text))
                return False
            case UpstreamCallStarted():
                self._add_text(self._joiner.end())
                return self._start(event)
            case UpstreamCallEnded():
                return self._end(event)
            case _:
                return False

    def _add_text(self, text: str) -> None:
        self._texts.append(text)
        self._chars += len(text)

    def _start(self, event: UpstreamCallStarted) -> bool:
        call = start_call(event.id, event.name, _shorten(event.arguments, ARGUMENTS_CHARS_MAX))
        index = self._find_open(event.id)
        if index is None:
            self._calls.append(OwnCall(self._chars, call))
            return True
        own = self._calls[index]
        self._calls[index] = OwnCall(own.at, call)
        return own.call != call

    def _end(self, event: UpstreamCallEnded) -> bool:
        index = self._find_open(event.id)
        if index is None:
            return False
        own = self._calls[index]
        content = _shorten(event.content, RESULT_CHARS_MAX)
        self._calls[index] = OwnCall(own.at, end_call(own.call, content, event.outcome))
        return True

    def _find_open(self, call_id: str) -> int | None:
        """Return the index of the running call with this id, or None."""
        for index in range(len(self._calls) - 1, -1, -1):
            call = self._calls[index].call
            if call.id == call_id and call.outcome is None:
                return index
        return None

    def collect(self, *, is_whole: bool) -> AnswerCalls:
        """Return the calls to store now."""
        text = "" if is_whole else "".join(self._texts)
        return AnswerCalls(self._place, tuple(self._calls), text, is_whole)


def place_of(conversation: ConversationDigest) -> bytes:
    """Return the place of the answer to a conversation, as a digest."""
    results = "\0".join(() if conversation.tail_users else conversation.answered)
    digest = hashlib.blake2b(results.encode("utf-8", "surrogatepass"), digest_size=LINK_BYTES)
    return conversation.users[-LINK_BYTES:] + digest.digest()


def with_answer(kept: Sequence[AnswerCalls], answer: AnswerCalls) -> tuple[AnswerCalls, ...]:
    """Return these with one more, which replaces one of the same place; beyond the limit, the oldest are dropped."""
    answers = [each for each in kept if each.place != answer.place]
    answers.append(answer)
    size = sum(each.size for each in answers)
    while len(answers) > 1 and size > KEPT_CHARS_MAX:
        size -= answers.pop(0).size
    return tuple(answers)


def with_own_calls(history: History, kept: Sequence[AnswerCalls]) -> History:
    """Return a history with the calls of its answers in their places (text, call, text).

    A cut answer that the history lacks is appended as an interrupted one.
    """
    if not kept:
        return history
    answers = {each.place: each for each in kept}
    entries: list[Entry] = []
    conversation = ConversationDigest()
    for entry in history.entries:
        if isinstance(entry, Step):
            answer = answers.get(place_of(conversation))
            entries.append(entry if answer is None else _merge(entry, answer))
        else:
            entries.append(entry)
        conversation = conversation.then((entry,))
    last = answers.get(place_of(conversation))
    if last is not None and not last.is_whole:
        entries.append(last.step)
    return History(tuple(entries))


def encode_calls(kept: Sequence[AnswerCalls]) -> bytes:
    """Encode the calls of a conversation."""
    return msgspec.msgpack.encode(kept)


def decode_calls(body: bytes) -> tuple[AnswerCalls, ...]:
    """Decode the calls of a conversation; none if they are damaged."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


_decoder = msgspec.msgpack.Decoder(tuple[AnswerCalls, ...])


def _merge(step: Step, answer: AnswerCalls) -> Step:
    if any(isinstance(part, UpstreamCall) for part in step.response.parts):
        return step  # the application resends them
    return replace(step, response=replace(step.response, parts=_parts(step.response.parts, answer)))


def _parts(parts: Sequence[ResponsePart], answer: AnswerCalls) -> tuple[ResponsePart, ...]:
    """Return the parts of a response with the agent's own calls among them."""
    merged: list[ResponsePart] = []
    left = list(answer.calls)
    at = 0
    for part in parts:
        if isinstance(part, Text):
            text = part.text
            while left and left[0].at < at + len(text):
                cut = max(left[0].at - at, 0)
                merged += [Text(text[:cut])] if cut else []
                text, at = text[cut:], at + cut
                merged.append(close_call(left.pop(0).call))
            merged += [Text(text)] if text else []
            at += len(text)
            continue
        if isinstance(part, ToolCall):
            merged += [close_call(own.call) for own in left]
            left.clear()
        merged.append(part)
    return (*merged, *(close_call(own.call) for own in left))


def _shorten(text: str, chars: int) -> str:
    """Return a text as a transcript quotes it: at most so many characters, with a mark of the omitted ones."""
    plain = without_base64(text)
    if len(plain) <= chars:
        return plain
    kept = chars - _MARK_CHARS
    return f"{plain[:kept]}\n[+{len(plain) - kept} characters]"
