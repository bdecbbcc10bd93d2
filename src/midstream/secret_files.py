"""Files with secrets: read only where no other user can have written or can read them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from midstream.errors import UsageError

SECRET_BYTES_MAX = 1024 * 1024
"""Bytes of a file with secrets; a larger one holds something else."""
_ROOT = 0


def read_secret_file(path: Path, *, what: str, follows_links: bool = False) -> str:
    """Return the text of a file with secrets.

    Args:
        what: Names its content in errors, such as "the key".
        follows_links: Whether the path may be a symbolic link: for files that a person named. The file behind it is
            checked in either case.

    Raises:
        FileNotFoundError: There is none.
        UsageError: It is no regular file, belongs to another user, may be read or written by others, is too large,
            or is not text. Nothing was read from a file of another user.
    """
    # Without O_NONBLOCK the open of a FIFO would wait for a writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    if not follows_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        opened = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UsageError(
                f"{what} in {path} cannot be read: it is a symbolic link; name the file"
            ) from error
        raise UsageError(f"{what} in {path} cannot be read: {error.strerror}") from error
    try:
        _require_private(os.fstat(opened), path, what)
        with os.fdopen(opened, "rb", closefd=False) as file:
            content = file.read(SECRET_BYTES_MAX + 1)
    finally:
        os.close(opened)
    if len(content) > SECRET_BYTES_MAX:
        raise UsageError(f"{path} is larger than {SECRET_BYTES_MAX} bytes; {what} cannot be in it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text; {what} cannot be in it") from error


def _require_private(found: os.stat_result, path: Path, what: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path} is no regular file; {what} must be in one")
    if os.name != "posix":
        return
    if found.st_uid not in (os.geteuid(), _ROOT):
        raise UsageError(f"{path} belongs to another user; {what} must be in a file of your own")
    if found.st_mode & 0o077:
        raise UsageError(f"{what} in {path} is readable by other users; restrict the file with chmod 600")
