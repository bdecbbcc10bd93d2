"""The state file of a client: checkpoints of its streams, unacknowledged commands, and tool calls.

The file is a SQLite database in WAL mode, readable by its owner only, used through one connection on one thread. One
process holds it at a time, because a second one could not know which tools the first one runs. Free pages are reused,
or returned to the file system in small steps.

The secrets of streams are stored separately (`secret_store.py`), from before the first command of a stream until after
its removal.

Commands, tool intents and outcomes are on disk before they have effects. Cursors survive the process. A power failure
may set them back; some events are then received again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.client.secret_store import SecretKey, SecretStore, StateFileRef
from midstream.client.sqlite_checks import is_laid_out, lay_out, transaction, translate_errors
from midstream.environment import Fault, World
from midstream.errors import MidstreamError, ProtocolError, UsageError
from midstream.file_safety import create_own_database, follow_own_links, require_own_database
from midstream.history.messages import ToolCall, ToolResult
from midstream.protocol.checkpoint import (
    FILLER,
    Checkpoint,
    CommandKept,
    CommandsAcked,
    CursorMoved,
    Forgotten,
    Write,
)
from midstream.protocol.durable_positions import KnownEpoch
from midstream.protocol.frames import EventId, ResultPayload, decode_payload, digest_of
from midstream.session.calls import CallPlan, CallState

T = TypeVar("T")

USER_VERSION = 4
"""Version of the schema; other versions are refused. Earlier ones were never released."""
APPLICATION_ID = 0x6D_69_64_63
"""Value of `pragma application_id` ("midc"), which identifies midstream's files."""
BUSY_S = 0.2
"""Seconds to wait for another process that is closing the file."""
FREE_PAGES_MAX = 256
"""Free pages of 4 KiB that are kept. Beyond them, at most as many are returned at a time."""
LOG_BYTES_MAX = 4 * 1024 * 1024
"""Size of the WAL after a checkpoint; SQLite makes one every 1,000 pages (4 MB)."""
CALLED = "state file"
DAMAGED_DIGEST = "damaged"
"""Digest in the plan of a call that cannot be read; no call has it."""
BUSY = "another process uses this state file; give each process its own"

_log = logging.getLogger(__name__)


class StreamBegun(Struct, frozen=True):
    """A new stream, stored with its first command; the secret was stored before, in another file."""

    session: str
    secret: str


class BeginningSeen(Struct, frozen=True):
    """The first event of a stream was received; its turn can be read again from there."""

    event_id: EventId


class CallNoted(Struct, frozen=True):
    """The model requested a call at this client. It replaces an earlier call at the same place."""

    turn: int
    response: int
    call: ToolCall
    plan: CallPlan


class CallAsked(Struct, frozen=True):
    """The server started the call; this client must return its outcome."""

    turn: int
    response: int
    call_id: str


class CallIntended(Struct, frozen=True):
    """Intent: the call is about to run for the `run`-th time."""

    turn: int
    response: int
    call_id: str
    run: int
    epoch: int


class CallAnswered(Struct, frozen=True):
    """The call's outcome; its command is stored in the same transaction."""

    turn: int
    response: int
    result: ToolResult


CallWrite = CallNoted | CallAsked | CallIntended | CallAnswered
FileWrite = StreamBegun | BeginningSeen | Write | CallWrite

Place = tuple[int, int, str]
"""Turn, response and call id, which identify a call."""
_FULL = (StreamBegun, CommandKept, CallIntended, CallAnswered)


class KeptCall(Struct, frozen=True):
    """A stored call of this client; `is_asked` if the server has started it."""

    turn: int
    response: int
    state: CallState
    is_asked: bool


class KeptStream(Struct, frozen=True):
    """A stream that can be resumed; `touched_at` in seconds since 1970.

    Its checkpoint has no secret yet: see `CheckpointFile.with_secret`. If `damage` is set, it cannot be resumed, and
    has no commands. With `has_lost_commands`, a filler without effect replaces each unreadable command, and the stored
    outcomes of its calls must be sent again.
    """

    session: str
    checkpoint: Checkpoint
    touched_at: float
    damage: str = ""
    has_lost_commands: bool = False


