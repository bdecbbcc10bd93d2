"""Journals in one SQLite file: group commit on one connection, readers apart, owners by operating-system locks.

Words that nobody syncs are written ahead of their commit while one process has the file for itself (`ahead`).

Every operation checks first and writes after: a refused one leaves nothing to undo, and what it shares a commit with
is not disturbed. The write-ahead log is copied into the database between commits, never inside one.

apsw is used for the SQLite it carries: those of most Pythons (3.7.0 to 3.51.2) can lose committed pages when two
connections write and checkpoint at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import apsw

from midstream.core.blobs import Blob
from midstream.core.parts import PART_MARK
from midstream.core.records import Sync
from midstream.errors import (
    JournalMovedError,
    LeaseHeldError,
    LeaseLostError,
    MidstreamError,
    NotFoundError,
    UsageError,
)
from midstream.store import inbox, shelves
from midstream.store import owner as owners
from midstream.store.ahead import Ahead, AheadFile, take_in
from midstream.store.commits import Asked, Commits, Durability
from midstream.store.contract import Appendix, Attempt, Kept, Mark, News, SessionInfo, Stored
from midstream.store.database import BEGIN, DatabaseFile, number_of
from midstream.store.effects import Effects
from midstream.store.thread import WorkThread
from midstream.store.watch import Watcher
from midstream.world import World

T = TypeVar("T")

LEASE_S = 20.0
"""Seconds without a sign of life after which a process that holds its lock counts as frozen. A garbage collection, a
burst of swapping or a tool that keeps the interpreter for itself must not look like it."""

AT_ONCE_BYTES_MAX = 16 * 1024
"""Bytes of a record up to which it may be committed on the event loop: some ten pages."""
LIST_PAGE = 200
"""Sessions a listing reads at once."""


class SQLiteStore:
    """A store in one file that several processes of one machine may share.

    Args:
        path: The database; made on first use, readable by this user only. Its folder must exist. Two companions
            (`-wal`, `-shm`) and a folder (`.owners`) appear beside it; after a crash the last words may stand in there.
        durability: "power" syncs every append, "process" none, "default" does what the records say.
        lease_s: Seconds after which the sessions of a frozen process may be taken; a dead one's may be at once.
        world: Where the owner's id and the jitter come from.
        vfs: Name of a registered SQLite file system, e.g. one that encrypts; None for the usual one.

    Raises:
        UsageError: There is no such `durability`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        durability: Durability = "default",
        lease_s: float = LEASE_S,
        world: World = World(),
        vfs: str | None = None,
    ) -> None:
        if durability not in get_args(Durability):
            raise UsageError(f"durability is one of {get_args(Durability)}, not {durability!r}")
        self.owner = ""
        self._file = DatabaseFile(Path(path), world, vfs)
        self._durability = durability
        self._lease_s = lease_s
        self._world = world
        self._opening = asyncio.Lock()
        self._opened: _Opened | None = None

    async def open(self) -> None:
        """See `Store.open`.

        Raises:
            UsageError: The file cannot be made, or is not ours. Nothing was changed.
        """
        async with self._opening:
            if self._opened is None:
                owner = self._world.new_id("owner")
                self._opened = await _Opened.make(self._file, owner, self._durability, self._lease_s)
                self.owner = self._opened.lock.owner

    async def close(self) -> None:
        """See `Store.close`."""
        async with self._opening:
            if self._opened is not None:
                opened, self._opened = self._opened, None
                self.owner = ""
                await asyncio.shield(opened.close())  # a cancelled close still closes

    async def claim(self, session: str, *, at: float) -> int:
        """See `Store.claim`."""
        opened = self._require_open(session)
        return await opened.commits.ask(partial(opened.writer.claim, session, at), Sync.NORMAL)

    async def release(self, session: str, *, epoch: int) -> None:
        """See `Store.release`."""
        opened = self._require_open(session)
        opened.synced_epochs.pop(session, None)
        await opened.commits.ask(partial(opened.writer.release, session, epoch), Sync.NORMAL)

    async def append(
        self,
        session: str,
        bodies: Sequence[bytes],
        *,
        expected: int,
        epoch: int,
        sync: Sync,
        mark: Mark | None = None,
        blobs: Sequence[Blob] = (),
        seal: bytes = b"",
    ) -> int:
        """See `Store.append`."""
        opened = self._require_open(session)
        for body in bodies:
            if not isinstance(body, bytes):
                raise UsageError("a record's body is bytes")
        # A claim is not synced by itself. The first append under its epoch syncs both, or a power cut could give
        # the same epoch, and the positions under it, to somebody else.
        is_first = opened.synced_epochs.get(session) != epoch
        if is_first:
            sync = Sync.FULL
        if sync is Sync.NORMAL and len(bodies) == 1 and not (mark or blobs or seal):
            work = partial(bodies.__getitem__, 0)
            if self.append_at_once(session, work, expected=expected, epoch=epoch) is not None:
                return expected + 1
        write = partial(opened.writer.append, session, Appendix(bodies, mark, blobs, seal), expected, epoch)
        end = await opened.commits.ask(write, sync)
        if is_first:
            opened.synced_epochs[session] = epoch
        return end

    def append_at_once(
        self, session: str, work: Callable[[], bytes], *, expected: int, epoch: int
    ) -> bytes | None:
        """See `Immediate.append_at_once`."""
        opened = self._opened
        if opened is None or opened.synced_epochs.get(session) != epoch:
            return None
        if opened.writer.may_write_ahead:
            return opened.commits.ahead(partial(opened.writer.write_ahead, session, work, expected, epoch))
        at_once = partial(opened.writer.append_at_once, session, work, expected, epoch)
        return opened.commits.at_once(at_once, Sync.NORMAL)

    async def append_within(
        self, session: str, work: Callable[[Attempt], Appendix], *, expected: int, epoch: int
    ) -> Appendix:
        """See `Transactional.append_within`."""
        opened = self._require_open(session)
        write = partial(opened.writer.append_within, session, work, expected, epoch)
        appendix = await opened.commits.ask(write, Sync.FULL, is_alone=True)
        opened.synced_epochs[session] = epoch
        return appendix

    async def prune(self, session: str, body: bytes, *, position: int, epoch: int) -> bool:
        """See `Store.prune`. The bytes are overwritten; the file does not shrink, its pages are used again."""
        opened = self._require_open(session)
        write = partial(opened.writer.prune, session, body, position, epoch)
        return await opened.commits.ask(write, Sync.NORMAL)

    async def blob(self, session: str, digest: str) -> bytes | None:
        """See `Store.blob`."""
        opened = self._require_open(session)
        return await opened.read(partial(opened.reader.blob, session, digest))

    async def read(self, session: str, *, after: int, limit: int) -> list[Stored]:
        """See `Store.read`."""
        opened = self._require_open(session)
        return await opened.read(partial(opened.reader.records, session, after, limit))

    async def find(self, session: str) -> SessionInfo | None:
        """See `Store.find`."""
        opened = self._require_open(session)
        return await opened.read(partial(opened.reader.find_sealed, session))

    async def list(
        self, *, live: bool | None = None, of: Collection[str] | None = None
    ) -> AsyncIterator[SessionInfo]:
        """See `Store.list`. The order is that of the first step; what is deleted meanwhile is left out."""
        opened = self._require_open("")
        numbers = await opened.read(partial(opened.reader.numbers, live, of))
        for start in range(0, len(numbers), LIST_PAGE):
            page = numbers[start : start + LIST_PAGE]
            for line in await opened.read(partial(opened.reader.lines, page)):
                yield line

    async def delete(self, session: str) -> bool:
        """See `Store.delete`.

        The bytes are overwritten in the file, and in the log unless another process is just reading it.
        """
        opened = self._require_open(session)
        opened.synced_epochs.pop(session, None)
        is_gone = await opened.commits.ask(partial(opened.writer.delete, session), Sync.FULL)
        if is_gone:
            await opened.commits.clear_log()
        return is_gone

    async def watch(self, followed: Mapping[str, int]) -> News:
        """See `Store.watch`. A death is seen within 20 ms, what others commit within 2 to 20 ms."""
        return await self._require_open("").watcher.watch(followed)

    async def hand_over(self, session: str, body: bytes) -> bytes:
        """See `Store.hand_over`."""
        opened = self._require_open(session)
        number = await opened.commits.ask(partial(opened.writer.put, session, body), Sync.NORMAL)
        try:
            return await opened.watcher.answer_to(number)
        finally:
            removed = opened.commits.ask(partial(opened.writer.remove, number), Sync.NORMAL)
            removed.add_done_callback(asyncio.Future.exception)  # one that stays is removed after our death

    async def answer(self, letter: int, body: bytes) -> None:
        """See `Store.answer`."""
        opened = self._require_open("")
        await opened.commits.ask(partial(opened.writer.answer, letter, body), Sync.NORMAL)

    async def kept(self, shelf: str, key: str) -> Kept | None:
        """See `Shelf.kept`."""
        opened = self._require_open(shelf + key)
        return await opened.read(partial(shelves.kept, opened.reader.rows, shelf, key))

    async def keep(self, shelf: str, key: str, body: bytes, *, expected: int, at: float) -> int:
        """See `Shelf.keep`."""
        opened = self._require_open(shelf + key)
        write = partial(opened.writer.keep, shelf, key, body, expected, at)
        return await opened.commits.ask(write, Sync.NORMAL)

    async def drop(self, shelf: str, key: str, *, expected: int) -> bool:
        """See `Shelf.drop`."""
        opened = self._require_open(shelf + key)
        return await opened.commits.ask(partial(opened.writer.drop, shelf, key, expected), Sync.NORMAL)

    async def shelf(self, shelf: str) -> Sequence[Kept]:
        """See `Shelf.shelf`."""
        opened = self._require_open(shelf)
        return await opened.read(partial(opened.reader.shelf, shelf))

    def _require_open(self, name: str) -> _Opened:
        if self._opened is None:
            raise UsageError("the store is not open: call `await store.open()` first")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError("a name is not valid Unicode") from error
        return self._opened


