"""All dialects of the gateway, by path and by name."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.dialects.anthropic import MESSAGES
from midstream.dialects.dialect import Dialect
from midstream.dialects.openai_chat import CHAT
from midstream.dialects.openai_responses_api import RESPONSES

__all__ = ["CHAT", "DIALECTS", "MESSAGES", "RESPONSES", "dialect_at", "dialect_for_errors", "find_dialect"]

DIALECTS = [CHAT, RESPONSES, MESSAGES]
"""A program can append its own dialect before it serves a gateway."""


def dialect_at(parts: Sequence[str]) -> Dialect | None:
    """Return the dialect of a path without the version, or None."""
    return next((dialect for dialect in DIALECTS if dialect.path == tuple(parts)), None)


def dialect_for_errors(parts: Sequence[str]) -> Dialect:
    """Return the dialect for errors at a path, which may be below the path of a dialect."""
    found = (dialect for dialect in DIALECTS if tuple(parts[: len(dialect.path)]) == dialect.path)
    return next(found, CHAT)


def find_dialect(name: str) -> Dialect:
    """Return a dialect by its name in a journal.

    Raises:
        KeyError: The name is unknown.
    """
    found = next((dialect for dialect in DIALECTS if dialect.name == name), None)
    if found is None:
        raise KeyError(name)
    return found
