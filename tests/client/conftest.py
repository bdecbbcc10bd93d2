from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.keyrings import FileKeyring, keyring_in, use_keyring


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a user without a server key, which other tests may have left: scripted servers have no proof."""
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path / "home"))


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[FileKeyring]:
    """The keyring of the user who runs the test, in a file."""
    backend = keyring_in(tmp_path)
    with use_keyring(backend):
        yield backend
