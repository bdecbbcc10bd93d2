"""Names of sessions that are part of another one: those of its sub-agents."""

from __future__ import annotations

PART_MARK = "::"
"""Stands in the name of a session that is part of another one, between that one's name and its place in it; nobody
else may open such a session."""
PART_MARK_END = PART_MARK[:-1] + chr(ord(PART_MARK[-1]) + 1)
"""What stands behind all that begins with the mark, in the order of names."""


def root_of(session: str) -> str:
    """Return the session that this one is part of, or itself."""
    return session.partition(PART_MARK)[0]
