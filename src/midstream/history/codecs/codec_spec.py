"""The shape every format is read into: turns of parts, each with the object it came from.

A format parses literally and never repairs. A turn that no step changed is written as the very object it was read
from, so what was valid stays byte for byte: signatures, cache markers, unknown part types and all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import msgspec
from msgspec import Struct

from midstream.history.messages import File

Value = Any
"""A JSON value of a provider. `Any`: providers add fields faster than types could follow."""
Json = dict[str, Any]
"""A JSON object of a provider."""


T = TypeVar("T", bound=str)


def with_constants(cls: type[T]) -> type[T]:
    """Set each annotated name of a class of texts to the one text of this class.

    An `Enum` reads better and is too slow on Python 3.11: `PartKind.CALL` takes 85 ns there, and 12 ns here. A repair
    of 10,000 messages reads half a million of them: with enums it takes a third longer, and misses its bars.
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
    """A tool the provider runs itself; its result stands in the same response."""
    HOSTED_RESULT: ClassVar[PartKind]
    SYSTEM: ClassVar[PartKind]
    """A system prompt inside a user's message (pydantic-ai)."""
    MEDIA: ClassVar[PartKind]
    OPAQUE: ClassVar[PartKind]
    """Anything else: kept as it is, never looked into."""


@with_constants
class Role(str):
    """The side whose turn it is."""

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
    """Parts of the next user message (Anthropic, Bedrock, Gemini, pydantic-ai)."""
    SEPARATE: ClassVar[ResultPlacement]
    """A message each, after the response (Chat Completions, Mistral, LangChain)."""
    FLAT: ClassVar[ResultPlacement]
    """No messages: calls and results are items of one list (Responses)."""


class Part(Struct, eq=False, gc=False):
    """One piece of a turn.

    `body` is the text, the arguments of a call (text or object, as the format has them) or the content of a
    result. `raw` is the provider's object, or None for a part that is not written yet. Not watched by the garbage
    collector: a call refers to its results, and they refer to it by its identity only.
    """

    kind: PartKind
    raw: Value = None
    id: str | None = None
    name: str = ""
    body: Value = None
    signature: str | None = None
    failed: bool = False
    owner: int = 0
    """Of a result: the identity of the call it answers, 0 for none."""
    answers: list[Part] | None = None
    """Of a call: its results, in the order they were found."""
    response: int = -1
    """Of a call: the number of the response it stands in. Of a result: that of its call."""
    turn: int = -1
    """Where it was read: the number of its turn."""
    is_second: bool = False
    """Of a result: its call has another one already."""
    side: Role | None = None
    """The only side that may hold it, where the format's parts state that (pydantic-ai's)."""
    is_by_name: bool = False
    """Has no id and needs none: results are found by the tool's name."""
    is_new: bool = False
    """Made by a repair."""


class MessageTurn(Struct, eq=False, gc=False):
    """One message (or item) of a history: who speaks, in parts.

    `source` is the object it was read from; it is written back untouched unless `is_changed`. `at` is its place in
    the input, or -1 for a turn made by a repair. Not watched by the garbage collector: nothing refers back to a turn.
    """

    role: Role
    parts: list[Part]
    source: Value = None
    at: int = -1
    is_changed: bool = False
    faults: tuple[str, ...] = ()
    """What only the format's reader can see, such as an empty `tool_calls` list."""
    response: int = -1

    @property
    def has_calls(self) -> bool:
        """Whether any part asks for a tool."""
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
    """An attachment in no provider's shape: `data` is base64, or `url` is its address. `detail`: see `File`."""

    media_type: str
    data: str | None = None
    url: str | None = None
    detail: str | None = None


