"""The common form of all formats: turns of parts, each with its original object.

A format parses literally and never repairs. An unchanged turn is written as its original object, so valid content stays
the same byte for byte, including signatures, cache markers and unknown part types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from midstream.history.messages import File, storable

Value = Any
"""A JSON value of a provider. `Any`: providers add fields faster than types could follow."""
Json = dict[str, Any]
"""A JSON object of a provider."""


T = TypeVar("T", bound=str)


def with_constants(cls: type[T]) -> type[T]:
    """Set each annotated name of a `str` subclass to its interned value.

    An `Enum` is too slow on Python 3.11: `PartKind.CALL` takes 85 ns there, and 12 ns here. A repair of 10,000 messages
    reads half a million of them, and would take a third longer with enums.
    """
    for name in cls.__annotations__:
        setattr(cls, name, cls(name.lower()))
    return cls


@with_constants
class PartKind(str):
    """The kind of a part, common to all providers."""

    __slots__ = ()
    TEXT: ClassVar[PartKind]
    THINKING: ClassVar[PartKind]
    CALL: ClassVar[PartKind]
    RESULT: ClassVar[PartKind]
    HOSTED_CALL: ClassVar[PartKind]
    """A tool that the provider runs itself; its result is in the same response."""
    HOSTED_RESULT: ClassVar[PartKind]
    SYSTEM: ClassVar[PartKind]
    """A system prompt inside a user's message (pydantic-ai)."""
    MEDIA: ClassVar[PartKind]
    OPAQUE: ClassVar[PartKind]
    """Any other part, which is kept unchanged and never read."""


@with_constants
class Role(str):
    """The role of a turn."""

    __slots__ = ()
    USER: ClassVar[Role]
    ASSISTANT: ClassVar[Role]
    TOOL: ClassVar[Role]
    SYSTEM: ClassVar[Role]
    OTHER: ClassVar[Role]


@with_constants
class ResultPlacement(str):
    """The place of the results of calls in a format."""

    __slots__ = ()
    GROUPED: ClassVar[ResultPlacement]
    """In the next user message (Anthropic, Bedrock, Gemini, pydantic-ai)."""
    SEPARATE: ClassVar[ResultPlacement]
    """One message each, after the response (Chat Completions, Mistral, LangChain)."""
    FLAT: ClassVar[ResultPlacement]
    """As items of one list, with the calls (Responses)."""


class Part(Struct, eq=False, gc=False):
    """One part of a turn.

    `body` is the text, the arguments of a call (text or object, as the format has them) or the content of a result.
    `raw` is the provider's object, or None for a part that is not written yet. Not tracked by the garbage collector: a
    call refers to its results, and they refer to it only by its identity.
    """

    kind: PartKind
    raw: Value = None
    id: str | None = None
    name: str = ""
    body: Value = None
    signature: str | None = None
    failed: bool = False
    owner: int = 0
    """Of a result: the identity of its call; 0 for none."""
    answers: list[Part] | None = None
    """Of a call: its results, in order."""
    response: int = -1
    """Of a call: the number of its response. Of a result: that of its call."""
    turn: int = -1
    """The number of its original turn."""
    is_second: bool = False
    """Of a result: whether its call has an earlier one."""
    side: Role | None = None
    """The only role that may contain it, if the format's parts define that (pydantic-ai)."""
    is_by_name: bool = False
    """Whether it has no id and needs none: results are found by the tool's name."""
    is_new: bool = False
    """Whether a repair created it."""


class MessageTurn(Struct, eq=False, gc=False):
    """One message (or item) of a history: a role and parts.

    `source` is its original object, which is written unchanged unless `is_changed`. `at` is its place in the input, or
    -1 for a turn of a repair. Not tracked by the garbage collector: nothing refers back to a turn.
    """

    role: Role
    parts: list[Part]
    source: Value = None
    at: int = -1
    is_changed: bool = False
    faults: tuple[str, ...] = ()
    """Faults that only the format's reader can see, such as an empty `tool_calls` list."""
    response: int = -1

    @property
    def has_calls(self) -> bool:
        """Whether any part requests a tool."""
        for part in self.parts:  # noqa: SIM110 - see `has`
            if part.kind is PartKind.CALL:
                return True
        return False

    def has(self, kind: PartKind) -> bool:
        """Whether any part is of this kind."""
        for part in self.parts:  # noqa: SIM110 - called several times for each turn: `any` takes three times as long
            if part.kind is kind:
                return True
        return False

    def has_only(self, kind: PartKind) -> bool:
        """Whether all parts are of this kind."""
        for part in self.parts:  # noqa: SIM110 - see `has`
            if part.kind is not kind:
                return False
        return True


class Media(Struct, frozen=True):
    """An attachment in a neutral form: `data` is base64, or `url` is its address. `detail`: see `File`."""

    media_type: str
    data: str | None = None
    url: str | None = None
    detail: str | None = None


