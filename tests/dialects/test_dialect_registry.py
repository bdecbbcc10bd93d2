from __future__ import annotations

import pytest

from midstream.dialects import dialect_registry


def test_a_dialect_is_found_by_its_path_and_by_its_name() -> None:
    assert len({dialect.name for dialect in dialect_registry.DIALECTS}) == len(dialect_registry.DIALECTS)
    for dialect in dialect_registry.DIALECTS:
        assert (
            dialect_registry.dialect_at(dialect.path)
            is dialect_registry.find_dialect(dialect.name)
            is dialect
        )
    assert dialect_registry.dialect_at(("elsewhere",)) is None
    with pytest.raises(KeyError):
        dialect_registry.find_dialect("elsewhere")


def test_an_error_is_written_in_the_dialect_of_its_path() -> None:
    assert (
        dialect_registry.dialect_for_errors(["responses", "resp_1", "cancel"]) is dialect_registry.RESPONSES
    )
    assert dialect_registry.dialect_for_errors(["messages", "count_tokens"]) is dialect_registry.MESSAGES
    assert dialect_registry.dialect_for_errors(["elsewhere"]) is dialect_registry.CHAT
