"""Pool records: the stored state of a conversation in an upstream, with which a later process continues it.

A record is written twice a turn (two phases). `create_fresh`, `create_resumed` or `create_fork` makes it pending,
before anything is sent: from then on the agent's state is uncertain. `confirm` follows the upstream's first event,
`with_answer` its last.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from midstream.errors import ModelRejectedError
from midstream.models.fingerprint import LINK_BYTES, Fingerprint, Outline

RECORD_AGE_MAX_S = 7 * 24 * 3600.0
"""Seconds a record is kept after its last use."""
RECORDS_MAX = 200
"""Greatest number of records; the most recently used are kept."""
MARKS_MAX = 64
"""Marks of a conversation, the newest: users edit their latest messages."""
ASIDES_MAX = 4
"""Side calls of a record: client applications have a few kinds of them, such as titles and summaries."""

_VERSION = b"\x01"
_CHECK_BYTES = 8


class ForkPoint(Struct, frozen=True, array_like=True):
    """A point to fork from: `agent`'s conversation with the first `users` user messages and the answers to them."""

    users: int
    agent: str
    mark: str


class Aside(Struct, frozen=True, array_like=True):
    """A side call: its system prompt and identity, the number of its user messages, and the last one's link."""

    system: bytes
    identity: bytes
    users: int
    link: bytes


class PoolRecord(Struct, frozen=True):
    """A conversation in an upstream.

    Args:
        agent: The id for resuming it; "" while a fresh one has none.
        fingerprint: The digest of the agent's conversation, once the record is confirmed.
        phase: `pending`: a message was being sent, and may have arrived. `confirmed`: the agent answered with an event.
        marks: By ascending `users`, `MARKS_MAX` at most.
        open_calls: The ids of the calls that its last response requested from the client application.
        answered: The ids of the calls whose results it got since the last user message.
        is_whole: Its last answer was complete, and its provider has rejected no request since.
        is_refused: The next message was refused: it is sent together with the following one.
        asides: The last unmarked side calls: if a client application continues one, it was the conversation.
        run: The run that has the agent now, or "". No other run resumes the agent before it is released. After the
            death of a run it never is, because the agent's state is unknown.
        created_at, used_at: Seconds since 1970: the opening of the agent, and its last sign of life.
    """

    agent: str
    upstream: str
    fingerprint: Fingerprint
    phase: Literal["pending", "confirmed"]
    created_at: float
    used_at: float
    marks: tuple[ForkPoint, ...] = ()
    open_calls: tuple[str, ...] = ()
    answered: tuple[str, ...] = ()
    asides: tuple[Aside, ...] = ()
    run: str = ""
    is_whole: bool = False
    is_refused: bool = False

    @property
    def is_resumable(self) -> bool:
        """Whether the agent has an id and a certain state, and no other run uses it."""
        return self.phase == "confirmed" and bool(self.agent) and not self.run


def create_fresh(outline: Outline, *, upstream: str, now: float) -> PoolRecord:
    """Return the record of a conversation that is about to be opened with the whole transcript."""
    return PoolRecord(
        "", upstream, outline.fingerprint, "pending", now, now, answered=_results_since_message(outline)
    )


def create_resumed(record: PoolRecord, outline: Outline, *, now: float) -> PoolRecord:
    """Return the record of an agent that is about to be resumed with the new messages."""
    common = record.fingerprint.count
    return replace(
        record,
        fingerprint=outline.fingerprint,
        phase="pending",
        marks=_marks_up_to(record.marks, common),
        open_calls=(),
        answered=_results_since_message(outline),
        asides=(),
        used_at=now,
        is_whole=False,
        is_refused=False,
    )


def create_fork(record: PoolRecord, outline: Outline, users: int, *, now: float) -> PoolRecord:
    """Return the record of a fork that is about to be opened from the mark after `users` user messages."""
    fresh = create_fresh(outline, upstream=record.upstream, now=now)
    return replace(fresh, marks=_marks_up_to(record.marks, users))