PLAIN_NAMES = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Tool names that every provider accepts."""


class CodecSpec(Struct, frozen=True, kw_only=True):
    """The table of one format: its keys, roles and abilities. Each codec has one as `spec`."""

    roles: frozenset[str] = frozenset({"user", "assistant", "system"})
    """The role names of messages; empty if no missing role is derived (LangChain)."""
    role_key: str = "role"
    user_role: str = "user"
    response_role: str = "assistant"
    system_role: str = "system"
    """The role of a message with instructions; empty if there is no such message (pydantic-ai)."""
    content_key: str = "content"
    system: Literal["list", "apart", "parts"] = "list"
    """Place of the system prompt: a message of the list, a parameter, or a part of a request."""
    system_keys: tuple[str, ...] = ()
    """Keys of a request for a separate system prompt, the usual one first."""
    write_system: Callable[[str], Value] = str
    """Writes a separate system prompt."""
    names: re.Pattern[str] = PLAIN_NAMES
    """Tool names that its providers accept."""
    has_tool_messages: bool = False
    """Whether a message can have `tool_calls` or a `tool_call_id`."""
    own_shapes: frozenset[str] = frozenset()
    """The formats whose blocks are valid in this one."""
    matches_by_name: bool = False
    """Whether a result without an id answers the call with its tool's name."""
    stores_responses: bool = False
    """Whether a response is stored as one message, which may have several thoughts."""
    is_thought_hollow: bool = False
    """Whether a response that has only thinking counts as empty."""
    signs_thinking: bool = False
    """Whether thinking has a signature, and is refused without one."""
    reasoning: Literal["no", "read", "written"] = "no"
    """Whether responses have `reasoning_content`, and whether others' thinking is written there."""
    has_text_arguments: bool = False
    """Whether the arguments of a call are JSON text."""
    arguments_key: str = "arguments"
    """The key of arguments that are JSON text."""
    has_outcomes: bool = False
    """Whether a result has the outcome of its call under `outcome`."""
    claude_profile: str = ""
    """The default profile for a Claude behind a proxy; or empty."""
    takes_plain: bool = False
    """Whether a message of one text is `{"role", "content"}`."""
    takes_addresses: bool = True
    """Whether attachments may be web addresses."""
    takes_any_media: bool = False
    """Whether other media are written like images."""
    typed: Callable[[Json], Json] | None = None
    """Adds the type of a message that only its keys show."""
    read_media: Callable[[Json], Media | None] | None = None
    write_media: Callable[[Media], Json | None] | None = None
    write_file: Callable[[File], Json | None] | None = None
    """Writes an attachment for which the common rules of images are not sufficient."""
    write_thought: Callable[[str, str | None, str], Json | None] | None = None
    """Writes thinking, given its text, its signature, and the format of the signing provider, or none."""
    write_own_thought: Callable[[str, str | None, bool], Json | None] | None = None
    """Writes thinking for its own model, given its text, its signature, and whether the text is withheld."""
    write_signature: Callable[[str], Json] | None = None
    """Writes the fields of a call for its thought signature."""
    hosted_answer: Callable[[Part, str], Part | None] | None = None
    """Writes the result of a hosted call that has none."""


class Format(Protocol):
    """One provider's messages, in both directions. `parse` is literal; `build` writes what `parse` can read."""

    name: str
    layout: ResultPlacement
    spec: CodecSpec
    profile: str
    """The name of the default profile."""
    wire: str
    """The name, in `profiles.WIRES`, of the format's own rules, which apply to every server; or empty."""

    def parse(self, message: Json, at: int) -> MessageTurn:
        """Read one message. Never raises for its content: unknown content becomes opaque parts."""

    def build(self, turn: MessageTurn) -> Json:
        """Write one turn: a copy of its source with the parts replaced, or a new message."""

    def text(self, words: str, role: Role) -> Part:
        """Create a text part for a turn of this role."""

    def call(self, call_id: str, name: str, arguments: Json) -> Part:
        """Create a call part."""

    def answer(self, call: Part, words: str, *, is_failed: bool) -> Part:
        """Create a result part for a call."""

    def rename(self, part: Part, new_id: str) -> None:
        """Set the call id of a call or a result."""

    def reargue(self, part: Part, arguments: Json) -> None:
        """Set the arguments of a call."""

    def refill(self, part: Part, words: str) -> None:
        """Set the whole content of a text or a result."""

    def retool(self, part: Part, name: str) -> None:
        """Set the tool name of a call or a result."""

    def bad_arguments(self, part: Part) -> Json | None:
        """Return valid arguments if a call's own are no JSON object, else None."""

    def pieces(self, part: Part) -> tuple[str, list[Part]]:
        """Split a result into its text, and its other content (images) as parts of a user turn."""

    def join(self, first: Part, second: Part) -> None:
        """Append the content of a second result of a call to the first."""

    def tidy(self, part: Part) -> str | None:
        """Make a result's content valid; return the code of its fault, or None."""


