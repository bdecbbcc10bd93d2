"""Checks of this machine: whether it can store sessions safely."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sqlite3
import stat
import sys
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

from midstream.environment import World
from midstream.errors import UsageError
from midstream.store.sqlite import engine_version
from midstream.store.sqlite.liveness import NodeLock, is_alive

PACKAGES = ("msgspec", "click", "starlette", "uvicorn", "websockets", "httpx2", "aiohttp", "apsw")
NETWORK_FILE_SYSTEMS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "fuse.sshfs",
    "9p",
    "afs",
    "ceph",
    "glusterfs",
    "lustre",
}
"""File systems whose locks or shared memory are not safe for SQLite's log."""
EARLIEST_AT = 1_767_225_600.0
"""2026-01-01: an earlier clock must be wrong, because this program is younger."""
CLOCK_SKEW_MAX_S = 2.0
"""Greatest difference between the clocks of this machine and of the disk."""


# Branches with a repaired release, and that release.
_REPAIRED_BRANCHES = {(3, 50): 7, (3, 44): 6}


class CheckResult(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    """It works, but a person should read the message."""
    PROBLEM = "problem"


class Check(Struct, frozen=True):
    """The result of one check."""

    name: str
    verdict: CheckResult
    words: str


def checks(folder: Path, *, port: int, world: World = World()) -> Iterator[Check]:
    """Run all checks. Written files are removed again.

    Args:
        folder: The folder for sessions; it need not exist.
        port: The port for a server on this machine.
    """
    yield _versions()
    yield _sqlite(engine_version())
    yield _file_system(folder, Path("/proc/self/mounts"))
    yield from _folder(folder, world)
    yield _clock(world)
    yield _port(port)


def _versions() -> Check:
    missing = [name for name in PACKAGES if not _version(name)]
    words = f"midstream {_version('midstream')}, Python {platform.python_version()}, {platform.system()}"
    if missing:
        return Check("versions", CheckResult.PROBLEM, f"{words}; not installed: {', '.join(missing)}")
    return Check("versions", CheckResult.OK, words)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _sqlite(found: str) -> Check:
    if has_wal_reset_bug(found):
        words = f"{found} can lose committed pages (WAL reset): install apsw 3.51.3 or newer"
        return Check("sqlite", CheckResult.PROBLEM, words)
    words = f"{found}, without the WAL-reset bug; clients use Python's {sqlite3.sqlite_version}, one connection each"
    return Check("sqlite", CheckResult.OK, words)


def has_wal_reset_bug(found: str) -> bool:
    """Whether a SQLite may lose pages when two connections write and checkpoint at once.

    Versions 3.7.0 to 3.51.2, except 3.50.7 and 3.44.6, which are repaired on their branches.
    """
    major, minor, patch = (int(number) for number in found.split(".")[:3])
    repaired_in = _REPAIRED_BRANCHES.get((major, minor))
    if repaired_in is not None:
        return patch < repaired_in
    return (3, 7, 0) <= (major, minor, patch) < (3, 51, 3)


def _file_system(folder: Path, mounts: Path) -> Check:
    kind = file_system_of(_existing(folder), mounts)
    if kind in NETWORK_FILE_SYSTEMS:
        words = f"{kind} is a network file system: keep the store on a local disk (--home)"
        return Check("file system", CheckResult.PROBLEM, words)
    return Check("file system", CheckResult.OK, kind or "local, as far as this system reports")


def file_system_of(folder: Path, mounts: Path) -> str:
    """Return the kind of a folder's file system, or "" if it is unknown."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    kind, size = "", -1
    for line in lines:
        _, place, found, *_ = [*line.split(" "), "", "", ""]
        mount = Path(place.replace("\\040", " "))
        # Of several mounts on one place, the last is visible.
        if folder.is_relative_to(mount) and len(mount.parts) >= size:
            kind, size = found, len(mount.parts)
    return kind


def _existing(folder: Path) -> Path:
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


def _folder(folder: Path, world: World) -> Iterator[Check]:
    """Check permissions, locks and the disk's clock in a temporary folder beside the store."""
    here = _existing(folder)
    if not os.access(here, os.W_OK | os.X_OK):
        yield Check("permissions", CheckResult.PROBLEM, f"this user may not write to {str(here)!r}")
        return
    if (
        here == folder.absolute()
        and sys.platform != "win32"
        and here.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    ):
        words = f"{str(here)!r} is readable by other users; chmod 700 keeps conversations private"
        yield Check("permissions", CheckResult.WARNING, words)
    else:
        yield Check("permissions", CheckResult.OK, f"{str(here)!r} is writable")
    try:
        with tempfile.TemporaryDirectory(prefix=".midstream-doctor-", dir=here) as draft:
            yield _locks(Path(draft), world)
            yield _skew(Path(draft), world)
    except OSError as error:
        yield Check("locks", CheckResult.PROBLEM, f"cannot write to {str(here)!r}: {error.strerror or error}")


def _locks(draft: Path, world: World) -> Check:
    try:
        first = NodeLock(draft, world.new_id("owner"))
    except UsageError as error:
        return Check("locks", CheckResult.PROBLEM, error.message)
    try:
        if not is_alive(draft, first.node):
            return Check(
                "locks", CheckResult.PROBLEM, "a held lock appears to be free; keep the store on a local disk"
            )
    finally:
        first.give_up()
    return Check("locks", CheckResult.OK, "held while their owner lives, free when it dies")


def _skew(draft: Path, world: World) -> Check:
    (draft / "now").touch()
    skew = abs((draft / "now").stat().st_mtime - world.now())
    if skew > CLOCK_SKEW_MAX_S:
        return Check(
            "disk clock",
            CheckResult.WARNING,
            f"the disk's clock is {skew:.0f} s off: is it another machine's?",
        )
    return Check("disk clock", CheckResult.OK, "agrees with this machine's")


def _clock(world: World) -> Check:
    if world.now() < EARLIEST_AT:
        return Check(
            "clock",
            CheckResult.PROBLEM,
            "the clock is before 2026; set it, because deadlines and leases depend on it",
        )
    return Check("clock", CheckResult.OK, "plausible")


def _port(port: int) -> Check:
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as door:
        if sys.platform != "win32":
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                "port", CheckResult.WARNING, f"{port} is taken ({error.strerror}): `midstream serve --port 0`"
            )
    return Check("port", CheckResult.OK, f"{port} is free on this machine")
