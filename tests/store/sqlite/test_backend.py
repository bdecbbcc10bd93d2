from __future__ import annotations

from pathlib import Path

import pytest

from midstream.errors import UsageError
from midstream.store.sqlite.backend import SQLiteBackend


def test_three_slashes_begin_a_relative_path_and_four_an_absolute_one() -> None:
    backend = SQLiteBackend()
    assert backend.file("///sessions.db") == Path("sessions.db")
    assert backend.file("////srv/sessions.db") == Path("/srv/sessions.db")


@pytest.mark.parametrize("address", ["", "sessions.db", "//host/sessions.db", "///"])
def test_an_address_without_a_path_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="sqlite:///"):
        SQLiteBackend().file(address)