PLAIN_NAMES = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""Tool names that every provider takes."""


class CodecSpec(Struct, frozen=True, kw_only=True):
    """The table of one format: its keys, roles and abilities. Each codec has one as `spec`."""

    roles: frozenset[str] = frozenset({"user", "assistant", "system"})
    """The names of roles that a message may have; empty where none is guessed (LangChain)."""
    role_key: str = "role"
    user_role: str = "user"
    response_role: str = "assistant"
    system_role: str = "system"
    """Of a message of instructions; empty where there is no such message (pydantic-ai)."""
    content_key: str = "content"
    system: Literal["list", "apart", "parts"] = "list"
    """Place of the system prompt: a message of the list, a parameter, or a part of a request."""
    system_keys: tuple[str, ...] = ()
    """Keys of a request that hold a system prompt which stands apart, the usual one first."""
    write_system: Callable[[str], Value] = str
    """Writes a system prompt that stands apart."""
    names: re.Pattern[str] = PLAIN_NAMES
    """Tool names that its providers take."""
    has_tool_messages: bool = False
    """A message can have `tool_calls`, or a `tool_call_id`."""
    own_shapes: frozenset[str] = frozenset()
    """The formats whose blocks are at home in this one."""
    matches_by_name: bool = False
    """A result without an id answers the call of its tool's name."""
    stores_responses: bool = False
    """Each response is stored as one response, which may think several times."""
    is_thought_hollow: bool = False
    """A response of nothing but thinking is an empty one."""
    signs_thinking: bool = False
    """Thinking has a signature, and is refused without one."""
    reasoning: Literal["no", "read", "written"] = "no"
    """Whether responses have `reasoning_content`, and whether thinking of others is written there."""
    has_text_arguments: bool = False
    """The arguments of a call are JSON text."""
    arguments_key: str = "arguments"
    """The key of arguments that are JSON text."""
    has_outcomes: bool = False
    """A result states under `outcome` how its call ended."""
    claude_profile: str = ""
    """The profile that is meant for a Claude when none is named: it is reached through a proxy; or empty."""
    takes_plain: bool = False
    """A message of one text is `{"role", "content"}`."""
    takes_addresses: bool = True
    """Attachments may be given by their web address."""
    takes_any_media: bool = False
    """Other media are written as images are."""
    typed: Callable[[Json], Json] | None = None
    """Gives a message the type that only its keys show."""
    read_media: Callable[[Json], Media | None] | None = None
    write_media: Callable[[Media], Json | None] | None = None
    write_file: Callable[[File], Json | None] | None = None
    """Writes an attachment that is more than an image by the common rules."""
    write_thought: Callable[[str, str | None, str], Json | None] | None = None
    """Writes thinking: its words, its signature, and the format of the provider that signed it, or none."""
    write_own_thought: Callable[[str, str | None, bool], Json | None] | None = None
    """Writes thinking for the model that thought it: its words, its signature, and whether the words are withheld."""
    write_signature: Callable[[str], Json] | None = None
    """Writes the fields of a call that hold its thought signature."""
    hosted_answer: Callable[[Part, str], Part | None] | None = None
    """Writes the result of a hosted call that has none."""


class Format(Protocol):
    """One provider's messages, both ways. `parse` is literal; `build` writes what `parse` would read."""

    name: str
    layout: ResultPlacement
    spec: CodecSpec
    profile: str
    """The name of the profile that is meant when none is named."""
    wire: str
    """The name, in `profiles.WIRES`, of the rules that come with the format itself, whoever serves it; or empty."""

    def parse(self, message: Json, at: int) -> MessageTurn:
        """Read one message. Never raises for what is in it: the unknown becomes opaque parts."""

    def build(self, turn: MessageTurn) -> Json:
        """Write one turn: a copy of its source with the parts replaced, or a new message."""

    def text(self, words: str, role: Role) -> Part:
        """Make a text part for a turn of this role."""

    def call(self, call_id: str, name: str, arguments: Json) -> Part:
        """Make a call part."""

    def answer(self, call: Part, words: str, *, is_failed: bool) -> Part:
        """Make a result part for a call."""

    def rename(self, part: Part, new_id: str) -> None:
        """Give a call or a result another call id."""

    def reargue(self, part: Part, arguments: Json) -> None:
        """Give a call other arguments."""

    def refill(self, part: Part, words: str) -> None:
        """Give a text or a result these words as its whole content."""

    def retool(self, part: Part, name: str) -> None:
        """Give a call or a result another tool name."""

    def bad_arguments(self, part: Part) -> Json | None:
        """Return the arguments to send where a call's own are no JSON object, else None."""

    def pieces(self, part: Part) -> tuple[str, list[Part]]:
        """Take a result apart: its words, and what else it carries (images) as parts of a user turn."""

    def join(self, first: Part, second: Part) -> None:
        """Append the content of a second result of the same call to the first."""

    def tidy(self, part: Part) -> str | None:
        """Make a result's content sendable; return the code of what was wrong, or None."""


