"""Writes to a database, on its only writing connection."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

import apsw
from msgspec import Struct

from midstream.errors import JournalMovedError, LeaseHeldError, LeaseLostError, MidstreamError
from midstream.session.child_names import PART_MARK, PART_MARK_END
from midstream.session.records import Sync
from midstream.store.contract import Attempt, Batch, require_as_found
from midstream.store.sqlite import inbox, key_values
from midstream.store.sqlite import liveness as nodes
from midstream.store.sqlite.database import BEGIN, DatabaseFile, number_of
from midstream.store.sqlite.effects import Effects
from midstream.store.sqlite.group_commit import QueuedOperation

T = TypeVar("T")

FIND_OWNED = "select id, epoch, node from session where name = ?"
FIND_EPOCH = "select id, epoch from session where name = ?"
# A new session starts above the epochs of all deleted ones, so that no old node and no old event id fits it.
CREATE = """
insert into session (name, epoch, node, created_at, changed_at)
values (?, 1 + (select epochs_spent from ledger), ?, ?, ?) returning epoch
"""
CLAIM = "update session set epoch = epoch + 1, node = ? where id = ? returning epoch"
RELEASE = "update session set node = null where name = ? and epoch = ?"
FIND_END = "select ifnull(max(position), 0) from record where session_id = ?"
APPEND = "insert into record (session_id, position, epoch, body, link) values (?, ?, ?, ?, ?)"
FOLD_INTO = """
update record set body = ?1, link = ifnull(?5, link)
where session_id = (select id from session where name = ?2) and position = ?3 and epoch = ?4
returning session_id
"""
DELETE_BEFORE = "delete from record where session_id = ? and position < ?"
# An empty title keeps the old one.
MARK = """
update session set is_live = ?, changed_at = ?, title = iif(?3 = '', title, ?3), turns = ?, status = ?
where id = ?
"""
SEAL = "update session set seal = ? where id = ?"
KEEP_BLOB = "insert into blob (session_id, digest, body) values (?, ?, ?) on conflict do nothing"
FIND_WITH_PARTS = """
select name, id, epoch, node from session where name = ?1 or (name > ?1 || ?2 and name < ?1 || ?3)
"""
DELETE_BLOBS = "delete from blob where session_id = ?"
DELETE_RECORDS = "delete from record where session_id = ?"
DELETE_SESSION = "delete from session where id = ?"
SPEND_EPOCHS = "update ledger set epochs_spent = max(epochs_spent, ?)"
# A number that changes exactly when another connection has committed.
FIND_DATA_VERSION = "pragma data_version"
VOID = "update ledger set voided = voided + 1"


class _End(Struct, frozen=True, gc=False):
    """End of a journal, with the epoch and the data version of its last check."""

    number: int
    position: int
    epoch: int
    data_version: int


class WriteConnection:
    """The only connection that writes and checkpoints. After `_open` it belongs to `Commits`."""

    def __init__(
        self,
        file: DatabaseFile,
        db: apsw.Connection,
        lock: nodes.NodeLock,
        peers: nodes.Peers,
    ) -> None:
        self.lock = lock
        self.peers = peers
        self.log_pages = 0
        """See `group_commit.Committer`."""
        self._file = file
        self._db = db
        self._execute = db.cursor().execute
        """A shared cursor for the statements of every commit: a new cursor for each costs a tenth of a short commit."""
        self._is_full: bool | None = None
        self._ends: dict[str, _End] = {}
        """Last known ends of journals."""
        self._data_version = -1
        """The result of `FIND_DATA_VERSION` in this commit."""
        self._copied_pages = 0
        """Pages that were in the log at its last checkpoint."""
        self._effects = Effects(db, partial(file.retry_while_busy, partial(db.execute, BEGIN)), file.world)
        db.wal_autocheckpoint(0)  # SQLite's own checkpoints would come inside a commit

    def close(self) -> None:
        """Release all leases and close; the last connection of all processes empties the log."""
        self.lock.give_up()
        self._db.close()

    # --- commits

    def commit(self, batch: Sequence[QueuedOperation], *, is_patient: bool = True) -> list[Any]:
        """See `group_commit.Committer`."""
        begin = partial(self._execute, BEGIN)
        try:
            self._sync_if(any(operation.sync is Sync.FULL for operation in batch))
            if is_patient:
                self._file.retry_while_busy(begin)
            else:
                begin()
        except apsw.Error as error:
            return [self._file.refusal(error, self._db) for _ in batch]
        try:
            self._data_version = number_of(self._execute(FIND_DATA_VERSION))
            answers = [_answer(operation.write) for operation in batch]
            is_refused = batch[0].is_alone and isinstance(answers[0], MidstreamError)
            self._execute("rollback" if is_refused else "commit")
        except apsw.Error as error:
            refusal = self._file.refusal(error, self._db)
            self._undo()
            if len(batch) > 1:  # one operation must not fail the others
                return [answer for operation in batch for answer in self.commit([operation])]
            return [refusal]
        except BaseException:
            self._undo()
            raise
        self._count_log()
        return answers

    def _sync_if(self, is_full: bool) -> None:  # noqa: FBT001 - one value of SQLite's
        if is_full is not self._is_full:
            self._db.execute(f"pragma synchronous = {'full' if is_full else 'normal'}")
            self._is_full = is_full

    def _undo(self) -> None:
        self._ends.clear()
        # A commit whose sync failed may be complete in the log, so that the next opening would find it. Another commit
        # overwrites it.
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

    def claim(self, session: str, *, at: float, is_free: bool | None) -> int:
        """See `Store.claim`."""
        row = self._db.execute(FIND_OWNED, (session,)).fetchone()
        require_as_found(session, is_free=is_free, now=None if row is None else row[2] is None)
        if row is None:
            return number_of(self._db.execute(CREATE, (session, self.lock.node, at, at)))
        number, _, node = row
        self._refuse_if_held(session, node)
        self._ends.pop(session, None)  # its epoch has ended, also for callers of this process
        return number_of(self._db.execute(CLAIM, (self.lock.node, number)))

    def release(self, session: str, epoch: int) -> None:
        """See `Store.release`."""
        self._ends.pop(session, None)
        self._db.execute(RELEASE, (session, epoch))

    def append(self, session: str, batch: Batch) -> int:
        """See `Store.append`."""
        number = self._require_end(session, batch.expected, batch.epoch)
        end, epoch = batch.expected, batch.epoch
        for body, link in zip(batch.bodies, batch.links or repeat(b""), strict=False):
            end += 1
            self._execute(APPEND, (number, end, epoch, body, link))
        for blob in batch.blobs:
            self._db.execute(KEEP_BLOB, (number, blob.digest, blob.body))
        if (mark := batch.mark) is not None:
            self._db.execute(MARK, (mark.is_live, mark.at, mark.title, mark.turns, mark.status, number))
        if batch.seal:
            self._db.execute(SEAL, (batch.seal, number))
        self._ends[session] = _End(number, end, epoch, self._data_version)
        return end

    def append_within(
        self, session: str, work: Callable[[Attempt], Batch], expected: int, epoch: int
    ) -> Batch:
        """See `Transactional.append_within`."""
        self._require_end(session, expected, epoch)
        batch = work(self._effects.attempt)
        if not self._db.in_transaction:
            raise apsw.BusyError("the transaction of an effect was lost, and no other could be had")
        self._data_version = number_of(self._execute(FIND_DATA_VERSION))  # it may be another transaction
        self.append(session, batch)
        return batch

    def _require_end(self, session: str, expected: int, epoch: int) -> int:
        known = self._ends.get(session)
        # No other process has committed since, and own claims and deletions remove the known end. At 100 sessions,
        # reading the epoch for each append would cost a twelfth of the steps.
        if known is None or known.epoch != epoch or known.data_version != self._data_version:
            known = self._find_end(session, epoch, known)
        if known.position != expected:
            raise JournalMovedError(f"session {session!r} ends at {known.position}, not at {expected}")
        return known.number

    def _find_end(self, session: str, epoch: int, known: _End | None) -> _End:
        row = self._execute(
            FIND_EPOCH, (session,)
        ).get  # read to the end, because an unfinished query keeps a lock
        if row is None or row[1] != epoch:
            self._ends.pop(session, None)
            raise LeaseLostError(f"session {session!r} has another epoch than {epoch}")
        number = row[0]
        # Only this node appends under its epoch, and no epoch is used twice, so the known end is still valid.
        if known is None or known.epoch != epoch:
            position = number_of(self._db.execute(FIND_END, (number,)))
        else:
            position = known.position
        return _End(number, position, epoch, self._data_version)

    def prune(self, session: str, body: bytes, position: int, epoch: int, link: bytes | None) -> bool:
        """See `Store.prune`."""
        row = self._db.execute(FOLD_INTO, (body, session, position, epoch, link)).fetchone()
        if row is None:
            return False
        self._db.execute(DELETE_BEFORE, (row[0], position))
        return True

    def delete(self, session: str) -> bool:
        """See `Store.delete`."""
        going: list[Any] = self._db.execute(FIND_WITH_PARTS, (session, PART_MARK, PART_MARK_END)).fetchall()
        for name, _, _, node in going:
            self._refuse_if_held(name, node)
        for name, number, epoch, _ in going:
            self._ends.pop(name, None)
            self._db.execute(DELETE_RECORDS, (number,))
            self._db.execute(DELETE_BLOBS, (number,))
            self._db.execute(DELETE_SESSION, (number,))
            self._db.execute(inbox.REMOVE_OF_SESSION, (name,))
            key_values.delete_of_session(self._db, name)
            self._db.execute(SPEND_EPOCHS, (epoch,))
        return bool(going)

    def _refuse_if_held(self, session: str, node: str | None) -> None:
        if node is None or node == self.lock.node:
            return
        if self.peers.may_hold(node):
            message = f"session {session!r} belongs to {node!r}, which is alive"
            raise LeaseHeldError(message, session=session)

    def put(self, session: str, body: bytes) -> int:
        """See `inbox.put`."""
        return inbox.put(self._db, session, self.lock.node, body)

    def answer(self, forwarded: int, body: bytes) -> None:
        """See `Store.answer`."""
        inbox.answer(self._db, forwarded, body, us=self.lock.node, may_hold=self.peers.may_hold)

    def remove(self, forwarded: int) -> None:
        """See `inbox.remove`."""
        inbox.remove(self._db, forwarded)

    def kv_put(self, namespace: str, key: str, body: bytes, expected: int, at: float) -> int:
        """See `KeyValue.kv_put`."""
        return key_values.put(self._db, namespace, key, body, expected=expected, at=at)

    def kv_delete(self, namespace: str, key: str, expected: int) -> bool:
        """See `KeyValue.kv_delete`."""
        return key_values.delete(self._db, namespace, key, expected=expected)

    # --- the log

    def checkpoint(self) -> None:
        """See `group_commit.Committer`. After a failure the log grows until the next checkpoint."""
        self._copied_pages += self.log_pages
        self.log_pages = 0
        with contextlib.suppress(apsw.Error):
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def clear_log(self) -> None:
        """See `group_commit.Committer`."""
        with contextlib.suppress(apsw.Error):
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)

    def _count_log(self) -> None:
        try:
            pages, _ = self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)  # only counts the pages
        except apsw.Error:
            return  # the next commit raises the error
        if pages < self._copied_pages:  # the log was restarted
            self._copied_pages = 0
        self.log_pages = pages - self._copied_pages


def _answer(write: Callable[[], T]) -> T | MidstreamError:
    try:
        return write()
    except MidstreamError as refused:
        return refused
