"""Records that are appended and not yet in the database: written ahead, into a file that outlives its process.

A commit of SQLite costs ten system calls, which is more than all the rest of a token's way. A copy into a file that is
mapped into memory costs none, and survives whatever a commit without a sync survives: every death of the process, not a
power cut. With one sync of that file it survives that as well, if all that comes before it in the database does. So an
owner that has the database for itself writes records there first; each commit begins with all that was written ahead,
and one is made soon for that alone. It is synced before the file lets go of what was promised to survive a power cut.

Nobody else ever has to look there, but whoever opens the database (`take_in`): it raises a flag in the files of all
others, brings what they hold into the database, and goes on. An owner looks at its flag after it has written and before
it tells anybody: what is told was brought in, or is in its own next commit. So whoever could take a session from an
owner, dead or frozen, has all that it told, and once others have come nothing is written ahead any more. Who only reads
the database looks here as well (`seen_in`), and raises nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from midstream.errors import UsageError
from midstream.places import sync_names
from midstream.store import owner as owners
from midstream.store.thread import pause

AHEAD_BYTES = 256 * 1024
"""Size of the file: some thousand words, of which hundreds come between two commits. What has no room is committed."""
SETTLE_S = 0.001
"""Seconds between the raising of a flag and the reading of what stands below it: whoever had not seen the flag yet has
its entry in memory by then, for all processors."""
CAN_SYNC = sys.platform == "linux"
"""Whether the file may be written to beside its map, and a sync of it takes what came either way down to the disk."""

_SUFFIX = ".ahead"
_HEAD = 64
_FLAG = 0
_ENTRY = struct.Struct("<QQQIII")
"""Of an entry: what `Ahead` has before the body, the lengths of body and seal, and a checksum of it all. A body of
length 0 is the end.

