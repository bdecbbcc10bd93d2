"""Folders of the command line's files: the XDG folders, their equivalents on macOS and Windows, or one `--home`.

Also private creation and syncing of any folder.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

PROJECT_CHARS_MAX = 40
"""Characters of a project's name in the name of its store's folder."""


@dataclass(frozen=True)
class Paths:
    """The folders of one user. Each is created at its first use."""

    data: Path
    """Data that must not be lost: the store."""
    state: Path
    """State of this machine: clients' checkpoints, the last session, a crash."""
    project: Path | None = None
    """The project folder, because each project has a store of its own; None with a chosen home."""

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
        """The default database of `serve` and `sessions`: one for each project."""
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
        """The default database of `gateway`."""
        return self.data / "gateway.db"


def _current() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:  # it was removed meanwhile
        return None


def make_folder(folder: Path) -> Path:
    """Create a folder that only this user can read, unless it exists, and return it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def sync_names(folder: Path) -> None:
    """Sync a folder's entries to the disk, if the system can sync folders.

    Raises:
        OSError: The disk reports an error.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder(variable: str) -> Path | None:
    """Return the folder in a variable; a relative one counts as unset, as XDG requires."""
    named = os.environ.get(variable, "")
    return Path(named) if named and Path(named).is_absolute() else None
