"""State of `chat`: the last session at each address, each session's checkpoint, and the last printed event.

After a kill, the client receives the last events again. A program cannot read the screen, so the id of each event is
stored before and after it is printed, and repeated events are not printed. Only the event that was being printed at the
kill is printed again, with a remark, because its first output may be incomplete.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from midstream.client.checkpoint_file import sessions_left
from midstream.errors import MalformedFrameError, SessionNotFoundError, UsageError
from midstream.file_safety import open_own, quarantine, read_own, replace_own
from midstream.paths import make_folder
from midstream.protocol.frames import EVENT_ID_CHARS_MAX, START, EventId

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
"""Valid names of sessions; they are also file names here."""
_NOTE_BYTES = 2 * EVENT_ID_CHARS_MAX + 1
"""Size of two event ids: the last printed one, and the one being printed."""


class Chats:
    """The chats of one user on this machine.

    Args:
        folder: Folder of the files; created on first use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last = folder / "last.json"

    def last(self, url: str) -> str:
        """Return the last session at an address.

        Raises:
            SessionNotFoundError: There is none.
        """
        session = self._read_last().get(url)
        if session is None:
            raise SessionNotFoundError(f"no chat at {url} can be resumed; start one without --resume")
        return session

    def set_last(self, url: str, session: str) -> None:
        """Make a session the last one at an address.

        Raises:
            UsageError: The name is invalid.
        """
        if not _NAME.fullmatch(session):
            raise UsageError(
                f"the name of a session must be 1 to 128 of letters, digits and '._:-', not {session[:40]!r}"
            )
        chats = {**self._read_last(), url: session}
        make_folder(self._folder)
        replace_own(self._last, msgspec.json.encode(chats))

    def state(self, url: str, session: str) -> Path:
        """Return the checkpoint file of a session. Each has its own, because only one process may use a file."""
        return self._file(url, session, "db")

    def find_interrupted(self, url: str) -> list[str]:
        """Return the sessions at an address with turns whose end this user's terminals have not shown."""
        files = sorted(self._folder.glob("*.db"), key=lambda path: path.lstat().st_mtime)
        return [session for path in files for session in sessions_left(path, server=url)]

    def find_last_shown(self, url: str, session: str) -> LastShown:
        """Return the last shown event of a session."""
        return LastShown(self._file(url, session, "shown"))

    def _file(self, url: str, session: str, kind: str) -> Path:
        """Return the path of a file of a session. Sessions of two servers may have the same name."""
        digest = hashlib.sha256(f"{url}\n{session}".encode()).hexdigest()[:16]
        return make_folder(self._folder) / f"{session.replace(':', '_')}-{digest}.{kind}"

    def _read_last(self) -> dict[str, str]:
        try:
            return msgspec.json.decode(read_own(self._last, "the list of chats"), type=dict[str, str])
        except (
            FileNotFoundError,
            NotADirectoryError,
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ):
            return {}  # only a convenience: it is created again
        except UsageError:  # a link, a pipe, or another user's file
            quarantine(self._last)
            return {}


class LastShown:
    """File with the newest printed event. Use it as a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._id = START
        self._doubtful = ""

    def __enter__(self) -> Self:
        self._file = open_own(self._path, "the note of what was shown", os.O_RDWR | os.O_CREAT)
        noted = os.pread(self._file, _NOTE_BYTES, 0).decode("ascii", "replace").split()
        try:
            self._id = EventId.parse(noted[0]) if noted else START
        except MalformedFrameError:
            self._id = START
        self._doubtful = noted[1] if len(noted) > 1 else ""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    @property
    def newest(self) -> str | None:
        """The newest printed event, or None."""
        return str(self._id) if self._id.position else None

    def has(self, event_id: str) -> bool:
        """Return whether this event, or a later one, was printed."""
        return EventId.parse(event_id).position <= self._id.position

    def may_have(self, event_id: str) -> bool:
        """Return whether an earlier process was killed while it printed this event."""
        return event_id == self._doubtful

    def begin(self, event_id: str) -> None:
        """Store that this event will be printed. The note survives a kill of the process."""
        self._note(f"{self._id} {event_id}")

    def end(self, event_id: str) -> None:
        """Store that this event was printed."""
        self._id = EventId.parse(event_id)
        self._note(event_id)

    def _note(self, text: str) -> None:
        os.pwrite(self._file, text.ljust(_NOTE_BYTES).encode(), 0)
