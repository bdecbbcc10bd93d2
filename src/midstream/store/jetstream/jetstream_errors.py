"""Errors of NATS servers and their driver as errors of ours."""

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
"""Whatever the driver raises where a server refuses, or is not reached."""
RETRY_AFTER_S = 1.0

NO_MESSAGE = 10037
NO_STREAM = 10059
WRONG_SEQUENCE = 10071
"""The subject has another last message than the expected one."""
_WRONG_SEQUENCES = frozenset((WRONG_SEQUENCE, 10164))
"""The second: another message of the subject is being written at this moment."""
_BATCH_REFUSED = frozenset((10176, 10210))
"""A server lacks a message of the batch, or had too many batches to take its first message."""
_FULL = frozenset((10023, 10028, 10047, 10077))
"""No storage left: of a server, of an account, of a stream."""
_DISABLED = frozenset((10039, 10076))
_TOO_LARGE = frozenset((10054, 10199))
_NOT_ALLOWED = frozenset((10052, 10065, 10058))


class SubjectMovedError(Exception):
    """A subject has another last message than the expected one. It may be one that this process has sent."""


class BatchRefusedError(Exception):
    """A server did not take a batch. Nothing of it was written."""


class UnknownOutcomeError(Exception):
    """A server did not answer to a write: it has happened, happens later, or does not happen."""


class NoMessageError(Exception):
    """A server has no message that fits."""


class NoStreamError(NoMessageError):
    """A server has no stream of this name."""


def error_of(code: int, description: str, where: str) -> Exception:
    """Return the exception for an error that a server has answered with."""
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
    """Return our error for one of the driver's; `where` is the address without its password."""
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
