from __future__ import annotations

from midstream.core.dialects import registry
from midstream.core.dialects.dialect import Asked
from midstream.core.formats.named import FORMATS
from midstream.core.messages import UserMessage


def test_every_api_has_its_format() -> None:
    assert {dialect.format for dialect in registry.DIALECTS} <= set(FORMATS)


def test_what_came_before_stands_before_what_is_asked() -> None:
    asked = Asked(
        dialect=registry.RESPONSES,
        model="m",
        messages=[{"role": "user", "content": "b"}],
        instructions="Be brief.",
    )
    read = asked.transcript([{"role": "user", "content": "a"}])
    assert read.instructions == "Be brief."
    assert read.history.entries == (UserMessage.of("a"), UserMessage.of("b"))
