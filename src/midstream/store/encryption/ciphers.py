"""Encryption at rest: data keys that encrypt, and the operator's keys that wrap them.

AES-256-GCM throughout. A process draws a data key for one epoch of one session, and stores it only wrapped. So its
nonces, which count from 1, are never used twice, even after a crash. The associated data contain the place of the
ciphertext, so that it cannot be decrypted elsewhere. The cipher does not commit to its key. A stored data key therefore
begins with a commitment, which is compared before decryption.

    encrypted = 1 | key id (8) | number (8) | ciphertext and tag       under a key that is kept apart, see `Kept`
    alone     = 2 | size (2) | kept key | ciphertext and tag           under a key of its own

Needs the extra `midstream[crypto]`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import weakref
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Protocol, runtime_checkable

from typing_extensions import override

from midstream.environment import World
from midstream.errors import KeyMissingError, StoreDamagedError, UsageError
from midstream.extras import extra
from midstream.file_safety import create_own_once, read_own

with extra("crypto"):
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

KEY_BYTES = 32
NONCE_BYTES = 12
ID_BYTES = 8
COMMITMENT_BYTES = 32
NAME_CHARS_MAX = 64
"""Characters of the name of an operator's key."""

SHARED = 1
"""First byte of data that are encrypted under a separate key; no JSON record begins with it."""
ALONE = 2
"""First byte of data with a key of their own."""
_HEAD = 1 + ID_BYTES + 8
_FIRST_NONCE = bytes(NONCE_BYTES)


class OperatorKeys(Protocol):
    """Operator's keys, which wrap all other keys: a file, or a key management service."""

    generation: str = ""
    """Name of the current wrapping key; "" if unknown. After a change, the store's secret is wrapped again."""

    async def wrap(self, key: bytes, *, context: bytes) -> bytes:
        """Return a data key encrypted, and bound to `context`.

        Raises:
            MidstreamError: The keys are unavailable.
        """

    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        """Return the key that was passed to `wrap`.

        Raises:
            KeyMissingError: It was wrapped under an unknown key.
            StoreDamagedError: It is not a result of `wrap` for this context.
        """


@runtime_checkable
class UnwrapsMany(Protocol):
    """An ability of `OperatorKeys` with slow requests: listings need a key for each session."""

    async def unwrap_many(self, wrapped: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        """Unwrap pairs of a wrapped key and its context, in order; None for a refused one.

        Raises:
            MidstreamError: The keys are unavailable.
        """


class ForkedKeys:
    """Ciphers by name, which are not available in a forked child.

    A child that used them would encrypt different content under the same nonces.
    """

    def __init__(self, ciphers: dict[str, AESGCM]) -> None:
        self._ciphers = ciphers
        self._is_parent = True
        _of_this_process.add(self)

    def __getitem__(self, name: str) -> AESGCM:
        """Return a cipher.

        Raises:
            KeyError: There is none with this name.
            UsageError: This process was forked after the store was opened.
        """
        if not self._is_parent:
            raise UsageError(
                "this store was opened before the process was forked; open it again in the child"
            )
        return self._ciphers[name]

    def drop(self) -> None:
        """Delete the ciphers."""
        self._ciphers = {}
        self._is_parent = False


class DataKey:
    """A data key of one process, one session and one epoch. Thread-safe."""

    def __init__(self, key: bytes) -> None:
        self.commitment = HKDFExpand(SHA256(), COMMITMENT_BYTES, b"midstream commitment").derive(key)
        self.id = self.commitment[:ID_BYTES]
        self._ciphers = ForkedKeys({"": AESGCM(key)})
        self._numbers = count(1)

    def encrypt(self, body: bytes, place: bytes) -> bytes:
        """Encrypt a body for one place."""
        number = next(self._numbers).to_bytes(NONCE_BYTES)
        return b"%c%b%b%b" % (SHARED, self.id, number[4:], self._ciphers[""].encrypt(number, body, place))

    def decrypt(self, encrypted: bytes, place: bytes) -> bytes:
        """Decrypt data of this key and place.

        Raises:
            StoreDamagedError: The data were changed, moved or cut, or have another key.
        """
        nonce = b"\0\0\0\0" + encrypted[1 + ID_BYTES : _HEAD]
        try:
            return self._ciphers[""].decrypt(nonce, encrypted[_HEAD:], place)
        except (InvalidTag, ValueError) as error:
            raise StoreDamagedError("the stored data was changed, moved or truncated") from error

    def decrypt_alone(self, encrypted: bytes, place: bytes) -> bytes:
        """Decrypt data of `encrypt_alone`, under this key; raises as `decrypt` does."""
        end = 3 + int.from_bytes(encrypted[1:3])
        try:
            return self._ciphers[""].decrypt(_FIRST_NONCE, encrypted[end:], place)
        except (InvalidTag, ValueError) as error:
            raise StoreDamagedError("the stored data was changed, moved or truncated") from error


class OneKey(OperatorKeys):
    """A single key that wraps others."""

    def __init__(self, key: bytes, world: World) -> None:
        self._ciphers = ForkedKeys({"": AESGCM(key)})
        self._world = world

    @override
    async def wrap(self, key: bytes, *, context: bytes) -> bytes:
        nonce = fresh_key(self._world)[:NONCE_BYTES]
        return nonce + self._ciphers[""].encrypt(nonce, key, context)

    @override
    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        try:
            return self._ciphers[""].decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], context)
        except (InvalidTag, ValueError) as error:
            raise StoreDamagedError("a wrapped key was changed, moved or truncated") from error


