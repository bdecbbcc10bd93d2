"""Names of plain streams, and the names of their journals."""

from __future__ import annotations

import pytest

from midstream.errors import UsageError
from midstream.server.api.stream_names import journal_of, name_of, require_stream_name, stored_part
from midstream.server.auth.caller import UnauthenticatedCaller
from midstream.store.contract import is_session


@pytest.mark.parametrize("name", ["a", "a/b", "a.b/c:d/e_f-g", "x" * 128])
def test_a_stream_name_and_its_journal_name_map_to_each_other(name: str) -> None:
    journal = journal_of(name, UnauthenticatedCaller())
    assert "/" not in journal
    assert not is_session(journal)
    assert name_of(journal, "") == name
    assert name_of(f"acme:{journal}", "acme") == name


@pytest.mark.parametrize("name", ["", "/", "a/", "/a", "a//b", "a~b", "a b", "ä", "x" * 129, "a/\n"])
def test_an_invalid_stream_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="the name of a stream has 1 to 128 of"):
        require_stream_name(name)


def test_a_journal_of_another_tenant_or_kind_has_no_stream_name() -> None:
    assert name_of("acme:~a", "") is None
    assert name_of("~a", "acme") is None
    assert name_of("session", "") is None
    assert name_of(stored_part("__ds/sub"), "") is None
