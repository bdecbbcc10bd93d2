"""The SQL of forwarded commands, and of the watcher's queries: one function each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

FORWARDED_MAX = 100
"""Commands of one result; further ones wait for the next check."""

PUT = "insert into inbox (session, sender, body) values (?, ?, ?) returning number"
FIND_FORWARDED = """
select inbox.session, sender, node from inbox left join session on session.name = inbox.session where number = ?
"""
ANSWER = "update inbox set answer = ? where number = ? and answer is null"
REMOVE = "delete from inbox where number = ?"
REMOVE_OF_SESSION = "delete from inbox where session = ?"
FIND_SENDERS = "select distinct sender from inbox"
REMOVE_OF_SENDER = "delete from inbox where sender = ?"

FIND_VERSION = "pragma data_version"
FIND_UNDECIDED = """
select number, inbox.session, body, sender, node, ifnull(epoch, 0) from inbox
left join session on session.name = inbox.session where answer is null order by number
"""
FIND_ANSWERS = "select number, answer from inbox where sender = ? and answer is not null"
FIND_GIVEN_UP = "select name, epoch from session where is_live = 1 and node is null"
FIND_ORPHANS = """
select name, epoch, node from session where is_live = 1
and (node is null or node not in (select value from json_each(?)))
"""
FIND_ENDS = """
select name, (select ifnull(max(position), 0) from record where session_id = session.id)
from json_each(?) as wanted join session on session.name = wanted.value
"""


class SqlConnection(Protocol):
    """The method of a database connection that this module uses."""

    def execute(self, statements: str, bindings: tuple[Any, ...] = ()) -> Any:  # noqa: ANN401 - the driver's cursor
        """Run one statement."""


class Undecided(Struct, frozen=True):
    """A forwarded command without an answer, its sender, and the node of its session."""

    number: int
    session: str
    body: bytes
    sender: str
    node: str | None
    epoch: int


# --- writes: each is one operation of a transaction ----------------------------------------------------------------


def put(db: SqlConnection, session: str, sender: str, body: bytes) -> int:
    """Store a command for the node that has the session's lease, and return its number."""
    number: int = db.execute(PUT, (session, sender, body)).get
    return number


def answer(db: SqlConnection, number: int, body: bytes, *, us: str, may_hold: Callable[[str], bool]) -> None:
    """Store this node's answer to a forwarded command, unless another living node has its session.

    Args:
        us: This node.
        may_hold: Whether another node may still have a session.
    """
    row = db.execute(FIND_FORWARDED, (number,)).fetchone()
    if row is None:
        return
    _, sender, node = row
    if node not in (None, us) and may_hold(node):
        return
    if sender == us or may_hold(sender):
        db.execute(ANSWER, (body, number))
    else:
        db.execute(REMOVE, (number,))


def remove(db: SqlConnection, number: int) -> None:
    """Delete a forwarded command."""
    db.execute(REMOVE, (number,))


def clear(db: SqlConnection, *, is_alive: Callable[[str], bool]) -> None:
    """Delete the forwarded commands of dead senders: their clients send them again to another node."""
    for (sender,) in db.execute(FIND_SENDERS).fetchall():
        if not is_alive(sender):
            db.execute(REMOVE_OF_SENDER, (sender,))


# --- reads ----------------------------------------------------------------------------------------------------------


class WatcherView:
    """The watcher's view of the database, for use in its thread."""

    def __init__(self, rows: Callable[[str, tuple[Any, ...]], list[Any]]) -> None:
        self._rows = rows

    def version(self) -> int:
        """Return a number that changes with every commit of another connection."""
        number: int = self._rows(FIND_VERSION, ())[0][0]
        return number

    def list_undecided(self) -> list[Undecided]:
        """Return all forwarded commands without an answer, oldest first."""
        return [Undecided(*row) for row in self._rows(FIND_UNDECIDED, ())]

    def answers(self, sender: str) -> list[tuple[int, bytes]]:
        """Return the answers to this node's forwarded commands."""
        return self._rows(FIND_ANSWERS, (sender,))

    def list_given_up(self) -> list[tuple[str, int]]:
        """Return the released sessions with an open turn, with their epochs."""
        return self._rows(FIND_GIVEN_UP, ())

    def orphans(self, living: Collection[str]) -> list[tuple[str, int, str | None]]:
        """Return the sessions with an open turn that none of these nodes has, with epoch and node."""
        return self._rows(FIND_ORPHANS, (_json(living),))

    def find_moved(self, followed: Mapping[str, int]) -> frozenset[str]:
        """Return the sessions whose end differs from the given one, or that were deleted."""
        ends = dict(self._rows(FIND_ENDS, (_json(followed),)))
        return frozenset(session for session, end in followed.items() if ends.get(session, 0) != end)


def _json(names: Collection[str]) -> str:
    return msgspec.json.encode(list(names)).decode()
