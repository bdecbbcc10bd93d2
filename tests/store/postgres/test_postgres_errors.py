"""Errors of PostgreSQL as errors of ours, with advice."""

from __future__ import annotations

import asyncpg
import pytest

from midstream.errors import StoreBusyError, StoreDamagedError, StoreFullError, UsageError
from midstream.store.postgres.postgres_errors import refusal_of


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (asyncpg.DiskFullError("x"), StoreFullError),
        (asyncpg.OutOfMemoryError("x"), StoreBusyError),
        (asyncpg.TooManyConnectionsError("x"), StoreBusyError),
        (asyncpg.AdminShutdownError("x"), StoreBusyError),
        (asyncpg.CannotConnectNowError("x"), StoreBusyError),
        (asyncpg.ReadOnlySQLTransactionError("x"), StoreBusyError),
        (asyncpg.DeadlockDetectedError("x"), StoreBusyError),
        (asyncpg.ConnectionDoesNotExistError("x"), StoreBusyError),
        (asyncpg.InterfaceError("x"), StoreBusyError),
        (asyncpg.InternalClientError("x"), StoreBusyError),
        (ConnectionRefusedError("x"), StoreBusyError),
        (TimeoutError(), StoreBusyError),
        (asyncpg.InvalidPasswordError("x"), UsageError),
        (asyncpg.InvalidCatalogNameError("x"), UsageError),
        (asyncpg.InsufficientPrivilegeError("x"), UsageError),
        (asyncpg.UndefinedTableError("x"), UsageError),
        (asyncpg.ProgramLimitExceededError("x"), UsageError),
        (asyncpg.DataCorruptedError("x"), StoreDamagedError),
        (asyncpg.InternalServerError("x"), StoreDamagedError),
    ],
)
def test_each_error_maps_to_one_of_ours(error: Exception, kind: type[Exception]) -> None:
    refusal = refusal_of(error, "store postgresql://h/db")
    assert type(refusal) is kind
    if kind is not UsageError:
        assert "postgresql://h/db" in refusal.message


def test_our_own_errors_are_unchanged() -> None:
    ours = UsageError("x")
    assert refusal_of(ours, "") is ours