_SCHEMA = """
-- The streams of this client, with the application's cursor in each.
CREATE TABLE stream (
    stream TEXT PRIMARY KEY,
    server TEXT NOT NULL,
    session TEXT NOT NULL,
    epoch INTEGER,
    position INTEGER,
    next_seqno INTEGER NOT NULL,
    touched_at REAL NOT NULL,
    promised TEXT,
    known_epoch INTEGER,
    began_at REAL,
    acked INTEGER NOT NULL
) WITHOUT ROWID;
-- Unacknowledged commands.
CREATE TABLE command (
    stream TEXT NOT NULL,
    seqno INTEGER NOT NULL,
    digest TEXT NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (stream, seqno)
) WITHOUT ROWID;
-- The state of each call that this client runs.
CREATE TABLE call (
    stream TEXT NOT NULL,
    turn INTEGER NOT NULL,
    response INTEGER NOT NULL,
    call_id TEXT NOT NULL,
    call BLOB NOT NULL,
    plan BLOB NOT NULL,
    is_asked INTEGER NOT NULL DEFAULT 0,
    runs INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL DEFAULT 0,
    result BLOB,
    PRIMARY KEY (stream, turn, response, call_id)
) WITHOUT ROWID;
-- One row: a number that grows each time a process begins to run tools, and the file's name in the secret store.
CREATE TABLE life (epoch INTEGER NOT NULL, name TEXT NOT NULL DEFAULT '');
INSERT INTO life (epoch) VALUES (0);
"""

# The first event of each stream, in a separate table: older files without it can still be used.
_BEGINNINGS = """
CREATE TABLE IF NOT EXISTS beginning (stream TEXT PRIMARY KEY, event_id TEXT NOT NULL) WITHOUT ROWID
"""
# All stored data of the streams.
_STREAMS = """
SELECT stream, session, epoch, position, next_seqno, touched_at, promised, known_epoch, began_at,
    acked FROM stream
WHERE server = ? ORDER BY touched_at
"""
_MOVE = """
UPDATE stream SET epoch = ?, position = ?, promised = ?, known_epoch = ?, began_at = ? WHERE stream = ?
"""
_COMMANDS = "SELECT seqno, digest, payload FROM command WHERE stream = ? ORDER BY seqno"
_CALLS = """
SELECT turn, response, call_id, call, plan, is_asked, runs, epoch, result FROM call WHERE stream = ?
ORDER BY turn, response, call_id
"""


