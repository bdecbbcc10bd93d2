"""Secrets of streams and sessions: one SQLite file for all clients of a user.

The file is separate from their checkpoints, and readable by its owner only. With the system's keyring, the keyring has
the secret, and the row in the file has the random name of its entry, so that names in the keyring reveal nothing. A row
is written before its entry and removed after it. So a crash may leave a row without an entry, which `settle` removes,
but never an entry without a row.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from midstream.client.os_keyring import OsKeyring
from midstream.client.sqlite_checks import is_laid_out, lay_out, transaction, translate_errors
from midstream.environment import World
from midstream.errors import UnavailableError, UsageError
from midstream.file_safety import create_own_database
from midstream.paths import Paths, make_folder

T = TypeVar("T")

USER_VERSION = 2
"""Version of the schema. A file with an earlier, unreleased version is replaced with a warning."""
APPLICATION_ID = 0x6D_69_64_73
"""Value of `pragma application_id` ("mids"), which identifies midstream's files."""
BUSY_S = 40.0
"""Seconds to wait for another process, which holds the file for milliseconds, or for two calls of a keyring."""
ABANDONED_S = 7 * 24 * 3600.0
"""Seconds after which the secrets of a missing state file are removed; a moved file is opened before."""
CALLED = "file of secrets"

_log = logging.getLogger(__name__)


class SecretKey(Struct, frozen=True):
    """The key of a stream's secret, or, without a stream, of the session's own secret."""

    server: str
    session: str
    stream: str = ""


class StateFileRef(Struct, frozen=True):
    """The state file of a stream's secret: its permanent name, and its current path.

    A session's own secret has none: it stays until it is deleted.
    """

    name: str = ""
    place: str = ""


NOBODY = StateFileRef()


def secrets_of_this_user() -> Path:
    """Return the file of secrets that all clients of this user share.

    Raises:
        UsageError: This user has no home folder.
    """
    try:
        return Paths.find().secrets
    except RuntimeError as error:  # raised by pathlib, in a container with an unknown user
        raise UsageError("this user has no home folder; set MIDSTREAM_HOME, or give `secrets=`") from error


class SecretFileSummary(Struct, frozen=True):
    """Numbers of the secrets of a file.

    Args:
        in_file: Secrets in the file itself.
        in_keyring: Secrets in the keyring.
        orphans: Secrets whose state file is missing.
    """

    in_file: int = 0
    in_keyring: int = 0
    orphans: int = 0


class _Row(Struct, frozen=True):
    key: SecretKey
    entry: str | None
    """Its name in the keyring; None if the secret is in the file."""
    secret: str | None


_SCHEMA = """
CREATE TABLE secret (
    server TEXT NOT NULL,
    session TEXT NOT NULL,
    stream TEXT NOT NULL,
    entry TEXT, -- its name in the keyring, if the secret is there
    secret TEXT,
    keeper TEXT NOT NULL,
    place TEXT NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (server, session, stream)
) WITHOUT ROWID
"""
_ROWS = "SELECT server, session, stream, entry, secret FROM secret WHERE "
_ONE = "server = ? AND session = ? AND stream = ?"
_SET = "UPDATE secret SET secret = ? WHERE server = ? AND session = ? AND stream = ?"
_DELETE = "DELETE FROM secret WHERE server = ? AND session = ? AND stream = ?"
_NEW = "INSERT OR IGNORE INTO secret VALUES (?, ?, ?, ?, NULL, ?, ?, ?)"


