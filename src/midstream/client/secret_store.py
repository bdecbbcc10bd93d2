"""What proves that streams and sessions are ours: in the system's keyring, else in a file of this user.

One SQLite file for all clients of a user, apart from their checkpoints and readable by its owner only. It says which
secrets there are; where a keyring keeps them it holds their names, and no secret. Entries have names by chance, so a
keyring that lists them tells nothing of servers and sessions.

Whatever happens between two steps, nothing is lost and nothing stays for ever: an entry is written down before the
keyring is asked to keep it, it counts when it is kept, and it is crossed out before the keyring is asked to forget it.
`settle` finishes what a dead process left.
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

from midstream.client.databases import is_laid_out, lay_out, transaction, translated
from midstream.client.os_keyring import OsKeyring
from midstream.errors import StoreBusyError, UnavailableError, UsageError
from midstream.places import made
from midstream.world import World

T = TypeVar("T")

USER_VERSION = 1
APPLICATION_ID = 0x6D_69_64_73
"""Kept in `pragma application_id`, so that no other program's database is taken for ours: "mids"."""
BUSY_S = 10.0
"""Seconds to wait for another process; each holds the file for a few milliseconds at a time."""
PUTS_MAX = 5
"""Tries of a `put` while others put the same."""
TOLD_MAX = 256
"""Entries of the keyring that are not asked for again: one has a name of its own, and never another secret."""
UNDERWAY_S = 3600.0
"""Seconds after which an entry that does not count was left by somebody who died."""
ABANDONED_S = 7 * 24 * 3600.0
"""Seconds after which a secret is removed whose checkpoint is not where it was: moved ones are opened before."""
CALLED = "file of secrets"

_log = logging.getLogger(__name__)


class SecretKey(Struct, frozen=True):
    """Whose secret: that of a stream, or with no stream the session's own."""

    server: str
    session: str
    stream: str = ""


class Keeper(Struct, frozen=True):
    """The checkpoint that a stream's secret is kept for: its lasting name, and where it is now.

    A session's own secret has none: it stays until somebody forgets it.
    """

    name: str = ""
    place: str = ""


NOBODY = Keeper()


class Survey(Struct, frozen=True):
    """What a file of secrets says about itself; no secret is read.

    Args:
        in_file: Secrets that stand in the file itself.
        in_keyring: Secrets that the keyring has.
        orphans: Entries that a dead process left, or whose checkpoint is not where it was.
    """

    in_file: int = 0
    in_keyring: int = 0
    orphans: int = 0


class _Entry(Struct, frozen=True):
    name: str
    is_in_keyring: int
    secret: str | None


_SCHEMA = """
CREATE TABLE entry (
    name TEXT PRIMARY KEY, -- in the keyring
    server TEXT NOT NULL,
    session TEXT NOT NULL,
    stream TEXT NOT NULL,
    keeper TEXT NOT NULL,
    place TEXT NOT NULL,
    at REAL NOT NULL,
    counts INTEGER NOT NULL, -- 0: not kept yet, or crossed out
    is_in_keyring INTEGER NOT NULL, -- whether the keyring was asked to keep it
    secret TEXT -- unless the keyring has it
) WITHOUT ROWID;
CREATE UNIQUE INDEX one ON entry (server, session, stream) WHERE counts
"""
_CURRENT = """
SELECT name, is_in_keyring, secret FROM entry WHERE server = ? AND session = ? AND stream = ? AND counts
"""
_NEW = "INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
# A dead process' drafts and removals; the streams that this checkpoint does not have any more, whatever they are.
_LEFT = "SELECT name, is_in_keyring, secret FROM entry WHERE NOT counts AND (at < ? OR keeper = ?)"
_STREAMS_OF = "SELECT name, is_in_keyring, secret, stream FROM entry WHERE counts AND keeper = ?"
_ELSEWHERE = "SELECT name, is_in_keyring, secret, place FROM entry WHERE keeper NOT IN ('', ?) AND at < ?"


