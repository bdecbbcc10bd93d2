"""Settings of streams in a file that an operator may change while the server runs (STREAM-56)."""

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

CHECK_S = 1.0
"""Seconds between two checks of the file for changes: a check takes some microseconds."""

_log = logging.getLogger(__name__)

Mark = tuple[int, int, int]
"""Modification time, size and inode of the file, which change with its content."""


class SettingsFile:
    """TOML file with the members of `StreamSettings`; missing members have their defaults.

    Args:
        path: Path of the file, which may be replaced or rewritten at any time.
    """

    def __init__(self, path: Path, *, world: World = World()) -> None:
        self._path = path
        self._world = world
        self._mark: Mark | None = None

    def read(self) -> StreamSettings:
        """Read the file.

        Raises:
            UsageError: The file cannot be read, or has an unknown setting.
        """
        try:
            self._mark = _mark_of(self._path)
            members = tomllib.loads(read_own(self._path, "the file of settings", is_named=True).decode())
            return msgspec.convert(members, StreamSettings)
        except OSError as error:
            raise UsageError(f"the settings in {self._path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError, msgspec.ValidationError, UsageError) as error:
            raise UsageError(f"the settings in {self._path} are invalid: {error}") from error

    async def follow(self, change: Callable[[StreamSettings], None]) -> None:
        """Call `change` with each new content, until it is cancelled.

        The file is read after two checks with the same mark, because it may be half written before. A file that cannot
        be read changes nothing, and is logged.
        """
        seen = self._mark
        while True:
            await self._world.sleep(CHECK_S)
            found = await asyncio.to_thread(self._read_mark)
            is_at_rest, seen = found == seen, found
            if found is None or found == self._mark or not is_at_rest:
                continue
            try:
                settings = await asyncio.to_thread(self.read)
            except UsageError as error:
                _log.warning("%s; the previous settings remain in effect", error.message)
            else:
                change(settings)
                _log.info("new settings for streams: %s", settings)

    def _read_mark(self) -> Mark | None:
        try:
            return _mark_of(self._path)
        except OSError:  # it is being replaced, or missing: the last settings apply
            return None


def _mark_of(path: Path) -> Mark:
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino
