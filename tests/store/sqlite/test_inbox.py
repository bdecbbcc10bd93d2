"""The SQL of the inbox, on its own database; the store contract covers several nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apsw
import pytest

from midstream.store.sqlite import inbox
from midstream.store.sqlite.database import schema
from midstream.store.sqlite.inbox import Undecided, WatcherView


@pytest.fixture
def db() -> Iterator[apsw.Connection]:
    connection = apsw.Connection(":memory:")
    connection.execute(schema())
    yield connection
    connection.close()


def _view(db: apsw.Connection) -> WatcherView:
    def rows(query: str, values: tuple[Any, ...]) -> list[Any]:
        return db.execute(query, values).fetchall()

    return WatcherView(rows)


def _session(
    db: apsw.Connection, name: str, node: str | None, *, epoch: int = 1, is_live: bool = True
) -> None:
    db.execute(
        "insert into session (name, epoch, node, created_at, changed_at, is_live) values (?, ?, ?, 1, 1, ?)",
        (name, epoch, node, is_live),
    )


def _no_node(node: str) -> bool:
    return False


def _every_node(node: str) -> bool:
    return True


def test_a_command_is_undecided_until_it_is_answered(db: apsw.Connection) -> None:
    _session(db, "s", "us", epoch=7)
    first = inbox.put(db, "s", "them", b"1")
    second = inbox.put(db, "new", "them", b"2")
    view = _view(db)
    assert view.list_undecided() == [
        Undecided(first, "s", b"1", "them", "us", 7),
        Undecided(second, "new", b"2", "them", None, 0),
    ]
    inbox.answer(db, first, b"yes", us="us", may_hold=_every_node)
    inbox.answer(db, first, b"no", us="us", may_hold=_every_node)
    assert view.list_undecided() == [Undecided(second, "new", b"2", "them", None, 0)]
    assert view.answers("them") == [(first, b"yes")]
    inbox.remove(db, first)
    assert view.answers("them") == []


def test_a_node_cannot_answer_for_another_living_node(db: apsw.Connection) -> None:
    _session(db, "s", "them")
    forwarded = inbox.put(db, "s", "sender", b"1")
    inbox.answer(db, forwarded, b"no", us="us", may_hold=_every_node)
    assert [each.number for each in _view(db).list_undecided()] == [forwarded]


def test_an_answer_to_a_dead_sender_is_not_stored(db: apsw.Connection) -> None:
    forwarded = inbox.put(db, "s", "dead", b"1")
    inbox.answer(db, forwarded, b"yes", us="us", may_hold=_no_node)
    assert (_view(db).list_undecided(), _view(db).answers("dead")) == ([], [])


def test_commands_and_answers_of_a_dead_sender_are_cleared(db: apsw.Connection) -> None:
    answered, asked = inbox.put(db, "s", "dead", b"1"), inbox.put(db, "s", "dead", b"2")
    inbox.answer(db, answered, b"yes", us="us", may_hold=_every_node)
    inbox.clear(db, is_alive=_every_node)
    assert _view(db).answers("dead") == [(answered, b"yes")]
    assert [each.number for each in _view(db).list_undecided()] == [asked]
    inbox.clear(db, is_alive=_no_node)
    assert _view(db).answers("dead") == []
    assert _view(db).list_undecided() == []


def test_open_turns_without_a_living_node_are_found(db: apsw.Connection) -> None:
    _session(db, "given up", None, epoch=2)
    _session(db, "lost", "dead", epoch=3)
    _session(db, "held", "us")
    _session(db, "closed", "dead", is_live=False)
    assert _view(db).list_given_up() == [("given up", 2)]
    assert sorted(_view(db).orphans(["us"])) == [("given up", 2, None), ("lost", 3, "dead")]


def test_the_search_for_open_turns_does_not_read_all_sessions(db: apsw.Connection) -> None:
    for query in (inbox.FIND_GIVEN_UP, inbox.FIND_ORPHANS.replace("?", "'[]'")):
        plan = " ".join(str(row[3]) for row in db.execute(f"explain query plan {query}"))
        assert "session_live" in plan


def test_a_session_has_moved_if_its_end_has_changed_or_it_is_deleted(db: apsw.Connection) -> None:
    _session(db, "s", "us")
    db.execute("insert into record select id, 1, 1, x'7b7d', x'' from session")
    view = _view(db)
    assert view.find_moved({"s": 1, "never": 0}) == frozenset()
    assert view.find_moved({"s": 0}) == {"s"}
    assert view.find_moved({"gone": 4}) == {"gone"}
