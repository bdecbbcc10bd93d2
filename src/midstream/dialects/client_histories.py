"""A client application's transcript as a history: always repaired, never refused for its content.

The repair changes only what a history cannot contain; rules of providers do not apply. So a transcript that is resent
in the next turn gives the same history again.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from midstream.dialects.incoming_files import attachment_of
from midstream.errors import InvalidHistoryError
from midstream.history.codecs.codec_spec import (
    Format,
    Json,
    MessageTurn,
    Part,
    PartKind,
    ResultPlacement,
    Role,
    Value,
    as_words,
)
from midstream.history.codecs.format_registry import find_format
from midstream.history.messages import (
    Entry,
    History,
    Outcome,
    Response,
    ResponsePart,
    Step,
    Text,
    Thinking,
    ToolCall,
    ToolResult,
    UserMessage,
    UserPart,
    storable,
    with_distinct_ids,
)
from midstream.history.profiles import Profile
from midstream.history.repair.walk import repair_messages

HOSTED_CHARS_MAX = 2000
"""Characters that are kept of a hosted tool's use in an earlier response."""

_READING = Profile(name="reading", first="any", is_empty_user_refused=False, files="any")
OF_ONE_MESSAGE = frozenset(
    {"broken-arguments", "content-shape", "empty-calls", "empty-message", "null-content"}
)
"""Edits that depend on one message only, such as `tool_calls: null` in dumps of OpenAI's SDK, LiteLLM and LangChain,
empty arguments, and an empty response."""
_PLAIN = {"role", "content"}
_LOST = "(the host sent no result for this call)"


class Transcript(Struct, frozen=True):
    """A client application's conversation: the system prompt, and the history."""

    instructions: str
    history: History


def transcript_of(messages: list[Value], form: str, instructions: str = "") -> Transcript:
    """Read a client application's messages.

    Args:
        messages: The received messages, without any validation.
        form: Name of their format (`midstream.history.codecs`).
        instructions: The separate system prompt; system messages are appended to it.
    """
    named = find_format(form)
    sent = [message if isinstance(message, dict) else _in_words(message) for message in messages]
    return _read(repair_messages(sent, named, _READING).messages, named, instructions)


class Piece(Struct, frozen=True):
    """Messages whose reading does not depend on the messages around them.

    Args:
        count: Number of messages.
        is_closed: Whether a following piece that does not begin with a result can be read separately.
        ids: Their ids as items of the Responses API; pieces of one conversation have different ids.
    """

    transcript: Transcript
    count: int
    is_closed: bool
    ids: frozenset[str] = frozenset()


def piece_of(messages: list[Value], form: str) -> Piece | None:
    """Read messages as a piece; return None if their repair may depend on the messages around them."""
    named = find_format(form)
    if not all(isinstance(message, dict) for message in messages):
        return None
    try:
        sound = repair_messages([*messages], named, _READING)
    except InvalidHistoryError:
        return None
    if not all(edit.code in OF_ONE_MESSAGE for edit in sound.edits):
        return None
    transcript = _read(sound.messages, named)
    ids = [message["id"] for message in messages if isinstance(message.get("id"), str)]
    has_ids = named.layout is ResultPlacement.FLAT
    return Piece(transcript, len(messages), closes(messages[-1], form), frozenset(ids if has_ids else ()))


def closes(message: Value, form: str) -> bool:
    """Return whether the response before the end of this message is complete."""
    return isinstance(message, dict) and _turn_of(message, form).role in (Role.USER, Role.TOOL)


def answers(message: Value, form: str) -> bool:
    """Return whether a message contains tool results."""
    if not isinstance(message, dict):
        return False
    turn = _turn_of(message, form)
    return turn.role is Role.TOOL or any(part.kind is PartKind.RESULT for part in turn.parts)


def _turn_of(message: Json, form: str) -> MessageTurn:
    return find_format(form).parse(message, 0)


def _read(messages: Sequence[Json], named: Format, instructions: str = "") -> Transcript:
    reader = _Reader(named, instructions)
    has_plain = named.layout is not ResultPlacement.FLAT
    for at, message in enumerate(messages):
        if has_plain and message.keys() == _PLAIN and _is_text(message):
            reader.plain(message["role"], message["content"])
        else:
            reader.read(named.parse(message, at))
    return reader.transcript()


def _is_text(message: dict[str, Value]) -> bool:
    """Return whether a message is only a role and a text, like most messages."""
    words = message["content"]
    return type(words) is str and words != "" and message["role"] in ("user", "assistant")


def _in_words(message: Value) -> dict[str, Value]:
    return {"role": "user", "content": as_words(message)}