class _Opened:
    """What exists between open and close: the owner's lock, two connections, a thread for each, and the watcher."""

    def __init__(
        self, writer: _Writer, reader: Reader, threads: _Threads, watcher: Watcher, commits: Commits
    ) -> None:
        self.writer = writer
        self.reader = reader
        self.watcher = watcher
        self.commits = commits
        self.synced_epochs: dict[str, int] = {}
        """The epoch of each session under which something was synced."""
        self.lock = writer.lock
        self._threads = threads

    @classmethod
    async def make(cls, file: DatabaseFile, owner: str, durability: Durability, lease_s: float) -> _Opened:
        threads = _Threads(
            WorkThread("midstream-sqlite-writer"),
            WorkThread("midstream-sqlite-reader"),
        )
        try:
            writer, reader = await threads.writing.ask(partial(_open, file, owner, lease_s))
        except BaseException:
            threads.shut()
            raise
        watcher = Watcher(owner, writer.peers, file.looking, file.world)
        watcher.start()
        return cls(writer, reader, threads, watcher, Commits(writer, threads.writing, durability, file.world))

    async def read(self, question: Callable[[], T]) -> T:
        await self.commits.caught_up()
        return await self._threads.reading.ask(question)

    async def close(self) -> None:
        await self.watcher.close()
        await self.commits.finish()
        await self._threads.reading.ask(self.reader.close)
        # Whoever finds the lock free may take our sessions: only after the last write.
        await self._threads.writing.ask(self.writer.close)
        self._threads.shut()


