"""Names of child sessions: those of sub-agents, inside another session."""

from __future__ import annotations

PART_MARK = "::"
"""Separator between the parent's name and the call's place in a child session's name. Clients cannot open these."""
PART_MARK_END = PART_MARK[:-1] + chr(ord(PART_MARK[-1]) + 1)
"""The end of the range of names that begin with the mark."""


def root_of(session: str) -> str:
    """Return the root session of a name: the part before the mark."""
    return session.partition(PART_MARK)[0]
