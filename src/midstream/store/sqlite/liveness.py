"""Liveness of nodes: a node is a process that holds an operating-system lock on a file of its own.

The system frees the lock the moment the process dies, however it dies; a free lock, or a missing file, is a dead
node. That needs neither a clock nor a heartbeat. A node's name is never used twice.

A process that is stopped, not dead, still holds its lock. So every node that sees others also touches its file every
now and then; who sees no touch for the whole of a lease takes it for frozen (`Peers`). A touch shows that the
process gets processor time, not that its event loop is quick: it comes from a thread of the store, so that a tool
which blocks the loop for a minute is working, not frozen. `NodeSilences` adds up how long a file stayed as it was. A
node that is wrongly taken for frozen is fenced by the epoch, as if it had died.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

from midstream.errors import UsageError
from midstream.file_safety import open_own, require_own_folder
from midstream.store.node_liveness import NodeSilences

if sys.platform == "win32":
    import msvcrt

    def _is_lock_taken(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    _is_lock_free = _is_lock_taken
else:
    import fcntl

    def _is_lock_taken(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _is_lock_free(descriptor: int) -> bool:
        try:
            # Shared: several who look at a dead one in the same moment do not take one another for it.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


TRIES_MAX = 100
"""A sweep by another process may take a new file away before it is locked; a hundred in a row are no accident."""
BEATS_PER_LEASE = 10
"""Touches of a node's file in the time after which it counts as frozen."""

CALLED = "the lock file"

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", re.ASCII)
"""Form of a node's name: it comes from the database, and becomes a part of a path."""

_log = logging.getLogger(__name__)


class NodeLock:
    """The sign of life of one node: a locked file `<folder>/<node>.lock`."""

    def __init__(self, folder: Path, node: str) -> None:
        """Take the lock.

        Raises:
            UsageError: The folder cannot be written, is a link or another user's, or its file system has no locks.
                Nothing is left behind.
        """
        self.node = node
        self._path = _lock_file(folder, node)
        try:
            require_own_folder(folder, "the folder of lock files")
            folder.mkdir(mode=0o700, exist_ok=True)
            self._descriptor = _take(self._path)
        except OSError as error:
            raise UsageError(
                f"cannot lock a file in {str(folder)!r} ({error.strerror}): "
                "put the database on a local file system that this user may write to"
            ) from error
        _locks_of_this_process.add(self)

    def show_liveness(self) -> None:
        """Show those who look that this process is given time."""
        if self._descriptor >= 0:
            # A full disk is no reason to die; who looks waits for a whole lease.
            with contextlib.suppress(OSError):
                os.utime(self._descriptor if os.utime in os.supports_fd else self._path)

    def give_up(self) -> None:
        """Release the lock, so that this node counts as dead. Calling it twice is harmless."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)  # noqa: PTH108 - see `_lock_file`
            self.drop()

    def drop(self) -> None:
        """Let go of the file and leave it there: what the system does for a process that died."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_alive(folder: Path, node: str) -> bool:
    """Return whether a node's lock is held; the file of a dead one is removed.

    What is no lock file (a link, a pipe, a name that no node has) holds no lock, and is left where it is.
    """
    if not _NODE.fullmatch(node):
        return False
    path = _lock_file(folder, node)
    try:
        descriptor = os.open(path, os.O_RDWR | _NO_FOLLOW)
    except FileNotFoundError:
        return False
    except OSError as error:
        # Another user's file: a process that cannot check it must not take over.
        return error.errno not in _NO_LOCK_FILE
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return False
    try:
        if not _is_lock_free(descriptor):
            return True
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108 - see `_lock_file`
        return False
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove the files that killed nodes left behind."""
    for path in folder.glob("*.lock"):
        is_alive(folder, path.stem)


def has_others(folder: Path, node: str) -> bool:
    """Return whether another process holds a lock here."""
    return any(path.stem != node and is_alive(folder, path.stem) for path in folder.glob("*.lock"))


class Peers:
    """The other nodes of a place, as one of them sees them. One thread looks; others read what it saw.

    Args:
        lock: The lock of the observer, which is touched while other nodes exist.
        lease_s: Seconds without a beat after which a node counts as frozen.
    """

    def __init__(self, folder: Path, lock: NodeLock, *, lease_s: float) -> None:
        self.living: frozenset[str] = frozenset()
        """Who holds its lock and is not frozen, besides the one who looks."""
        self.frozen: frozenset[str] = frozenset()
        """Who holds its lock and has not beaten for a lease."""
        self._folder = folder
        self._lock = lock
        self._lease_s = lease_s
        self._beat_s = lease_s / BEATS_PER_LEASE
        self._beaten_at = -lease_s
        self._silences: NodeSilences[str] = NodeSilences(lease_s=lease_s, beat_s=self._beat_s)

    def check_all(self, *, now: float) -> bool:
        """Check all nodes; return whether one came, went, froze or continued.

        Args:
            now: The looker's own clock, in seconds; it may stand still while the machine is suspended.
        """
        self._silences.observe(
            {node: beat for node, beat in self._beats() if is_alive(self._folder, node)}, now=now
        )
        if self._silences.known and now - self._beaten_at >= self._beat_s:
            self._lock.show_liveness()
            self._beaten_at = now
        return self._judge()

    def may_hold(self, node: str) -> bool:
        """Whether a session of this node must be left to it."""
        return node not in self.frozen and is_alive(self._folder, node)

    def _judge(self) -> bool:
        frozen = self._silences.frozen
        living = frozenset(self._silences.known) - frozen
        for node in frozen - self.frozen:
            _log.warning(
                "node %s was silent for %g s; other nodes may take its sessions", node, self._lease_s
            )
        is_changed = (living, frozen) != (self.living, self.frozen)
        self.living, self.frozen = living, frozen
        return is_changed

    def _beats(self) -> Iterator[tuple[str, int]]:
        """Yield the others, and when each has last touched its file."""
        with os.scandir(
            self._folder
        ) as files:  # fifty times a second: `Path.glob` would cost more than all the rest
            for file in files:
                node, dot, kind = file.name.rpartition(".")
                if (dot, kind) == (".", "lock") and node != self._lock.node:
                    with contextlib.suppress(FileNotFoundError):  # it has just gone
                        yield node, os.lstat(file.path).st_mtime_ns  # the entry's own may be old


_locks_of_this_process: weakref.WeakSet[NodeLock] = weakref.WeakSet()
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NO_LOCK_FILE = frozenset((errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENAMETOOLONG))
"""Errors of opening what is a link, a pipe, a folder, or has a name that no file has."""


def _lock_file(folder: Path, node: str) -> str:
    return os.path.join(folder, f"{node}.lock")  # noqa: PTH118 - called too often for a `Path`


def _take(path: str) -> int:
    for _ in range(TRIES_MAX):
        descriptor = open_own(Path(path), CALLED, os.O_RDWR | os.O_CREAT)
        try:
            if _is_lock_taken(descriptor) and _is_same_file(descriptor, path):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(0, f"{path} is removed repeatedly")


def _is_same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _drop_in_child() -> None:
    # A forked child shares the lock and would keep a killed parent alive for the others.
    for lock in _locks_of_this_process:
        lock.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
