from __future__ import annotations

import pytest

from midstream.errors import StoreDamagedError
from midstream.store.contract import KeyValueEntry
from midstream.store.guard.replaced_entries import SpentEntries
from tests.spec import spec

OLD, NEW = KeyValueEntry("k", 1, b"old", 1.0), KeyValueEntry("k", 2, b"new", 2.0)


@spec("SEC-50")
def test_a_replaced_entry_is_refused_under_any_version() -> None:
    spent = SpentEntries()
    spent.check("n", OLD, since=spent.count)
    spent.replace("n", "k", expected=1, version=2, body=b"new")
    spent.check("n", NEW, since=spent.count)
    for version in (1, 3):
        with pytest.raises(StoreDamagedError, match="put back"):
            spent.check("n", KeyValueEntry("k", version, b"old", 1.0), since=spent.count)
    spent.check("other", OLD, since=spent.count)


@spec("SEC-50")
def test_a_deleted_entry_is_refused() -> None:
    spent = SpentEntries()
    spent.check("n", OLD, since=spent.count)
    spent.spend("n", "k", version=7)  # Another one was deleted.
    spent.check("n", OLD, since=spent.count)
    spent.spend_session(("m", "n"), "k")
    with pytest.raises(StoreDamagedError):
        spent.check("n", OLD, since=spent.count)


@spec("SEC-50")
def test_an_entry_replaced_during_its_read_counts_as_current() -> None:
    spent = SpentEntries()
    spent.check("n", OLD, since=spent.count)
    since = spent.count
    spent.replace("n", "k", expected=1, version=2, body=b"new")
    spent.check("n", OLD, since=since)  # The read began before.
    spent.replace("n", "k", expected=2, version=3, body=b"newest")
    with pytest.raises(StoreDamagedError):
        spent.check("n", NEW, since=spent.count)  # That read did not hide the later one.