class _Threads(NamedTuple):
    writing: WorkThread
    reading: WorkThread

    def shut(self) -> None:
        self.writing.shut()
        self.reading.shut()


def _open(file: DatabaseFile, owner: str, lease_s: float) -> tuple[_Writer, Reader]:
    with contextlib.ExitStack() as undo, file.named_errors():
        db = file.connect()
        undo.callback(db.close)
        file.prepare(db)
        reading = file.connect(flags=apsw.SQLITE_OPEN_READONLY)
        undo.callback(reading.close)
        lock = owners.OwnerLock(file.owners, owner)
        undo.callback(lock.give_up)
        owners.sweep(file.owners)
        ahead = take_in(
            file.owners,
            owner,
            lambda found: file.patiently(partial(_bring_in, db, found)),
            may_write=file.is_plain,
        )
        if ahead is not None:
            undo.callback(ahead.close)
        peers = owners.Peers(file.owners, lock, lease_s=lease_s)
        file.patiently(partial(inbox.clear, db, is_alive=partial(owners.is_alive, file.owners)))
        undo.pop_all()
    return _Writer(file, db, lock, peers, ahead), Reader(file, reading)


def _bring_in(db: apsw.Connection, entries: Sequence[Ahead]) -> None:
    db.execute(BEGIN)
    try:
        for each in entries:
            db.execute(APPEND_AHEAD, (each.number, each.position, each.epoch, each.body))
        db.execute("commit")
    finally:
        if db.in_transaction:
            db.execute("rollback")


