"""Writes of an append beside its records: the session's line in listings, and hints for the next node."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.history.messages import Text, UserMessage
from midstream.session.blobs import Blob
from midstream.session.records import (
    CallStarted,
    MessageAccepted,
    Record,
    TranscriptAccepted,
    TurnEnded,
    TurnResumed,
    encode,
    sync_of,
)
from midstream.session.session import Session
from midstream.store.contract import Batch, SessionListing

TITLE_CHARS_MAX = 80

_MARKING = (MessageAccepted, TranscriptAccepted, TurnResumed, TurnEnded)
"""Records that change the line."""


def batch_of(
    records: Sequence[Record], blobs: Sequence[Blob], before: Session, after: Session, *, epoch: int
) -> Batch:
    """Return the append of records that lead from the state `before` to the state `after`."""
    bodies = [encode(record) for record in records]
    mark = mark_of(records, before, after)
    return Batch(bodies, before.position, epoch, sync_of(records), mark, blobs)


def without_starts(records: Sequence[Record]) -> tuple[Record, ...]:
    """Omit the starts of calls for the next node: a call that was started and did not run would be in doubt."""
    return tuple(record for record in records if not isinstance(record, CallStarted))


def mark_of(records: Sequence[Record], before: Session, after: Session) -> SessionListing | None:
    """Return the session's new line if these records change it, else None.

    A session is live while midstream's own loop has work in it. Driven turns, and waits for people alone, are not live.
    """
    mark = None
    for record in records:
        if not isinstance(record, _MARKING):
            continue
        status = after.status.value
        title = mark.title if mark else ""
        match record:
            case MessageAccepted():
                title = _title_of(record.message) if record.turn == 1 else title
                is_ours = not record.driver
                mark = SessionListing(is_ours, record.at, title=title, turns=after.turns, status=status)
            case TranscriptAccepted():
                title = _title_of(_first(after)) if record.turn == 1 else title
                mark = SessionListing(
                    is_live=True, at=record.at, title=title, turns=after.turns, status=status
                )
            case TurnResumed():
                mark = SessionListing(
                    is_live=True, at=record.at, title=title, turns=after.turns, status=status
                )
            case TurnEnded():
                mark = SessionListing(
                    is_live=False, at=record.at, title=title, turns=after.turns, status=status
                )
    is_handed_on = after.is_with_application and not before.is_with_application
    if is_handed_on or (after.is_live and after.rests_on_people != before.rests_on_people):
        at = max(getattr(record, "at", 0.0) for record in records)
        title = mark.title if mark else ""
        return SessionListing(after.needs_node, at, title=title, turns=after.turns, status=after.status.value)
    return mark


def _first(session: Session) -> UserMessage:
    """Return the first user message of a conversation that an application sent."""
    messages = (entry for entry in session.history.entries if isinstance(entry, UserMessage))
    return next(messages, UserMessage(()))


def _title_of(message: UserMessage) -> str:
    text = " ".join(part.text for part in message.parts if isinstance(part, Text))
    return " ".join(text.split())[:TITLE_CHARS_MAX]
