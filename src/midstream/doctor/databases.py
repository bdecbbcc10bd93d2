"""opencode's database: tables `session`, `message` and `part`, with a JSON document in each row.

Sessions that are only in its newer tables are in `session_message`, with a complete message in each row. Reading
creates no files, and a server may use the file meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from midstream.doctor import opencode, sqlite_files
from midstream.doctor.file_reading import value_in
from midstream.doctor.file_writing import Written, copy_of, make_backup, make_whole
from midstream.doctor.findings import HistoryReport, finding
from midstream.doctor.opencode import StorageFindings, StoredMessage
from midstream.doctor.rewriting import encode
from midstream.doctor.shapes import Json
from midstream.doctor.sqlite_files import Database
from midstream.errors import ConflictError, UnreadableHistoryError

ITS_TABLES = {"session", "message", "part"}

# All sessions, the oldest first.
SESSIONS = "select id from session order by time_created, id"
# A session's messages in the order of sending.
MESSAGES = "select id, data from message where session_id = ? order by time_created, id"
# The parts of a message in their order.
PARTS = "select id, data from part where message_id = ? order by id"
# Messages without a row that have parts.
ORPHANS = "select distinct message_id from part where message_id not in (select id from message) order by 1"
# A session's messages in newer versions.
NEWER = "select id, type, data from session_message where session_id = ? order by {order}"


REPLACE = {
    table: f"update {table} set data = ? where id = ? and data is ?"  # noqa: S608 - our own names
    for table in ("message", "part", "session_message")
}
"""Replaces the document of an unchanged row."""
DELETE = {
    table: f"delete from {table} where id = ? and data is ?"  # noqa: S608 - see above
    for table in ("message", "part", "session_message")
}
"""Deletes an unchanged row."""


class Change(Struct, frozen=True):
    """Change of one row."""

    table: str
    id: str
    before: str | bytes
    after: str | None
    """None: the row is omitted from the copy, and not changed in place."""


class DatabaseRemedy:
    """A repaired copy of a database that is not written yet."""

    def __init__(self, path: Path, changes: list[Change]) -> None:
        self._path = path
        self._changes = changes

    def beside(self) -> Written:
        """Write `NAME.repaired.EXT`, a copy with changed rows; an earlier copy is replaced.

        Raises:
            ConflictError: A row was changed since it was examined. No copy was written.
            UnavailableError: The disk, the folder or a lock refuses. No copy was written.
        """
        target = copy_of(self._path)
        with sqlite_files.translate_write_errors(target):
            change = partial(_apply, changes=self._changes)
            make_whole(target, partial(sqlite_files.copy, self._path, change=change), like=self._path)
        return Written(target)

    def in_place(self) -> Written:
        """Change the rows in one transaction, after copying the database to `NAME.EXT.bak`.

        opencode may be running: it waits, and reads all of the change or nothing.

        Raises:
            ConflictError: A row was changed since it was examined. Nothing was changed.
            UnavailableError: The disk, the folder or a lock refuses. Nothing was changed; a backup may exist.
        """
        real = self._path.resolve()
        with sqlite_files.translate_write_errors(real):
            backup = make_backup(real, partial(sqlite_files.copy, real))
            with sqlite_files.writing(real) as db:
                _apply(db, [change for change in self._changes if change.after is not None])
        return Written(self._path, backup)


def is_opencode(path: Path) -> bool:
    """Whether a database is opencode's.

    Raises:
        UnreadableHistoryError: It is damaged, or another program keeps it locked.
    """
    with sqlite_files.translate_read_errors(), sqlite_files.reading(path) as db:
        return _tables(db) >= ITS_TABLES


def examine_opencode(
    path: Path, profile: str | None, tick: Callable[[int], None]
) -> tuple[HistoryReport, DatabaseRemedy | None]:
    """Examine every session of a database.

    Raises:
        UnreadableHistoryError: It is damaged, or another program keeps it locked.
        UsageError: There is no profile with this name.
    """
    with sqlite_files.translate_read_errors(), sqlite_files.reading(path) as db:
        db.execute("begin")  # one snapshot, whatever opencode writes meanwhile
        database = _Database(db, profile)
        for number, (session,) in enumerate(db.execute(SESSIONS)):
            tick(number)
            database.examine(session)
        database.find_orphans()
    return database.report(path), DatabaseRemedy(path, database.changes) if database.changes else None


class _Database(StorageFindings):
    def __init__(self, db: Database, profile: str | None) -> None:
        super().__init__(profile)
        self.changes: list[Change] = []
        self._db = db
        tables = _tables(db)
        order = "seq, id" if "seq" in _columns(db, "session_message") else "time_created, id"
        self._newer = NEWER.format(order=order) if "session_message" in tables else None

    def examine(self, session: str) -> None:
        """Examine one session."""
        self.judge(list(self._read_messages(session)) or list(self._newer_ones(session)))

    def find_orphans(self) -> None:
        """Find parts without a message."""
        for (message,) in self._db.execute(ORPHANS):
            self.note_orphan(f"message {message}")

    def _read_messages(self, session: str) -> Iterator[StoredMessage]:
        for id_, data in self._db.execute(MESSAGES, (session,)):
            info = self._read("message", id_, data)
            if info is None:
                continue
            parts: list[tuple[str, Json]] = []
            for part_id, part_data in self._db.execute(PARTS, (id_,)):
                part = self._read("part", part_id, part_data)
                if part is None:
                    continue
                parts.append((f"part {part_id}", part))
                if opencode.is_open(part):
                    self._change("part", part_id, part_data, opencode.end_call(part))
            yield StoredMessage(f"message {id_}", info, parts)

    def _newer_ones(self, session: str) -> Iterator[StoredMessage]:
        for id_, kind, data in self._db.execute(self._newer, (session,)) if self._newer else ():
            value = self._read("session_message", id_, data)
            if value is None:
                continue
            name = f"session_message {id_}"
            found = opencode.newer_message(kind, value)
            if found is not None:
                info, parts = found
                yield StoredMessage(name, info, [(name, part) for part in parts])
            closed = opencode.end_newer_calls(value)
            if closed is not value:
                self._change("session_message", id_, data, closed)

    def _read(self, table: str, id_: str, data: Any) -> Json | None:  # noqa: ANN401 - SQLite has no types
        try:
            value = value_in(
                data if isinstance(data, bytes) else str(data).encode("utf-8", "surrogatepass")
            ).value
        except UnreadableHistoryError:
            value = None
        if isinstance(value, dict):
            return value
        problem = finding("broken-row", "left out of the copy", file=f"{table} {id_}", lost="a row")
        self.findings.append(problem)
        self.changes.append(Change(table, id_, data, None))
        if table == "message":  # the parts of an unreadable message
            parts = self._db.execute(PARTS, (id_,))
            self.changes += [Change("part", part, body, None) for part, body in parts]
        return None

    def _change(self, table: str, id_: str, before: Any, after: Json) -> None:  # noqa: ANN401 - see `_read`
        self.changes.append(Change(table, id_, before, encode(after).decode()))


def _tables(db: Database) -> set[str]:
    return {name for (name,) in db.execute("select name from sqlite_schema where type = 'table'")}


def _columns(db: Database, table: str) -> set[str]:
    return {name for (name,) in db.execute("select name from pragma_table_info(?)", (table,))}


def _apply(db: Database, changes: list[Change]) -> None:
    """Change rows, all or none.

    Raises:
        ConflictError: A row has changed.
    """
    db.execute("begin immediate")
    try:
        for change in changes:
            if change.after is None:
                db.execute(DELETE[change.table], (change.id, change.before))
            else:
                db.execute(REPLACE[change.table], (change.after, change.id, change.before))
            if db.changes() != 1:
                raise ConflictError(
                    f"{change.table} {change.id} was changed meanwhile; stop opencode, then try again"
                )
        db.execute("commit")
    finally:
        if db.in_transaction:
            db.execute("rollback")