FIND_OWNED = "select id, epoch, owner from session where name = ?"
FIND_EPOCH = "select id, epoch from session where name = ?"
# A new session starts above the epochs of all deleted ones, so that no old owner and no old event id fits it.
CREATE = """
insert into session (name, epoch, owner, created_at, changed_at)
values (?, 1 + (select epochs_spent from ledger), ?, ?, ?) returning epoch
"""
CLAIM = "update session set epoch = epoch + 1, owner = ? where id = ? returning epoch"
RELEASE = "update session set owner = null where name = ? and epoch = ?"
FIND_END = "select ifnull(max(position), 0) from record where session_id = ?"
APPEND = "insert into record (session_id, position, epoch, body) values (?, ?, ?, ?)"
# Four statements in one, a transaction of its own: what a token costs.
APPEND_AT_ONCE = """
insert into record (session_id, position, epoch, body)
select id, ?, epoch, ? from session where id = ? and epoch = ?
"""
# Of a session that has another epoch by now, or of a journal that has it already, nothing.
APPEND_AHEAD = """
insert into record (session_id, position, epoch, body)
select id, ?2, epoch, ?4 from session where id = ?1 and epoch = ?3
    and ?2 = 1 + (select ifnull(max(position), 0) from record where session_id = id)
"""
FOLD_INTO = """
update record set body = ?1 where session_id = (select id from session where name = ?2) and position = ?3 and epoch = ?4
returning session_id
"""
DELETE_BEFORE = "delete from record where session_id = ? and position < ?"
# An empty title leaves the old one.
MARK = """
update session set is_live = ?, changed_at = ?, title = iif(?3 = '', title, ?3), turns = ?, status = ?
where id = ?
"""
SEAL = "update session set seal = ? where id = ?"
KEEP_BLOB = "insert into blob (session_id, digest, body) values (?, ?, ?) on conflict do nothing"
FIND_WITH_PARTS = """
select name, id, epoch, owner from session where name = ?1 or (name > ?1 || ?2 and name < ?1 || ?3)
"""
PART_MARK_END = PART_MARK[:-1] + chr(ord(PART_MARK[-1]) + 1)
DELETE_BLOBS = "delete from blob where session_id = ?"
DELETE_RECORDS = "delete from record where session_id = ?"
DELETE_SESSION = "delete from session where id = ?"
SPEND_EPOCHS = "update ledger set epochs_spent = max(epochs_spent, ?)"
VOID = "update ledger set voided = voided + 1"


class _End(NamedTuple):
    """Where a journal ends, under which epoch that was seen, and the number of its session, which no other ever has."""

    position: int
    epoch: int
    number: int


