"""Positions known to be on the server's disk: they separate a power cut from a journal that was cut.

*Promised* is the newest event that it has seen of those that a server may not lose (STREAM-100). Words that came after
it a power cut may take; it itself, and all before it, only somebody who cuts the journal or sets the server back to an
older copy.

A server that was set back and went on since gives out the same event ids again. But whoever went on began an epoch for
it, as every node does, and at another time than the epoch of that number had begun before. So a client that knows when
the newest epoch it has seen began tells the two apart (STREAM-104).
"""

from __future__ import annotations

from msgspec import Struct

from midstream.errors import EventsLostError
from midstream.protocol.frames import EventId
from midstream.session.records import Record, is_durable


class KnownEpoch(Struct, frozen=True):
    """An epoch, and when it began in seconds since 1970, as the server told it."""

    epoch: int
    began_at: float


def known_after(
    known: KnownEpoch | None, promised: EventId | None, epoch: int, began_at: float | None
) -> KnownEpoch | None:
    """Return the newest epoch that is known after the server has told when one began; None tells nothing.

    Where nothing was promised, nothing can be lost: then the server is believed.

    Raises:
        EventsLostError: It began at another time, as far as is known.
    """
    if began_at is None:
        return known
    told = KnownEpoch(epoch, began_at)
    if known is None or promised is None or epoch > known.epoch:
        return told
    if epoch == known.epoch and told != known:
        raise _lost(promised, f"began epoch {epoch} another time since")
    return known


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
