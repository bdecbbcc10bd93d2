"""Errors of PostgreSQL and its driver, converted to errors of midstream."""

from __future__ import annotations

from midstream.errors import (
    MidstreamError,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
    UsageError,
)
from midstream.extras import extra

with extra("postgres"):
    import asyncpg

FAILURES = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
"""Exceptions of the driver if the server refuses or cannot be reached."""
RETRY_AFTER_S = 1.0
AGAIN = (asyncpg.DeadlockDetectedError, asyncpg.SerializationError)
"""The server undid the statement because of another one; it may be repeated."""

_UNREACHABLE = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.LockNotAvailableError,
    *AGAIN,
)
_LOST = (OSError, TimeoutError, asyncpg.PostgresConnectionError, asyncpg.InternalClientError)
_TERMINATED = (
    asyncpg.AdminShutdownError,
    asyncpg.ConnectionDoesNotExistError,
    asyncpg.InterfaceError,  # of the closed connection
    asyncpg.InternalClientError,  # the server's last message came between two statements
)
_DAMAGED = (asyncpg.DataCorruptedError, asyncpg.IndexCorruptedError)
_UNPREPARED = (
    asyncpg.UndefinedTableError,
    asyncpg.UndefinedColumnError,
    asyncpg.InvalidSchemaNameError,
)


def is_lost(error: BaseException, connection: asyncpg.Connection) -> bool:
    """Whether the connection ended with this error, so that the outcome of its statement is unknown."""
    if isinstance(error, _LOST):
        return True
    try:
        is_closed: bool = connection.is_closed()
    except asyncpg.InterfaceError:  # the pool has taken it back as closed
        return True
    return is_closed


def is_terminated(error: BaseException | None) -> bool:
    """Whether an established connection was ended; False if none could be opened."""
    return isinstance(error, _TERMINATED)


def refusal_of(error: BaseException, where: str) -> MidstreamError:
    """Return the error of midstream for one of PostgreSQL; `where` is the address without its password."""
    match error:
        case MidstreamError():
            return error
        case asyncpg.DiskFullError():
            return StoreFullError(f"no space left for {where}: free some and try again")
        case asyncpg.InvalidAuthorizationSpecificationError() | asyncpg.InvalidCatalogNameError():
            return UsageError(f"{where}: {first_line(error)}")
        case asyncpg.InsufficientPrivilegeError():
            return UsageError(
                f"{where}: {first_line(error)}; `midstream store migrate --grant ROLE` gives a role what it needs"
            )
        case asyncpg.TooManyConnectionsError():
            return StoreBusyError(f"{where} has no connection left", retry_after_s=RETRY_AFTER_S)
        case asyncpg.ProgramLimitExceededError():
            return UsageError("a record is larger than PostgreSQL can hold")
        case _ if isinstance(error, _UNREACHABLE):
            return StoreBusyError(f"{where}: {first_line(error)}", retry_after_s=RETRY_AFTER_S)
        case _ if isinstance(error, _UNPREPARED):
            return UsageError(f"{where}: {first_line(error)}; prepare it with `midstream store migrate`")
        case _ if isinstance(error, _DAMAGED):
            return StoreDamagedError(f"{where}: {first_line(error)}")
        case OSError() | TimeoutError() | asyncpg.InterfaceError() | asyncpg.InternalClientError():
            return StoreBusyError(
                f"{where} cannot be reached ({first_line(error)})", retry_after_s=RETRY_AFTER_S
            )
        case _:
            return StoreDamagedError(f"{where}: {first_line(error)} ({type(error).__name__})")


def first_line(error: BaseException) -> str:
    """Return the message of an error without its details, which may contain users' content."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
