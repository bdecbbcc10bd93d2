from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from midstream.store.sqlite import SQLiteStore
from tests.store.stores import Impatient

pytest.register_assert_rewrite("midstream.testing.store_contract")

IN_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="session")
def folders() -> Iterator[Path]:
    """Return a folder on a fast file system, for tests in which nothing depends on a real disk."""
    where = IN_MEMORY if IN_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="midstream-", dir=where) as folder:
        yield Path(folder)


@pytest.fixture
def folder(folders: Path) -> Path:
    """Return a fresh folder in `folders`."""
    return Path(tempfile.mkdtemp(dir=folders))


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[SQLiteStore]:
    """Yield an open store at `folder / "x.db"`."""
    store = SQLiteStore(folder / "x.db", world=Impatient())
    await store.open()
    yield store
    await store.close()
