"""The limit of nesting for all JSON that midstream reads.

Frames, bodies, schemas, arguments, transcripts and results come from other programs. A few kilobytes of brackets can
overflow the stack of a recursive function. So a value is checked where it is read, and a deeper one is refused.
"""

from __future__ import annotations

import re

import msgspec

DEPTH_MAX = 64
"""Levels of arrays and objects within each other. Schemas and transcripts in use have fewer than 20."""
TOO_DEEP = f"nested more than {DEPTH_MAX} levels deep"

# An unclosed string extends to the end of the document, so that no text is read twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+', re.DOTALL)
_ALIKE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def is_too_deep(value: object) -> bool:
    """Whether a decoded value has more than `DEPTH_MAX` levels of lists and dicts."""
    level = [value] if isinstance(value, list | dict) else []
    levels = 0
    while level and levels < DEPTH_MAX:
        insides = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for inside in insides for inner in inside if isinstance(inner, list | dict)]
        levels += 1
    return bool(level)


def is_text_too_deep(document: str | bytes) -> bool:
    """Whether a JSON document has more than `DEPTH_MAX` levels; invalid JSON may count as too deep."""
    body = document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document
    if body.count(b"[") + body.count(b"{") <= DEPTH_MAX:
        return False
    left = _STRING.sub(b"", body).translate(_ALIKE, _NO_BRACKETS)
    for _ in range(DEPTH_MAX):  # each pass removes the innermost level
        left = left.replace(b"[]", b"")
        if not left:
            return False
    return True


def require_shallow(value: object) -> None:
    """Check a decoded value.

    Raises:
        msgspec.DecodeError: It has more than `DEPTH_MAX` levels.
    """
    if is_too_deep(value):
        raise msgspec.DecodeError(f"it is {TOO_DEEP}")


def require_shallow_text(document: str | bytes) -> None:
    """Check a JSON document; raises as `require_shallow` does."""
    if is_text_too_deep(document):
        raise msgspec.DecodeError(f"it is {TOO_DEEP}")