class _Writer:
    """The one connection that writes and checkpoints. After `_open` it belongs to `Commits`."""

    def __init__(
        self,
        file: DatabaseFile,
        db: apsw.Connection,
        lock: owners.OwnerLock,
        peers: owners.Peers,
        ahead: AheadFile | None,
    ) -> None:
        self.lock = lock
        self.peers = peers
        self.log_pages = 0
        """See `commits.Writer`."""
        self._file = file
        self._db = db
        self._ahead = ahead
        self._execute = db.cursor().execute
        """For what every commit does: a cursor for each statement costs a tenth of a short commit."""
        self._is_full: bool | None = None
        self._ends: dict[str, _End] = {}
        """Where a session's journal ends, as was last seen here."""
        self._copied_pages = 0
        """Pages that were in the log when it was copied back last, as far as readers allowed."""
        self._effects = Effects(db, partial(file.patiently, partial(db.execute, BEGIN)), file.world)
        db.wal_autocheckpoint(0)  # SQLite's own checkpoints would come inside somebody's commit

    def close(self) -> None:
        """Give up all leases and close; the last connection of all empties the log."""
        if self._ahead is not None:
            self._ahead.close()
        self.lock.give_up()
        self._db.close()

    # --- commits

    @property
    def may_write_ahead(self) -> bool:
        """Whether `write_ahead` is worth trying."""
        return self._ahead is not None and not self._ahead.is_stopped

    @property
    def is_behind(self) -> bool:
        """See `commits.Writer`."""
        return self._ahead is not None and bool(self._ahead.entries)

    def commit(self, batch: Sequence[Asked]) -> list[Any]:
        """See `commits.Writer`."""
        try:
            self._sync_if(any(asked.sync is Sync.FULL for asked in batch))
            self._file.patiently(partial(self._execute, BEGIN))
        except apsw.Error as error:
            return [self._file.refusal(error, self._db) for _ in batch]
        try:
            count = self._append_ahead()
            answers = [_answer(asked.write) for asked in batch]
            is_refused = batch[0].is_alone and isinstance(answers[0], MidstreamError)
            self._execute("rollback" if is_refused else "commit")
        except apsw.Error as error:
            refusal = self._file.refusal(error, self._db)
            self._undo()
            if len(batch) > 1:  # one's fault is not everybody's
                return [answer for asked in batch for answer in self.commit([asked])]
            return [refusal]
        except BaseException:
            self._undo()
            raise
        if count and not is_refused and self._ahead is not None:
            self._ahead.forget(count)
        self._count_log()
        return answers

    def _append_ahead(self) -> int:
        """Append what was written ahead; return how much that was."""
        if self._ahead is None:
            return 0
        for each in self._ahead.entries:
            self._execute(APPEND_AHEAD, (each.number, each.position, each.epoch, each.body))
        return len(self._ahead.entries)

    def _sync_if(self, is_full: bool) -> None:  # noqa: FBT001 - one value of SQLite's
        if is_full is not self._is_full:
            self._db.execute(f"pragma synchronous = {'full' if is_full else 'normal'}")
            self._is_full = is_full

    def _undo(self) -> None:
        self._ends.clear()
        # A commit whose sync failed may lie in the log as if it were whole; the next opening of the file would
        # find it there. Another one is written over it.
        with contextlib.suppress(apsw.Error):
            if self._db.in_transaction:
                self._db.execute("rollback")
            self._db.execute(BEGIN)
            self._db.execute(VOID)
            self._db.execute("commit")
        with contextlib.suppress(apsw.Error):
            if self._db.in_transaction:
                self._db.execute("rollback")

    # --- operations: check, then write

    def claim(self, session: str, at: float) -> int:
        row = self._db.execute(FIND_OWNED, (session,)).fetchone()
        if row is None:
            return number_of(self._db.execute(CREATE, (session, self.lock.owner, at, at)))
        number, _, owner = row
        self._refuse_if_held(session, owner)
        return number_of(self._db.execute(CLAIM, (self.lock.owner, number)))

    def release(self, session: str, epoch: int) -> None:
        self._ends.pop(session, None)
        self._db.execute(RELEASE, (session, epoch))

    def append(self, session: str, appendix: Appendix, expected: int, epoch: int) -> int:
        number = self._require_end(session, expected, epoch)
        end = expected
        for body in appendix.bodies:
            end += 1
            self._execute(APPEND, (number, end, epoch, body))
        for blob in appendix.blobs:
            self._db.execute(KEEP_BLOB, (number, blob.digest, blob.body))
        if (mark := appendix.mark) is not None:
            self._db.execute(MARK, (mark.is_live, mark.at, mark.title, mark.turns, mark.status, number))
        if appendix.seal:
            self._db.execute(SEAL, (appendix.seal, number))
        self._ends[session] = _End(end, epoch, number)
        return end

    def append_at_once(
        self, session: str, work: Callable[[], bytes], expected: int, epoch: int
    ) -> bytes | None:
        """Append one record and return it; None where `append` has to look closer. See `Commits.at_once`."""
        known = self._ends.get(session)
        if known is None or known.position != expected or known.epoch != epoch or self.is_behind:
            return None
        body = work()
        if len(body) > AT_ONCE_BYTES_MAX:
            return None
        try:
            if self._is_full is not False:
                self._sync_if(is_full=False)
            self._execute(APPEND_AT_ONCE, (expected + 1, body, known.number, epoch))
        except apsw.Error:
            return None  # the thread meets it again, and tells it
        if not self._db.changes():
            return None
        self._ends[session] = _End(expected + 1, epoch, known.number)
        self._count_log()
        return body

    def write_ahead(self, session: str, work: Callable[[], bytes], expected: int, epoch: int) -> bytes | None:
        """As `append_at_once`, ahead of the commit. See `Commits.ahead`."""
        known = self._ends.get(session)
        if self._ahead is None or known is None or known.position != expected or known.epoch != epoch:
            return None
        body = work()
        if len(body) > AT_ONCE_BYTES_MAX:
            return None
        if not self._ahead.put(Ahead(known.number, expected + 1, epoch, body)):
            return None
        self._ends[session] = _End(expected + 1, epoch, known.number)
        return body

    def append_within(
        self, session: str, work: Callable[[Attempt], Appendix], expected: int, epoch: int
    ) -> Appendix:
        self._require_end(session, expected, epoch)
        appendix = work(self._effects.attempt)
        if not self._db.in_transaction:
            raise apsw.BusyError("the transaction of an effect was lost, and no other could be had")
        self.append(session, appendix, expected, epoch)
        return appendix

    def _require_end(self, session: str, expected: int, epoch: int) -> int:
        row = self._execute(FIND_EPOCH, (session,)).get  # to the end: what is half read stays locked
        if row is None or row[1] != epoch:
            self._ends.pop(session, None)
            raise LeaseLostError(f"session {session!r} has another epoch than {epoch}")
        number = row[0]
        known = self._ends.get(session)
        # Nobody else appends under our epoch, and none is given twice: what was once seen under it still holds.
        if known is None or known.epoch != epoch:
            end = number_of(self._db.execute(FIND_END, (number,)))
        else:
            end = known.position
        if end != expected:
            raise JournalMovedError(f"session {session!r} ends at {end}, not at {expected}")
        return int(number)

    def prune(self, session: str, body: bytes, position: int, epoch: int) -> bool:
        row = self._db.execute(FOLD_INTO, (body, session, position, epoch)).fetchone()
        if row is None:
            return False
        self._db.execute(DELETE_BEFORE, (row[0], position))
        return True

    def delete(self, session: str) -> bool:
        going: list[Any] = self._db.execute(FIND_WITH_PARTS, (session, PART_MARK, PART_MARK_END)).fetchall()
        for name, _, _, owner in going:
            self._refuse_if_held(name, owner)
        for name, number, epoch, _ in going:
            self._ends.pop(name, None)
            self._db.execute(DELETE_RECORDS, (number,))
            self._db.execute(DELETE_BLOBS, (number,))
            self._db.execute(DELETE_SESSION, (number,))
            self._db.execute(inbox.REMOVE_OF_SESSION, (name,))
            shelves.drop_of_session(self._db, name)
            self._db.execute(SPEND_EPOCHS, (epoch,))
        return bool(going)

    def _refuse_if_held(self, session: str, owner: str | None) -> None:
        if owner is None or owner == self.lock.owner:
            return
        if self.peers.may_hold(owner):
            message = f"session {session!r} belongs to {owner!r}, which is alive"
            raise LeaseHeldError(message, session=session)

    def put(self, session: str, body: bytes) -> int:
        return inbox.put(self._db, session, self.lock.owner, body)

    def answer(self, letter: int, body: bytes) -> None:
        inbox.answer(self._db, letter, body, us=self.lock.owner, may_hold=self.peers.may_hold)

    def remove(self, letter: int) -> None:
        inbox.remove(self._db, letter)

    def keep(self, shelf: str, key: str, body: bytes, expected: int, at: float) -> int:
        return shelves.keep(self._db, shelf, key, body, expected=expected, at=at)

    def drop(self, shelf: str, key: str, expected: int) -> bool:
        return shelves.drop(self._db, shelf, key, expected=expected)

    # --- the log

    def checkpoint(self) -> None:
        """See `commits.Writer`. A failure costs nothing but space: the log goes on."""
        self._copied_pages += self.log_pages
        self.log_pages = 0
        with contextlib.suppress(apsw.Error):
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def clear_log(self) -> None:
        """See `commits.Writer`."""
        with contextlib.suppress(apsw.Error):
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def _count_log(self) -> None:
        try:
            pages, _ = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)  # copies nothing: it counts
        except apsw.Error:
            return  # the next commit tells what is wrong
        if pages < self._copied_pages:  # it was started anew
            self._copied_pages = 0
        self.log_pages = pages - self._copied_pages


