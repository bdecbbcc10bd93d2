"""The database file: its creation, checks and migration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import apsw

from midstream.environment import World
from midstream.errors import MidstreamError, StoreBusyError, UsageError
from midstream.file_safety import create_own, follow_own_links, require_own_database
from midstream.store.sqlite import inbox
from midstream.store.sqlite import liveness as nodes
from midstream.store.sqlite.sqlite_errors import refusal_of
from midstream.store.sqlite.worker_thread import pause

T = TypeVar("T")

SCHEMA_VERSION = 2
"""Kept in `pragma user_version`."""
# From version 1, whose journals have no chain. The new column rewrites no rows.
UPGRADE = """
alter table record add column link blob not null default x'';
create index if not exists session_changed on session (changed_at, name);
"""
CALLED = "the database"
APPLICATION_ID = 0x6D_73_74_72
"""Kept in `pragma application_id`, so that the database of another program is refused: "mstr"."""
PRERELEASE_ID = 0x6D_69_64_73
"""The application id of versions before the first release, whose records had other names."""

BUSY_TRIES_MAX = 1000
"""Tries to get the lock from another process, 0.2 to 4 ms apart at random: about two seconds. With SQLite's own
waiting, one process could starve the others."""
BUSY_PAUSE_MIN_S = 0.0002
BUSY_PAUSE_MAX_S = 0.004
PAGE_BYTES = 2048
"""Page size: an append rewrites about two pages, so half of SQLite's usual size writes nearly half the bytes."""
LOG_BYTES_MAX = 64 * 2**20
"""Size to which a log is cut after a slow reader of another process has made it grow."""
BEGIN = "begin immediate"
COMPANIONS = ("-wal", "-shm")
"""Ends of the names of SQLite's log and its index, beside a database."""
_IN_LOG_MODE = b"\2\2"
"""Bytes 18 and 19 of a database in log mode."""


def schema() -> str:
    """Return the statements that create the tables, views and indexes."""
    return files("midstream.store.sqlite").joinpath("schema.sql").read_text()


