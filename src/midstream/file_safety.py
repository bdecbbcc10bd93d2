"""Safe access to the files that midstream opens for its own state: databases, keys, locks, settings.

Other users of the machine may be able to write into the folder of such a file. So each file is checked before it is
used. It must be a regular file that this user or the system administrator owns. No symbolic link of another user is
followed, and no open waits for a pipe.

Two kinds of names are distinguished:

- A *named* file is one that a person chose (`--store`, `--key-file`). A symbolic link is followed if this user or the
  administrator created it. Folders may be links.
- A *derived* file has a name that midstream creates, such as `sessions.db-wal`. It is never a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from midstream.errors import UsageError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

READ_BYTES_MAX = 1024 * 1024
"""Bytes of a file of settings or keys; a longer one is refused."""
LINKS_MAX = 40
"""Symbolic links that are followed for one name, as on Linux."""
QUARANTINE_MARK = ".quarantined-"
"""Suffix of a file that was moved aside, before its number."""
QUARANTINED_MAX = 100
"""Files of one name that are kept aside; one more is not moved."""
DATABASE_COMPANIONS = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite keeps beside a database."""

_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
_CLOSE_ON_EXEC: int = getattr(os, "O_CLOEXEC", 0)
_BINARY: int = getattr(os, "O_BINARY", 0)


def find_own(path: Path, called: str) -> os.stat_result | None:
    """Check a derived file without opening it; return None if there is none.

    Args:
        called: The file's name in messages, such as "the lock file".

    Raises:
        UsageError: It is a symbolic link, not a regular file, or another user's. Nothing was opened or changed.
        OSError: The system refuses the check.
    """
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    require_own(found, path, called)
    return found


def require_own(found: os.stat_result, path: Path | str, called: str) -> None:
    """Raise `UsageError` unless this is a regular file that this user or the administrator owns."""
    _require_regular(found, path, called)
    _require_owner(found, path, called)


def require_own_folder(path: Path, called: str) -> None:
    """Check a derived folder; a missing one is no error.

    Raises:
        UsageError: It is a symbolic link, not a folder, or another user's.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{called} {str(path)!r} is not a folder; remove it, and try again")
    _require_owner(found, path, called)


def follow_own_links(path: Path, called: str) -> Path:
    """Return the target of a named path. Links of this user and of the administrator are followed.

    Raises:
        UsageError: Another user created one of the links, or there are more than `LINKS_MAX`.
    """
    place = path
    for _ in range(LINKS_MAX):
        try:
            found = os.lstat(place)
        except OSError:  # it is missing: the caller creates or reports it
            return place
        if not stat.S_ISLNK(found.st_mode):
            return place
        _require_owner(found, place, f"the symbolic link for {called}")
        place = place.parent / place.readlink()
    raise UsageError(f"{called} {str(path)!r} leads through too many symbolic links")


def open_own(path: Path, called: str, flags: int = os.O_RDONLY, *, mode: int = 0o600) -> int:
    """Open a derived file and return its descriptor. Links are not followed, and no open waits for a pipe.

    Raises:
        UsageError: It is a symbolic link, not a regular file, or another user's. Its content was not changed.
        OSError: The system refuses to open it.
    """
    find_own(path, called)
    try:
        descriptor = os.open(path, flags | _NO_FOLLOW | _NO_WAIT | _CLOSE_ON_EXEC | _BINARY, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or a pipe that was created meanwhile
            raise UsageError(f"{called} {str(path)!r} is not a regular file; remove it") from error
        raise
    try:
        require_own(os.fstat(descriptor), path, called)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_own(
    path: Path,
    called: str,
    *,
    bytes_max: int = READ_BYTES_MAX,
    is_secret: bool = False,
    is_named: bool = False,
) -> bytes:
    """Return the content of a file.

    Args:
        called: The file's name in messages.
        bytes_max: Its greatest size in bytes.
        is_secret: Whether it must not be readable by other users.
        is_named: Whether a person chose its name: then links of this user are followed.

    Raises:
        UsageError: It is not safe to use, or too large; the message has the reason and the remedy.
        OSError: It is missing, or the system refuses to read it.
    """
    place = follow_own_links(path, called) if is_named else path
    descriptor = open_own(place, called)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if is_secret and os.name == "posix" and stat.S_IMODE(found.st_mode) & 0o077:
            raise UsageError(
                f"{called} {str(path)!r} is readable by other users; restrict it with chmod 600, "
                "and consider a new one"
            )
        body = file.read(bytes_max + 1)
    if len(body) > bytes_max:
        raise UsageError(f"{called} {str(path)!r} is larger than {bytes_max:,} bytes")
    return body


def read_secret_text(path: Path, called: str, *, is_named: bool = False) -> str:
    """Return the text of a file that no other user may read.

    Args:
        called: Its content's name in messages, such as "the key".
        is_named: Whether a person chose its name: then links of this user are followed.

    Raises:
        FileNotFoundError: There is none.
        UsageError: It is not safe to use, too large, not text, or the system refuses to read it.
    """
    try:
        return read_own(path, called, is_secret=True, is_named=is_named).decode()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{called} {str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{called} {str(path)!r} is not text; name the right file") from error


def create_own(path: Path) -> bool:
    """Create an empty derived file that only this user can read; return False if it exists.

    Raises:
        OSError: It cannot be created.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _CLOSE_ON_EXEC
    try:
        os.close(os.open(path, flags, 0o600))
    except FileExistsError:
        return False
    return True


