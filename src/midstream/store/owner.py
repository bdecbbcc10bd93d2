"""Who is alive: an owner is a process that holds an operating-system lock on a file of its own.

The system frees the lock the moment the process dies, however it dies; a free lock, or a missing file, is a dead
owner. Nobody needs a clock or a heartbeat for that. An owner's name is never used twice.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from pathlib import Path

from midstream.errors import UsageError

if sys.platform == "win32":
    import msvcrt

    def _is_lock_taken(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _is_lock_taken(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


TRIES_MAX = 10
"""A sweep by another process may take a new file away before it is locked; ten sweeps in a row are no accident."""


class OwnerLock:
    """The sign of life of one owner: a locked file `<folder>/<owner>.lock`."""

    def __init__(self, folder: Path, owner: str) -> None:
        """Take the lock.

        Raises:
            UsageError: The folder cannot be written, or its file system knows no locks. Nothing is left behind.
        """
        self.owner = owner
        self._path = _lock_file(folder, owner)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._descriptor = _take(self._path)
        except OSError as error:
            raise UsageError(
                f"cannot lock a file in {str(folder)!r} ({error.strerror}): "
                "put the database on a local file system that this user may write to"
            ) from error
        _locks_of_this_process.add(self)

    def give_up(self) -> None:
        """Be dead for everybody. Calling it twice is harmless."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            self.drop()

    def drop(self) -> None:
        """Let go of the file and leave it there: what the system does for a process that died."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_alive(folder: Path, owner: str) -> bool:
    """Return whether an owner's lock is held; the file of a dead one is removed."""
    path = _lock_file(folder, owner)
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # somebody else's file: who cannot look must not take over
    try:
        if not _is_lock_taken(descriptor):
            return True
        with contextlib.suppress(OSError):
            path.unlink()
        return False
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove the files that killed owners left behind."""
    for path in folder.glob("*.lock"):
        is_alive(folder, path.stem)


_locks_of_this_process: weakref.WeakSet[OwnerLock] = weakref.WeakSet()


def _lock_file(folder: Path, owner: str) -> Path:
    return folder / f"{owner}.lock"


def _take(path: Path) -> int:
    for _ in range(TRIES_MAX):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if _is_lock_taken(descriptor) and _is_same_file(descriptor, path):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(0, f"{path.name} is taken away again and again")


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _drop_in_child() -> None:
    # A forked child shares the lock and would keep a killed parent alive for the others.
    for lock in _locks_of_this_process:
        lock.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