class SecretStore:
    """The secrets of one user, for use from one event loop. The first call opens the file.

    Args:
        path: The file, created if missing. None keeps everything in memory.
        keyring: Keyring for new secrets, instead of the file.
    """

    def __init__(self, path: str | Path | None, *, world: World, keyring: OsKeyring | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._world = world
        self._uses_keyring = keyring is not None and path is not None
        self._keyring = keyring or OsKeyring()
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None

    async def get(self, key: SecretKey) -> str | None:
        """Return a secret; None if it does not exist, or is missing in the keyring.

        Raises:
            UnavailableError: The keyring with the secret does not answer (within 15 s), or the file is locked.
            UsageError: Others may read the file, or it cannot be opened.
            StoreDamagedError: The file is damaged.
        """
        return await self._call(lambda: self._get(key))

    async def put(
        self, key: SecretKey, secret: str, *, keeper: StateFileRef = NOBODY, replaces: str | None = None
    ) -> str:
        """Store a secret durably, unless another one exists; return the stored one.

        If several processes store different secrets, all receive the same one.

        Args:
            keeper: The state file of the stream.
            replaces: A secret that may be replaced.

        Raises:
            UnavailableError, StoreFullError, UsageError, StoreDamagedError: As `get`. Nothing was changed.
        """
        return await self._call(lambda: self._put(key, secret, keeper, replaces))

    async def delete(self, key: SecretKey, *, only: str | None = None) -> None:
        """Remove a secret; a missing one is not an error.

        Args:
            only: Remove the secret only if it has this value.

        Raises:
            UnavailableError, StoreFullError, UsageError, StoreDamagedError: As `get`. Nothing was changed.
        """
        await self._call(lambda: self._delete(key, only))

    async def settle(self, keeper: StateFileRef, streams: Collection[str]) -> None:
        """Remove secrets of removed streams, after a state file was opened and locked.

        Secrets in a keyring stay until the keyring answers.

        Args:
            streams: All streams of the state file; secrets of its other streams are removed.

        Raises:
            UnavailableError, StoreFullError, UsageError, StoreDamagedError: As `get`.
        """
        if self._path is not None and self._path.exists():
            await self._call(lambda: self._settle(keeper, frozenset(streams)))

    async def close(self) -> None:
        """Close the file. Idempotent."""
        if self._thread is not None:
            await self._call(self._close)
            self._thread.shutdown()
            self._thread = None

    # --- on the thread ------------------------------------------------------------------------------------------

    async def _call(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="midstream-secrets")
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: _translate(work, self._path)
        )

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _get(self, key: SecretKey) -> str | None:
        row = self._row(key)
        return None if row is None else self._secret_of(row)

    def _secret_of(self, row: _Row) -> str | None:
        return row.secret if row.entry is None else self._keyring.get(row.entry)

    def _put(self, key: SecretKey, secret: str, keeper: StateFileRef, replaces: str | None) -> str:
        entry = self._world.new_id("secret") if self._uses_keyring else None
        new = (key.server, key.session, key.stream, entry, keeper.name, keeper.place, self._world.now())
        if entry is not None:
            self._execute(_NEW, *new)  # committed before the entry in the keyring is written
        with transaction(self._file()):
            self._execute(_NEW, *new)
            row = self._row(key)
            assert row is not None
            known = self._secret_of(row)
            if known is not None and known != replaces:
                return known
            if row.entry is None:
                whose = (key.server, key.session, key.stream)
                self._execute(_SET, secret, *whose)
            else:
                self._keyring.put(row.entry, secret)
        return secret

    def _delete(self, key: SecretKey, only: str | None) -> None:
        with transaction(self._file()):
            row = self._row(key)
            if row is not None and (only is None or self._secret_of(row) == only):
                if row.entry is not None:
                    self._keyring.delete(row.entry)
                self._execute(_DELETE, key.server, key.session, key.stream)

    def _settle(self, keeper: StateFileRef, streams: frozenset[str]) -> None:
        assert keeper.name, "secrets without a keeper are those of sessions"
        ours = [row for row in self._rows("keeper = ?", keeper.name) if row.key.stream not in streams]
        places = "SELECT DISTINCT keeper, place FROM secret WHERE keeper NOT IN ('', ?)"
        since = self._world.now() - ABANDONED_S
        for name, place in self._execute(places, keeper.name).fetchall():
            if place == keeper.place or _is_gone(place):
                ours += self._rows("keeper = ? AND place = ? AND at < ?", name, place, since)
        for row in ours:
            try:
                self._delete(row.key, None)
            except UnavailableError as error:
                _log.warning("%s: an unused entry could not be removed", error.message)
        moved = "UPDATE secret SET place = ? WHERE keeper = ? AND place != ?"
        self._execute(moved, keeper.place, keeper.name, keeper.place)

    # --- the file -----------------------------------------------------------------------------------------------

    def _row(self, key: SecretKey) -> _Row | None:
        return next(iter(self._rows(_ONE, key.server, key.session, key.stream)), None)

    def _rows(self, which: str, *values: object) -> list[_Row]:
        found = self._execute(_ROWS + which, *values).fetchall()
        return [_Row(SecretKey(*whose), entry, secret) for *whose, entry, secret in found]

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._file().execute(statement, values)

    def _file(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _open_file(self._path)
        return self._connection


def survey(path: Path) -> SecretFileSummary:
    """Return the numbers of secrets in a file, without a call of the keyring.

    Raises:
        UsageError, UnavailableError, StoreDamagedError: As `SecretStore.get`.
    """
    return _translate(lambda: _survey(path), path)


def _translate(work: Callable[[], T], path: Path | None) -> T:
    called = f"{CALLED} {str(path)!r}"
    return translate_errors(
        work, called=called, busy=f"another process has held the {called} for {BUSY_S:g} s"
    )


def _survey(path: Path) -> SecretFileSummary:
    if not path.exists():
        return SecretFileSummary()
    with closing(_open_file(path)) as connection:
        rows = connection.execute("SELECT entry IS NULL, keeper, place FROM secret").fetchall()
    in_file = sum(is_here for is_here, _, _ in rows)
    orphans = sum(bool(keeper) and _is_gone(place) for _, keeper, place in rows)
    return SecretFileSummary(in_file, len(rows) - in_file, orphans)


def _is_gone(place: str) -> bool:
    """Return whether a state file is missing. A path that this user cannot access does not count as missing."""
    try:
        return not Path(place).exists()
    except OSError:
        return False


def _open_file(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        make_folder(path.parent)
        create_own_database(path, f"the {CALLED}")
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise UsageError(
                f"{path} holds secrets and is readable by other users; restrict it with chmod 600"
            )
    place = ":memory:" if path is None else str(path)
    connection = sqlite3.connect(place, isolation_level=None, timeout=BUSY_S, check_same_thread=False)
    try:
        # Deleted data is overwritten, and the journal keeps it only during a transaction.
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")
        if _is_older(connection) or not is_laid_out(connection, APPLICATION_ID, USER_VERSION, called=CALLED):
            with transaction(connection):  # another process may have created the schema
                if _is_older(connection):
                    _log.warning(
                        "%s has an earlier layout and is replaced; earlier streams lose their secrets",
                        path,
                    )
                    connection.execute("DROP TABLE IF EXISTS entry")
                    lay_out(connection, _SCHEMA, APPLICATION_ID, USER_VERSION)
                elif not is_laid_out(connection, APPLICATION_ID, USER_VERSION, called=CALLED):
                    lay_out(connection, _SCHEMA, APPLICATION_ID, USER_VERSION)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_older(connection: sqlite3.Connection) -> bool:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return bool(application == APPLICATION_ID and version < USER_VERSION)
