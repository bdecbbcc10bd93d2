"""How streams are served, in a file that an operator changes while the server runs (STREAM-56)."""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec

from midstream.environment import World
from midstream.errors import UsageError
from midstream.file_safety import read_own
from midstream.protocol.stream_settings import StreamSettings

LOOK_S = 1.0
"""Seconds between two looks at whether the file has changed: one look costs some microseconds."""

_log = logging.getLogger(__name__)

Mark = tuple[int, int, int]
"""By what another content is known: when it was written, how long it is, and which file it is."""


class SettingsFile:
    """The members of `StreamSettings`, as TOML; those that are missing have their defaults.

    Args:
        path: May be replaced or written anew at any time.
    """

    def __init__(self, path: Path, *, world: World = World()) -> None:
        self._path = path
        self._world = world
        self._mark: Mark | None = None

    def read(self) -> StreamSettings:
        """Read it as it is now.

        Raises:
            UsageError: It cannot be read, or has an unknown setting.
        """
        try:
            self._mark = _mark_of(self._path)
            told = tomllib.loads(read_own(self._path, "the file of settings", is_named=True).decode())
            return msgspec.convert(told, StreamSettings)
        except OSError as error:
            raise UsageError(f"the settings in {self._path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError, msgspec.ValidationError, UsageError) as error:
            raise UsageError(f"the settings in {self._path} are invalid: {error}") from error

    async def follow(self, change: Callable[[StreamSettings], None]) -> None:
        """Call `change` with each new content, until it is cancelled.

        It is read when two looks found the same of it: before that it may be half written. What cannot be read
        changes nothing, and is logged.
        """
        seen = self._mark
        while True:
            await self._world.sleep(LOOK_S)
            found = await asyncio.to_thread(self._read_mark)
            is_at_rest, seen = found == seen, found
            if found is None or found == self._mark or not is_at_rest:
                continue
            try:
                settings = await asyncio.to_thread(self.read)
            except UsageError as error:
                _log.warning("%s; the previous settings stay", error.message)
            else:
                change(settings)
                _log.info("new settings for streams: %s", settings)

    def _read_mark(self) -> Mark | None:
        try:
            return _mark_of(self._path)
        except OSError:  # it is being replaced, or is gone: the last settings hold
            return None


def _mark_of(path: Path) -> Mark:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino
