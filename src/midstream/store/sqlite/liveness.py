"""Liveness of nodes: a node is a process that holds an operating-system lock on a file of its own.

The system releases the lock when the process dies. A node with a free lock, or without a file, is dead. That needs
neither a clock nor a heartbeat. A node's name is never used twice.

A stopped process still holds its lock. So every node with peers also touches its file periodically. A node without a
touch for a whole lease counts as frozen (`Peers`). A thread of the store does the touches, so that a tool that blocks
the event loop for a minute does not make its node frozen. `NodeSilences` measures how long a file was not touched. A
node that is wrongly taken for frozen is fenced by the epoch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import sys
import time
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
            # A shared lock, so that two concurrent observers of a dead node do not take each other for it.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


TRIES_MAX = 100
"""Another process may lock and remove a new file before it is locked; a hundred times in a row are no accident."""
PAUSE_MAX_S = 0.01
"""Longest pause between two tries: the other process may be waiting for a processor while it holds the lock."""
BEATS_PER_LEASE = 10
"""Touches of a node's file in the time after which it counts as frozen."""

CALLED = "the lock file"

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", re.ASCII)
"""Form of a node's name: it comes from the database, and becomes a part of a path."""

_log = logging.getLogger(__name__)


class NodeLock:
    """The lock of one node: a locked file `<folder>/<node>.lock`."""

    def __init__(self, folder: Path, node: str) -> None:
        """Acquire the lock.

        Raises:
            UsageError: The folder cannot be written, is a link or another user's, or has no locks. No file remains.
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

    def beat(self) -> None:
        """Touch the lock file, as a heartbeat."""
        if self._descriptor >= 0:
            # A full disk must not end the node; observers wait for a whole lease.
            with contextlib.suppress(OSError):
                os.utime(self._descriptor if os.utime in os.supports_fd else self._path)

    def give_up(self) -> None:
        """Release the lock, so that this node counts as dead. A second call has no effect."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)  # noqa: PTH108 - see `_lock_file`
            self.drop()

    def drop(self) -> None:
        """Close the file without removing it, as the system does for a dead process."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_alive(folder: Path, node: str) -> bool:
    """Whether a node's lock is held; the file of a dead one is removed.

    A link, a pipe or an invalid name is no lock: such a file is not removed.
    """
    if not _NODE.fullmatch(node):
        return False
    path = _lock_file(folder, node)
    try:
        descriptor = os.open(path, os.O_RDWR | _NO_FOLLOW)
    except FileNotFoundError:
        return False
    except OSError as error:
        # Another user's file: without a check, the node must not count as dead.
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
    """Remove the files of killed nodes."""
    for path in folder.glob("*.lock"):
        is_alive(folder, path.stem)


def has_others(folder: Path, node: str) -> bool:
    """Whether another process holds a lock in this folder."""
    return any(path.stem != node and is_alive(folder, path.stem) for path in folder.glob("*.lock"))


class Peers:
    """One node's view of its peers. One thread checks them; other threads read the results.

    Args:
        lock: The lock of the observer, which is touched while other nodes exist.
        lease_s: Seconds without a beat after which a node counts as frozen.
    """

    def __init__(self, folder: Path, lock: NodeLock, *, lease_s: float) -> None:
        self.living: frozenset[str] = frozenset()
        """The other nodes that hold their locks and are not frozen."""
        self.frozen: frozenset[str] = frozenset()
        """The other nodes that hold their locks and have not beaten for a lease."""
        self._folder = folder
        self._lock = lock
        self._lease_s = lease_s
        self._beat_s = lease_s / BEATS_PER_LEASE
        self._beaten_at = -lease_s
        self._silences: NodeSilences[str] = NodeSilences(lease_s=lease_s, beat_s=self._beat_s)

    def check_all(self, *, now: float) -> bool:
        """Check all nodes; return whether one came, went, froze or continued.

        Args:
            now: The observer's clock, in seconds; it may stop while the machine is suspended.
        """
        self._silences.observe(
            {node: beat for node, beat in self._beats() if is_alive(self._folder, node)}, now=now
        )
        if self._silences.known and now - self._beaten_at >= self._beat_s:
            self._lock.beat()
            self._beaten_at = now
        return self._judge()

    def may_hold(self, node: str) -> bool:
        """Whether a node may still run its sessions."""
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
        """Yield the other nodes, each with the time of the last touch."""
        with os.scandir(
            self._folder
        ) as files:  # fifty times a second: `Path.glob` would cost more than the rest
            for file in files:
                node, dot, kind = file.name.rpartition(".")
                if (dot, kind) == (".", "lock") and node != self._lock.node:
                    with contextlib.suppress(FileNotFoundError):  # it was just removed
                        yield (
                            node,
                            os.lstat(file.path).st_mtime_ns,
                        )  # the time in the directory entry may be outdated


_locks_of_this_process: weakref.WeakSet[NodeLock] = weakref.WeakSet()
_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NO_LOCK_FILE = frozenset((errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENAMETOOLONG))
"""Errors of opening a link, a pipe or a folder, or of an invalid name."""


def _lock_file(folder: Path, node: str) -> str:
    return os.path.join(folder, f"{node}.lock")  # noqa: PTH118 - called too often for a `Path`


def _take(path: str) -> int:
    for tries in range(TRIES_MAX):
        time.sleep(min(tries / 1000, PAUSE_MAX_S))
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
    # A forked child shares the lock, and would keep a killed parent alive.
    for lock in _locks_of_this_process:
        lock.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
