from __future__ import annotations

from pathlib import Path

import pytest

from midstream.errors import NotFoundError, UsageError
from midstream.store.memory import MemoryStore
from midstream.store.sqlite import SQLiteStore
from midstream.store.store_registry import file_of, open_store, read_store


def test_a_path_and_a_url_are_a_sqlite_file_that_is_created_when_opened(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    for named in (path, str(path), f"sqlite:///{path}"):
        assert isinstance(open_store(named), SQLiteStore)
        assert file_of(named) == path
    assert not path.exists()


def test_a_store_object_is_itself_and_each_store_in_memory_is_new() -> None:
    own = MemoryStore()
    assert open_store(own) is own
    assert isinstance(open_store("memory:"), MemoryStore)
    assert open_store("memory:") is not open_store("memory:")
    assert file_of("memory:") is None


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (
            "mysql://u:secret@host/db",
            "'mysql://u@host/db' has an unknown scheme; known: 'memory:', 'nats:', 'postgres:'",
        ),
        ("postgresql:db", "is named 'postgresql://user@host"),
        ("nats:host", "is named 'nats://host:4222"),
        ("nats://host/?durable=1", "has no parameter 'durable'"),
        ("sqlite:sessions.db", "write 'sqlite:///' and a path"),
        ("memory:here", "write 'memory:'"),
    ],
)
def test_a_url_of_an_unknown_store_is_refused(url: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        open_store(url)


def test_a_windows_drive_is_no_scheme() -> None:
    assert file_of("C:\\sessions.db") == Path("C:\\sessions.db")


def test_reading_a_missing_store_does_not_create_it(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError), read_store(tmp_path / "s.db"):
        pass
    assert [*tmp_path.iterdir()] == []
    with (
        pytest.raises(UsageError, match="readable only in the process that opened it"),
        read_store("memory:"),
    ):
        pass
