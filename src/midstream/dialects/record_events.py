"""The events that one reader gets of a session: they follow from its records, in order, in every dialect."""

from __future__ import annotations

from abc import ABC, abstractmethod

from midstream.session.records import Record


class RecordEvents(ABC):
    """Turns the records of a session into the bytes of one reader's answer, in order."""

    is_over: bool = False
    """Whether the reader has all that it gets."""

    def begin(self) -> list[bytes]:
        """Return the events before the first record, such as those for records that were pruned."""
        return []

    @abstractmethod
    def take(self, record: Record, *, epoch: int) -> list[bytes]:
        """Return the events that the next record adds."""

    def rest(self) -> list[bytes]:
        """Return the events of the moment at which no further record is there."""
        return []
