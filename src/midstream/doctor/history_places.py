"""Places of histories: the named files and folders, and the files in those folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from midstream.doctor.opencode_folders import is_storage

SUFFIXES = {".json", ".jsonl", ".ndjson", ".db", ".sqlite", ".sqlite3"}
"""Suffixes of examined files in a folder; a named file may have any name."""


class HistoryPlace(Struct, frozen=True):
    """A file or folder to examine."""

    path: Path
    is_named: bool
    """Whether it was named: then it is reported even without a history."""
    is_outside: bool = False
    """Whether it is a link in a named folder to a file outside of it."""


def places_in(paths: Iterable[Path]) -> Iterator[HistoryPlace]:
    """Yield the places to examine, each once, folders in the order of their names.

    Links to folders are not followed, because they may form a loop.
    """
    seen: set[str] = set()
    for path in paths:
        for place in _below(path):
            key = os.path.realpath(place.path)
            if key not in seen:
                seen.add(key)
                yield place


def _below(path: Path) -> Iterator[HistoryPlace]:
    if not os.path.isdir(path) or is_storage(path):  # noqa: PTH112 - false without permission to look
        yield HistoryPlace(path, is_named=True)
        return
    is_empty = True
    closed: list[Path] = []
    for folder, folders, files in os.walk(path, onerror=lambda error: closed.append(Path(error.filename))):
        here = Path(folder)
        if is_storage(here):
            folders.clear()
            is_empty = False
            yield HistoryPlace(here, is_named=False)
            continue
        folders.sort()
        for name in sorted(files):
            if Path(name).suffix in SUFFIXES and not name.startswith("."):
                is_empty = False
                found = here / name
                is_outside = not found.resolve().is_relative_to(path.resolve())
                yield HistoryPlace(found, is_named=False, is_outside=is_outside)
    for each in closed:
        yield HistoryPlace(each, is_named=True)
    if is_empty and not closed:
        yield HistoryPlace(path, is_named=True)
