from __future__ import annotations

from midstream.dialects import dialect_registry
from midstream.dialects.dialect import Asked
from midstream.history.codecs.format_registry import FORMATS
from midstream.history.messages import UserMessage


def test_every_api_has_its_format() -> None:
    assert {dialect.format for dialect in dialect_registry.DIALECTS} <= set(FORMATS)


def test_earlier_messages_precede_the_requests_own() -> None:
    asked = Asked(
        dialect=dialect_registry.RESPONSES,
        model="m",
        messages=[{"role": "user", "content": "b"}],
        instructions="Be brief.",
    )
    read = asked.transcript([{"role": "user", "content": "a"}])
    assert read.instructions == "Be brief."
    assert read.history.entries == (UserMessage.of("a"), UserMessage.of("b"))
