"""Names of plain streams: which there are, and the names of their journals."""

from __future__ import annotations

import pytest

from midstream.errors import UsageError
from midstream.server.api.stream_names import journal_of, name_of, require_stream_name, stored_part
from midstream.server.auth.caller import UnauthenticatedCaller
from midstream.store.contract import is_session


@pytest.mark.parametrize("name", ["a", "a/b", "a.b/c:d/e_f-g", "x" * 128])
def test_a_name_and_its_journal_lead_to_each_other(name: str) -> None:
    journal = journal_of(name, UnauthenticatedCaller())
    assert "/" not in journal
    assert not is_session(journal)
    assert name_of(journal, "") == name
    assert name_of(f"acme:{journal}", "acme") == name


@pytest.mark.parametrize("name", ["", "/", "a/", "/a", "a//b", "a~b", "a b", "ä", "x" * 129, "a/\n"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        require_stream_name(name)


def test_journals_of_others_have_no_name() -> None:
    assert name_of("acme:~a", "") is None
    assert name_of("~a", "acme") is None
    assert name_of("session", "") is None
    assert name_of(stored_part("__ds/sub"), "") is None