class SecretStore:
    """The secrets of one user. Use it from one event loop, then close it; it opens with its first use.

    Args:
        path: The file; made where it is missing. None keeps everything in memory and asks no keyring.
        world: Clock and names.
        keyring: The system's.
    """

    def __init__(self, path: str | Path | None, *, world: World, keyring: OsKeyring | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._world = world
        self._keyring = None if path is None else keyring or OsKeyring()
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._told: dict[str, str] = {}

    async def get(self, key: SecretKey) -> str | None:
        """Return a secret; None where there is none, or the keyring says that it has it no more.

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

        On disk, or in the keyring, when it returns. Of several processes that put different ones, all are told the
        same.

        Args:
            key: Whose it is.
            secret: Any text.
            keeper: The checkpoint that has the stream.
            replaces: The one that may be replaced.

        Raises:
            UnavailableError, StoreFullError, UsageError, StoreDamagedError: As `get`. Nothing was changed.
        """
        return await self._call(lambda: self._put(key, secret, keeper, replaces))

    async def forget(self, key: SecretKey, *, only: str | None = None) -> None:
        """Remove a secret; one that is not there is no error.

        Where the keyring does not answer, it is crossed out at once and removed by a later `settle`.

        Args:
            key: Whose it is.
            only: The one to remove: where another one counts by now, that stays.

        Raises:
            UnavailableError, StoreFullError, UsageError, StoreDamagedError: As `get`. Nothing was changed.
        """
        await self._call(lambda: self._forget(key, only))

    async def settle(self, keeper: Keeper, streams: Collection[str]) -> None:
        """Finish what dead processes left, for whoever has just opened a checkpoint and holds it alone.

        Args:
            keeper: The checkpoint.
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
            self._thread, lambda: _translated(work, self._path)
        )

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _get(self, key: SecretKey) -> str | None:
        for _ in range(PUTS_MAX):
            entry = self._current(key)
            if entry is None:
                return None
            if (secret := self._secret_of(entry)) is not None or self._current(key) == entry:
                return secret
        raise StoreBusyError(f"others change the {CALLED} all the time")

    def _secret_of(self, entry: _Entry) -> str | None:
        if entry.secret is not None:
            return entry.secret
        assert self._keyring is not None, "who has no keyring keeps secrets in the file"
        if (known := self._told.get(entry.name)) is not None:
            return known
        told = self._keyring.get(entry.name)
        if told is not None:
            self._told[entry.name] = told
            if len(self._told) > TOLD_MAX:
                del self._told[next(iter(self._told))]
        return told

    def _put(self, key: SecretKey, secret: str, keeper: Keeper, replaces: str | None) -> str:
        for _ in range(PUTS_MAX):
            before = self._current(key)
            known = self._get(key) if before else None
            if known == secret or known not in {None, replaces}:
                assert known is not None, "a secret is put, and it is none"
                return known
            draft = self._draft(key, secret, keeper)
            if self._promote(draft, key, keeper, instead_of=before):
                if before is not None:
                    self._remove(before)
                return secret
            self._remove(draft)
        raise StoreBusyError(f"others change the {CALLED} all the time")

    def _draft(self, key: SecretKey, secret: str, keeper: Keeper) -> _Entry:
        """Return an entry that does not count yet; it stands in the file if the keyring knows of it."""
        draft = _Entry(self._world.new_id("secret"), 0, secret)
        if self._keyring is None or not (backend := self._keyring.name()):
            return draft
        draft = _Entry(draft.name, 1, None)
        self._execute(_NEW, *self._row(draft, key, keeper, counts=0))
        try:
            self._keyring.put(draft.name, secret)
        except UnavailableError as error:
            _log.warning("%s (%s): the secret is kept in %s", error.message, backend, self._path)
            return _Entry(draft.name, 1, secret)
        return draft

    def _promote(self, draft: _Entry, key: SecretKey, keeper: Keeper, *, instead_of: _Entry | None) -> bool:
        """Let a draft count in the place of what counted; False where that is not so any more."""
        with transaction(self._file()):
            if self._current(key) != instead_of:
                return False
            if instead_of is not None:
                self._cross_out(instead_of)
            self._execute("DELETE FROM entry WHERE name = ?", draft.name)
            self._execute(_NEW, *self._row(draft, key, keeper, counts=1))
        return True

    def _row(
        self, entry: _Entry, key: SecretKey, keeper: Keeper, *, counts: int
    ) -> tuple[str | float | None, ...]:
        whose = (key.server, key.session, key.stream, keeper.name, keeper.place)
        return (entry.name, *whose, self._world.now(), counts, entry.is_in_keyring, entry.secret)

    def _forget(self, key: SecretKey, only: str | None) -> None:
        entry = self._current(key)
        if entry is not None and (only is None or self._secret_of(entry) == only):
            self._remove(entry)

    def _cross_out(self, entry: _Entry) -> None:
        self._execute("UPDATE entry SET counts = 0, secret = NULL WHERE name = ?", entry.name)

    def _remove(self, entry: _Entry) -> None:
        self._told.pop(entry.name, None)
        if entry.is_in_keyring and self._keyring is not None:
            self._cross_out(entry)
            try:
                self._keyring.forget(entry.name)
            except UnavailableError as error:
                _log.warning(
                    "%s: one of its entries is of no use any more, and is still there", error.message
                )
                return
        self._execute("DELETE FROM entry WHERE name = ?", entry.name)

    def _settle(self, keeper: Keeper, streams: frozenset[str]) -> None:
        assert keeper.name, "what is nobody's are the secrets of sessions"
        now = self._world.now()
        orphans = [_Entry(*row) for row in self._execute(_LEFT, now - UNDERWAY_S, keeper.name)]
        for *row, stream in self._execute(_STREAMS_OF, keeper.name).fetchall():
            if stream not in streams:
                orphans.append(_Entry(*row))
        for *row, place in self._execute(_ELSEWHERE, keeper.name, now - ABANDONED_S).fetchall():
            if place == keeper.place or _is_gone(place):
                orphans.append(_Entry(*row))
        for entry in orphans:
            self._remove(entry)
        moved = "UPDATE entry SET place = ? WHERE keeper = ? AND place != ?"
        self._execute(moved, keeper.place, keeper.name, keeper.place)

    # --- the file -----------------------------------------------------------------------------------------------

    def _current(self, key: SecretKey) -> _Entry | None:
        row = self._execute(_CURRENT, key.server, key.session, key.stream).fetchone()
        return None if row is None else _Entry(*row)

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._file().execute(statement, values)

    def _file(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _opened(self._path)
        return self._connection


def survey(path: Path, *, now: float) -> Survey:
    """Return what is kept in a file of secrets; nothing is written, and no keyring is asked.

    Raises:
        UsageError, UnavailableError, StoreDamagedError: As `SecretStore.get`.
    """
    return _translated(lambda: _survey(path, now), path)


def _translated(work: Callable[[], T], path: Path | None) -> T:
    called = f"{CALLED} {str(path)!r}"
    return translated(work, called=called, busy=f"another process has held the {called} for {BUSY_S:g} s")


def _survey(path: Path, now: float) -> Survey:
    if not path.exists():
        return Survey()
    with closing(_opened(path)) as connection:
        rows = connection.execute("SELECT counts, secret IS NULL, keeper, place, at FROM entry").fetchall()
    orphans = in_file = in_keyring = 0
    for counts, is_elsewhere, keeper, place, at in rows:
        if (not counts and at < now - UNDERWAY_S) or (counts and keeper and _is_gone(place)):
            orphans += 1
        if counts:
            in_keyring += is_elsewhere
            in_file += not is_elsewhere
    return Survey(in_file, in_keyring, orphans)


def _is_gone(place: str) -> bool:
    """Whether a checkpoint is not where it was; what this user may not see may be there."""
    try:
        return not Path(place).exists()
    except OSError:
        return False


def _opened(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        if not path.exists():
            made(path.parent)
            path.touch(mode=0o600)
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise UsageError(f"others may read {path}, which holds secrets: make it yours alone (chmod 600)")
    place = ":memory:" if path is None else str(path)
    connection = sqlite3.connect(place, isolation_level=None, timeout=BUSY_S, check_same_thread=False)
    try:
        # What is removed is gone from the file, and no log holds it longer than a transaction.
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")
        if not is_laid_out(connection, APPLICATION_ID, USER_VERSION, called=CALLED):
            with transaction(connection):  # another process may have been faster
                if not is_laid_out(connection, APPLICATION_ID, USER_VERSION, called=CALLED):
                    lay_out(connection, _SCHEMA, APPLICATION_ID, USER_VERSION)
    except BaseException:
        connection.close()
        raise
    return connection