def fresh_key(world: World) -> bytes:
    """Draw a key."""
    return hashlib.blake2b(
        world.new_secret().encode(), digest_size=KEY_BYTES, person=b"midstream-key"
    ).digest()


def derive_key(secret: str, share: bytes, place: bytes) -> tuple[bytes, bytes]:
    """Derive a key from a secret and the server's share for one place; return it with its commitment."""
    both = HKDF(SHA256(), 2 * KEY_BYTES, share, place).derive(secret.encode("utf-8", "surrogatepass"))
    return both[:KEY_BYTES], both[KEY_BYTES:]


def digest_from(key: bytes, purpose: bytes) -> str:
    """Derive a digest from a key for a purpose."""
    return HKDFExpand(SHA256(), KEY_BYTES, purpose).derive(key).hex()


async def wrap_key(key: bytes, keys: OperatorKeys, *, context: bytes) -> bytes:
    """Return a data key for storage: its commitment, and the wrapped key."""
    return DataKey(key).commitment + await keys.wrap(key, context=context)


async def unwrap_key(kept: bytes, keys: OperatorKeys, *, context: bytes) -> DataKey:
    """Unwrap a data key of `wrap_key`.

    Raises:
        KeyMissingError: The operator's key is missing.
        StoreDamagedError: It is another key, or was changed or moved.
    """
    return committed_key(kept, await keys.unwrap(kept[COMMITMENT_BYTES:], context=context))


async def unwrap_keys(kept: Sequence[tuple[bytes, bytes]], keys: UnwrapsMany) -> list[DataKey | None]:
    """Unwrap pairs of a result of `wrap_key` and its context; None for a refused one."""
    found = await keys.unwrap_many([(each[COMMITMENT_BYTES:], context) for each, context in kept])
    opened: list[DataKey | None] = [None] * len(kept)
    for place, ((each, _), key) in enumerate(zip(kept, found, strict=True)):
        with contextlib.suppress(StoreDamagedError):  # the reader of its row gets the error
            opened[place] = None if key is None else committed_key(each, key)
    return opened


def committed_key(kept: bytes, key: bytes) -> DataKey:
    """Return an unwrapped data key, after comparing it with its commitment.

    Raises:
        StoreDamagedError: The commitment is of another key.
    """
    if len(key) != KEY_BYTES:
        raise StoreDamagedError("a data key has another length")
    found = DataKey(key)
    if not hmac.compare_digest(found.commitment, kept[:COMMITMENT_BYTES]):
        raise StoreDamagedError("a data key is not the one that was committed to")
    return found


async def encrypt_alone(body: bytes, place: bytes, keys: OperatorKeys, world: World) -> bytes:
    """Encrypt a body under a new key, which is stored with it, wrapped."""
    key = fresh_key(world)
    kept = await wrap_key(key, keys, context=place)
    encrypted = AESGCM(key).encrypt(_FIRST_NONCE, body, place)
    return b"%c%b%b%b" % (ALONE, len(kept).to_bytes(2), kept, encrypted)


