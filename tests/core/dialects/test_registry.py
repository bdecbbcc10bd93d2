from __future__ import annotations

import pytest

from midstream.core.dialects import registry


def test_a_dialect_is_found_by_its_path_and_by_its_name() -> None:
    assert len({dialect.name for dialect in registry.DIALECTS}) == len(registry.DIALECTS)
    for dialect in registry.DIALECTS:
        assert registry.at_path(dialect.path) is registry.named(dialect.name) is dialect
    assert registry.at_path(("elsewhere",)) is None
    with pytest.raises(KeyError):
        registry.named("elsewhere")


def test_an_error_is_written_in_the_dialect_of_its_address() -> None:
    assert registry.speaking(["responses", "resp_1", "cancel"]) is registry.RESPONSES
    assert registry.speaking(["messages", "count_tokens"]) is registry.MESSAGES
    assert registry.speaking(["elsewhere"]) is registry.CHAT
