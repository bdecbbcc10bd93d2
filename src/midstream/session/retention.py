"""Rules of retention: the events that a journal keeps for returning readers. Pure: sizes and times are arguments.

Pruning replaces the records up to a place by the session that they folded to, which has every message, response and
result. Deltas, attempts and progress up to that place are lost, so a reader before it gets a snapshot instead.
Positions never change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct

from midstream.number_checks import require_count, require_seconds

EVENTS_FOR_S = 7 * 24 * 60 * 60.0
"""Seconds that an event is kept if there is no other limit: a week."""
EVENTS_MAX = 100_000
BYTES_MAX = 64 * 2**20
"""Events, and bytes of events, of one session: some hundred long turns."""
KEPT_SHARE = 0.5
"""The share of a limit that is kept after it was exceeded, so that pruning is rare."""
PRUNED_AT_ONCE_MAX = 20_000
"""Records that one prune removes at most, because other sessions wait for its transaction."""


class Retention(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits for the replay of a session's events, and for its life. None is no limit.

    Of a running turn, only complete steps may be pruned, and only for `events_max` and `bytes_max`. The conversation
    itself is not shortened by any of the first three.

    Args:
        events_for_s: Seconds for which an event of a finished turn can be replayed.
        events_max: Events of one session that can be replayed.
        bytes_max: Bytes of events of one session that can be replayed.
        sessions_for_s: Seconds after its last change after which a session without an open turn is deleted, with its
            conversation and its sub-agents' sessions.

    Raises:
        UsageError: A limit is not above 0.
    """

    events_for_s: float | None = EVENTS_FOR_S
    events_max: int | None = EVENTS_MAX
    bytes_max: int | None = BYTES_MAX
    sessions_for_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("events_for_s", "sessions_for_s"):
            if (seconds := getattr(self, name)) is not None:
                require_seconds(name, seconds, most=math.inf, is_positive=True)
        for name in ("events_max", "bytes_max"):
            if (limit := getattr(self, name)) is not None:
                require_count(name, limit, least=1)

    @property
    def is_endless(self) -> bool:
        """Whether nothing is ever pruned or deleted."""
        return all(getattr(self, name) is None for name in self.__struct_fields__)


class _Glance(Struct, frozen=True):
    """The facts of a record that a survey needs."""

    type: str
    at: float = 0.0
    driver: str = ""


_glance: msgspec.json.Decoder[_Glance] = msgspec.json.Decoder(_Glance)


class _Place(Struct, frozen=True):
    """A possible new beginning of a journal: everything up to and including this record is finished."""

    position: int
    epoch: int
    bytes: int
    """Bytes of the records up to and including this one."""
    at: float
    is_turn_over: bool


class PruningSurvey:
    """A search for possible new beginnings of a journal, in one pass over its records (`take` each page, in order)."""

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of all processed records, without the beginning of a pruned journal."""
        self.end = 0
        """Position of the last processed record."""
        self._begin: int | None = None
        """Position of an earlier pruning; 0 if there was none."""
        self._places: list[_Place] = []
        self._at = 0.0
        self._is_driven = False
        self._is_sound = True

    @property
    def count(self) -> int:
        """Number of processed events."""
        return self.end - (self._begin or 0)

    def take(self, records: Iterable[tuple[int, int, bytes]]) -> None:
        """Process `(position, epoch, body)`. Nothing from an unreadable record on may be pruned."""
        for position, epoch, body in records:
            self.end = position
            try:
                seen = _glance.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                seen = _Glance("")
                self._is_sound = False
            # Its time is that of the pruning, not of the replaced records.
            is_begin = seen.type == "journal_pruned"
            if self._begin is None:
                self._begin = position if is_begin else position - 1
            if not is_begin:
                self.bytes += len(body)
                self._at = max(self._at, seen.at)
                self._note(_Place(position, epoch, self.bytes, self._at, seen.type == "turn_ended"), seen)

    def _note(self, place: _Place, seen: _Glance) -> None:
        if seen.type == "message_accepted":
            self._is_driven = bool(seen.driver)
        is_whole = seen.type == "step_committed" and not self._is_driven
        if (place.is_turn_over or is_whole) and self._is_sound:
            self._places.append(place)

    def ripe_at(self, retention: Retention) -> float:
        """Return the time at which the first finished turn becomes too old; infinity if none does now."""
        first = next((place.at for place in self._places if place.is_turn_over), math.inf)
        return math.inf if retention.events_for_s is None else first + retention.events_for_s

    def cut(self, retention: Retention, *, now: float) -> tuple[int, int] | None:
        """Return position and epoch of the last record to prune, or None if all may stay."""
        wanted = max(self._too_old(retention, now), self._too_many(retention), self._too_large(retention))
        going = [place for place in self._places if place.position <= wanted]
        if not going:
            return None
        most = (self._begin or 0) + PRUNED_AT_ONCE_MAX
        last = next((place for place in reversed(going) if place.position <= most), going[0])
        return last.position, last.epoch

    def _too_old(self, retention: Retention, now: float) -> int:
        """Return the last position that is too old; 0 for none."""
        if retention.events_for_s is None:
            return 0
        since = now - retention.events_for_s
        return max(
            (each.position for each in self._places if each.is_turn_over and each.at <= since), default=0
        )

    def _too_many(self, retention: Retention) -> int:
        if retention.events_max is None or self.count <= retention.events_max:
            return 0
        kept = int(retention.events_max * KEPT_SHARE)
        return self._first(lambda place: self.end - place.position <= kept)

    def _too_large(self, retention: Retention) -> int:
        if retention.bytes_max is None or self.bytes <= retention.bytes_max:
            return 0
        kept = int(retention.bytes_max * KEPT_SHARE)
        return self._first(lambda place: self.bytes - place.bytes <= kept)

    def _first(self, is_enough: Callable[[_Place], bool]) -> int:
        """Return the first place that is enough, the last one if none is, or 0 if there is none."""
        last = self._places[-1].position if self._places else 0
        return next((place.position for place in self._places if is_enough(place)), last)
