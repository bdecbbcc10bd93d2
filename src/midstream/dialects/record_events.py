"""Interface of converters from a session's records to one reader's events."""

from __future__ import annotations

from abc import ABC, abstractmethod

from midstream.session.records import Record


class RecordEvents(ABC):
    """Converts the records of a session, in order, to the bytes of one reader's answer."""

    is_over: bool = False
    """Whether the reader has received its last event."""

    def begin(self) -> list[bytes]:
        """Return the events before the first record, such as those for pruned records."""
        return []

    @abstractmethod
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        """Return the events of the next record."""

    def rest(self) -> list[bytes]:
        """Return the events at the current end of the journal."""
        return []
