"""What an application is told: one event for each record, also of the sub-agents below a session."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from midstream.core.client_stream import Applied, ClientEvent, Replaced
from midstream.core.frames import Gone, Snapshot
from midstream.core.messages import UpstreamCall
from midstream.core.records import ChildSaid, Delta, QuestionAsked, Record, TurnEnded, decode


class PlaybackLost(Struct, frozen=True, tag="playback_lost", tag_field="type"):
    """What this client had said and nobody had acknowledged cannot be read any more, so that it is not said again.

    Args:
        reason: What is damaged.
        session: The session as the server has it: what `GET /v1/sessions/{id}` answers, as JSON. Put it in the place
            of all that you have of it.
    """

    reason: str
    session: msgspec.Raw


class Event(Struct, frozen=True):
    """One thing that happened in a session, or in that of a sub-agent at work for it.

    Args:
        id: Its place on the session's line. Keep it beside what you make of the event: where it comes again, you
            have it.
        record: What happened; see `midstream.core.records`. A `Gone` says that what came after `id` is not on the
            line any more (the server lost it in a power cut, or keeps it no longer): forget it; what is there follows.
            A `Snapshot` is the session as it was at `id`: put it in the place of all that you have of it. A
            `PlaybackLost` begins what is left of a turn whose state is damaged here (STREAM-48).
    """

    id: str
    record: Record | Gone | Snapshot | PlaybackLost

    @property
    def text(self) -> str:
        """The words for the reader that this event adds; "" where it adds none, and for those of a sub-agent."""
        is_word = isinstance(self.record, Delta) and self.record.kind == "text"
        return self.record.text if is_word else ""  # type: ignore[union-attr] # a word is a Delta

    @property
    def upstream_call(self) -> UpstreamCall | None:
        """A tool that the upstream runs itself, told when it starts (without `outcome`) and when it ended; else None.

        It is there to be shown: nobody here may run it.
        """
        return self.record.call if isinstance(self.record, Delta) else None

    @property
    def is_end(self) -> bool:
        """Whether a turn ends here."""
        return isinstance(self.record, TurnEnded)

    @property
    def path(self) -> tuple[str, ...]:
        """The sessions of the sub-agents it comes from, the outermost first; () for the session itself."""
        return self._seen_through()[0]

    @property
    def innermost(self) -> Record | Gone | Snapshot | PlaybackLost:
        """What happened, seen through the sub-agents that report it: the record of the last session of `path`.

        Raises:
            RecordUndecodableError: A sub-agent's record is of a later version.
        """
        return self._seen_through()[1]

    @property
    def question(self) -> QuestionAsked | None:
        """The question to a person that is asked here, by the agent or by a sub-agent; None where none is.

        It is answered in the session that asks: the last one of `path`, where there is any.
        """
        record = self.innermost
        return record if isinstance(record, QuestionAsked) else None

    def _seen_through(self) -> tuple[tuple[str, ...], Record | Gone | Snapshot | PlaybackLost]:
        path: list[str] = []
        record = self.record
        while isinstance(record, ChildSaid):
            path.append(record.child)
            record = decode(bytes(record.record))
        return tuple(path), record


def event_of(event: ClientEvent) -> Event:
    """Return what the application is told of an event of the stream."""
    match event:
        case Applied(event_id, record):
            return Event(str(event_id), record)
        case Replaced(event_id, session):
            return Event(str(event_id), Snapshot(str(event_id), session))
        case _:
            gone = Gone(str(event.event_id), event.reason, has_snapshot=event.has_snapshot)
            return Event(str(event.event_id), gone)
