"""State that `chat` keeps: the last session at each address, each session's checkpoint, and the text shown last.

The client keeps how far an application has handled its events; a process that is killed gets the last ones again.
A screen cannot be asked what stands on it, so the id of each event is noted before and after it is printed. What
comes again is not printed again, but for one event: the one that was being printed in the instant of the kill. It may
stand there or not, so it is printed again with a remark.
"""

from __future__ import annotations

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
"""What a server takes for a session's name; files are named after it here."""
_NOTE_BYTES = 2 * EVENT_ID_CHARS_MAX + 1
"""Two event ids: the last one printed and the one being printed."""


class Chats:
    """The chats of one user on this machine.

    Args:
        folder: Where they are kept; made on first use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last = folder / "last.json"

    def last(self, url: str) -> str:
        """Return the session that was last talked in at an address.

        Raises:
            SessionNotFoundError: None was.
        """
        session = self._read_last().get(url)
        if session is None:
            raise SessionNotFoundError(f"no chat at {url} can be resumed; start one without --resume")
        return session

    def set_last(self, url: str, session: str) -> None:
        """Make a session the last one at an address.

        Raises:
            UsageError: It is no name of a session.
        """
        if not _NAME.fullmatch(session):
            raise UsageError(
                f"a session is named with 1 to 128 of letters, digits and '._:-', not {session[:40]!r}"
            )
        chats = {**self._read_last(), url: session}
        make_folder(self._folder)
        replace_own(self._last, msgspec.json.encode(chats))

    def state(self, session: str) -> Path:
        """Return the checkpoint file of a session: one each, as only one process may use one."""
        return make_folder(self._folder) / f"{session.replace(':', '_')}.db"

    def find_interrupted(self, url: str) -> list[str]:
        """Return the sessions at an address whose turns this user's terminals did not see the end of."""
        files = sorted(self._folder.glob("*.db"), key=lambda path: path.lstat().st_mtime)
        return [session for path in files for session in sessions_left(path, server=url)]

    def find_last_shown(self, session: str) -> LastShown:
        """Return what was shown last of a session."""
        return LastShown(make_folder(self._folder) / f"{session.replace(':', '_')}.shown")

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
            return {}  # only a convenience: it is made anew
        except UsageError:  # a link, a pipe or another user's file
            quarantine(self._last)
            return {}


class LastShown:
    """The newest event that was printed, in a file of its own. Use it as a context manager."""

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
        """The newest event that was printed; None where none was."""
        return str(self._id) if self._id.position else None

    def has(self, event_id: str) -> bool:
        """Whether this event, or one after it, was printed before."""
        return EventId.parse(event_id).position <= self._id.position

    def may_have(self, event_id: str) -> bool:
        """Whether this is the event in the middle of whose printing an earlier process was killed."""
        return event_id == self._doubtful

    def begin(self, event_id: str) -> None:
        """Keep that this event is being printed. It survives the death of the process at once."""
        self._note(f"{self._id} {event_id}")

    def end(self, event_id: str) -> None:
        """Keep that this event is on the screen now."""
        self._id = EventId.parse(event_id)
        self._note(event_id)

    def _note(self, text: str) -> None:
        os.pwrite(self._file, text.ljust(_NOTE_BYTES).encode(), 0)