def role_in(roles: dict[str, Role], named: Value) -> Role:
    """Return the role of a message; the value may be anything."""
    return roles.get(named, Role.OTHER) if isinstance(named, str) else Role.OTHER


def type_of(raw: Json) -> str:
    """Return the type of a block; the value may be anything."""
    kind = raw.get("type")
    return kind if isinstance(kind, str) else ""


def stated_type(block: Value) -> str | None:
    """Return the type of a valid typed block; None for anything else."""
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else None


def name_of(value: Value) -> str:
    """Return a tool's name; the value may be anything."""
    return value if isinstance(value, str) else ""


RAW = "_raw"
"""The argument for text that is no JSON object, so that it is not lost."""


def object_of(value: Value) -> Json | None:
    """Return an object for arguments that are no object; None if they are one."""
    if isinstance(value, dict):
        return None
    if value is None:
        return {}
    if isinstance(value, str):
        return _object_in(value, depth=2)
    return {RAW: as_json(value)}


def object_in_text(value: Value) -> Json | None:
    """Return an object for arguments that are no JSON text of an object; None if they are."""
    if isinstance(value, str):
        try:
            if isinstance(msgspec.json.decode(value), dict):
                return None
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            pass
        return _object_in_strict(value)
    return value if isinstance(value, dict) else object_of(value)


def _object_in_strict(text: str) -> Json | None:
    """Parse what `json` accepts and msgspec does not: NaN, and escapes of lone surrogates."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return _object_in(text, depth=2)
    return None if isinstance(found, dict) else _object_in(text, depth=2)


def _object_in(text: str, *, depth: int) -> Json:
    """Find the object in a text, or in a text within the text; without one, keep the text under `RAW`."""
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {RAW: text}
    if isinstance(found, dict):
        return _whole(found)
    if isinstance(found, str) and depth:
        return _object_in(found, depth=depth - 1)
    return {} if found is None else {RAW: text}


def _whole(found: Json) -> Json:
    """Return the object without lone surrogates, which its text had as escapes."""
    try:
        msgspec.json.encode(found)
    except UnicodeEncodeError:
        mended: Json = json.loads(storable(as_json(found)))
        return mended
    return found


_TEXTS = frozenset({"text", "input_text", "output_text"})


def is_sound(block: Value) -> bool:
    """Whether this is a block with a type, and with valid text."""
    kind = stated_type(block)
    return kind is not None and (kind not in _TEXTS or isinstance(block.get("text"), str))


def sound_blocks(content: list[Value], kind: str = "text") -> list[Value]:
    """Return a result's blocks; invalid ones become text, of the format's own kind."""
    return [block if is_sound(block) else {"type": kind, "text": words_of_block(block)} for block in content]


def words_of_block(block: Value) -> str:
    """Return the text of an invalid block: its own text, if it has one, else all of it as JSON."""
    if isinstance(block, dict) and ("text" in block or type_of(block) in _TEXTS):
        return as_words(block.get("text"))
    return as_words(block)


def one_each(block: Value, keys: Container[str]) -> list[Value]:
    """Split a block with several contents where each must have one; other keys stay with the first."""
    is_several = isinstance(block, dict) and len(block) > 1
    found = [key for key in block if key in keys] if is_several else []
    if len(found) < 2:  # noqa: PLR2004 - it contains one value, or none
        return [block]
    first = {key: value for key, value in block.items() if key == found[0] or key not in found}
    return [first, *({key: block[key]} for key in found[1:])]


def parts_of(blocks: list[Value], keys: Container[str], read: Callable[[Value], Part]) -> list[Part]:
    """Read blocks of a format where each must have one content; one with several becomes several parts."""
    parts: list[Part] = []
    for block in blocks:
        for piece in one_each(block, keys):
            part = read(piece)
            if piece is not block:
                part.is_new = True
            parts.append(part)
    return parts


def as_json(value: Value) -> str:
    """Return a JSON value as text; equal values give equal text."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "), default=str)


def as_words(value: Value) -> str:
    """Return a JSON value as text: a text unchanged, null as an empty text, other values as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else as_json(value)


def both_words(first: str, second: str) -> str:
    """Join two texts with a line break."""
    return f"{first}\n{second}" if first and second else first or second


def split_result(body: Value, read: Callable[[Value], Part]) -> tuple[str, list[Part]]:
    """Split a result into its text and its media; `read` converts one of its chunks to a part."""
    if not isinstance(body, list):
        return as_words(body), []
    words, media = "", []
    for chunk in body:
        part = read(chunk)
        if part.kind is PartKind.MEDIA:
            media.append(part)
        else:
            words = both_words(words, as_words(part.body if part.kind is PartKind.TEXT else chunk))
    return words, media


def join_content(first: Value, second: Value, listed: Callable[[Value], list[Value]]) -> Value:
    """Join the content of two results: as chunks if either has some, else as text."""
    if isinstance(first, list) or isinstance(second, list):
        return [*listed(first), *listed(second)]
    return both_words(as_words(first), as_words(second))