class DatabaseFile:
    """A database file.

    Args:
        path: Its path; it may not exist yet.
        world: Source of the jitter between tries.
        vfs: Name of a registered SQLite file system, or None for the usual one.
    """

    def __init__(self, path: Path, world: World, vfs: str | None) -> None:
        # Resolved, so that all processes use the same folder for nodes.
        self.path = path.resolve()
        self.nodes = self.path.with_name(f"{self.path.name}.nodes")
        self.key_file = self.path.with_name(f"{self.path.name}.store-key")
        self._named = path
        self.world = world
        self._vfs = vfs

    @contextlib.contextmanager
    def open_for_watcher(self) -> Iterator[inbox.WatcherView]:
        """Open a read-only connection for the watcher, in its thread."""
        with self.convert_errors():
            db = self.connect(flags=apsw.SQLITE_OPEN_READONLY)

        def rows(query: str, values: tuple[Any, ...]) -> list[Any]:  # as SQLite has them
            # Without retries: the watcher checks again soon, and must beat meanwhile.
            with self.convert_errors(db):
                return db.execute(query, values).fetchall()

        try:
            yield inbox.WatcherView(rows)
        finally:
            db.close()

    def connect(
        self, *, flags: int = apsw.SQLITE_OPEN_READWRITE, is_immutable: bool = False
    ) -> apsw.Connection:
        """Open a connection; one that may write creates the file, readable by this user only.

        Args:
            is_immutable: Whether SQLite may assume that no process changes the file.

        Raises:
            UsageError: The file, or one that SQLite keeps beside it, is not safe to open: see `file_safety`.
        """
        try:
            follow_own_links(self._named, CALLED)
            require_own_database(self.path, CALLED)
        except OSError as error:
            raise UsageError(f"database {str(self.path)!r} cannot be opened: {error.strerror}") from error
        if flags & apsw.SQLITE_OPEN_READWRITE:
            self._create()
        flags |= apsw.SQLITE_OPEN_NOFOLLOW
        if is_immutable:
            uri = f"{self.path.as_uri()}?immutable=1"
            return apsw.Connection(uri, flags=flags | apsw.SQLITE_OPEN_URI, vfs=self._vfs)
        return apsw.Connection(str(self.path), flags=flags, vfs=self._vfs)

    @contextlib.contextmanager
    def open_reader(self) -> Iterator[apsw.Connection]:
        """Open a read-only connection that leaves no files beside the database, also where none can be created.

        A reader of a database in log mode would create a log and its index, which stay. Without these two, no process
        has opened the database, so the file is read as immutable.

        Raises:
            UsageError: See `connect`.
            StoreBusyError: A process has opened and changed the database meanwhile: what was read may be wrong.
        """
        flags = apsw.SQLITE_OPEN_READONLY
        before = self._stamp() if self._is_unused() else None
        db = self.connect(flags=flags) if before is None else self.connect(flags=flags, is_immutable=True)
        try:
            yield db
        finally:
            db.close()
        if before is not None and before != self._stamp():
            raise StoreBusyError(f"database {str(self.path)!r} was changed while it was read; try again")

    def prepare(self, db: apsw.Connection) -> None:
        """Create the tables, or check the existing ones.

        Raises:
            UsageError: They belong to another program, or have a newer version. Nothing was changed.
        """
        db.execute(f"pragma page_size = {PAGE_BYTES}")  # only for a new file
        self.retry_while_busy(partial(self.is_prepared, db))
        self.retry_while_busy(partial(db.execute, "pragma journal_mode = wal"))
        db.execute(f"pragma journal_size_limit = {LOG_BYTES_MAX}")
        db.execute("pragma secure_delete = on")  # deleted content is overwritten
        # macOS: a plain sync ends in the drive's cache. Without effect elsewhere.
        db.execute("pragma fullfsync = on; pragma checkpoint_fullfsync = on")
        self.retry_while_busy(partial(db.execute, BEGIN))
        try:
            if not self.is_prepared(db):
                db.execute(schema())
                db.execute(f"pragma application_id = {APPLICATION_ID}")
                db.execute(f"pragma user_version = {SCHEMA_VERSION}")
            elif number_of(db.execute("pragma user_version")) < SCHEMA_VERSION:
                self._upgrade(db)
            db.execute("commit")
        finally:
            if db.in_transaction:
                db.execute("rollback")

    def retry_while_busy(self, step: Callable[[], T]) -> T:
        """Run one SQLite operation, and retry while another process has the lock."""
        for _ in range(BUSY_TRIES_MAX):
            try:
                return step()
            except apsw.BusyError:
                spread = BUSY_PAUSE_MAX_S - BUSY_PAUSE_MIN_S
                pause(BUSY_PAUSE_MIN_S + spread * self.world.chance())
        return step()

    @contextlib.contextmanager
    def convert_errors(self, db: apsw.Connection | None = None) -> Iterator[None]:
        """Convert SQLite's errors."""
        try:
            yield
        except apsw.Error as error:
            raise self.refusal(error, db) from error

    def refusal(self, error: apsw.Error, db: apsw.Connection | None) -> MidstreamError:
        """Return the error of midstream for one of SQLite."""
        return refusal_of(error, f"database {str(self.path)!r}", db)

    def _is_unused(self) -> bool:
        """Whether no process has opened the database: it is in log mode, and has neither a log nor its index."""
        if any(self.path.with_name(f"{self.path.name}{companion}").exists() for companion in COMPANIONS):
            return False
        try:
            with self.path.open("rb") as file:
                return file.read(20)[18:] == _IN_LOG_MODE
        except OSError:
            return False

    def identify(self) -> tuple[int, int] | None:
        """Return the device and the number of the file at the path; None if there is none."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _stamp(self) -> tuple[int, int, int]:
        found = self.path.stat()
        return found.st_size, found.st_mtime_ns, found.st_ino

    def _create(self) -> None:
        # Only if it is missing: closing a second descriptor of a database would release SQLite's locks on it.
        try:
            create_own(self.path)
        except OSError as error:
            raise UsageError(f"database {str(self.path)!r} cannot be created: {error.strerror}") from error

    def _upgrade(self, db: apsw.Connection) -> None:
        # A process of the older version with the open file would append records without links.
        if nodes.has_others(self.nodes, ""):
            raise UsageError(
                f"database {str(self.path)!r} has schema 1, and a server uses it: stop all servers of the "
                "older version, then start this one"
            )
        db.execute(UPGRADE)
        db.execute(f"pragma user_version = {SCHEMA_VERSION}")

    def is_prepared(self, db: apsw.Connection) -> bool:
        """Return whether the tables exist; raise `UsageError` for those of another program."""
        with _one_moment(db):  # another process may be creating the tables
            application = number_of(db.execute("pragma application_id"))
            version = number_of(db.execute("pragma user_version"))
            tables = number_of(db.execute("select count(*) from sqlite_schema"))
        if application == APPLICATION_ID:
            if version > SCHEMA_VERSION:
                raise UsageError(
                    f"database {str(self.path)!r} has schema {version}, this midstream supports "
                    f"{SCHEMA_VERSION}; install the newer midstream that created it"
                )
            return True
        if application == PRERELEASE_ID:
            raise UsageError(
                f"database {str(self.path)!r} was made by a version before the first release, whose format changed: "
                "move the file away to begin a new one"
            )
        if application or version or tables:
            raise UsageError(f"database {str(self.path)!r} belongs to another program")
        return False


@contextlib.contextmanager
def _one_moment(db: apsw.Connection) -> Iterator[None]:
    """Read from one snapshot in the block."""
    if db.in_transaction:
        yield
        return
    db.execute("begin")
    try:
        yield
    finally:
        db.execute("rollback")


def number_of(cursor: apsw.Cursor) -> int:
    """Return the only number of a query's result."""
    number: int = cursor.get
    return number
