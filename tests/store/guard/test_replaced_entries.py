from __future__ import annotations

import pytest

from midstream.errors import StoreDamagedError
from midstream.store.contract import KeyValueEntry
from midstream.store.guard.replaced_entries import SpentEntries
from tests.spec import spec

OLD, NEW = KeyValueEntry("k", 1, b"old", 1.0), KeyValueEntry("k", 2, b"new", 2.0)


@spec("SEC-50")
def test_what_was_replaced_is_not_accepted_again_under_any_version() -> None:
    spent = SpentEntries()
    spent.check("n", OLD, since=spent.count)
    spent.replace("n", "k", expected=1, version=2, body=b"new")
    spent.check("n", NEW, since=spent.count)
    for version in (1, 3):
        with pytest.raises(StoreDamagedError, match="put back"):
            spent.check("n", KeyValueEntry("k", version, b"old", 1.0), since=spent.count)
    spent.check("other", OLD, since=spent.count)


@spec("SEC-50")
def test_what_was_deleted_is_not_accepted_again() -> None:
    spent = SpentEntries()
    spent.check("n", OLD, since=spent.count)
    spent.spend("n", "k", version=7)  # another one was deleted
    spent.check("n", OLD, since=spent.count)
    spent.spend_session(("m", "n"), "k")
    with pytest.raises(StoreDamagedError):
        spent.check("n", OLD, since=spent.count)


@spec("SEC-50")
def test_what_is_replaced_while_it_is_read_was_not_put_back() -> None:
    spent = SpentEntries()
    spent.check("n", OLD, since=spent.count)
    since = spent.count
    spent.replace("n", "k", expected=1, version=2, body=b"new")
    spent.check("n", OLD, since=since)  # the read began before
    spent.replace("n", "k", expected=2, version=3, body=b"newest")
    with pytest.raises(StoreDamagedError):
        spent.check("n", NEW, since=spent.count)  # that read did not hide what came after it
