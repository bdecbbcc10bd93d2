"""Files of JSON lines: the messages of each kind of line, and lines for repaired messages.

A ledger classifies single lines; `conversations.py` joins the lines of one conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct
from typing_extensions import override

from midstream.doctor.shapes import Json, format_of, is_message
from midstream.errors import UnreadableHistoryError
from midstream.history.codecs.codec_spec import PartKind, Role
from midstream.history.codecs.format_registry import find_format
from midstream.history.codecs.recognition import recognize_by_marks

OWN_TEXT_MIN = 8
"""Characters from which a text identifies its line: shorter texts may be shared objects."""
SAMPLE = 200
"""Lines that are read to recognize their kind."""


class Node(Struct, frozen=True):
    """Place of a line in a tree of lines."""

    id: str
    parent: str | None


class MessageLine(Struct, eq=False):
    """A line with messages, usually one."""

    number: int
    value: Json
    messages: list[Json]
    node: Node | None = None
    group: str = ""
    """Equal for the lines of one response."""
    is_context: bool = False
    """Whether it belongs to an earlier stretch and was already examined."""


class Ledger:
    """One kind of JSON lines; by default each line is a message, in order."""

    kind: str
    format: str
    is_split: bool
    """Whether one message may have several lines."""

    def messages(self, line: Json) -> list[Json]:
        """Return the messages in a line; none for another kind of line."""
        return [line]

    def node(self, line: Json) -> Node | None:
        """Return the place of a line in the tree; None if lines are in order."""
        del line
        return None

    def group(self, line: Json) -> str:
        """Return the common key of a response's lines; "" for a single line."""
        del line
        return ""

    def is_break(self, line: Json) -> bool:
        """Whether the lines before this one are not sent any more."""
        del line
        return False

    def is_turn(self, line: Json) -> bool:
        """Whether a turn begins here that can be withdrawn."""
        del line
        return False

    def turns_undone(self, line: Json) -> int:
        """Return the number of earlier turns that this line withdraws."""
        del line
        return 0

    def line_of(self, entry: MessageLine, messages: list[Json]) -> Json:
        """Return an entry's line with other messages."""
        del entry
        return messages[0]

    def new_line(self, like: MessageLine, message: Json, number: int) -> Json:
        """Return a new line similar to an existing one. `number` distinguishes several new lines."""
        del like, number
        return message

    def with_parent(self, line: Json, parent: str | None) -> Json:
        """Return a line with another parent; the same line without a tree."""
        del parent
        return line


class ClaudeCode(Ledger):
    """A session of Claude Code: a tree of lines, one for each block of a response."""

    kind = "claude-code"
    format = "anthropic"
    is_split = True

    def messages(self, line: Json) -> list[Json]:
        """See `Ledger.messages`. Lines that Claude Code only shows have none."""
        message = line.get("message")
        if line.get("type") not in ("user", "assistant") or not isinstance(message, dict):
            return []
        if line.get("isApiErrorMessage") or line.get("isVisibleInTranscriptOnly"):
            return []
        return [message]

    @override
    def node(self, line: Json) -> Node | None:
        uuid, parent = line.get("uuid"), line.get("parentUuid")
        return Node(uuid, parent if isinstance(parent, str) else None) if isinstance(uuid, str) else None

    @override
    def group(self, line: Json) -> str:
        message = line.get("message")
        name = message.get("id") if line.get("type") == "assistant" and isinstance(message, dict) else None
        return name if isinstance(name, str) else ""

    @override
    def line_of(self, entry: MessageLine, messages: list[Json]) -> Json:
        return {**entry.value, "message": messages[0]}

    def new_line(self, like: MessageLine, message: Json, number: int) -> Json:
        """See `Ledger.new_line`. The id is derived from the call's or the neighbour's, so each run writes the same."""
        kept = {key: value for key, value in like.value.items() if key not in _OF_ONE_LINE}
        kind = "assistant" if message.get("role") == "assistant" else "user"
        content = message.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        answered = [block.get("tool_use_id") for block in blocks]
        seed = f"{like.node.id if like.node else like.number}/{number}"
        if any(answered):  # branches that share a call have the same result
            seed = f"{like.value.get('sessionId')}/{answered}"
        return {**kept, "type": kind, "message": message, "uuid": _uuid(seed)}

    @override
    def with_parent(self, line: Json, parent: str | None) -> Json:
        return line if line.get("parentUuid") == parent else {**line, "parentUuid": parent}


_OF_ONE_LINE = {"message", "uuid", "requestId", "toolUseResult", "sourceToolAssistantUUID", "isMeta", "type"}


