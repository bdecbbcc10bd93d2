"""Positions known to be on the server's disk: they separate a power cut from a journal that was cut.

*Promised* is the newest event that it has seen of those that a server may not lose (STREAM-100). A power cut may
lose later records. The event itself, and all before it, are only lost if the journal is cut or the server is set
back to an older copy.

A server that was set back and went on since gives out the same event ids again. But the node that continued has
begun an epoch, at another time than the earlier epoch of that number. So a client distinguishes the two by the time
at which the newest epoch it has seen began (STREAM-104).
"""

from __future__ import annotations

from msgspec import Struct

from midstream.errors import EventsLostError
from midstream.protocol.frames import EventId
from midstream.session.records import Record, is_durable


class KnownEpoch(Struct, frozen=True):
    """An epoch, and when it began in seconds since 1970, as sent by the server."""

    epoch: int
    began_at: float


def newest_epoch_after(
    known: KnownEpoch | None, promised: EventId | None, epoch: int, began_at: float | None
) -> KnownEpoch | None:
    """Return the newest known epoch after the server has sent when one began; None is no information.

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
        raise _loss_error(promised, f"began epoch {epoch} again since")
    return known


def durable_position_after(
    promised: EventId | None, event_id: EventId, record: Record, *, is_owned: bool
) -> EventId | None:
    """Return what is promised after one more event: the next one, or one that comes again after a `gone`.

    Args:
        is_owned: It came on a stream of the client's own: no other session can have taken this one's place.

    Raises:
        EventsLostError: It stands where another one was promised to stay.
    """
    if promised is None or not is_owned or event_id.position > promised.position:
        return event_id if is_durable(record) else promised
    is_other = event_id.position == promised.position and event_id != promised
    if is_other or event_id.epoch > promised.epoch:
        raise _loss_error(promised, f"has {event_id} in its place")
    return promised


def require_durable_position(promised: EventId | None, newest: EventId, *, is_owned: bool) -> None:
    """Let a server pass whose journal ends with `newest`.

    Raises:
        EventsLostError: It ends before what was promised to stay.
    """
    if promised is not None and (newest < promised or (is_owned and newest.position < promised.position)):
        raise _loss_error(promised, f"ends with {newest}")


def _loss_error(promised: EventId, what: str) -> EventsLostError:
    return EventsLostError(
        f"the server had {promised} on its disk, and {what}: its journal was cut, or is an older copy"
    )
