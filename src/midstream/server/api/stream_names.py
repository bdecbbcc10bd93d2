"""Names of plain streams: those of clients, and those of their journals in the store.

A name has segments, separated by slashes. In the journal's name, `PLAIN_MARK` replaces each slash; a segment cannot
contain it. So the names of journals are valid in every store and in patterns of scopes.
"""

from __future__ import annotations

from midstream.engine.host import Host
from midstream.engine.journal import require_session_id
from midstream.errors import UsageError
from midstream.server.auth.caller import Caller
from midstream.store.contract import PLAIN_MARK

CONTROL = "__ds"
"""First path segment of control requests; no stream has it."""
SESSIONS = "sessions"
"""First path segment of read-only streams of sessions."""


def require_stream_name(name: str) -> None:
    """Require a valid name of a plain stream.

    Raises:
        UsageError: The name is not 1 to 128 of letters, digits, `._:-` and single slashes between them.
    """
    try:
        for part in (name.replace("/", "."), *name.split("/")):
            require_session_id(part)
    except UsageError as error:
        message = "the name of a stream has 1 to 128 of letters, digits and '._:-', with single slashes between them"
        raise UsageError(f"{message}; got {name[:40]!r}") from error


def require_no_locks(host: Host) -> None:
    """Refuse plain streams on a server with escrow, because they would not be encrypted.

    Raises:
        UsageError: Clients hold the keys of their sessions.
    """
    if host.locks is not None:
        raise UsageError("plain streams are not available if clients hold the keys of their sessions")


def journal_of(name: str, caller: Caller) -> str:
    """Return the journal for a caller's name of a stream.

    Raises:
        UsageError: The name is invalid.
    """
    require_stream_name(name)
    return caller.stored_name(stored_part(name))


def stored_part(name: str) -> str:
    """Return the name of a stream's journal without its tenant."""
    return PLAIN_MARK + name.replace("/", PLAIN_MARK)


def name_of(journal: str, tenant: str) -> str | None:
    """Return the name of a journal's stream; None if it is not a stream of this tenant."""
    start = f"{tenant}:{PLAIN_MARK}" if tenant else PLAIN_MARK
    if not journal.startswith(start):
        return None
    name = journal.removeprefix(start).replace(PLAIN_MARK, "/")
    return None if name.partition("/")[0] == CONTROL else name
