from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("midstream.testing.store_contract")

IN_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def folders() -> Iterator[Path]:
    """Where files are quick: for tests in which nothing depends on a real disk."""
    where = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="midstream-", dir=where) as folder:
        yield Path(folder)


@pytest.fixture
def folder(folders: Path) -> Path:
    """A fresh folder in `folders`."""
    return Path(tempfile.mkdtemp(dir=folders))