def role_in(roles: dict[str, Role], named: Value) -> Role:
    """Look up a role that a message names; anything may stand there."""
    return roles.get(named, Role.OTHER) if isinstance(named, str) else Role.OTHER


def type_of(raw: Json) -> str:
    """The type that a block states; it may be any value."""
    kind = raw.get("type")
    return kind if isinstance(kind, str) else ""


def stated_type(block: Value) -> str | None:
    """The type of a block with a type, as every provider with typed blocks requires; None for anything else."""
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else None


def name_of(value: Value) -> str:
    """Read a tool's name; anything may stand there."""
    return value if isinstance(value, str) else ""


RAW = "_raw"
"""The argument that carries a text which is no JSON object, so that nothing of it is lost."""


def object_of(value: Value) -> Json | None:
    """Read arguments that should have been an object; None if they are one."""
    if isinstance(value, dict):
        return None
    if value is None:
        return {}
    if isinstance(value, str):
        return _object_in(value, depth=2)
    return {RAW: as_json(value)}


def object_in_text(value: Value) -> Json | None:
    """Read arguments that should have been the JSON text of an object; None if they are."""
    if isinstance(value, str):
        try:
            if isinstance(msgspec.json.decode(value), dict):
                return None
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            pass
        return _object_in_strict(value)
    return value if isinstance(value, dict) else object_of(value)


def _object_in_strict(text: str) -> Json | None:
    """Accept what `json` reads and msgspec does not: NaN, and escapes of lone surrogates."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return _object_in(text, depth=2)
    return None if isinstance(found, dict) else _object_in(text, depth=2)


def _object_in(text: str, *, depth: int) -> Json:
    """Find the object in a text, also in a text within the text; keep the text where there is none."""
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
    """Return the object without the halves of characters that its text spelled as escapes."""
    try:
        msgspec.json.encode(found)
    except UnicodeEncodeError:
        text = as_json(found).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        mended: Json = json.loads(text)
        return mended
    return found


_TEXTS = frozenset({"text", "input_text", "output_text"})


def is_sound(block: Value) -> bool:
    """Whether this is a block with a type, and with a valid text."""
    kind = stated_type(block)
    return kind is not None and (kind not in _TEXTS or isinstance(block.get("text"), str))


def sound_blocks(content: list[Value], kind: str = "text") -> list[Value]:
    """Return a result's blocks with those that are not sound written as text, of the format's own kind."""
    return [block if is_sound(block) else {"type": kind, "text": words_of_block(block)} for block in content]


def words_of_block(block: Value) -> str:
    """The words of a block that is not sound: its text, if it has one, else all of it."""
    if isinstance(block, dict) and ("text" in block or type_of(block) in _TEXTS):
        return as_words(block.get("text"))
    return as_words(block)


def one_each(block: Value, keys: Container[str]) -> list[Value]:
    """Take apart a block that holds several things where each must hold one; the rest goes with the first."""
    is_several = isinstance(block, dict) and len(block) > 1
    found = [key for key in block if key in keys] if is_several else []
    if len(found) < 2:  # noqa: PLR2004 - it holds one thing, or none
        return [block]
    first = {key: value for key, value in block.items() if key == found[0] or key not in found}
    return [first, *({key: block[key]} for key in found[1:])]


def parts_of(blocks: list[Value], keys: Container[str], read: Callable[[Value], Part]) -> list[Part]:
    """Read blocks in a format where each must hold one thing; one that holds several is that many parts."""
    parts: list[Part] = []
    for block in blocks:
        for piece in one_each(block, keys):
            part = read(piece)
            if piece is not block:
                part.is_new = True
            parts.append(part)
    return parts


def as_json(value: Value) -> str:
    """Write any JSON value as text, the same way every time."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "), default=str)


def as_words(value: Value) -> str:
    """Read any JSON value as words: text as it is, nothing as nothing, the rest as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else as_json(value)


def both_words(first: str, second: str) -> str:
    """Put two texts after one another, each on lines of its own."""
    return f"{first}\n{second}" if first and second else first or second


def split_result(body: Value, read: Callable[[Value], Part]) -> tuple[str, list[Part]]:
    """Return the words of a result and the media in it; `read` makes a part of one of its chunks."""
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
    """Return the content of two results in one: chunks if either has some, else words."""
    if isinstance(first, list) or isinstance(second, list):
        return [*listed(first), *listed(second)]
    return both_words(as_words(first), as_words(second))