def confirm(record: PoolRecord, agent: str, *, now: float) -> PoolRecord:
    """Return the record after the upstream's first event, which named the agent."""
    return replace(record, agent=agent, phase="confirmed", used_at=now)


def with_answer(
    record: PoolRecord, *, agent: str, mark: str, open_calls: Sequence[str], now: float
) -> PoolRecord:
    """Return the record after a complete response.

    Args:
        agent: The id for resuming from now on.
        mark: The last mark, or "". No fork can start there while calls are open.
        open_calls: The calls that the response requested from the client application.
    """
    count = record.fingerprint.count
    marks = record.marks
    if mark and not open_calls and count:
        marks = (*_marks_up_to(marks, count - 1), ForkPoint(count, agent, mark))[-MARKS_MAX:]
    return replace(
        record,
        agent=agent,
        phase="confirmed",
        marks=marks,
        open_calls=tuple(open_calls),
        used_at=now,
        is_whole=True,
    )


def with_refusal(record: PoolRecord, error: str) -> PoolRecord:
    """Return the record of an agent that has refused a message, or removed it again.

    Args:
        error: The code of the error, or "". After a rejection, the agent's memory may be the cause.
    """
    if not error:
        return record
    is_whole = record.is_whole and error != ModelRejectedError.code
    return replace(record, is_whole=is_whole, is_refused=True)


def with_side_call(record: PoolRecord, outline: Outline) -> PoolRecord:
    """Return the record with an unmarked side call beside it."""
    return replace(record, asides=with_aside(record.asides, outline.fingerprint))


def with_aside(asides: Sequence[Aside], fingerprint: Fingerprint) -> tuple[Aside, ...]:
    """Return these with one more. Only the newest with the same system prompt is kept, and `ASIDES_MAX` of all."""
    aside = Aside(
        fingerprint.system, fingerprint.identity, fingerprint.count, fingerprint.users[-LINK_BYTES:]
    )
    others = [each for each in asides if (each.system, each.identity) != (aside.system, aside.identity)]
    return (*others, aside)[-ASIDES_MAX:]


def encode(record: PoolRecord) -> bytes:
    """Encode a record. Equal records give equal bytes."""
    body = msgspec.msgpack.encode(record)
    return _VERSION + _check(body) + body


def decode(body: bytes) -> PoolRecord | None:
    """Decode a record; None if it is damaged, or of another version."""
    check, rest = body[1 : 1 + _CHECK_BYTES], body[1 + _CHECK_BYTES :]
    if body[:1] != _VERSION or check != _check(rest):
        return None
    try:
        record = _DECODER.decode(rest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record if _is_sound(record) else None


def find_expired(
    used: Iterable[tuple[str, float]],
    *,
    now: float,
    age_max_s: float = RECORD_AGE_MAX_S,
    records_max: int = RECORDS_MAX,
) -> tuple[str, ...]:
    """Return the keys of expired records, and of those beyond the `records_max` last used.

    Args:
        used: Keys with their times of last use. A time in the future counts as now, because a clock was set back.
    """
    by_use = sorted(((min(at, now), key) for key, at in used), key=lambda pair: (-pair[0], pair[1]))
    return tuple(
        key for place, (at, key) in enumerate(by_use) if place >= records_max or now - at > age_max_s
    )


_DECODER = msgspec.msgpack.Decoder(PoolRecord)


def _check(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_CHECK_BYTES, person=b"midstream-record").digest()


def _is_sound(record: PoolRecord) -> bool:
    users = [mark.users for mark in record.marks]
    return (
        len(record.fingerprint.users) % LINK_BYTES == 0
        and math.isfinite(record.created_at)
        and math.isfinite(record.used_at)
        and users == sorted(set(users))
        and all(0 < number <= record.fingerprint.count for number in users)
    )


def _results_since_message(outline: Outline) -> tuple[str, ...]:
    """Return the results since the last user message; none if it is the end."""
    return () if outline.tail_users else outline.answered


def _marks_up_to(marks: Sequence[ForkPoint], users: int) -> tuple[ForkPoint, ...]:
    return tuple(mark for mark in marks if mark.users <= users)