FIND_RECORDS = """
select position, epoch, body from record
where session_id = (select id from session where name = ?) and position > ? order by position limit ?
"""
FIND_BLOB = "select body from blob where session_id = (select id from session where name = ?) and digest = ?"
COLUMNS = """
select session.name, (select ifnull(max(position), 0) from record where session_id = session.id),
    session.epoch, session.created_at, is_live, changed_at, title, turns, status, owner is null,
    (select ifnull(min(position), 0) from record where session_id = session.id)
"""
LINE = f"{COLUMNS} from session"
FIND_LINE = f"{LINE} where name = ?"
FIND_SEALED = f"{COLUMNS}, seal from session where name = ?"
LIST_NUMBERS = """
select id from session where ?1 is null or is_live = ?1 order by changed_at desc, id desc
"""
LIST_NUMBERS_OF = """
select session.id, changed_at from json_each(?2) as wanted join session on name = wanted.value
where ?1 is null or is_live = ?1
union
select session.id, changed_at from json_each(?2) as wanted
join session on name > wanted.value || ?3 and name < wanted.value || ?4
where ?1 is null or is_live = ?1
order by changed_at desc, 1 desc
"""
LIST_LINES = f"{LINE}, json_each(?) as wanted where session.id = wanted.value order by wanted.key"


