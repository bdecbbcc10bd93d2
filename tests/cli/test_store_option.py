from __future__ import annotations

from pathlib import Path

import pytest

from midstream.cli.store_option import encrypted_store
from midstream.errors import UsageError
from midstream.store.encryption.encrypted_store import EncryptedStore
from midstream.store.encryption.escrow import EscrowedStore
from midstream.store.memory import MemoryStore


def test_a_new_file_gets_keys_beside_it_and_other_stores_need_a_key_option(tmp_path: Path) -> None:
    assert isinstance(encrypted_store("memory:", None, is_escrowed=False), MemoryStore)
    assert isinstance(encrypted_store(tmp_path / "s.db", None, is_escrowed=True), EscrowedStore)
    keys = tmp_path / "s.db.keys"
    assert keys.exists()
    assert isinstance(encrypted_store("memory:", keys, is_escrowed=False), EncryptedStore)
    with pytest.raises(UsageError, match="give one with --key-file"):
        encrypted_store("memory:", None, is_escrowed=True)
    with pytest.raises(UsageError):
        encrypted_store("memory:", tmp_path / "none", is_escrowed=True)
