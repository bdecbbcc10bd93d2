"""Files with secrets: read only where no other user can have written or can read them."""

from __future__ import annotations

from pathlib import Path

from midstream.errors import UsageError
from midstream.file_safety import READ_BYTES_MAX, read_own

SECRET_BYTES_MAX = READ_BYTES_MAX
"""Bytes of a file with secrets; a larger one holds something else."""


def read_secret_file(path: Path, *, what: str, follows_links: bool = False) -> str:
    """Return the text of a file with secrets.

    Args:
        what: Names its content in errors, such as "the key".
        follows_links: Whether the path may be a symbolic link of this user: for files that a person named. The file
            behind it is checked in either case.

    Raises:
        FileNotFoundError: There is none.
        UsageError: It is no regular file, belongs to another user, may be read or written by others, is too large,
            or is not text. Nothing was read from a file of another user.
    """
    called = f"the file with {what}"
    try:
        content = read_own(path, called, is_secret=True, is_named=follows_links)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{called} {str(path)!r} cannot be read: {error.strerror}") from error
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{called} {str(path)!r} is not text") from error
