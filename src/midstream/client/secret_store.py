"""Secrets that prove that streams and sessions are ours: one SQLite file for all clients of a user.

The file is apart from their checkpoints and readable by its owner only. Where the keyring of the system was chosen, it
has the secret, and the row in the file has the random name of its entry: a list of the keyring shows no servers and
sessions. A row is written before its entry and removed after it, so a process that dies in between leaves a row that
`settle` finds, and never an entry without one.
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
from midstream.paths import make_folder

T = TypeVar("T")

USER_VERSION = 2
"""Layout of the file. One of an earlier layout, which was never released, is begun anew with a warning."""
APPLICATION_ID = 0x6D_69_64_73
"""Kept in `pragma application_id`, so that no other program's database is taken for ours: "mids"."""
BUSY_S = 40.0
"""Seconds to wait for another process; it holds the file for milliseconds, or for two answers of a keyring."""
ABANDONED_S = 7 * 24 * 3600.0
"""Seconds after which a secret is removed whose checkpoint is not where it was: moved ones are opened before."""
CALLED = "file of secrets"

_log = logging.getLogger(__name__)


class SecretKey(Struct, frozen=True):
    """The key of a secret: that of a stream, or with no stream the session's own."""

    server: str
    session: str
    stream: str = ""


class Keeper(Struct, frozen=True):
    """The checkpoint that a stream's secret is kept for: its lasting name, and where it is now.

    A session's own secret has none: it stays until it is deleted.
    """

    name: str = ""
    place: str = ""


NOBODY = Keeper()


class SecretFileSummary(Struct, frozen=True):
    """Numbers of the secrets in a file; no secret is read.

    Args:
        in_file: Secrets that stand in the file itself.
        in_keyring: Secrets that the keyring has.
        orphans: Secrets whose checkpoint is not where it was.
    """

    in_file: int = 0
    in_keyring: int = 0
    orphans: int = 0


class _Row(Struct, frozen=True):
    key: SecretKey
    entry: str | None
    """Its name in the keyring; None where the secret stands in the file."""
    secret: str | None


_SCHEMA = """
CREATE TABLE secret (
    server TEXT NOT NULL,
    session TEXT NOT NULL,
    stream TEXT NOT NULL,
    entry TEXT, -- its name in the keyring, where that has the secret
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
    """The secrets of one user. Use it from one event loop, then close it; it opens with its first use.

    Args:
        path: The file; made where it is missing. None keeps everything in memory.
        keyring: Has new secrets in the place of the file.
    """

    def __init__(self, path: str | Path | None, *, world: World, keyring: OsKeyring | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._world = world
        self._uses_keyring = keyring is not None and path is not None
        self._keyring = keyring or OsKeyring()
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None

    async def get(self, key: SecretKey) -> str | None:
        """Return a secret; None where there is none, or the keyring has it no more.

        Raises:
            UnavailableError: The keyring that has it does not answer (after 15 s at most), or the file is locked.
            UsageError: Others may read the file, or it cannot be opened.
            StoreDamagedError: It is no intact database.
        """
        return await self._call(lambda: self._get(key))

    async def put(
        self, key: SecretKey, secret: str, *, keeper: Keeper = NOBODY, replaces: str | None = None
    ) -> str:
        """Keep a secret, unless there is another one already, and return the one that counts now.

        On disk, or in the keyring, when it returns. Of several processes that put different ones, all get the same.

        Args:
            keeper: The checkpoint that has the stream.
            replaces: The one that may be replaced.

        Raises:
            UnavailableError, StoreFullError, UsageError, StoreDamagedError: As `get`. Nothing was changed.
        """
        return await self._call(lambda: self._put(key, secret, keeper, replaces))

    async def delete(self, key: SecretKey, *, only: str | None = None) -> None:
        """Remove a secret; one that is not there is no error.

        Args:
            only: The one to remove: where another one counts by now, that stays.

        Raises:
            UnavailableError, StoreFullError, UsageError, StoreDamagedError: As `get`. Nothing was changed.
        """
        await self._call(lambda: self._delete(key, only))

    async def settle(self, keeper: Keeper, streams: Collection[str]) -> None:
        """Remove secrets of streams that are gone, when a checkpoint was opened and is held alone.

        Those that a keyring has stay until one that answers is there.

        Args:
            streams: All that it has: secrets of others that it had are removed.

        Raises:
            UnavailableError, StoreFullError, UsageError, StoreDamagedError: As `get`.
        """
        if self._path is not None and self._path.exists():
            await self._call(lambda: self._settle(keeper, frozenset(streams)))

    async def close(self) -> None:
        """Let go of the file. Calling it twice is harmless."""
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

    def _put(self, key: SecretKey, secret: str, keeper: Keeper, replaces: str | None) -> str:
        entry = self._world.new_id("secret") if self._uses_keyring else None
        new = (key.server, key.session, key.stream, entry, keeper.name, keeper.place, self._world.now())
        if entry is not None:
            self._execute(_NEW, *new)  # committed before the keyring has anything
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

    def _settle(self, keeper: Keeper, streams: frozenset[str]) -> None:
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
    """Return the numbers of what is kept in a file of secrets; no keyring is asked.

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
    """Whether a checkpoint is not where it was; what this user may not see may be there."""
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
        # What is removed is gone from the file, and no log holds it longer than a transaction.
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")
        if _is_older(connection) or not is_laid_out(connection, APPLICATION_ID, USER_VERSION, called=CALLED):
            with transaction(connection):  # another process may have been faster
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
