"""What a client knows to be on its server's disk: by this it tells a power cut from a journal that was cut.

*Promised* is the newest event that it has seen of those that a server may not lose (STREAM-100). Words that came after
it a power cut may take; it itself, and all before it, only somebody who cuts the journal or sets the server back to an
older copy.
"""

from __future__ import annotations

from midstream.core.frames import EventId
from midstream.core.records import Record, is_durable
from midstream.errors import EventsLostError


def promised_after(
    promised: EventId | None, event_id: EventId, record: Record, *, is_owned: bool
) -> EventId | None:
    """Return what is promised after one more event: the next one, or one that comes again since the server said `gone`.

    Args:
        is_owned: It came on a stream of the client's own: no other session can have taken this one's place.

    Raises:
        EventsLostError: It stands where another one was promised to stay.
    """
    if promised is None or not is_owned or event_id.position > promised.position:
        return event_id if is_durable(record) else promised
    is_other = event_id.position == promised.position and event_id != promised
    if is_other or event_id.epoch > promised.epoch:
        raise _lost(promised, f"has {event_id} in its place")
    return promised


def require_promised(promised: EventId | None, newest: EventId, *, is_owned: bool) -> None:
    """Let a server pass whose journal ends with `newest`.

    Raises:
        EventsLostError: It ends before what was promised to stay.
    """
    if promised is not None and (newest < promised or (is_owned and newest.position < promised.position)):
        raise _lost(promised, f"ends with {newest}")


def _lost(promised: EventId, what: str) -> EventsLostError:
    return EventsLostError(
        f"the server had {promised} on its disk, and {what}: its journal was cut, or is an older copy"
    )
