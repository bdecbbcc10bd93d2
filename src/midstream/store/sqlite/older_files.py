"""Records beside a database that an older midstream left, read once.

Earlier versions wrote records into a file of their owner (`OWNER.ahead`) before they committed them. `take_in` moves
such records into the database when it is opened. It also sets the flag in each file by which an older process that is
still alive stops writing there, so that its sessions can be taken over later.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import apsw

from midstream.store.sqlite import liveness as owners
from midstream.store.sqlite.database import BEGIN, DatabaseFile
from midstream.store.sqlite.worker_thread import pause

SETTLE_S = 0.001
"""Seconds after which a process that had not seen its flag has its record in the file."""

_FILE_BYTES = 256 * 1024
_HEAD_BYTES = 64
_ENTRY = struct.Struct("<QQQIII")
"""Session number, position, epoch, length of body and of seal, checksum. A body of length 0 is the end."""
_CHECKED = struct.Struct("<QQQI")

# A record that the database has, or whose session has another epoch, is left out.
_APPEND = """
insert into record (session_id, position, epoch, body)
select id, ?2, epoch, ?4 from session where id = ?1 and epoch = ?3
    and ?2 = 1 + (select ifnull(max(position), 0) from record where session_id = id)
"""
_SEAL = "update session set seal = ? where id = ?"


class _Entry(NamedTuple):
    number: int
    position: int
    epoch: int
    body: bytes
    seal: bytes


def take_in(file: DatabaseFile, db: apsw.Connection) -> None:
    """Append the records that older processes left beside the database, synced; remove the files of dead ones."""
    paths = [*file.owners.glob("*.ahead")]
    if not paths:
        return
    for path in paths:
        _overwrite(path, b"\1")
    pause(SETTLE_S)
    for path in paths:
        if entries := _read(path):
            file.patiently(partial(_append, db, entries))
        if not owners.is_alive(file.owners, path.stem):
            _overwrite(path, bytes(_FILE_BYTES))  # deleted content must not remain on the disk
            path.unlink(missing_ok=True)


def _append(db: apsw.Connection, entries: list[_Entry]) -> None:
    db.execute("pragma synchronous = full")
    db.execute(BEGIN)
    try:
        for number, position, epoch, body, seal in entries:
            db.execute(_APPEND, (number, position, epoch, body))
            if seal and db.changes():
                db.execute(_SEAL, (seal, number))
        db.execute("commit")
    finally:
        if db.in_transaction:
            db.execute("rollback")


def _read(path: Path) -> list[_Entry]:
    try:
        return [*_entries(path.read_bytes())]
    except FileNotFoundError:  # another process that opened the database removed it
        return []


def _entries(content: bytes) -> Iterator[_Entry]:
    start = _HEAD_BYTES
    while start + _ENTRY.size <= len(content):
        number, position, epoch, length, seal_length, checksum = _ENTRY.unpack_from(content, start)
        start += _ENTRY.size
        middle, end = start + length, start + length + seal_length
        body, seal = content[start:middle], content[middle:end]
        expected = zlib.crc32(_CHECKED.pack(number, position, epoch, len(seal)))
        if not length or checksum != zlib.crc32(seal, zlib.crc32(body, expected)):
            return
        yield _Entry(number, position, epoch, body, seal)
        start = end


def _overwrite(path: Path, content: bytes) -> None:
    """Write to the beginning of a file, unless it was removed."""
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDWR)
        try:
            with mmap.mmap(descriptor, _FILE_BYTES) as mapped:  # the older process reads its flag in a map
                mapped[: len(content)] = content
        finally:
            os.close(descriptor)
