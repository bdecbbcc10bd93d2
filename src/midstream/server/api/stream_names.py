"""Names of plain streams: as clients write them, and as the store has their journals.

A name has segments, separated by slashes. In the journal's name each slash is a second `PLAIN_MARK`, which no segment
can have, so that names of journals stay within what every store and every pattern of scopes accepts.
"""

from __future__ import annotations

from midstream.engine.host import Host
from midstream.engine.journal import require_session_id
from midstream.errors import UsageError
from midstream.server.auth.caller import Caller
from midstream.store.contract import PLAIN_MARK

CONTROL = "__ds"
"""First segment of the addresses that control streams; no stream has it."""
SESSIONS = "sessions"
"""First segment of the streams that are made of sessions, and are only read."""


def require_stream_name(name: str) -> None:
    """Refuse a name that no plain stream can have.

    Raises:
        UsageError: It is not 1 to 128 of letters, digits, `._:-` and single slashes between them.
    """
    require_session_id(name.replace("/", "."))
    for segment in name.split("/"):
        require_session_id(segment)


def require_no_locks(host: Host) -> None:
    """Refuse plain streams where they would not be encrypted as sessions are.

    Raises:
        UsageError: Clients hold the keys of their sessions.
    """
    if host.locks is not None:
        raise UsageError("plain streams are not served where clients hold the keys of their sessions")


def journal_of(name: str, visitor: Caller) -> str:
    """Return the journal of the stream that a caller names.

    Raises:
        UsageError: No stream can have that name.
    """
    require_stream_name(name)
    return visitor.stored_name(stored_part(name))


def stored_part(name: str) -> str:
    """Return the name of a stream's journal, without the name of a tenant."""
    return PLAIN_MARK + name.replace("/", PLAIN_MARK)


def name_of(journal: str, tenant: str) -> str | None:
    """Return the name of the stream of a journal; None where it is none of this tenant's streams."""
    start = f"{tenant}:{PLAIN_MARK}" if tenant else PLAIN_MARK
    if not journal.startswith(start):
        return None
    name = journal.removeprefix(start).replace(PLAIN_MARK, "/")
    return None if name.partition("/")[0] == CONTROL else name
