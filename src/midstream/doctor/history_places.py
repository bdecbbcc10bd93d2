"""Places of histories: the files and folders that were named, and what is below them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from midstream.doctor.opencode_folders import is_storage

SUFFIXES = {".json", ".jsonl", ".ndjson", ".db", ".sqlite", ".sqlite3"}
"""Files of a folder that are looked at; a file that is named is looked at whatever it is called."""


class HistoryPlace(Struct, frozen=True):
    """Something to examine."""

    path: Path
    is_named: bool
    """This one was requested: report it if there is no history in it."""
    is_outside: bool = False
    """It is a link in a folder that was named, to a file outside of that folder."""


def places_in(paths: Iterable[Path]) -> Iterator[HistoryPlace]:
    """Iterate over what to examine, each once, folders in the order of their names.

    Links to folders are not followed: a loop of them would never end.
    """
    seen: set[str] = set()
    for path in paths:
        for place in _below(path):
            key = os.path.realpath(place.path)
            if key not in seen:
                seen.add(key)
                yield place


def _below(path: Path) -> Iterator[HistoryPlace]:
    if not os.path.isdir(path) or is_storage(path):  # noqa: PTH112 - false where we may not even look
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
