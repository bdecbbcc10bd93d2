"""Folders of the command line's files: the XDG folders, their like on macOS and Windows, or one `--home`.

And what is done to folders anywhere: made private, and made to last.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

PROJECT_CHARS_MAX = 40
"""Characters of a project's folder name in the name of its store's folder."""


@dataclass(frozen=True)
class Paths:
    """The folders of one user. None of them exists before something is written there."""

    data: Path
    """What must not be lost: the store."""
    state: Path
    """State of this machine: where a client stands, the last session, a crash."""
    project: Path | None = None
    """The folder whose sessions these are, as each project has a store of its own; None in a home that was chosen."""

    @classmethod
    def find(cls, home: Path | None = None) -> Paths:
        """Return the paths below `home`, else below MIDSTREAM_HOME, else the system's own folders.

        In the system's own folders the project is the current folder.
        """
        chosen = home or _folder("MIDSTREAM_HOME")
        if chosen is not None:
            return cls(chosen, chosen)
        user, project = Path.home(), _current()
        if sys.platform == "darwin":
            everything = user / "Library" / "Application Support" / "midstream"
            return cls(everything, everything, project)
        if sys.platform == "win32":
            everything = (_folder("LOCALAPPDATA") or user / "AppData" / "Local") / "midstream"
            return cls(everything, everything, project)
        data = _folder("XDG_DATA_HOME") or user / ".local" / "share"
        state = _folder("XDG_STATE_HOME") or user / ".local" / "state"
        return cls(data / "midstream", state / "midstream", project)

    @property
    def store(self) -> Path:
        """The database that `serve` and `sessions` use where none is named: one for each project."""
        if self.project is None:
            return self.data / "sessions.db"
        digest = hashlib.blake2b(os.fsencode(self.project), digest_size=4).hexdigest()
        name = "".join(each if each.isalnum() else "-" for each in self.project.name)[:PROJECT_CHARS_MAX]
        return self.data / "projects" / f"{name}-{digest}" / "sessions.db"

    @property
    def secrets(self) -> Path:
        """Default file of clients' secrets."""
        return self.state / "secrets.db"

    @property
    def gateway_store(self) -> Path:
        """The database that `gateway` uses where none is named."""
        return self.data / "gateway.db"


def _current() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed under us
        return None


def make_folder(folder: Path) -> Path:
    """Make a folder that only this user may look into, unless it is there, and return it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def sync_names(folder: Path) -> None:
    """Make what was made, renamed or removed in a folder survive a power cut, where the system can sync folders.

    Raises:
        OSError: The disk does not answer for it.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder(variable: str) -> Path | None:
    """Return the folder a variable names; a relative one counts as unset, as XDG requires."""
    named = os.environ.get(variable, "")
    return Path(named) if named and Path(named).is_absolute() else None