class CheckpointFile:
    """The state file of one client, for use from one event loop.

    Args:
        path: Path of the file; None keeps everything in memory.
        server: URL of the server of the streams; a file may contain streams of several servers.
        secrets: The store of their secrets; its creator closes it.
        world: Clock, names and fault points.
    """

    def __init__(self, path: str | Path | None, *, server: str, secrets: SecretStore, world: World) -> None:
        self._path = None if path is None else Path(path)
        self._server = server
        self._secrets = secrets
        self._world = world
        self._keeper = StateFileRef()
        self._thread: ThreadPoolExecutor | None = None
        self._connection: sqlite3.Connection | None = None
        self._is_full = True

    async def open(self) -> None:
        """Open or create the file for this process, and remove unused secrets.

        Raises:
            StoreBusyError, StoreFullError, StoreDamagedError: Nothing was changed.
            UsageError: The file belongs to another program or cannot be opened, or others may read the file of secrets.
                Nothing was changed.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="midstream-checkpoint")
        try:
            await self._call(self._open)
            await self._secrets.settle(self._keeper, await self._call(self._names))
        except MidstreamError:
            await self.close()
            raise

    async def close(self) -> None:
        """Finish pending work, and close the file. Idempotent."""
        if self._thread is not None:
            await self._call(self._close)
            self._thread.shutdown()
            self._thread = None

    async def write(self, stream: str, writes: Sequence[FileWrite]) -> None:
        """Store changes of one stream in one transaction, synced if their kind requires it.

        Raises:
            StoreFullError, StoreBusyError, StoreDamagedError: Nothing was written.
        """
        if not writes:
            return
        for write in writes:
            if isinstance(write, StreamBegun):
                key = SecretKey(self._server, write.session, stream)
                await self._secrets.put(key, write.secret, keeper=self._keeper)
        at = self._world.now()
        self._world.reach(Fault.BEFORE_CHECKPOINT)
        forgotten = await self._call(lambda: self._write(stream, writes, at))
        self._world.reach(Fault.AFTER_CHECKPOINT)
        for session in forgotten:
            await self._delete_secret(SecretKey(self._server, session, stream))

    async def streams(self) -> list[KeptStream]:
        """Return the stored streams of this server, least recently used first."""
        return await self._call(lambda: list(self._streams()))

    async def with_secret(self, kept: KeptStream) -> KeptStream:
        """Return a stream with its secret; without a secret, mark it as damaged.

        Raises:
            UnavailableError: The keyring with the secret does not answer. The call can be retried.
            UsageError, StoreDamagedError: The file of secrets cannot be used.
        """
        checkpoint = kept.checkpoint
        secret = await self._secrets.get(SecretKey(self._server, kept.session, checkpoint.stream))
        if secret is None:
            damage = kept.damage or "the secret of this stream is missing"
            return replace(kept, checkpoint=replace(checkpoint, unacked=()), damage=damage)
        return replace(kept, checkpoint=replace(checkpoint, secret=secret))

    async def calls(self, stream: str) -> list[KeptCall]:
        """Return the stored calls of a stream; damaged ones are logged.

        A damaged outcome is replaced by that in its command; without one, the call is in doubt. A damaged call counts
        as started: it is not run again, and its outcome is sent if it can be read.
        """
        return await self._call(lambda: list(self._calls(stream)))

    async def longest_limit_s(self, stream: str) -> float:
        """Return the longest limit of the tools that run for a stream, which may be above the look-back; 0 without."""
        calls = await self.calls(stream)
        return max((call.state.plan.timeout_s for call in calls if call.state.is_open), default=0.0)

    async def beginning(self, stream: str) -> str | None:
        """Return the first event of a stream; None before it."""
        found = "SELECT event_id FROM beginning WHERE stream = ?"
        row = await self._call(lambda: self._execute(found, stream).fetchone())
        return None if row is None else str(row[0])

    async def start_epoch(self) -> int:
        """Return a new epoch for running tools, greater than all earlier ones."""
        return await self._call(self._start_epoch)

    async def _delete_secret(self, key: SecretKey) -> None:
        """Remove an unused secret; after a failure, the next `open` removes it."""
        try:
            await self._secrets.delete(key)
        except MidstreamError as error:
            _log.warning("the secret of the stream %s could not be removed: %s", key.stream, error.message)

    # --- on the thread ------------------------------------------------------------------------------------------

    async def _call(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            raise UsageError("the client is not open; use it inside `async with connect(...)`")
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: translate_errors(work, called=CALLED, busy=BUSY)
        )

    def _open(self) -> None:
        if self._connection is not None:
            return
        if self._path is not None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            create_own_database(self._path, f"the {CALLED}")
        place = ":memory:" if self._path is None else str(self._path)
        connection = sqlite3.connect(place, isolation_level=None, timeout=BUSY_S, check_same_thread=False)
        try:
            # Exclusive: a second process, which would run the same tools, is refused.
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            is_new = not is_laid_out(connection, APPLICATION_ID, USER_VERSION, called=CALLED)
            if self._path is not None:
                # SQLite creates its WAL files with the mode of the file.
                follow_own_links(self._path, f"the {CALLED}").chmod(0o600)
            # For a file that already has tables, this applies after the next VACUUM.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES_MAX}")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")  # lock the file now, not at the first write
            if is_new:
                lay_out(connection, _SCHEMA, APPLICATION_ID, USER_VERSION)
            connection.execute(_BEGINNINGS)
            self._keeper = self._keeper_of(connection)
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def _keeper_of(self, connection: sqlite3.Connection) -> StateFileRef:
        """Return the name of this file in the secret store, which is created once."""
        (name,) = connection.execute("SELECT name FROM life").fetchone()
        if not name:
            name = self._world.new_id("client")
            connection.execute("UPDATE life SET name = ?", (name,))
        return StateFileRef(name, "" if self._path is None else str(self._path.absolute()))

    def _names(self) -> list[str]:
        return [stream for (stream,) in self._execute("SELECT stream FROM stream")]

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        assert self._connection is not None, "the file is open"
        return self._connection.execute(statement, values)

    @contextmanager
    def _transaction(self, *, is_full: bool) -> Iterator[None]:
        if is_full is not self._is_full:
            self._execute(f"PRAGMA synchronous = {'FULL' if is_full else 'NORMAL'}")
            self._is_full = is_full
        assert self._connection is not None, "the file is open"
        with transaction(self._connection):
            yield

    def _write(self, stream: str, writes: Sequence[FileWrite], at: float) -> list[str]:
        """Store changes of a stream; return, as a list, the session of a deleted stream."""
        is_full = any(isinstance(write, _FULL) for write in writes)
        forgotten: list[str] = []
        with self._transaction(is_full=is_full):
            for write in writes:
                if isinstance(write, Forgotten):
                    kept = self._execute("SELECT session FROM stream WHERE stream = ?", stream)
                    forgotten += [session for (session,) in kept]
                self._apply(stream, write, at)
            self._execute("UPDATE stream SET touched_at = ? WHERE stream = ?", at, stream)
        self._give_back()
        return forgotten

    def _give_back(self) -> None:
        """Shrink the file by at most `FREE_PAGES_MAX` pages, to limit the time."""
        (free,) = self._execute("PRAGMA freelist_count").fetchone()
        if free > FREE_PAGES_MAX and self._connection is not None:
            # A script, because each page is a step, and `execute` makes only one.
            self._connection.executescript(f"PRAGMA incremental_vacuum({FREE_PAGES_MAX})")

    def _apply(self, stream: str, write: FileWrite, at: float) -> None:
        match write:
            case StreamBegun(session):
                insert = "INSERT INTO stream VALUES (?, ?, ?, NULL, NULL, 0, ?, NULL, NULL, NULL, 0)"
                self._execute(insert, stream, self._server, session, at)
            case BeginningSeen(event_id):
                self._execute("INSERT OR REPLACE INTO beginning VALUES (?, ?)", stream, str(event_id))
            case CommandKept(seqno, payload):
                insert = "INSERT INTO command VALUES (?, ?, ?, ?)"
                self._execute(insert, stream, seqno, digest_of(payload), payload)
                self._execute("UPDATE stream SET next_seqno = ? WHERE stream = ?", seqno + 1, stream)
            case CommandsAcked(seqno):
                self._execute("DELETE FROM command WHERE stream = ? AND seqno <= ?", stream, seqno)
                self._execute("UPDATE stream SET acked = ? WHERE stream = ?", seqno + 1, stream)
            case CursorMoved(event_id, promised, known):
                place = (event_id.epoch, event_id.position) if event_id else (None, None)
                began = (known.epoch, known.began_at) if known else (None, None)
                self._execute(_MOVE, *place, str(promised) if promised else None, *began, stream)
            case Forgotten():
                for table in ("stream", "command", "call", "beginning"):
                    self._execute(f"DELETE FROM {table} WHERE stream = ?", stream)  # noqa: S608 - our own names
            case _:
                self._apply_to_call(stream, write)

    def _apply_to_call(self, stream: str, write: CallWrite) -> None:
        match write:
            case CallNoted(turn, response, call, plan):
                row = (stream, turn, response, call.id, msgspec.json.encode(call), msgspec.json.encode(plan))
                self._execute(
                    "INSERT OR REPLACE INTO call (stream, turn, response, call_id, call, plan) "
                    "VALUES (?, ?, ?, ?, ?, ?)",
                    *row,
                )
            case CallAsked(turn, response, call_id):
                self._update_call("is_asked = 1", stream, turn, response, call_id)
            case CallIntended(turn, response, call_id, run, epoch):
                self._update_call("runs = ?, epoch = ?", stream, turn, response, call_id, run, epoch)
            case CallAnswered(turn, response, result):
                body = msgspec.json.encode(result)
                self._update_call("result = ?", stream, turn, response, result.call_id, body)

    def _update_call(
        self, change: str, stream: str, turn: int, response: int, call_id: str, *values: object
    ) -> None:
        where = "stream = ? AND turn = ? AND response = ? AND call_id = ?"
        update = f"UPDATE call SET {change} WHERE {where}"  # noqa: S608 - our own words
        self._execute(update, *values, stream, turn, response, call_id)

    def _streams(self) -> Iterator[KeptStream]:
        for row in self._execute(_STREAMS, self._server).fetchall():
            stream, session = row[:2]
            if isinstance(stream, str) and isinstance(session, str):
                yield self._stream(stream, session, row[2:])
            else:
                # An infinite time: it must not be removed without a message.
                checkpoint = Checkpoint(str(stream), "")
                yield KeptStream(str(session), checkpoint, math.inf, "its place in the state file is damaged")

    def _stream(self, stream: str, session: str, columns: Sequence[object]) -> KeptStream:
        """Decode a stream. A damaged column is ignored: events are received again, or a check for loss is missing."""
        damaged: list[str] = []

        def read(name: str, kind: type[T]) -> T | None:
            value = columns[_COLUMNS.index(name)]
            try:
                return None if value is None else msgspec.convert(value, type=kind)
            except msgspec.ValidationError:  # SQLite permits any type in any column
                damaged.append(name)
                return None

        epoch, position = read("epoch", int), read("position", int)
        event_id = None if position is None or epoch is None else EventId(epoch, position)
        known_epoch, began_at = read("known_epoch", int), read("began_at", float)
        known = None if known_epoch is None else KnownEpoch(known_epoch, began_at or 0.0)
        promised = _event_id_of(read("promised", str) or "", damaged)
        touched_at = read("touched_at", float)
        numbers = read("acked", int), read("next_seqno", int)
        commands = self._read_unacked(stream, *numbers, is_begun=event_id is not None)
        if damaged:
            _log.warning("of the stream %s in the state file %s is damaged", stream, ", ".join(damaged))
        checkpoint = Checkpoint(stream, "", event_id, commands.next_seqno, commands.unacked, promised, known)
        at = math.inf if touched_at is None else touched_at
        return KeptStream(session, checkpoint, at, commands.damage, commands.has_lost)

    def _read_unacked(
        self, stream: str, acked: int | None, next_seqno: int | None, *, is_begun: bool
    ) -> _Commands:
        """Return a stream's unacknowledged commands. A filler replaces an unreadable one, except a message."""
        unacked: dict[int, bytes] = {}
        lost: dict[int, str] = {}
        for seqno, digest, payload in self._execute(_COMMANDS, stream):
            if not isinstance(payload, bytes) or digest_of(payload) != digest:
                lost[seqno] = f"command {seqno} in the state file is damaged"
                continue
            try:
                decode_payload(payload)
            except ProtocolError:
                lost[seqno] = f"command {seqno} in the state file was written by another version"
                continue
            unacked[seqno] = payload
        rows = sorted({*unacked, *lost})
        if next_seqno is None and not rows:
            return _Commands(
                1, (), "its place in the state file is damaged"
            )  # the stream began with a message
        end = rows[-1] + 1 if next_seqno is None else next_seqno
        first = rows[0] if rows else end
        for seqno in range(first if acked is None else min(acked, first), end):
            if seqno not in unacked:
                lost.setdefault(seqno, "the state file has lost commands")
        if 0 in lost and not is_begun and self._execute(_CALLS, stream).fetchone() is None:
            return _Commands(end, (), lost[0])
        for seqno, damage in lost.items():
            _log.warning("the stream %s continues without the lost data: %s", stream, damage)
            unacked[seqno] = FILLER
        return _Commands(end, tuple(sorted(unacked.items())), has_lost=bool(lost))

    def _calls(self, stream: str) -> Iterator[KeptCall]:
        payloads = [
            decode_payload(body) for _, body in self._read_unacked(stream, None, None, is_begun=True).unacked
        ]
        results = {
            (each.turn, each.response, each.result.call_id): each.result
            for each in payloads
            if isinstance(each, ResultPayload)
        }
        for row in self._execute(_CALLS, stream):
            place = row[0], row[1], row[2]
            yield _call_of(place, row[3:], results.get(place))

    def _start_epoch(self) -> int:
        with self._transaction(is_full=True):
            (epoch,) = self._execute("UPDATE life SET epoch = epoch + 1 RETURNING epoch").fetchone()
        return int(epoch)


