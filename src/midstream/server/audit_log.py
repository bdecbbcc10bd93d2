"""The audit log: one JSON line for each act of a principal, appended before the act, and for each refusal.

| field | meaning |
| --- | --- |
| `at` | time, RFC 3339, UTC |
| `event` | `read`, `list`, `send`, `answer`, `ticket`, `share`, `unshare`, `delete`, `login`, `logout`, `link`,
`revoke`, `metrics` |
| `outcome` | `admitted` before the act; else the code of the refusal or failure |
| `principal` | name of the principal; "" if unknown |
| `credential` | id of the cookie or viewer token, as `midstream access list` shows it; "" for a token |
| `address` | address of the client |
| `session` | the session, as the store names it |
| `method`, `path` | of the request; the path without its query |
| `call`, `choice` | of an answer: the call, and the decision |
| `target` | the principal of a `share`, `login` or `revoke` |

A line has at most `LINE_BYTES_MAX` bytes: longer values are cut. It contains no text of a session and no credential.
"""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from midstream.environment import World
from midstream.errors import UnavailableError, UsageError
from midstream.file_safety import open_own

LINE_BYTES_MAX = 4096
"""Bytes of a line with its end. A write of this size is atomic, also when several processes share a file."""
ADMITTED = "admitted"
_CUTS = (256, 64, 16)
_log = logging.getLogger(__name__)


class AuditLine(Struct, frozen=True, omit_defaults=True):
    """One line; the module's table describes the fields."""

    at: str
    event: str
    outcome: str
    principal: str
    address: str
    credential: str = ""
    session: str = ""
    method: str = ""
    path: str = ""
    call: str = ""
    choice: str = ""
    target: str = ""


class AuditLog:
    """Appends lines to a file that only this user can read. A file that was moved away is created again.

    Raises:
        UsageError: The file cannot be opened, is not a regular file, or belongs to another user.
    """

    def __init__(self, path: Path, world: World | None = None) -> None:
        self._path = path
        self._world = world or World()
        self._file = self._open()

    def write(
        self,
        event: str,
        outcome: str,
        *,
        principal: str = "",
        address: str = "",
        credential: str = "",
        session: str = "",
        method: str = "",
        path: str = "",
        call: str = "",
        choice: str = "",
        target: str = "",
    ) -> None:
        """Append a line.

        Raises:
            UnavailableError: The line could not be written. The caller must not do the act.
        """
        at = datetime.fromtimestamp(self._world.now(), UTC).isoformat(timespec="milliseconds")
        line = AuditLine(
            at.replace("+00:00", "Z"),
            event,
            outcome,
            principal,
            address,
            credential,
            session,
            method,
            path,
            call,
            choice,
            target,
        )
        body = encode_line(line)
        try:
            self._follow_rotation()
            written = os.write(self._file, body)
        except (OSError, UsageError) as error:
            raise UnavailableError(
                f"the audit log {self._path} cannot be written; nothing was done"
            ) from error
        if written < len(body):
            raise UnavailableError(f"the audit log {self._path} cannot be written whole; nothing was done")

    def write_refusal(self, event: str, code: str, **fields: str) -> None:
        """Append a line about a refusal. A failure is only logged: the request is refused anyway."""
        try:
            self.write(event, code, **fields)
        except UnavailableError as error:
            _log.error("%s", error.message)

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _open(self) -> int:
        try:
            file = open_own(self._path, "the audit log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise UsageError(f"the audit log {self._path} cannot be opened: {error.strerror}") from error
        found = os.fstat(file)
        if os.name == "posix" and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            os.close(file)
            raise UsageError(f"the audit log {self._path} must be a regular file that only you may write")
        return file

    def _follow_rotation(self) -> None:
        """Reopen the file if its path is missing or is another file now."""
        try:
            named = self._path.lstat()
            is_same = os.path.samestat(named, os.fstat(self._file))
        except FileNotFoundError:
            is_same = False
        if not is_same:
            fresh = self._open()
            self.close()
            self._file = fresh


def encode_line(line: AuditLine) -> bytes:
    """Encode a line within `LINE_BYTES_MAX` bytes; long values are cut."""
    values = msgspec.structs.asdict(line)
    for cut in _CUTS:
        short = {name: value if len(value) <= cut else f"{value[:cut]}…" for name, value in values.items()}
        short["at"] = line.at
        body = msgspec.json.encode(AuditLine(**short)) + b"\n"
        if len(body) <= LINE_BYTES_MAX:
            break
    return body
