"""Data keys, and the operator's keys in a file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.environment import World
from midstream.errors import KeyMissingError, StoreDamagedError, UsageError
from midstream.store.encryption import ciphers
from midstream.store.encryption.ciphers import DataKey, FileKeys
from midstream.testing.fake_worlds import FakeWorld
from tests.spec import spec

HERE, THERE = b"record 1 3 s", b"record 2 3 s"


@pytest.fixture
def keys(tmp_path: Path) -> FileKeys:
    FileKeys.make(tmp_path / "keys")
    return FileKeys(tmp_path / "keys")


def _key() -> DataKey:
    return DataKey(ciphers.fresh_key(World()))


@given(st.binary(max_size=300))
def test_a_body_is_decrypted_at_its_place_and_its_ciphertext_shows_nothing(body: bytes) -> None:
    key = _key()
    encrypted = key.encrypt(body, HERE)
    assert key.decrypt(encrypted, HERE) == body
    assert len(encrypted) == len(body) + 33
    assert len(body) < 8 or body not in encrypted


def test_no_nonce_is_used_twice_under_one_key() -> None:
    key = _key()
    numbers = {key.encrypt(b"same", HERE)[9:17] for _ in range(1000)}
    assert len(numbers) == 1000


@given(st.integers(0, 44), st.integers(1, 255))
def test_a_changed_byte_is_detected(place: int, change: int) -> None:
    key = _key()
    encrypted = bytearray(key.encrypt(b"some words..", HERE))
    encrypted[place] ^= change
    if 0 < place < 9 or place == 0:  # Kind and key id: they would select another key.
        return
    with pytest.raises(StoreDamagedError):
        key.decrypt(bytes(encrypted), HERE)


@pytest.mark.parametrize("cut", [0, 5, 16, 20, 40])
def test_a_moved_cut_or_foreign_ciphertext_is_detected(cut: int) -> None:
    key = _key()
    encrypted = key.encrypt(b"some words..", HERE)
    for body, place, reader in [
        (encrypted, THERE, key),
        (encrypted[:cut], HERE, key),
        (encrypted, HERE, _key()),
    ]:
        with pytest.raises(StoreDamagedError):
            reader.decrypt(body, place)


async def test_a_data_key_can_be_unwrapped_only_in_its_own_context(keys: FileKeys) -> None:
    key = ciphers.fresh_key(World())
    kept = await ciphers.wrap_key(key, keys, context=b"key s")
    assert key not in kept
    encrypted = DataKey(key).encrypt(b"words", HERE)
    assert (await ciphers.unwrap_key(kept, keys, context=b"key s")).decrypt(encrypted, HERE) == b"words"
    with pytest.raises(KeyMissingError):
        await ciphers.unwrap_key(kept, keys, context=b"key t")
    another = ciphers.fresh_key(World())
    swapped = kept[:32] + (await ciphers.wrap_key(another, keys, context=b"key s"))[32:]
    with pytest.raises(StoreDamagedError, match="committed"):
        await ciphers.unwrap_key(swapped, keys, context=b"key s")


async def test_a_standalone_ciphertext_carries_its_key(keys: FileKeys) -> None:
    encrypted = await ciphers.encrypt_alone(b"words", HERE, keys, World())
    assert await ciphers.decrypt_alone(encrypted, HERE, keys) == b"words"
    assert encrypted != await ciphers.encrypt_alone(b"words", HERE, keys, World())
    with pytest.raises(KeyMissingError):
        await ciphers.decrypt_alone(encrypted, THERE, keys)
    for place in range(len(encrypted)):
        changed = bytearray(encrypted)
        changed[place] ^= 1
        with pytest.raises((StoreDamagedError, KeyMissingError)):
            await ciphers.decrypt_alone(bytes(changed), HERE, keys)
        with pytest.raises((StoreDamagedError, KeyMissingError)):
            await ciphers.decrypt_alone(encrypted[:place], HERE, keys)


async def test_keys_are_rotated_by_a_new_first_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    FileKeys.make(path, name="old")
    FileKeys.make(tmp_path / "new", name="new")
    wrapped = await FileKeys(path).wrap(b"k" * 32, context=b"c")
    path.write_text((tmp_path / "new").read_text() + "# an old one\n" + path.read_text())
    both = FileKeys(path)
    assert await both.unwrap(wrapped, context=b"c") == b"k" * 32
    again = await both.wrap(b"k" * 32, context=b"c")
    assert await FileKeys(tmp_path / "new").unwrap(again, context=b"c") == b"k" * 32
    with pytest.raises(KeyMissingError, match="'old' is not in"):
        await FileKeys(tmp_path / "new").unwrap(wrapped, context=b"c")


def test_a_key_file_is_created_once_and_readable_by_its_user_only(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    FileKeys.make(path, world=FakeWorld())
    before = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="cannot be created"):
        FileKeys.make(path)
    assert path.read_text() == before
    path.chmod(0o640)
    with pytest.raises(UsageError, match="readable by other users"):
        FileKeys(path)


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "1\n", "1 short\n", "1 " + "A" * 43 + "=\n1 " + "A" * 43 + "="]
)
def test_a_file_without_valid_keys_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        FileKeys(path)
    assert "AAAA" not in refused.value.message
    with pytest.raises(UsageError):
        FileKeys(tmp_path / "nothing")


@spec("SEC-53")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_keys_and_its_parent_keeps_them(keys: FileKeys) -> None:
    key = _key()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        data = b"it encrypted"
        try:
            key.encrypt(b"body", HERE)
        except UsageError as error:
            try:
                asyncio.run(keys.wrap(b"k" * 32, context=b""))
            except UsageError:
                data = error.message.encode()
        finally:
            os.write(writing, data)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert b"forked" in pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert key.decrypt(key.encrypt(b"body", HERE), HERE) == b"body"


@spec("SEC-55", "SEC-56")
def test_a_key_file_must_be_a_regular_file_of_this_user(tmp_path: Path) -> None:
    FileKeys.make(tmp_path / "keys")
    (tmp_path / "link").symlink_to("keys")
    assert FileKeys(tmp_path / "link").generation == "1"
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="not a regular file"):
        FileKeys(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot be created"):
        FileKeys.make(tmp_path / "link")