def replace_own(path: Path, body: bytes) -> None:
    """Replace a derived file atomically, readable by this user only. A link with its name is replaced, not followed.

    Raises:
        OSError: It cannot be written. The old file is unchanged.
    """
    with _draft(path, body) as draft:
        draft.replace(path)


def create_own_once(path: Path, body: bytes) -> bool:
    """Create a derived file with its content atomically; return False if it exists.

    Raises:
        OSError: It cannot be written. Nothing was changed.
    """
    with _draft(path, body) as draft:
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            return False
    return True


@contextlib.contextmanager
def lock_own(path: Path, called: str) -> Iterator[None]:
    """Hold the system's lock on a derived file, which is created if missing and stays; another process waits.

    Raises:
        UsageError: It is not safe to use; see `open_own`.
        OSError: The system refuses the file or the lock.
    """
    descriptor = open_own(path, called, os.O_RDWR | os.O_CREAT)
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def require_own_database(path: Path, called: str) -> None:
    """Check a database and the files that SQLite keeps beside it, before it is opened.

    Args:
        path: The database itself, after `follow_own_links`.

    Raises:
        UsageError: One of them is a symbolic link, not a regular file, or another user's. Nothing was opened.
        OSError: The system refuses a check.
    """
    find_own(path, called)
    for end in DATABASE_COMPANIONS:
        find_own(path.with_name(f"{path.name}{end}"), f"the companion of {called},")


def require_regular_database(path: Path, called: str) -> None:
    """Check a database of another program, which may belong to another user, and SQLite's files beside it.

    Raises:
        UsageError: One of them is a symbolic link or not a regular file. Nothing was opened.
    """
    for end in ("", *DATABASE_COMPANIONS):
        place = path.with_name(f"{path.name}{end}")
        with contextlib.suppress(FileNotFoundError):
            _require_regular(os.lstat(place), place, called)


def create_own_database(path: Path, called: str) -> None:
    """Create a missing named database, empty and readable by this user only, and check it.

    Raises:
        UsageError: It, or a file that SQLite keeps beside it, is not safe to open. Nothing was changed.
        OSError: It cannot be created.
    """
    place = follow_own_links(path, called)
    create_own(place)
    require_own_database(place, called)


def quarantine(path: Path) -> Path | None:
    """Move a derived file, link or pipe aside, so that a new file can take its name; return its new path.

    A link's target is not changed. None if the file cannot be moved.
    """
    for number in range(1, QUARANTINED_MAX + 1):
        aside = path.with_name(f"{path.name}{QUARANTINE_MARK}{number}")
        if not os.path.lexists(aside):
            try:
                os.rename(path, aside)  # noqa: PTH104 - a link itself is moved
            except OSError:
                return None
            return aside
    return None


def _require_regular(found: os.stat_result, path: Path | str, called: str) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise UsageError(f"{called} {str(path)!r} is a symbolic link; remove the link, and try again")
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{called} {str(path)!r} is not a regular file; remove it, and try again")


def _require_owner(found: os.stat_result, path: Path | str, called: str) -> None:
    if os.name != "posix":
        return
    user = os.geteuid()
    if found.st_uid not in {user, 0}:
        raise UsageError(
            f"{called} {str(path)!r} belongs to user {found.st_uid}, not to this user ({user}); "
            "change its owner if you trust its content, or remove it"
        )


@contextlib.contextmanager
def _draft(path: Path, body: bytes) -> Iterator[Path]:
    """Write a new file beside a path, synced and readable by this user only; remove it at the end of the block.

    An interrupt (Ctrl-C) at any moment leaves no file: the name is known before the file exists.
    """
    from midstream.environment import World  # noqa: PLC0415 - slow to import, and not needed to read

    draft = path.with_name(f".{World().new_id('draft')}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
