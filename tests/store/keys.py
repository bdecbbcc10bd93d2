"""An operator's keys for tests."""

from __future__ import annotations

from pathlib import Path

from midstream.store.encryption.ciphers import FileKeys


def keys_in(folder: Path, name: str = "keys") -> FileKeys:
    """Return the keys in a folder; create them on first use."""
    path = folder / name
    if not path.exists():
        FileKeys.make(path)
    return FileKeys(path)
