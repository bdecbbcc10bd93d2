"""Limits of a tool in the transaction of its own outcome: a savepoint, a time limit, no access to midstream's tables.

This is no protection from malicious tools, which run in the same process. It prevents accidents: a statement that would
change a journal, commit half of an append, or block all sessions.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import apsw

from midstream.environment import World
from midstream.errors import TransactionError, UsageError
from midstream.store.sqlite.database import schema

T = TypeVar("T")

SAVEPOINT = "midstream_effect"
STEPS = 1000
"""Steps of SQLite's virtual machine between two readings of the clock: some 10 µs."""
SLOW_S = 0.1
"""Seconds after which an effect is logged, because it blocked all sessions."""
PRAGMAS = frozenset(
    {"foreign_key_list", "index_info", "index_list", "table_info", "table_list", "table_xinfo"}
)
"""Pragmas that only describe tables."""

_NEVER = frozenset(
    {
        apsw.SQLITE_TRANSACTION,
        apsw.SQLITE_ATTACH,
        apsw.SQLITE_DETACH,
        # It would stay with the connection and hide a table of the same name from the next tool.
        apsw.SQLITE_CREATE_TEMP_TABLE,
        apsw.SQLITE_CREATE_TEMP_TRIGGER,
        apsw.SQLITE_CREATE_TEMP_VIEW,
        apsw.SQLITE_ANALYZE,  # it would change the query plans of the store
    }
)
_FIRST_IS_TABLE = frozenset({apsw.SQLITE_READ, apsw.SQLITE_UPDATE})
"""For these operations, the second argument is a column, which may have any name."""

_log = logging.getLogger(__name__)


def own_names() -> frozenset[str]:
    """Return the lower-case names of the store's tables, views and indexes, and of SQLite's table of row numbers."""
    created = re.findall(r"(?im)^create (?:unique )?(?:table|view|index) (\w+)", schema())
    return frozenset(name.lower() for name in created) | {"sqlite_sequence"}


class Effects:
    """The effects of tools on one connection, for use in the connection's thread.

    Args:
        db: The connection; a transaction is open whenever `attempt` is called.
        begin: Opens another transaction if a tool's statement has ended it.
    """

    def __init__(self, db: apsw.Connection, begin: Callable[[], object], world: World) -> None:
        self._db = db
        self._begin = begin
        self._clock = world.monotonic
        self._own = own_names()

    def attempt(self, effect: Callable[[OpenTransaction], T], *, within_s: float) -> T:
        """See `contract.Attempt`.

        Raises:
            UsageError: A failed statement of the tool has ended the transaction. Its changes are undone.
        """
        began_at = self._clock()
        self._db.execute(f"savepoint {SAVEPOINT}")
        opened = OpenTransaction(self._db, lambda: self._clock() > began_at + within_s)
        try:
            with self._guard(opened):
                value = effect(opened)
                opened.require_whole()
        except BaseException:
            self._undo()
            raise
        finally:
            opened.is_over = True
            if (took_s := self._clock() - began_at) > SLOW_S:
                _log.warning(
                    "a tool in a transaction blocked all sessions for %.3f s; such a tool must be short",
                    took_s,
                )
        self._db.execute(f"release {SAVEPOINT}")
        return value

    def _undo(self) -> None:
        if self._db.in_transaction:
            self._db.execute(f"rollback to {SAVEPOINT}")
            self._db.execute(f"release {SAVEPOINT}")
        else:
            self._begin()  # SQLite has undone everything: after an interrupted write, or by a statement

    @contextmanager
    def _guard(self, opened: OpenTransaction) -> Iterator[None]:
        self._db.set_authorizer(self._judge)
        self._db.set_progress_handler(opened.is_late, STEPS)
        try:
            yield
        finally:
            self._db.set_progress_handler(None)
            self._db.set_authorizer(None)

    def _judge(
        self,
        operation: int,
        first: str | None,
        second: str | None,
        _database: str | None,
        _source: str | None,
    ) -> int:
        """Return whether a tool's statement is permitted; SQLite calls this while it parses the statement."""
        named = (first,) if operation in _FIRST_IS_TABLE else (first, second)
        if operation == apsw.SQLITE_PRAGMA:
            is_allowed = (first or "").lower() in PRAGMAS
        elif operation == apsw.SQLITE_SAVEPOINT:
            is_allowed = (second or "").lower() != SAVEPOINT
        elif operation == apsw.SQLITE_FUNCTION:
            is_allowed = True
        else:
            is_allowed = operation not in _NEVER and not any(
                (name or "").lower() in self._own for name in named
            )
        return apsw.SQLITE_OK if is_allowed else apsw.SQLITE_DENY


class OpenTransaction:
    """See `contract.Transaction`."""

    def __init__(self, db: apsw.Connection, is_late: Callable[[], bool]) -> None:
        self.is_late = is_late
        """Whether the time limit of the call was reached."""
        self.is_over = False
        """Whether the tool has returned."""
        self._db = db

    def execute(
        self, statement: str, bindings: Sequence[Any] | Mapping[str, Any] = ()
    ) -> list[tuple[Any, ...]]:
        """See `contract.Transaction.execute`."""
        self.require_whole()
        if self.is_late():
            raise TransactionError("the time limit of this call was reached; the statement was not run")
        changes = self._db.total_changes()
        try:
            return self._db.execute(statement, bindings).fetchall()
        except apsw.Error as error:
            what = (
                "the time limit of this call was reached"
                if isinstance(error, apsw.InterruptError)
                else str(error)
            )
            if not self._db.in_transaction:
                left = "Everything that this call wrote was undone."
            elif self._db.total_changes() != changes:
                left = "Some of its changes were made before it failed, and remain."
            else:
                left = "It changed nothing."
            raise TransactionError(f"{what}. {left}", is_over=not self._db.in_transaction) from error

    def require_whole(self) -> None:
        """Raise `UsageError` if the transaction accepts no more statements."""
        if self.is_over:
            raise UsageError("this transaction ended when its tool returned")
        if not self._db.in_transaction:
            raise UsageError("a statement that failed has ended this transaction")