async def decrypt_alone(encrypted: bytes, place: bytes, keys: OperatorKeys) -> bytes:
    """Decrypt data of `encrypt_alone` for this place.

    Raises:
        KeyMissingError: The operator's key is missing.
        StoreDamagedError: The data were changed, moved or cut.
    """
    key = await unwrap_key(wrapped_of(encrypted), keys, context=place)
    return key.decrypt_alone(encrypted, place)


def wrapped_of(encrypted: bytes) -> bytes:
    """Return the wrapped key in data of `encrypt_alone`.

    Raises:
        StoreDamagedError: There is none.
    """
    kept = encrypted[3 : 3 + int.from_bytes(encrypted[1:3])]
    if encrypted[:1] != b"%c" % ALONE or len(kept) <= COMMITMENT_BYTES:
        raise StoreDamagedError("the stored data was changed or truncated")
    return kept


class FileKeys(OperatorKeys):
    """The operator's keys in a file: a line `name base64` each. The first one wraps, all of them unwrap.

    To rotate, insert a new line before the others. Remove an old line when no data under its key are left.

    Args:
        path: The file, created by `make`, readable only by its user.
        world: Source of the nonces of wraps.

    Raises:
        UsageError: The file is missing, other users may read it, or a line is not a key.
    """

    def __init__(self, path: str | Path, *, world: World = World()) -> None:
        self._world = world
        found = _read(Path(path))
        self._names = frozenset(found)
        self._keys = ForkedKeys(found)
        self.generation = next(iter(found))

    @staticmethod
    def make(path: str | Path, *, name: str = "1", world: World = World()) -> None:
        """Create a file with one new key, readable only by its user.

        Raises:
            UsageError: The file exists, or cannot be created. Nothing was changed.
        """
        line = f"{name} {b64encode(fresh_key(world)).decode()}\n"
        try:
            is_new = create_own_once(Path(path), line.encode())
        except OSError as error:
            raise UsageError(f"the key file {str(path)!r} cannot be created: {error.strerror}") from error
        if not is_new:
            raise UsageError(f"the key file {str(path)!r} cannot be created: it exists")

    @override
    async def wrap(self, key: bytes, *, context: bytes) -> bytes:
        nonce = fresh_key(self._world)[:NONCE_BYTES]
        name = self.generation.encode()
        return b"%c%b%b%b" % (
            len(name),
            name,
            nonce,
            self._keys[self.generation].encrypt(nonce, key, context),
        )

    @override
    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        end = 1 + (wrapped[0] if wrapped else 0)
        name = wrapped[1:end].decode("utf-8", "replace")
        if name not in self._names:
            raise KeyMissingError(f"the operator's key {name[:NAME_CHARS_MAX]!r} is not in the key file")
        body = end + NONCE_BYTES
        try:
            return self._keys[name].decrypt(wrapped[end:body], wrapped[body:], context)
        except (InvalidTag, ValueError) as error:
            message = f"a data key does not open with the operator's key {name!r}: another key, or damage"
            raise KeyMissingError(message) from error


def _read(path: Path) -> dict[str, AESGCM]:
    try:
        lines = read_own(path, "the key file", is_secret=True, is_named=True).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the key file {str(path)!r} cannot be read: {type(error).__name__}") from error
    found: dict[str, AESGCM] = {}
    for number, line in enumerate(lines, start=1):
        name, _, text = line.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        try:
            key = b64decode(text.strip(), validate=True)
        except Base64Error:
            key = b""
        if len(key) != KEY_BYTES or len(name) > NAME_CHARS_MAX or not name.isascii() or name in found:
            raise UsageError(f"line {number} of the key file {str(path)!r} is not a key of its own name")
        found[name] = AESGCM(HKDF(SHA256(), KEY_BYTES, None, b"midstream operator").derive(key))
    if not found:
        raise UsageError(f"the key file {str(path)!r} has no key; create it with `FileKeys.make`")
    return found


_of_this_process: weakref.WeakSet[ForkedKeys] = weakref.WeakSet()


def _drop_in_child() -> None:
    for keys in [*_of_this_process]:
        keys.drop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
