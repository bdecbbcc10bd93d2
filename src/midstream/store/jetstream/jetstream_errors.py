"""Errors of NATS servers and their driver, and their conversion to errors of midstream."""

from __future__ import annotations

from midstream.errors import (
    MidstreamError,
    StoreBusyError,
    StoreDamagedError,
    StoreFullError,
    UsageError,
)
from midstream.extras import extra

with extra("nats"):
    import nats.errors

FAILURES = (nats.errors.Error, OSError, TimeoutError)
"""Exceptions of the driver if a server refuses or cannot be reached."""
RETRY_AFTER_S = 1.0

NO_MESSAGE = 10037
NO_STREAM = 10059
WRONG_SEQUENCE = 10071
"""The subject has another last message than the expected one."""
_WRONG_SEQUENCES = frozenset((WRONG_SEQUENCE, 10164))
"""The second code: another message of the subject is just being written."""
_BATCH_REFUSED = frozenset((10176, 10210))
"""A server lacks a message of the batch, or had too many open batches."""
_FULL = frozenset((10023, 10028, 10047, 10077))
"""No space left: of a server, of an account, of a stream."""
_DISABLED = frozenset((10039, 10076))
_TOO_LARGE = frozenset((10054, 10199))
_NOT_ALLOWED = frozenset((10052, 10065, 10058))


class SubjectMovedError(Exception):
    """The last message of a subject is not the expected one. It may be a message of this process."""


class BatchRefusedError(Exception):
    """A server refused a batch. Nothing of it was written."""


class UnknownOutcomeError(Exception):
    """A server did not answer to a write, which may have happened or may still happen."""


class NoMessageError(Exception):
    """A server has no matching message."""


class NoStreamError(NoMessageError):
    """A server has no stream of this name."""


def error_of(code: int, description: str, where: str) -> Exception:
    """Return the exception for an error code of a server."""
    if code in _WRONG_SEQUENCES:
        return SubjectMovedError(description)
    if code in _BATCH_REFUSED:
        return BatchRefusedError(description)
    if code == NO_MESSAGE:
        return NoMessageError(description)
    if code == NO_STREAM:
        return NoStreamError(description)
    if code in _FULL:
        return StoreFullError(f"no space left in {where} ({description}): free some and try again")
    if code in _DISABLED:
        return UsageError(f"{where} has no JetStream: set `jetstream` in the server's configuration")
    if code in _TOO_LARGE:
        return UsageError(f"{where}: {description}")
    if code in _NOT_ALLOWED:
        return UsageError(f"{where}: {description}")
    return StoreBusyError(f"{where}: {description} (JetStream error {code})", retry_after_s=RETRY_AFTER_S)


def refusal_of(error: BaseException, where: str) -> MidstreamError:
    """Return the error of midstream for one of the driver; `where` is the address without its password."""
    match error:
        case MidstreamError():
            return error
        case nats.errors.AuthorizationError() | nats.errors.InvalidUserCredentialsError():
            return UsageError(f"{where}: the servers refuse these credentials")
        case nats.errors.MaxPayloadError():
            return UsageError(f"{where}: a message is larger than the server's `max_payload`")
        case nats.errors.Error() | OSError() | TimeoutError():
            words = str(error) or type(error).__name__
            return StoreBusyError(f"{where} cannot be reached ({words})", retry_after_s=RETRY_AFTER_S)
        case _:
            return StoreDamagedError(f"{where}: {error} ({type(error).__name__})")