class Reader:
    """A connection that only reads. It belongs to the thread that uses it (the store's: to its reader's thread)."""

    def __init__(self, file: DatabaseFile, db: apsw.Connection) -> None:
        self._file = file
        self._db = db

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def records(self, session: str, after: int, limit: int) -> list[Stored]:
        """See `Store.read`."""
        return [Stored(*row) for row in self.rows(FIND_RECORDS, (session, after, limit))]

    def blob(self, session: str, digest: str) -> bytes | None:
        """See `Store.blob`."""
        rows = self.rows(FIND_BLOB, (session, digest))
        return rows[0][0] if rows else None

    def find(self, session: str) -> SessionInfo | None:
        """See `Store.find`; without the seal, which a file of an older version has not."""
        rows = self.rows(FIND_LINE, (session,))
        return _line(rows[0]) if rows else None

    def find_sealed(self, session: str) -> SessionInfo | None:
        """See `Store.find`."""
        rows = self.rows(FIND_SEALED, (session,))
        return _line(rows[0]) if rows else None

    def numbers(self, live: bool | None, of: Collection[str] | None = None) -> list[int]:  # noqa: FBT001 - three values, one column
        """Return the rows of a listing, last changed first."""
        if of is None:
            return [number for (number,) in self.rows(LIST_NUMBERS, (live,))]
        values = (live, json.dumps([*of]), PART_MARK, PART_MARK_END)
        return [number for number, _ in self.rows(LIST_NUMBERS_OF, values)]

    def lines(self, numbers: Sequence[int]) -> list[SessionInfo]:
        """Return the lines of these rows, in their order; what was deleted meanwhile is left out."""
        wanted = ",".join(map(str, numbers))
        return [_line(row) for row in self.rows(LIST_LINES, (f"[{wanted}]",))]

    def shelf(self, shelf: str) -> list[Kept]:
        """See `Shelf.shelf`. A file of an older version has none."""
        return shelves.entries(self.rows, shelf)

    def rows(self, query: str, values: tuple[Any, ...]) -> list[Any]:  # as SQLite has them
        """Run a query and return its rows."""
        with self._file.named_errors(self._db):
            return self._file.patiently(lambda: self._db.execute(query, values).fetchall())


@contextlib.contextmanager
def reading(path: str | Path, *, world: World = World()) -> Iterator[Reader]:
    """Look into a database without making, locking or writing anything, also while a server works on it.

    Raises:
        NotFoundError: There is no such file, or nothing was ever stored in it.
        UsageError: The file is not ours, or may not be read.
        StoreDamagedError: It is no intact database.
    """
    file = DatabaseFile(Path(path), world, None)
    if not file.path.is_file():
        raise NotFoundError(
            f"there is no database {str(file.path)!r}: name one with --store, or start a server"
        )
    with file.named_errors():
        db = file.connect(flags=apsw.SQLITE_OPEN_READONLY)
    try:
        with file.named_errors(db):
            if not file.patiently(partial(file.require_ours, db)):
                raise NotFoundError(f"nothing was stored in {str(file.path)!r} yet")
        yield Reader(file, db)
    finally:
        db.close()


def engine_version() -> str:
    """Return the version of the SQLite that works on the files."""
    return apsw.sqlite_lib_version()


def _answer(write: Callable[[], T]) -> T | MidstreamError:
    try:
        return write()
    except MidstreamError as refused:
        return refused


def _line(row: tuple[Any, ...]) -> SessionInfo:  # as SQLite has them
    session, end, epoch, created_at, is_live, at, title, turns, status, is_free, oldest, *seal = row
    mark = Mark(bool(is_live), at, title, turns, status)
    return SessionInfo(session, end, epoch, created_at, mark, bool(is_free), oldest, *seal)