class _Reader:
    """Reads message turns in order; a response is complete when another role follows."""

    def __init__(self, form: Format, instructions: str) -> None:
        self._form = form
        self._instructions = [instructions] if instructions.strip() else []
        self._entries: list[Entry] = []
        self._parts: list[ResponsePart] = []
        self._results: dict[str, ToolResult] = {}

    def plain(self, role: str, words: str) -> None:
        """Read a message with one text; a shortcut for `read`."""
        self._close()
        parts = (Text(storable(words)),)
        self._entries.append(UserMessage(parts) if role == "user" else Step(Response(parts)))

    def read(self, turn: MessageTurn) -> None:
        """Read one message turn."""
        if turn.role is Role.SYSTEM:
            self._instruct(turn.parts)
        elif turn.role is Role.ASSISTANT:
            if self._results or self._form.layout is not ResultPlacement.FLAT:
                self._close()
            for part in turn.parts:
                self._response(part)
        else:
            self._user(turn)

    def transcript(self) -> Transcript:
        """Return the transcript of all turns."""
        self._close()
        return Transcript("\n\n".join(self._instructions), History(tuple(self._entries)))

    def _instruct(self, parts: list[Part]) -> None:
        words = "\n".join(
            as_words(part.body) for part in parts if part.kind in (PartKind.TEXT, PartKind.SYSTEM)
        )
        if words.strip():
            self._instructions.append(storable(words))

    def _response(self, part: Part) -> None:
        match part.kind:
            case PartKind.TEXT:
                self._append_text(as_words(part.body))
            case PartKind.THINKING:
                words = _read_thought(part)
                if words or part.signature:
                    signature = part.signature if isinstance(part.signature, str) else None
                    self._parts.append(Thinking(storable(words), signature))
            case PartKind.CALL:
                self._parts.append(_call(part))
            case PartKind.HOSTED_CALL | PartKind.HOSTED_RESULT:
                self._append_text(f"[{part.name or 'tool'}] {as_words(part.body)[:HOSTED_CHARS_MAX]}")
            case PartKind.OPAQUE if isinstance(part.raw, dict) and isinstance(part.raw.get("refusal"), str):
                self._append_text(part.raw["refusal"])
            case _:
                pass  # an item with a meaning for one provider only

    def _append_text(self, words: str) -> None:
        if words:
            self._parts.append(Text(storable(words)))

    def _user(self, turn: MessageTurn) -> None:
        user_parts: list[UserPart] = []
        for part in turn.parts:
            match part.kind:
                case PartKind.RESULT:
                    self._result(part)
                case PartKind.SYSTEM:
                    self._instruct([part])
                case PartKind.TEXT:
                    user_parts.append(Text(storable(as_words(part.body))))
                case PartKind.MEDIA:
                    user_parts.append(attachment_of(self._form, part))
                case _:
                    user_parts.append(Text(storable(as_words(part.raw))))
        if user_parts or (turn.role is Role.USER and not turn.parts):
            self._close()
            self._entries.append(UserMessage(tuple(user_parts)))

    def _result(self, part: Part) -> None:
        words, media = self._form.pieces(part)
        noted = [attachment_of(self._form, piece) for piece in media]
        for each in noted:
            words += f"\n[{each.text if isinstance(each, Text) else each.media_type + ' left out'}]"
        call_id = part.id if isinstance(part.id, str) else ""
        if part.is_by_name:
            call_id = self._call_named(part.name) or call_id
        outcome = Outcome.ERROR if part.failed else Outcome.OK
        self._results.setdefault(call_id, ToolResult(call_id, storable(words), outcome))

    def _call_named(self, name: str) -> str:
        """Return the id of the first open call of a tool, for results without a call id."""
        calls = (part for part in self._parts if isinstance(part, ToolCall))
        return next((call.id for call in calls if call.name == name and call.id not in self._results), "")

    def _close(self) -> None:
        parts = with_distinct_ids(tuple(self._parts), response_no=len(self._entries))
        results, self._parts, self._results = self._results, [], {}
        if not parts:
            return
        answered = tuple(
            results.get(call.id) or ToolResult(call.id, _LOST, Outcome.UNKNOWN)
            for call in parts
            if isinstance(call, ToolCall)
        )
        self._entries.append(Step(Response(parts), answered))


def _call(part: Part) -> ToolCall:
    body = part.body
    arguments = body if isinstance(body, str) else as_words({} if body is None else body)
    call_id = part.id if isinstance(part.id, str) else ""
    if part.is_by_name and not call_id:
        call_id = f"call-{part.name}"
    return ToolCall(storable(call_id), storable(part.name), storable(arguments) or "{}")


def _read_thought(part: Part) -> str:
    """Return the text of a thought, also of an item of the Responses API."""
    if isinstance(part.body, str):
        return part.body
    raw = part.raw if isinstance(part.raw, dict) else {}
    pieces = [*_list_of(raw.get("summary")), *_list_of(raw.get("content"))]
    texts = (piece.get("text") for piece in pieces if isinstance(piece, dict))
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _list_of(value: Value) -> list[Value]:
    return value if isinstance(value, list) else []
