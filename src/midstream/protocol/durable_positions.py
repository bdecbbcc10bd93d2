"""Positions known to be on the server's disk, which distinguish a power cut from a truncated journal.

*Promised* is the newest event received that a server must not lose (STREAM-100). A power cut may lose later records.
The event itself, and all before it, are lost only if the journal is truncated or the server is set back to an older
copy.

A server that was set back and then continued uses the same event ids again. But its new epoch began at another time
than the earlier epoch of the same number. So a client compares the begin of the newest epoch that it has received
(STREAM-104).
"""

from __future__ import annotations

from msgspec import Struct

from midstream.errors import EventsLostError
from midstream.protocol.frames import EventId
from midstream.session.records import Record, is_durable


class KnownEpoch(Struct, frozen=True):
    """An epoch and its begin in seconds since 1970, as sent by the server."""

    epoch: int
    began_at: float


def newest_epoch_after(
    known: KnownEpoch | None, promised: EventId | None, epoch: int, began_at: float | None
) -> KnownEpoch | None:
    """Return the newest known epoch after the server has sent the begin of one; None is no information.

    Without a promised event, nothing can be lost, and any value is accepted.

    Raises:
        EventsLostError: The known begin of this epoch is another one.
    """
    if began_at is None:
        return known
    announced_epoch = KnownEpoch(epoch, began_at)
    if known is None or promised is None or epoch > known.epoch:
        return announced_epoch
    if epoch == known.epoch and announced_epoch != known:
        raise _loss_error(promised, f"began epoch {epoch} again since")
    return known


def durable_position_after(
    promised: EventId | None, event_id: EventId, record: Record, *, is_owned: bool
) -> EventId | None:
    """Return the promised event after one more event: the next one, or a repeated one after a `gone`.

    Args:
        is_owned: Whether it came on a stream of this client, so that no other session of that name has it.

    Raises:
        EventsLostError: Another event was promised at its position.
    """
    if promised is None or not is_owned or event_id.position > promised.position:
        return event_id if is_durable(record) else promised
    is_other = event_id.position == promised.position and event_id != promised
    if is_other or event_id.epoch > promised.epoch:
        raise _loss_error(promised, f"has {event_id} in its place")
    return promised


def require_durable_position(promised: EventId | None, newest: EventId, *, is_owned: bool) -> None:
    """Check that a server's journal with the end `newest` has the promised event.

    Raises:
        EventsLostError: It ends before the promised event.
    """
    if promised is not None and (newest < promised or (is_owned and newest.position < promised.position)):
        raise _loss_error(promised, f"ends with {newest}")


def _loss_error(promised: EventId, what: str) -> EventsLostError:
    return EventsLostError(
        f"the server had {promised} on its disk, and {what}: its journal was cut, or is an older copy"
    )
