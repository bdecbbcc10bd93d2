from __future__ import annotations

import pytest

from midstream.errors import StoreDamagedError
from midstream.store.contract import KeyValueEntry
from midstream.store.guard.spent_entries import SpentEntries
from tests.spec import spec

OLD, NEW = KeyValueEntry("k", 1, b"old", 1.0), KeyValueEntry("k", 2, b"new", 2.0)


@spec("SEC-50")
def test_what_was_replaced_is_not_accepted_again_under_any_version() -> None:
    spent = SpentEntries()
    spent.check("n", OLD)
    spent.replace("n", "k", expected=1, version=2, body=b"new")
    spent.check("n", NEW)
    for version in (1, 3):
        with pytest.raises(StoreDamagedError, match="put back"):
            spent.check("n", KeyValueEntry("k", version, b"old", 1.0))
    spent.check("other", OLD)


@spec("SEC-50")
def test_what_was_deleted_is_not_accepted_again() -> None:
    spent = SpentEntries()
    spent.check("n", OLD)
    spent.spend("n", "k", version=7)  # another one was deleted
    spent.check("n", OLD)
    spent.spend_session(("m", "n"), "k")
    with pytest.raises(StoreDamagedError):
        spent.check("n", OLD)