It is written after the body, or with it in one go; what a death or a power cut leaves of one has another checksum.
"""
_PLACE = struct.Struct("<QQQI")


class Ahead(NamedTuple):
    """A record, and where it belongs: the number of its session, its position, and the epoch it was appended under."""

    number: int
    position: int
    epoch: int
    body: bytes
    seal: bytes = b""
    """What the journal is sealed with that ends here; b"" leaves what is there."""


class AheadFile:
    """What one owner has written ahead. Not for two at once: nothing is put while a commit is made, which forgets.

    Args:
        folder: That of the owners' locks.
        owner: Whose it is; it holds its lock.

    Raises:
        UsageError: The file cannot be made, such as on a full disk. Nothing is left behind.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        self.entries: list[Ahead] = []
        """What is not known to be in the database, in the order in which it was put."""
        self.is_promised = False
        """Whether some of it was promised to survive a power cut: the commit that takes it in is to be synced."""
        self._path = folder / f"{owner}{_SUFFIX}"
        self._is_placed = False
        """Whether the folder is known to have the file after a power cut."""
        try:
            # Written, not only sized: a page that has no room on the disk would kill whoever touches it.
            self._path.touch(mode=0o600)
            self._path.write_bytes(bytes(AHEAD_BYTES))
            self._descriptor, self._map = _mapped(self._path)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            raise UsageError(f"cannot write {str(self._path)!r} ({error.strerror})") from error
        self._end = _HEAD
        self.is_stopped = False
        """Whether nothing can be put any more, as others are here, or were."""

    def put(self, entry: Ahead) -> bool:
        """Write a record without a seal.

        Returns:
            False where it may not be told to anybody, and is not there: it is to be committed.
        """
        number, position, epoch, body, _ = entry
        start, length = self._end, len(body)
        end = start + _ENTRY.size + length
        if end + _ENTRY.size > AHEAD_BYTES or self.is_stopped or not length:
            return False
        self._map[start + _ENTRY.size : end] = body
        _ENTRY.pack_into(self._map, start, number, position, epoch, length, 0, _checksum(entry))
        if self._map[_FLAG]:
            self._map[start:end] = bytes(end - start)
            self.is_stopped = True
            return False
        self._end = end
        self.entries.append(entry)
        return True

    def put_all(self, entries: Sequence[Ahead], *, is_synced: bool) -> bool:
        """Write records in one go; return False where they may not be told to anybody, and are not there.

        It is written, not copied through the map: to sync a page that was written to through a map costs more.

        Args:
            is_synced: Whether all that was put is to survive a power cut, in so far as what stands before it in the
                database does. Where the disk does not answer for that, nothing is put any more.
        """
        content = b"".join(map(_entry, entries))
        start, end = self._end, self._end + len(content)
        if end + _ENTRY.size > AHEAD_BYTES or self.is_stopped or not all(each.body for each in entries):
            return False
        try:
            is_there = os.pwrite(self._descriptor, content, start) == len(content) and not self._map[_FLAG]
            if is_there and is_synced:
                self._sync()  # whoever raises the flag from here on finds the entries
        except OSError:
            is_there = False
        if not is_there:
            self.is_stopped = True
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, bytes(len(content)), start)
            return False
        self._end = end
        self.entries += entries
        return True

    def forget(self, count: int) -> None:
        """Let go of the first entries, which are in the database now; once it is all of them, their bytes go too.

        Where any of them was promised to survive a power cut, the database must have synced them.
        """
        del self.entries[:count]
        if not self.entries:
            self.is_promised = False
            if self._end > _HEAD:
                self._map[_HEAD : self._end] = bytes(self._end - _HEAD)
                self._end = _HEAD

    def forget_for_good(self) -> None:
        """Let the bytes of what was let go be gone from the disk as well."""
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Remove the file, unless it has what is not in the database: that is for whoever opens it next."""
        self._map.close()
        os.close(self._descriptor)
        if not self.entries:
            self._path.unlink(missing_ok=True)

    def _sync(self) -> None:
        if not self._is_placed:
            for folder in (self._path.parent, self._path.parent.parent):
                sync_names(folder)
            self._is_placed = True
        self.is_promised = True
        os.fdatasync(self._descriptor)


def take_in(
    folder: Path, owner: str, bring_in: Callable[[Sequence[Ahead]], None], *, may_write: bool
) -> AheadFile | None:
    """Bring into the database what others have written ahead, and return where this owner may do so, if anywhere.

    Its own file is there before it looks for others, and its lock before that: of two that open at once, one at least
    sees the other.

    Args:
        bring_in: Appends in one transaction, which survives a power cut, what is not in the database yet.
        may_write: Whether this owner may write ahead, where it is alone.
    """
    ours: AheadFile | None = None
    if may_write:
        with contextlib.suppress(UsageError):  # a full disk: everything is committed, if anything is
            ours = AheadFile(folder, owner)
    try:
        others = [path for path in folder.glob(f"*{_SUFFIX}") if path.stem != owner]
        for path in others:
            _overwrite(path, _FLAG, b"\1")
        if others:
            pause(SETTLE_S)
        for path in others:
            if found := _seen(path):
                bring_in(found)
            if not owners.is_alive(folder, path.stem):
                _remove(path)
        if ours is not None and owners.has_others(folder, owner):
            ours.is_stopped = True
    except BaseException:
        if ours is not None:
            ours.close()
        raise
    return ours


def seen_in(folder: Path) -> list[Ahead]:
    """Return what owners have written ahead, each one's in its order, without a word to them.

    Some of it may be in the database by the time that is looked at. What is not there then is here.
    """
    return [entry for path in folder.glob(f"*{_SUFFIX}") for entry in _seen(path)]


def _seen(path: Path) -> list[Ahead]:
    try:
        descriptor, mapped = _mapped(path, mmap.ACCESS_READ)
    except (OSError, ValueError):  # it has gone, or its owner died when it made it
        return []
    with mapped:
        os.close(descriptor)
        return [*_entries(mapped[:])]


def _remove(path: Path) -> None:
    """Remove a dead owner's file; what is deleted later must not be found in its place."""
    _overwrite(path, 0, bytes(AHEAD_BYTES))
    path.unlink(missing_ok=True)  # another one that opened the database may have


def _entries(content: bytes) -> Iterator[Ahead]:
    start = _HEAD
    while start + _ENTRY.size <= len(content):
        number, position, epoch, length, seal_length, checksum = _ENTRY.unpack_from(content, start)
        start += _ENTRY.size
        middle, end = start + length, start + length + seal_length
        entry = Ahead(number, position, epoch, content[start:middle], content[middle:end])
        if not length or checksum != _checksum(entry):
            return
        yield entry
        start = end


def _entry(entry: Ahead) -> bytes:
    *place, body, seal = entry
    return _ENTRY.pack(*place, len(body), len(seal), _checksum(entry)) + body + seal


def _checksum(entry: Ahead) -> int:
    number, position, epoch, body, seal = entry
    return zlib.crc32(seal, zlib.crc32(body, zlib.crc32(_PLACE.pack(number, position, epoch, len(seal)))))


def _overwrite(path: Path, start: int, content: bytes) -> None:
    """Write to somebody else's file, unless it has gone, or its owner died when it made it."""
    with contextlib.suppress(OSError, ValueError):
        descriptor, mapped = _mapped(path)
        with mapped:
            os.close(descriptor)
            mapped[start : start + len(content)] = content


def _mapped(path: Path, access: int = mmap.ACCESS_WRITE) -> tuple[int, mmap.mmap]:
    descriptor = os.open(path, os.O_RDONLY if access == mmap.ACCESS_READ else os.O_RDWR)
    try:
        return descriptor, mmap.mmap(descriptor, AHEAD_BYTES, access=access)
    except BaseException:
        os.close(descriptor)
        raise
