"""Encryption at rest: data keys that encrypt, and the operator's keys that wrap them.

AES-256-GCM throughout. A data key is drawn by one process for one epoch of one session and never written but wrapped,
so that its nonces, which count from 1, are never given twice, whatever crashes. What is encrypted names its place in
the associated data: moved elsewhere, it cannot be read. The cipher does not commit to its key by itself, so what is
kept of a data key begins with a commitment, which is compared before anything is decrypted.

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
"""First byte of what is encrypted under a key that is kept apart; the JSON of a record begins with another one."""
ALONE = 2
"""First byte of what has a key of its own."""
_HEAD = 1 + ID_BYTES + 8
_FIRST_NONCE = bytes(NONCE_BYTES)


class OperatorKeys(Protocol):
    """Keeper of the keys that open everything: a file, or a key management service behind two calls."""

    generation: str = ""
    """Name of the key that wraps now; "" where its keeper does not name it. Another name wraps the store's secret
    again."""

    async def wrap(self, key: bytes, *, context: bytes) -> bytes:
        """Return a data key encrypted, and bound to `context`.

        Raises:
            MidstreamError: The keys cannot be had.
        """

    async def unwrap(self, wrapped: bytes, *, context: bytes) -> bytes:
        """Return what `wrap` was given.

        Raises:
            KeyMissingError: It was wrapped under a key that is not here.
            StoreDamagedError: It is not what `wrap` returned for this context.
        """


@runtime_checkable
class UnwrapsMany(Protocol):
    """An ability of `OperatorKeys` where each request costs time: lists need a key for each session."""

    async def unwrap_many(self, wrapped: Sequence[tuple[bytes, bytes]]) -> list[bytes | None]:
        """Return the keys of pairs of a wrapped key and its context, in their order; None for one that is refused.

        Raises:
            MidstreamError: The keys cannot be had.
        """


class ForkedKeys:
    """Ciphers by name, which a forked child of the process does not keep.

    A child that went on with them would encrypt other content under the same nonces.
    """

    def __init__(self, ciphers: dict[str, AESGCM]) -> None:
        self._ciphers = ciphers
        self._is_parent = True
        _of_this_process.add(self)

    def __getitem__(self, name: str) -> AESGCM:
        """Return a cipher.

        Raises:
            KeyError: There is none of this name.
            UsageError: The process was forked from the one that opened the store.
        """
        if not self._is_parent:
            raise UsageError(
                "this store was opened before the process was forked; open it again in the child"
            )
        return self._ciphers[name]

    def drop(self) -> None:
        """Drop the ciphers: nothing can be encrypted or decrypted with them any more."""
        self._ciphers = {}
        self._is_parent = False


class DataKey:
    """A key of one process for one epoch of one session. Safe to use from several threads."""

    def __init__(self, key: bytes) -> None:
        self.commitment = HKDFExpand(SHA256(), COMMITMENT_BYTES, b"midstream commitment").derive(key)
        self.id = self.commitment[:ID_BYTES]
        self._ciphers = ForkedKeys({"": AESGCM(key)})
        self._numbers = count(1)

    def encrypt(self, body: bytes, place: bytes) -> bytes:
        """Return a body encrypted, for this place only."""
        number = next(self._numbers).to_bytes(NONCE_BYTES)
        return b"%c%b%b%b" % (SHARED, self.id, number[4:], self._ciphers[""].encrypt(number, body, place))

    def decrypt(self, encrypted: bytes, place: bytes) -> bytes:
        """Return what was encrypted under this key for this place.

        Raises:
            StoreDamagedError: It was not: changed, moved or cut.
        """
        nonce = b"\0\0\0\0" + encrypted[1 + ID_BYTES : _HEAD]
        try:
            return self._ciphers[""].decrypt(nonce, encrypted[_HEAD:], place)
        except (InvalidTag, ValueError) as error:
            raise StoreDamagedError("the stored data was changed, moved or truncated") from error

    def decrypt_alone(self, encrypted: bytes, place: bytes) -> bytes:
        """Return what `encrypt_alone` encrypted under this key; raises as `decrypt` does."""
        end = 3 + int.from_bytes(encrypted[1:3])
        try:
            return self._ciphers[""].decrypt(_FIRST_NONCE, encrypted[end:], place)
        except (InvalidTag, ValueError) as error:
            raise StoreDamagedError("the stored data was changed, moved or truncated") from error


class OneKey(OperatorKeys):
    """A single key that wraps others, as `OperatorKeys` do."""

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
    """Return the key that a secret and a share of ours make for one place, and what shows that it is that key."""
    both = HKDF(SHA256(), 2 * KEY_BYTES, share, place).derive(secret.encode("utf-8", "surrogatepass"))
    return both[:KEY_BYTES], both[KEY_BYTES:]


def digest_from(key: bytes, purpose: bytes) -> str:
    """Derive a digest from a key and a purpose; the key cannot be derived from it."""
    return HKDFExpand(SHA256(), KEY_BYTES, purpose).derive(key).hex()


async def wrap_key(key: bytes, keys: OperatorKeys, *, context: bytes) -> bytes:
    """Return a data key as it may be written down: its commitment, and it itself wrapped."""
    return DataKey(key).commitment + await keys.wrap(key, context=context)


async def unwrap_key(kept: bytes, keys: OperatorKeys, *, context: bytes) -> DataKey:
    """Return the data key that `wrap_key` returned.

    Raises:
        KeyMissingError: The operator's key is not here.
        StoreDamagedError: It is another key, or was changed or moved.
    """
    return committed_key(kept, await keys.unwrap(kept[COMMITMENT_BYTES:], context=context))


async def unwrap_keys(kept: Sequence[tuple[bytes, bytes]], keys: UnwrapsMany) -> list[DataKey | None]:
    """Return the data keys of pairs of what `wrap_key` returned and its context; None for one that is refused."""
    found = await keys.unwrap_many([(each[COMMITMENT_BYTES:], context) for each, context in kept])
    opened: list[DataKey | None] = [None] * len(kept)
    for place, ((each, _), key) in enumerate(zip(kept, found, strict=True)):
        with contextlib.suppress(StoreDamagedError):  # the reader of its row gets the error
            opened[place] = None if key is None else committed_key(each, key)
    return opened


def committed_key(kept: bytes, key: bytes) -> DataKey:
    """Return an unwrapped data key.

    Raises:
        StoreDamagedError: It is another key than the one that was committed to.
    """
    if len(key) != KEY_BYTES:
        raise StoreDamagedError("a data key has another length")
    found = DataKey(key)
    if not hmac.compare_digest(found.commitment, kept[:COMMITMENT_BYTES]):
        raise StoreDamagedError("a data key is not the one that was committed to")
    return found


async def encrypt_alone(body: bytes, place: bytes, keys: OperatorKeys, world: World) -> bytes:
    """Return a body encrypted under a key of its own, which comes with it wrapped."""
    key = fresh_key(world)
    kept = await wrap_key(key, keys, context=place)
    encrypted = AESGCM(key).encrypt(_FIRST_NONCE, body, place)
    return b"%c%b%b%b" % (ALONE, len(kept).to_bytes(2), kept, encrypted)


async def decrypt_alone(encrypted: bytes, place: bytes, keys: OperatorKeys) -> bytes:
    """Return what `encrypt_alone` was given for this place.

    Raises:
        KeyMissingError: The operator's key is not here.
        StoreDamagedError: It was changed, moved or cut.
    """
    key = await unwrap_key(wrapped_of(encrypted), keys, context=place)
    return key.decrypt_alone(encrypted, place)


def wrapped_of(encrypted: bytes) -> bytes:
    """Return the wrapped key (as of `wrap_key`) that came with a body of `encrypt_alone`.

    Raises:
        StoreDamagedError: It has none.
    """
    kept = encrypted[3 : 3 + int.from_bytes(encrypted[1:3])]
    if encrypted[:1] != b"%c" % ALONE or len(kept) <= COMMITMENT_BYTES:
        raise StoreDamagedError("the stored data was changed or truncated")
    return kept


class FileKeys(OperatorKeys):
    """The operator's keys in a file: a line `name base64` each. The first one wraps, all of them unwrap.

    To rotate, put a new line before the others. An old line may go when nothing written under it is left.

    Args:
        path: Made by `make`, readable by its node only.
        world: Where the nonces of wraps come from.

    Raises:
        UsageError: There is no such file, others may read it, or a line of it is no key.
    """

    def __init__(self, path: str | Path, *, world: World = World()) -> None:
        self._world = world
        found = _read(Path(path))
        self._names = frozenset(found)
        self._keys = ForkedKeys(found)
        self.generation = next(iter(found))

    @staticmethod
    def make(path: str | Path, *, name: str = "1", world: World = World()) -> None:
        """Make a file with one new key, readable by its node only.

        Raises:
            UsageError: There is a file already, or it cannot be made. Nothing was changed.
        """
        line = f"{name} {b64encode(fresh_key(world)).decode()}\n"
        try:
            is_new = create_own_once(Path(path), line.encode())
        except OSError as error:
            raise UsageError(f"the key file {str(path)!r} cannot be made: {error.strerror}") from error
        if not is_new:
            raise UsageError(f"the key file {str(path)!r} cannot be made: it exists")

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
