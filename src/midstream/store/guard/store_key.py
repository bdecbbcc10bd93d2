"""The key of an unencrypted store, in a file beside it that only this user can read.

A program that can write only into the database cannot create links of journals or commands for other nodes. The file
has one line for each key, in base64. The first key makes links, all keys check them. The line `accepts-older` means
that the store had journals before it had this key.
"""

from __future__ import annotations

import hashlib
import logging
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from pathlib import Path

from midstream.environment import World
from midstream.errors import UsageError
from midstream.file_safety import create_own_once, read_own
from midstream.store.contract import Store
from midstream.store.guard.chain import SECRET_BYTES, ChainKey, ChainKeys

ACCEPTS_OLDER = "accepts-older"
CALLED = "the key file of the store"
KEYS_MAX = 100

_log = logging.getLogger(__name__)


def require_shared_key(path: Path | None) -> None:
    """Refuse a missing key file of a store that several machines share: each would create another key.

    Raises:
        UsageError: The file is missing. None as a path means that no key is used, and is accepted.
    """
    if path is not None and not path.exists():
        raise UsageError(
            f"{str(path)!r} is missing: create it once, with 32 random bytes in base64, readable by this user only, "
            "and copy it to each server"
        )


class FileKeySource:
    """The keys in a file, created at the first opening of the store.

    Args:
        path: The file; see `Store.key_file`.
        world: Source of a new key.
    """

    def __init__(self, path: Path, world: World) -> None:
        self._path = path
        self._world = world

    async def load(self, store: Store) -> ChainKeys:
        """Return the keys of an open store; create the first one if there is no file.

        Raises:
            UsageError: The file is not safe to use, cannot be created, or a line is not a key. Nothing was changed.
        """
        try:
            return read_chain_keys(self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _unusable(self._path, error) from error
        is_mixed = await has_sessions(store)
        secret = hashlib.blake2b(
            self._world.new_secret().encode(), digest_size=SECRET_BYTES, person=b"midstream-key"
        ).digest()
        text = f"{b64encode(secret).decode()}\n" + (f"{ACCEPTS_OLDER}\n" if is_mixed else "")
        try:
            if create_own_once(self._path, text.encode()) and is_mixed:
                _log.warning(
                    "the key %s was created for a store that has sessions: their earlier records are not authenticated",
                    self._path,
                )
            return read_chain_keys(self._path)
        except OSError as error:
            raise _unusable(self._path, error) from error


def read_chain_keys(path: Path) -> ChainKeys:
    """Return the keys in a file.

    Raises:
        UsageError: The file is not safe to use, or a line is not a key.
        OSError: There is no such file, or it cannot be read.
    """
    lines = read_own(path, CALLED, is_secret=True).decode("ascii", "replace").split()
    found: list[ChainKey] = []
    for number, line in enumerate(lines, start=1):
        if line == ACCEPTS_OLDER:
            continue
        try:
            secret = b64decode(line, validate=True)
        except Base64Error:
            secret = b""
        if len(secret) != SECRET_BYTES or len(found) == KEYS_MAX:
            raise UsageError(
                f"line {number} of {CALLED} {str(path)!r} is not a key; restore the file from a copy"
            )
        found.append(ChainKey(secret))
    if not found:
        raise UsageError(f"{CALLED} {str(path)!r} has no key; restore it from a copy, or remove it")
    return ChainKeys(found, is_mixed=ACCEPTS_OLDER in lines, place=repr(str(path)))


async def has_sessions(store: Store) -> bool:
    """Whether a store has any session."""
    async for _ in store.list(limit=1):
        return True
    return False


def _unusable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{CALLED} {str(path)!r} cannot be used: {error.strerror}")
