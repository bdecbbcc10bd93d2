"""opencode's storage folder, examined session by session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from midstream.doctor import opencode
from midstream.doctor.file_reading import Stamp, require_no_link, stamp_of, value_in
from midstream.doctor.file_writing import Written, write_folder_beside, write_in_place
from midstream.doctor.findings import HistoryReport, finding
from midstream.doctor.rewriting import encode
from midstream.errors import UnreadableHistoryError


class FolderRemedy:
    """A repaired copy of the broken sessions of a storage folder that is not written yet."""

    def __init__(
        self, path: Path, originals: list[Path], changed: dict[Path, bytes | None], stamps: dict[Path, Stamp]
    ) -> None:
        self._path = path
        self._originals = originals
        self._changed = changed
        self._stamps = stamps

    def beside(self) -> Written:
        """Write the changed sessions into `NAME.repaired`; see `file_writing.write_folder_beside`."""
        return write_folder_beside(self._path, self._originals, self._changed)

    def in_place(self) -> Written:
        """Replace each changed file, and keep backups; a file that is not JSON stays."""
        backup = None
        for name, body in self._changed.items():
            if body is not None:
                backup = write_in_place(self._path / name, [body], self._stamps[name]).backup
        return Written(self._path, backup)


def is_storage(path: Path) -> bool:
    """Whether a folder is opencode's storage."""
    return all(os.path.isdir(path / name) for name in ("message", "part"))  # noqa: PTH112 - false without permission to look


def examine_storage(
    path: Path, profile: str | None, tick: Callable[[int], None]
) -> tuple[HistoryReport, FolderRemedy | None]:
    """Examine every session of a storage folder.

    Raises:
        UnreadableHistoryError: It is not a storage folder.
        UsageError: There is no profile with this name.
    """
    if not is_storage(path):
        if not os.access(path, os.R_OK | os.X_OK):
            raise UnreadableHistoryError("this user has no permission to read it", reason="no-permission")
        raise UnreadableHistoryError("no history in this folder", reason="not-found")
    storage = _Storage(path, profile)
    for number, session in enumerate(_folders(path / "message")):
        tick(number)
        storage.examine(session)
    storage.find_orphans()
    report = storage.report(path)
    if not storage.changed:
        return report, None
    return report, FolderRemedy(path, storage.originals, storage.changed, storage.stamps)


class _Storage(opencode.StorageFindings):
    def __init__(self, path: Path, profile: str | None) -> None:
        super().__init__(profile)
        self.changed: dict[Path, bytes | None] = {}
        self.stamps: dict[Path, Stamp] = {}
        self.originals: list[Path] = []
        self._path = path
        self._known: set[str] = set()

    def examine(self, session: str) -> None:
        """Examine one session."""
        before = len(self.changed)
        files: list[Path] = []
        stored = list(self._read_messages(session, files))
        self.judge(stored)
        for message in stored:
            for name, part in message.parts:
                if opencode.is_open(part):
                    self._change(Path(name), encode(opencode.end_call(part), indent=2))
        if len(self.changed) > before:
            self.originals += files
            self.originals += [
                each.relative_to(self._path) for each in self._path.glob(f"session/*/{session}.json")
            ]

    def find_orphans(self) -> None:
        """Find parts without a message."""
        for message in _folders(self._path / "part"):
            if message not in self._known:
                self.note_orphan(f"part/{message}")

    def _read_messages(self, session: str, files: list[Path]) -> Iterator[opencode.StoredMessage]:
        for name in _files(self._path / "message" / session):
            file = Path("message", session, name)
            self._known.add(file.stem)
            info = self._read(file, files)
            parts = [
                (part.as_posix(), value)
                for each in _files(self._path / "part" / file.stem)
                for part in [Path("part", file.stem, each)]
                if isinstance(value := self._read(part, files), dict)
            ]
            if isinstance(info, dict):
                yield opencode.StoredMessage(file.as_posix(), info, parts)

    def _read(self, name: Path, files: list[Path]) -> Any:  # noqa: ANN401 - any JSON of the file
        files.append(name)
        try:
            place = self._path / name
            require_no_link(place)
            self.stamps[name] = stamp_of(place)
            return value_in(place.read_bytes()).value
        except (UnreadableHistoryError, OSError):
            problem = finding("broken-file", "left out of the copy", file=name.as_posix(), lost="a file")
            self.findings.append(problem)
            self.changed[name] = None
            return None

    def _change(self, name: Path, body: bytes) -> None:
        self.changed[name] = body


def _folders(path: Path) -> list[str]:
    with os.scandir(path) as found:
        return sorted(each.name for each in found if each.is_dir())


def _files(path: Path) -> list[str]:
    if not path.is_dir():
        return []
    with os.scandir(path) as found:
        return sorted(each.name for each in found if each.name.endswith(".json"))
