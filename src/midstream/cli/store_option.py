"""Stores from the options of commands."""

from __future__ import annotations

from pathlib import Path

from midstream.errors import UsageError
from midstream.store.contract import Store
from midstream.store.key_location import KeyLocation, make_keys, open_keys
from midstream.store.store_registry import file_of, open_store, show_store


def encrypted_store(named: str | Path, key_file: KeyLocation | None, *, is_escrowed: bool) -> Store:
    """Return the store of an option, encrypted if the options require it.

    Raises:
        UsageError: The extra is not installed, or the key file is missing or cannot be read.
    """
    store, file = open_store(named), file_of(named)
    if is_escrowed and key_file is None:
        if file is None:
            raise UsageError(
                f"store {show_store(named)!r} is not a file, so it has no default key file; give one with --key-file"
            )
        key_file = file.with_name(f"{file.name}.keys")
    if key_file is None:
        return store
    if isinstance(key_file, Path) and file is not None:
        _make_first(key_file, file)
    keys = open_keys(key_file)
    from midstream.store.encryption.encrypted_store import encrypt_store  # noqa: PLC0415 - an extra that few need
    from midstream.store.encryption.escrow import escrow_store  # noqa: PLC0415 - see above

    return escrow_store(store, keys) if is_escrowed else encrypt_store(store, keys)


def _make_first(key_file: Path, file: Path) -> None:
    """Create a key file for a store that does not exist yet."""
    if key_file.exists() or file.exists():
        return
    try:
        make_keys(key_file)
    except UsageError:
        if not key_file.exists():  # else another server of this store has created it
            raise