class CodexRollout(Ledger):
    """A rollout of Codex: `{"timestamp", "type": "response_item", "payload": item}`, or bare items (2025)."""

    kind = "codex"
    format = "openai-responses"
    is_split = False

    @override
    def messages(self, line: Json) -> list[Json]:
        payload = line.get("payload")
        match line.get("type"):
            case "response_item":
                return (
                    [payload] if isinstance(payload, dict) and payload.get("type") != "ghost_snapshot" else []
                )
            case "compacted":
                kept = payload.get("replacement_history") if isinstance(payload, dict) else None
                return [item for item in kept if isinstance(item, dict)] if isinstance(kept, list) else []
            case _:
                return [line] if payload is None and recognize_by_marks(line) == self.format else []

    @override
    def is_break(self, line: Json) -> bool:
        return line.get("type") == "compacted"

    def is_turn(self, line: Json) -> bool:
        """Whether a line begins a turn: not if Codex itself sends it to the model as a user."""
        item = line.get("payload")
        if line.get("type") != "response_item" or not isinstance(item, dict) or item.get("type") != "message":
            return False
        match item.get("role"):
            case "user":
                return not any(text.lstrip().lower().startswith(_CODEX_CONTEXT) for text in _texts(item))
            case "assistant":  # an order from one agent to another
                return any(_is_order(text) for text in _texts(item))
            case _:
                return False

    @override
    def turns_undone(self, line: Json) -> int:
        event = line.get("payload")
        if line.get("type") != "event_msg" or not isinstance(event, dict):
            return 0
        turns = event.get("num_turns") if event.get("type") == "thread_rolled_back" else 0
        return turns if isinstance(turns, int) and turns > 0 else 0

    @override
    def line_of(self, entry: MessageLine, messages: list[Json]) -> Json:
        payload = entry.value.get("payload")
        if not isinstance(payload, dict):
            return messages[0]
        if self.is_break(entry.value):
            return {**entry.value, "payload": {**payload, "replacement_history": messages}}
        return {**entry.value, "payload": messages[0]}

    @override
    def new_line(self, like: MessageLine, message: Json, number: int) -> Json:
        del number
        if message.get("type") == "local_shell_call_output":  # Codex stores one kind of output for both
            message = {**message, "type": "function_call_output"}
        if "payload" not in like.value:
            return message
        return {"timestamp": like.value.get("timestamp"), "type": "response_item", "payload": message}


_CODEX_CONTEXT = (
    "# agents.md instructions",
    "<codex_internal_context",
    "<context_update>",
    "<environment_context>",
    "<hook_prompt",
    "<recommended_plugins>",
    "<skill>",
    "<subagent_notification>",
    "<turn_aborted>",
    "<user_instructions>",
    "<user_shell_command>",
)
"""Beginnings of user messages that no user wrote."""


def _texts(item: Json) -> list[str]:
    content = item.get("content")
    chunks = content if isinstance(content, list) else []
    return [
        chunk["text"] for chunk in chunks if isinstance(chunk, dict) and isinstance(chunk.get("text"), str)
    ]


def _is_order(text: str) -> bool:
    if not text.startswith("{") or '"recipient"' not in text:
        return False
    try:
        order = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
    return isinstance(order, dict) and {"author", "recipient", "content"} <= order.keys()


class Messages(Ledger):
    """A message in each line, of any format."""

    is_split = False

    def __init__(self, form: str) -> None:
        self.kind = self.format = form


class Facts(Struct, frozen=True):
    """Properties of a line's messages for the lines around it."""

    ids: frozenset[str]
    """Ids of calls and results."""
    is_prompt: bool
    """Whether it begins with a user's text, and answers no call."""
    is_response: bool
    """Whether it ends with the assistant."""
    has_system: bool


def facts_of(form: str) -> Callable[[Sequence[Json]], Facts]:
    """Return a function that computes the facts of a format's messages."""
    reader = find_format(form)

    def facts(messages: Sequence[Json]) -> Facts:
        turns = [reader.parse(message, at) for at, message in enumerate(messages)]
        parts = [part for turn in turns for part in turn.parts]
        ids = frozenset(part.id for part in parts if part.kind in _PAIRED and isinstance(part.id, str))
        first, last = (turns[0], turns[-1]) if turns else (None, None)
        is_prompt = (
            first is not None
            and first.role is Role.USER
            and bool(first.parts)
            and not any(part.kind is PartKind.RESULT for part in first.parts)
        )
        has_system = any(turn.role is Role.SYSTEM for turn in turns)
        return Facts(ids, is_prompt, last is not None and last.role is Role.ASSISTANT, has_system)

    return facts


_PAIRED = (PartKind.CALL, PartKind.RESULT, PartKind.HOSTED_CALL, PartKind.HOSTED_RESULT)


def ledger_for(sample: Sequence[Json], named: str | None) -> Ledger | None:
    """Return the ledger for lines like these; None if they are no history.

    Raises:
        UnreadableHistoryError: The lines are of several formats, or not of the named one.
    """
    if any(_is_claude_code(line) for line in sample):
        return _confirm(ClaudeCode(), named)
    if any(_is_codex(line) for line in sample):
        return _confirm(CodexRollout(), named)
    spoken = [line for line in sample if is_message(line)]
    if not spoken or 2 * len(spoken) < len(sample):
        return None
    form = format_of(spoken, named)
    if form == "tinyagent":
        raise UnreadableHistoryError(
            "messages of tinyagent are read from a session file, not a line each", reason="wrong-format"
        )
    return Messages(form)


def _confirm(ledger: Ledger, named: str | None) -> Ledger:
    if named not in (None, ledger.kind, ledger.format):
        raise UnreadableHistoryError(
            f"this is {ledger.kind}, not {named}; leave --format out", reason="wrong-format"
        )
    return ledger


def _is_claude_code(line: Json) -> bool:
    return "sessionId" in line and "uuid" in line and line.get("type") in ("user", "assistant", "system")


def _is_codex(line: Json) -> bool:
    if isinstance(line.get("payload"), dict):
        return line.get("type") in ("session_meta", "response_item", "compacted", "turn_context")
    return line.get("record_type") == "state"


def _uuid(seed: str) -> str:
    """Return an id that is derived from its neighbour, in the usual form."""
    text = hashlib.blake2b(seed.encode("utf-8", "replace"), digest_size=16).hexdigest()
    return "-".join((text[:8], text[8:12], f"8{text[13:16]}", f"8{text[17:20]}", text[20:]))


def identity_of(value: object) -> int | None:
    """Return a value's object identity; None for values that may be shared objects."""
    is_own = isinstance(value, dict | list) or (isinstance(value, str) and len(value) >= OWN_TEXT_MIN)
    return id(value) if is_own else None
