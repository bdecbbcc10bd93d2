"""A disk under SQLite that records every operation, runs full, fails, and can lose its power."""
# ruff: noqa: N802, FBT001 - these methods have SQLite's names and arguments

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import apsw


class Write(NamedTuple):
    file: str
    offset: int
    data: bytes


class Truncation(NamedTuple):
    """The file is truncated to this length."""

    file: str
    size: int


class Sync(NamedTuple):
    file: str


class FileDeletion(NamedTuple):
    file: str
    is_synced: bool


class Note(NamedTuple):
    """A marked moment of a test, with its data."""

    ends: dict[str, int]
    epochs: dict[str, int]


Operation = Write | Truncation | Sync | FileDeletion | Note


class Disk(apsw.VFS):
    """The usual file system, recorded. Registered under `name` while the object exists."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "")
        self.name = name
        self.log: list[Operation] = []
        self.is_full = False
        self.is_sync_broken = False

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> DiskFile:
        return DiskFile(self, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        self.log.append(FileDeletion(Path(filename).name, bool(syncdir)))
        super().xDelete(filename, syncdir)

    def syncs(self) -> int:
        return sum(isinstance(operation, Sync) for operation in self.log)

    def bytes_written(self) -> int:
        return sum(len(operation.data) for operation in self.log if isinstance(operation, Write))


class DiskFile(apsw.VFSFile):
    def __init__(self, disk: Disk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._disk = disk
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._name = Path(path or "").name

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._disk.is_full:
            raise apsw.FullError
        self._disk.log.append(Write(self._name, offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, newsize: int) -> None:
        self._disk.log.append(Truncation(self._name, newsize))
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:
        if self._disk.is_sync_broken:
            raise apsw.IOError
        self._disk.log.append(Sync(self._name))
        super().xSync(flags)


def after_power_cut(log: list[Operation], chance: random.Random) -> dict[str, bytes]:
    """Return files that a computer may find after a power cut behind these operations.

    Synced data is there. Each later write is there, or missing, or torn between two sectors of 512 bytes.
    """
    durable: dict[str, bytearray] = {}
    pending: dict[str, list[Write | Truncation]] = {}
    limbo: dict[str, bytearray] = {}  # Deleted, but the deletion may be lost.
    for operation in log:
        match operation:
            case Write() | Truncation():
                pending.setdefault(operation.file, []).append(operation)
            case Sync(file):
                limbo.clear()  # A journalling file system commits earlier name changes with the next sync.
                for late in pending.pop(file, []):
                    _apply(durable, late)
            case FileDeletion(file, is_synced):
                pending.pop(file, None)
                old = durable.pop(file, None)
                if old is not None and not is_synced:
                    limbo[file] = old
            case Note():
                pass
    for file, content in limbo.items():
        if file not in durable and file not in pending and chance.random() < 0.5:
            durable[file] = content
    for operations in pending.values():
        for late in operations:
            fate = chance.random()
            if fate < 0.4:
                _apply(durable, late)
            elif fate < 0.6 and isinstance(late, Write):
                kept = 512 * chance.randint(0, len(late.data) // 512)
                _apply(durable, late._replace(data=late.data[:kept]))
    return {file: bytes(content) for file, content in durable.items()}


def _apply(files: dict[str, bytearray], operation: Write | Truncation) -> None:
    content = files.setdefault(operation.file, bytearray())
    match operation:
        case Write(_, offset, data):
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data
        case Truncation(_, size):
            del content[size:]
