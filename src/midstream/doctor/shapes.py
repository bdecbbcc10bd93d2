"""Recognition of the format of a JSON value by its content, not by the file's name.

Each message has marks of one format, or none: `{"role": "user", "content": "hi"}` is valid in many formats. A list that
may be of several formats is reported, not guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from midstream.errors import UnreadableHistoryError
from midstream.history.codecs.format_registry import FORMATS, find_format
from midstream.history.codecs.recognition import ALIKE, recognize_by_marks

Json = dict[str, Any]
"""A JSON object of another program."""

FILE_KINDS = ("claude-code", "codex", "opencode", "tunacode", "midstream")
"""Kinds of files, in addition to the formats of messages."""

_TUNACODE = {"session_id", "project_id"}
"""Fields of a session of tunacode besides its messages."""

# The default format of a message without marks.
_PLAIN = "openai-chat"
# Formats in which a plain {"role", "content": text} message is valid.
_TAKE_PLAIN = {"anthropic", "openai-chat", "openai-responses", "mistral", "langchain", "bedrock"}

_LISTS: tuple[tuple[str, ...], ...] = (
    ("messages",),
    ("input",),
    ("contents",),
    ("history",),
    ("values", "messages"),
    ("channel_values", "messages"),
    ("checkpoint", "channel_values", "messages"),
    ("state", "messages"),
    ("request", "messages"),
    ("body", "messages"),
    ("body", "input"),
    ("body", "contents"),
)
"""Places of messages in request bodies, saved sessions and checkpoints."""


class Shape(Struct, frozen=True):
    """Place of the messages in a JSON document, and their format."""

    kind: str
    """The kind of file: `tunacode`, or the name of the format."""
    format: str
    path: tuple[str, ...]
    """Keys of the path to the list; empty for a bare list."""
    system: tuple[str, ...] = ()
    """Keys of the path to the separate system prompt, if there is one."""


def shape_of(value: object, named: str | None = None) -> Shape | None:
    """Find the messages of a document; None if there are none.

    Raises:
        UnreadableHistoryError: They are of several formats, or not of the named one.
    """
    if isinstance(value, list):
        if not _is_list_of_messages(value):
            return None
        form = format_of(value, _format_in(named))
        return confirm(Shape(form, form, ()), named)
    if not isinstance(value, dict):
        return None
    for path in _LISTS:
        found = at(value, path)
        if isinstance(found, list) and _is_list_of_messages(found):
            form = format_of(found, _format_in(named), (*path, *value))
            return confirm(Shape(_kind(value, form), form, path, _system(value, path, form)), named)
    return None


def confirm(shape: Shape, named: str | None) -> Shape:
    """Return the shape if it matches the given name; a kind of file must be exactly this kind.

    Raises:
        UnreadableHistoryError: It does not.
    """
    if named in FILE_KINDS and named != shape.kind:
        raise UnreadableHistoryError(
            f"this is {shape.kind}, not {named}; leave --format out", reason="wrong-format"
        )
    return shape


def resolve_format(name: str) -> str:
    """Return the canonical name of a format or kind of file.

    Raises:
        UsageError: There is none with this name.
    """
    plain = name.strip().lower().replace("_", "-")
    return plain if plain in FILE_KINDS else find_format(name).name


def _format_in(named: str | None) -> str | None:
    return None if named in FILE_KINDS else named


def at(value: object, path: Sequence[str]) -> Any:  # noqa: ANN401 - any value
    """Return the value at a path of keys, or None."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def with_value(document: object, path: Sequence[str], value: object) -> object:
    """Return the document with another value at the path; the rest is the same objects."""
    if not path:
        return value
    inner = document if isinstance(document, dict) else {}
    return {**inner, path[0]: with_value(inner.get(path[0]), path[1:], value)}


def format_of(messages: Iterable[object], named: str | None = None, hints: Sequence[str] = ()) -> str:
    """Return the format of a list of messages.

    Args:
        named: The format, if the user gave one.
        hints: Keys beside the list.

    Raises:
        UsageError: There is no format with this name.
        UnreadableHistoryError: The messages are of several formats, or not of the named one.
    """
    votes: Counter[str] = Counter()
    firsts: dict[str, int] = {}
    plain = 0
    for number, message in enumerate(messages):
        form = recognize_by_marks(message)
        if form:
            votes[form] += 1
            firsts.setdefault(form, number)
        elif isinstance(message, dict):
            plain += 1
    if named:
        return _confirm(find_format(named).name, votes, plain)
    if {ALIKE.get(form, form) for form in votes} == {"chat"}:
        return max(votes, key=("openai-chat", "mistral").index)  # the format with more features
    if len(votes) > 1:
        summary = ", ".join(
            f"{form} (first: message {firsts[form]})" for form in sorted(firsts, key=firsts.__getitem__)
        )
        raise UnreadableHistoryError(
            f"messages of several formats: {summary}; --format names the one to read them as",
            reason="mixed-formats",
        )
    return next(iter(votes), None) or _read_hints(hints)


def _confirm(named: str, votes: Counter[str], plain: int) -> str:
    alike = {form for form in votes if ALIKE.get(form, form) == ALIKE.get(named, named)}
    # A list of several formats may be read as any of them.
    if alike or (not votes and (not plain or named in _TAKE_PLAIN)):
        return named
    seen = ", ".join(sorted(votes)) or _PLAIN
    raise UnreadableHistoryError(f"this is {seen}, not {named}; leave --format out", reason="wrong-format")


def _read_hints(hints: Sequence[str]) -> str:
    if set(hints) >= _TUNACODE:
        return "tinyagent"
    if "input" in hints:
        return "openai-responses"
    if "system" in hints or "anthropic_version" in hints:
        return "anthropic"
    return _PLAIN


def is_message(value: object) -> bool:
    """Whether a value looks like a message of any format."""
    return bool(recognize_by_marks(value)) or (isinstance(value, dict) and isinstance(value.get("role"), str))


def _is_list_of_messages(values: list[object]) -> bool:
    """Whether most entries look like messages: then another entry is a finding."""
    return not values or 2 * sum(map(is_message, values)) >= len(values)


def _system(document: Json, path: tuple[str, ...], form: str) -> tuple[str, ...]:
    keys = find_format(form).spec.system_keys if form in FORMATS else ()  # tinyagent has no codec
    for key in keys:
        if at(document, (*path[:-1], key)) is not None:
            return (*path[:-1], key)
    return ()


def _kind(document: Json, form: str) -> str:
    is_tunacode = form in ("pydantic-ai", "tinyagent") and document.keys() >= _TUNACODE
    return "tunacode" if is_tunacode else form
