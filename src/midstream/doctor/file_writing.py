"""Atomic writing of files: a temporary file beside the target, synced, renamed, and the folder synced.

A crash leaves the old file unchanged, and at worst a temporary file that is never read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from midstream.doctor.file_reading import Stamp, stamp_of
from midstream.environment import World
from midstream.errors import ConflictError, UnavailableError
from midstream.file_safety import DATABASE_COMPANIONS
from midstream.paths import sync_names

BACKUPS_MAX = 1000
"""Backups of one file; beyond it, a person must remove some."""


ROUNDS_MAX = 3
"""Times that a copy is examined again: the repair of a branch can undo that of another one with common lines."""

NAME_CHARS_MAX = 40
"""Characters (of 4 bytes at most) of a file's name in the name of its draft, which may have 255 bytes."""

Pieces = Iterable[bytes]
Settle = Callable[[Path], Pieces | None]
"""Returns other content for a draft, or None if it is good."""


class Written(NamedTuple):
    """Path of a repaired copy, and of the backup of the replaced file."""

    path: Path
    backup: Path | None = None


def copy_of(path: Path) -> Path:
    """Return the path of the repaired copy of a file or folder: `NAME.repaired.EXT` beside it."""
    return path.with_name(f"{path.stem}.repaired{path.suffix}")


def write_beside(path: Path, pieces: Pieces, settle: Settle = lambda _: None) -> Written:
    """Write the repaired copy beside the original; an earlier copy is replaced.

    Args:
        settle: Checks the draft before it gets its name, and may return other content.

    Raises:
        UnavailableError: The disk or the folder refuses. No copy was written; the original is never changed.
    """
    target = copy_of(path)
    with _translate_errors(target):
        _replace(target, pieces, mode=stat.S_IMODE(path.stat().st_mode), settle=settle)
    return Written(target)


def write_in_place(path: Path, pieces: Pieces, expected: Stamp, settle: Settle = lambda _: None) -> Written:
    """Replace the original by the repaired text, after a backup.

    Args:
        expected: The original's stamp when it was examined.

    Raises:
        ConflictError: Another program wrote into the original meanwhile. It was not changed.
        UnavailableError: The disk or the folder refuses. The original was not changed; a backup may exist.
    """
    real = path.resolve()
    with _translate_errors(real):
        backup = _back_up(real)

        def require_unchanged() -> None:
            if stamp_of(real) != expected:
                raise ConflictError(
                    f"{str(path)!r} was changed meanwhile; stop the program that writes it, then try again"
                )

        mode = stat.S_IMODE(real.stat().st_mode)
        _replace(real, pieces, mode=mode, before=require_unchanged, settle=settle)
    return Written(path, backup)


def make_whole(target: Path, make: Callable[[Path], None], *, like: Path) -> None:
    """Let `make` write a file under a temporary name, and rename it when it is complete.

    Args:
        like: A file with the permissions of the new one.

    Raises:
        UnavailableError: The disk or the folder refuses. There is no new file.
    """
    with _translate_errors(target):
        with _draft(target) as draft:
            make(draft)
            draft.chmod(stat.S_IMODE(like.stat().st_mode))
            _sync(draft)
            os.replace(draft, target)  # noqa: PTH105 - tests inject failures into `os`
        sync_names(target.parent)


def make_backup(path: Path, make: Callable[[Path], None]) -> Path:
    """Let `make` write a backup of a file under an unused name; see `make_whole`."""
    backup = _free_backup(path)
    make_whole(backup, make, like=path)
    return backup


def write_folder_beside(path: Path, originals: Iterable[Path], changed: dict[Path, bytes | None]) -> Written:
    """Write a repaired copy of a folder's files beside it: the originals, and their changes.

    Args:
        originals: The files of the copy, as relative paths.
        changed: The new bytes of some of them, or None for omitted ones.

    Raises:
        ConflictError: There is an earlier copy. Nothing was written.
        UnavailableError: The disk or the folder refuses. No copy was written.
    """
    target = copy_of(path)
    if target.exists():
        raise ConflictError(f"{str(target)!r} already exists; remove it first")
    with _translate_errors(target):
        draft = _draft_path(target)
        try:
            draft.mkdir(mode=0o700)
            for name in originals:
                body = changed.get(name, b"") if name in changed else (path / name).read_bytes()
                if body is not None:
                    (draft / name).parent.mkdir(parents=True, exist_ok=True)
                    _replace(draft / name, [body], mode=0o600)
            os.rename(draft, target)  # noqa: PTH104 - tests inject failures into `os`
            sync_names(target.parent)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return Written(target)


def _back_up(path: Path) -> Path:
    """Create a backup; an older one is never overwritten."""
    backup = _free_backup(path)
    with path.open("rb") as original:
        _replace(backup, iter(lambda: original.read(2**20), b""), mode=stat.S_IMODE(path.stat().st_mode))
    return backup


def _free_backup(path: Path) -> Path:
    for number in range(1, BACKUPS_MAX):
        backup = path.with_name(f"{path.name}.bak{number if number > 1 else ''}")
        if not os.path.lexists(backup):
            return backup
    raise UnavailableError(f"{str(path)!r} has {BACKUPS_MAX} backups: remove some")


def _replace(
    target: Path,
    pieces: Pieces,
    *,
    mode: int,
    before: Callable[[], None] = lambda: None,
    settle: Settle = lambda _: None,
) -> None:
    """Write a file atomically. `before` is called last and may refuse."""
    with _draft(target) as draft:
        _write(draft, pieces)
        for _ in range(ROUNDS_MAX):
            better = settle(draft)
            if better is None:
                break
            _replace(draft, better, mode=mode)
        draft.chmod(mode)
        before()
        os.replace(draft, target)  # noqa: PTH105 - tests inject failures into `os`
    sync_names(target.parent)


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """Create an empty file beside the target, which only its owner can read; remove it if it keeps its name.

    An interrupt (Ctrl-C) at any moment leaves no file: the name is known before the file exists.
    """
    draft = _draft_path(target)
    try:
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        yield draft
    finally:
        for ending in ("", *DATABASE_COMPANIONS):
            with contextlib.suppress(OSError):
                draft.with_name(draft.name + ending).unlink(missing_ok=True)


def _draft_path(target: Path) -> Path:
    return target.with_name(f".{target.name[:NAME_CHARS_MAX]}.{World().new_id('draft')}.tmp")


def _write(draft: Path, pieces: Pieces) -> None:
    with draft.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _translate_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error
