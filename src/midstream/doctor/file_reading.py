"""Reading of files as text and JSON, with the place of a fault.

Lines are read one at a time, so that the memory depends only on the longest line.
"""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from midstream.errors import UnreadableHistoryError
from midstream.json_depth import TOO_DEEP, is_text_too_deep, is_too_deep

LINE_BYTES_MAX = 64 * 2**20
"""A longer line is skipped and reported; no provider's message is that long."""
DOCUMENT_BYTES_MAX = 512 * 2**20
"""Greatest size of a file with one JSON value, which takes about five times its size in memory."""
HEAD_BYTES = 64 * 2**10
"""Bytes that are read to distinguish text from other files."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class FileLine(NamedTuple):
    """One line of a file: its number from 1, its offset, and its bytes with the line end."""

    number: int
    offset: int
    body: bytes
    is_whole: bool
    """Whether it has a line end; only the last line may have none."""


class Value(NamedTuple):
    """A JSON value, and its readable faults: `NaN`, `Infinity`."""

    value: Any  # any value of the file
    constants: tuple[str, ...] = ()


class Stamp(NamedTuple):
    """State of a file that changes with each write."""

    size: int
    modified_ns: int
    inode: int


def stamp_of(path: Path) -> Stamp:
    """Return a file's stamp, to detect later changes."""
    found = path.stat()
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ino)


def require_file(path: Path) -> None:
    """Check that there is a file to read.

    Raises:
        UnreadableHistoryError: It is missing, a broken link, a device, or not readable for this user.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UnreadableHistoryError("this is not a regular file (- reads a pipe)", reason="not-a-file")
        with path.open("rb"):
            pass
    except OSError as error:
        raise of_os_error(error, path) from error


def require_no_link(path: Path) -> None:
    """Check that a file is in its folder, and that reading it does not block.

    Raises:
        UnreadableHistoryError: It is a symbolic link, a pipe or a device.
        OSError: It is missing, or cannot be checked.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise UnreadableHistoryError("this is a link, or not a regular file", reason="not-a-file")


def of_os_error(error: OSError, path: Path) -> UnreadableHistoryError:
    """Return the error for an error of the operating system about a file."""
    if isinstance(error, FileNotFoundError):
        if path.is_symlink():
            target = str(path.readlink())
            return UnreadableHistoryError(f"a link to {target!r}, which does not exist", reason="not-found")
        return UnreadableHistoryError("no such file", reason="not-found")
    if isinstance(error, PermissionError):
        return UnreadableHistoryError("this user has no permission to read it", reason="no-permission")
    return UnreadableHistoryError(f"it cannot be read: {error.strerror or error}", reason="not-a-file")


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file.

    Raises:
        UnreadableHistoryError: The file is not text.
    """
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    # A power cut can leave zeros at the end of a text.
    is_text = head.removeprefix(BYTE_ORDER_MARK).lstrip().startswith((b"{", b"["))
    if b"\0" in head and not is_text and not head.startswith(b"SQLite format 3\0"):
        raise UnreadableHistoryError("it is not text", reason="binary")
    return head


def lines_of(path: Path) -> Iterator[FileLine]:
    """Yield the lines that are not blank; a line beyond the limit has an empty body."""
    with path.open("rb") as file:
        number, offset = 0, 0
        while body := file.readline(LINE_BYTES_MAX):
            number += 1
            size, is_long = len(body), False
            rest = body
            while not rest.endswith(b"\n") and (rest := file.readline(LINE_BYTES_MAX)):
                size, is_long = size + len(rest), True
            is_whole = rest.endswith(b"\n")
            body = body if number > 1 else body.removeprefix(BYTE_ORDER_MARK)
            if is_long:
                yield FileLine(number, offset, b"", is_whole)
            elif not body.isspace():
                yield FileLine(number, offset, body, is_whole)
            offset += size


def line_at(path: Path, offset: int) -> bytes:
    """Return the line that begins at an offset."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.readline(LINE_BYTES_MAX).removeprefix(BYTE_ORDER_MARK)


def document_in(path: Path) -> Value:
    """Read a file with one JSON value.

    Raises:
        UnreadableHistoryError: It is too large, or not JSON; the message has the place of the fault.
    """
    size = path.stat().st_size
    if size > DOCUMENT_BYTES_MAX:
        raise UnreadableHistoryError(
            f"{size / 2**20:,.0f} MB in one JSON value, more than {DOCUMENT_BYTES_MAX / 2**20:,.0f}: "
            "write it as JSON lines, which have no limit",
            reason="too-large",
        )
    return value_in(path.read_bytes().removeprefix(BYTE_ORDER_MARK))


def value_in(body: bytes) -> Value:
    """Parse one JSON value; accept what Python's parser accepts: lone surrogates, NaN.

    Raises:
        UnreadableHistoryError: It is not JSON, or nested too deeply.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise _too_deep() from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _value_by_python(body)
    if is_too_deep(value):
        raise _too_deep()
    return Value(value)


def _value_by_python(body: bytes) -> Value:
    if is_text_too_deep(body):
        raise _too_deep()
    constants: list[str] = []
    try:
        value = json.loads(body.decode("utf-8", "surrogatepass"), parse_constant=constants.append)
    except RecursionError as error:
        raise _too_deep() from error
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        place = f"line {error.lineno}, column {error.colno}"
        if is_cut:
            raise UnreadableHistoryError(f"the JSON is cut off at {place}", reason="cut-json") from error
        raise UnreadableHistoryError(f"no JSON at {place}: {error.msg}", reason="not-json") from error
    except UnicodeDecodeError as error:
        raise UnreadableHistoryError(f"no UTF-8 at byte {error.start}", reason="not-json") from error
    except ValueError as error:
        digits = sys.get_int_max_str_digits()
        raise UnreadableHistoryError(f"an integer of more than {digits} digits", reason="not-json") from error
    return Value(value, tuple(constants))


def _too_deep() -> UnreadableHistoryError:
    return UnreadableHistoryError(TOO_DEEP, reason="too-deep")
