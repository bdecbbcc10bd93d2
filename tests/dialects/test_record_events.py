"""Events derived from the records of a session."""

from __future__ import annotations

from typing_extensions import override

from midstream.dialects.record_events import RecordEvents
from midstream.session.records import Record, TurnEnded, TurnStatus


class NameEvents(RecordEvents):
    """Sends the name of each record, and only that."""

    @override
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        return [type(record).__name__.encode()]


def test_only_records_give_events_unless_a_dialect_has_more() -> None:
    names = NameEvents()
    ended = TurnEnded(1, TurnStatus.COMPLETED, 0.0)
    assert [names.begin(), names.take(ended, epoch=1), names.rest()] == [[], [b"TurnEnded"], []]
    assert not names.is_over
