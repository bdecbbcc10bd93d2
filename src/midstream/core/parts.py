"""Sessions that are part of another one, those of its sub-agents: how their names say so."""

from __future__ import annotations

PART_MARK = "::"
"""Stands in the name of a session that is part of another one, between that one's name and its place in it; nobody
else may open such a session."""


def root_of(session: str) -> str:
    """Return the session that this one is part of, or itself."""
    return session.partition(PART_MARK)[0]
