"""Truncates damaged journals before the damage, in a copy of a SQLite store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from midstream.session.session import Session

# A session's records after a position.
CUT_RECORDS = """
delete from record where position > ? and session_id = (select id from session where name = ?)
"""
# The line of a truncated session in listings.
CUT_MARK = "update session set is_live = ?, turns = ? where name = ?"


def cut_journals(db: Any, *, sessions: Mapping[str, Session]) -> None:  # noqa: ANN401 - the driver's connection
    """Truncate each of these sessions to the position of its given state."""
    with db:
        for name, session in sessions.items():
            db.execute(CUT_RECORDS, (session.position, name))
            db.execute(CUT_MARK, (session.is_live, session.turns, name))