def sessions_left(path: Path, *, server: str) -> list[str]:
    """Return the sessions with interrupted turns in a state file, least recently used first.

    Empty if another process uses the file, or if it cannot be read.
    """
    found = "SELECT session FROM stream WHERE server = ? AND next_seqno > 0 ORDER BY touched_at"
    try:
        require_own_database(follow_own_links(path, CALLED), CALLED)
        with closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=0)
        ) as connection:
            return list(dict.fromkeys(session for (session,) in connection.execute(found, (server,))))
    except (sqlite3.Error, OSError, UsageError) as error:
        _log.debug("state file not read: %s", error)
        return []


_COLUMNS = ("epoch", "position", "next_seqno", "touched_at", "promised", "known_epoch", "began_at", "acked")
"""Columns of `_STREAMS` after stream and session."""


class _Commands(Struct, frozen=True):
    """The unacknowledged commands of a stream; `damage` is the reason if they cannot be read."""

    next_seqno: int
    unacked: tuple[tuple[int, bytes], ...]
    damage: str = ""
    has_lost: bool = False


def _event_id_of(text: str, damaged: list[str]) -> EventId | None:
    try:
        return EventId.parse(text) if text else None
    except ProtocolError:
        damaged.append("promised")
        return None


def _call_of(place: Place, columns: Sequence[Any], sent: ToolResult | None) -> KeptCall:
    """Decode a call. `sent` is the outcome in its command, which replaces a damaged one."""
    call, plan, is_asked, runs, epoch, body = columns
    turn, response, call_id = place
    where = f"a call of turn {turn}, response {response}"
    result = sent if body is None else _decode_result(body, where) or sent
    try:
        known, planned = msgspec.json.decode(call, type=ToolCall), msgspec.json.decode(plan, type=CallPlan)
        runs, epoch = msgspec.convert((runs, epoch), type=tuple[int, int])
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError):
        _log.warning("%s in the state file is damaged; it is not run again", where)
        # Treat it as started, without permission to run again, whatever its policy was.
        known, planned, runs, epoch = ToolCall(call_id, "", "{}"), CallPlan(call_id, DAMAGED_DIGEST), 1, -1
    return KeptCall(
        turn, response, CallState(known, planned, runs=runs, epoch=epoch, result=result), bool(is_asked)
    )


def _decode_result(body: bytes, place: str) -> ToolResult | None:
    """Decode an outcome; return None if it is damaged, so that only its call is in doubt."""
    try:
        return msgspec.json.decode(body, type=ToolResult)
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError):
        _log.warning("the outcome of %s in the state file is damaged; the call is in doubt", place)
        return None
