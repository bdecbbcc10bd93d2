"""Periodic pruning of the store's journals by the rules of retention.

Pruning does not disturb the node of a session: the replacement of a prefix follows from its records alone, and no
position changes. So several processes may prune a journal concurrently; the second one finds it done. A sweep has
budgets for sessions and records, and pauses between pages. Records that a running turn may need are never pruned: see
`session/retention.py` for the places, and `is_prunable` for the checks of the state.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

import msgspec
from msgspec import Struct

from midstream.engine.awake_sessions import AwakeSessions
from midstream.engine.journal import PAGE_RECORDS
from midstream.environment import Fault, World
from midstream.errors import (
    EntryDamagedError,
    EntryMovedError,
    LeaseHeldError,
    MidstreamError,
    NotFoundError,
    SessionBusyError,
    SessionLockedError,
    UnavailableError,
)
from midstream.protocol.frames import EventId
from midstream.session.child_names import PART_MARK
from midstream.session.journal_reading import JournalReader
from midstream.session.records import OPEN_STATUSES, OutcomeDamaged, encode
from midstream.session.retention import PruningSurvey, Retention
from midstream.session.session import Session, evolve, is_prunable, prune_session, restore_session
from midstream.store.contract import ListPlace, SessionInfo, Store, StoredRecord, is_session

SWEEP_S = 60.0
"""Seconds between two sweeps."""
SWEEP_SESSIONS_MAX = 250
"""Sessions that one sweep lists at most: the last changed ones, and as many others in turn. The cost of a sweep does
not depend on the size of the store."""
RETENTION, PLACE = "retention", "place"
"""Entry with the progress of the round over all sessions, which the nodes of a store share."""
SURVEYS_MAX = 100_000
"""Journals whose last survey is kept in memory, about 20 MiB. Others are read again."""
SWEEP_RECORDS_MAX = 50_000
"""Records that one sweep reads at most, about a second of work, plus the rest of the last journal."""
PAUSE_S = 0.005
"""Seconds of rest after each page, so that other readers do not wait."""
LOCKED_S = 600.0
"""Seconds until the next look at a locked session, which is also checked when its client leaves."""
SURVEYS = 8
"""How many times a journal is read while it doubles, and within `events_for_s`."""
UNREAD_MAX = 256
"""Events that a journal may always gain before its next survey."""

_log = logging.getLogger(__name__)


class PrunableSessions(Protocol):
    """The sessions of a host."""

    awake: AwakeSessions

    async def glance(self, session_id: str) -> Session:
        """Return the state of a session without waking it."""

    async def delete(self, session_id: str) -> None:
        """Delete an idle session with all its records."""

    def is_locked(self, info: SessionInfo) -> bool:
        """Whether the open turn of a session waits for its client's secret."""


class _Survey(Struct, frozen=True):
    """The results of the last survey of a journal."""

    end: int
    count: int
    next_at: float
    """The time of its next survey, if it does not grow."""
    is_locked: bool = False
    """Whether it could not be read without its client."""


class Pruner:
    """Prunes the journals of a store; `run` continues until it is cancelled."""

    def __init__(self, sessions: PrunableSessions, store: Store, world: World, retention: Retention) -> None:
        self._sessions = sessions
        self._store = store
        self._world = world
        self._retention = retention
        self._surveys: OrderedDict[str, _Survey] = OrderedDict()
        """Surveys by session; the longest unread first."""
        self._records_left = 0
        """Records that this sweep may still read."""

    async def run(self) -> None:
        """Sleep and sweep, without end."""
        while not self._retention.is_endless:
            await self._world.sleep(SWEEP_S)
            try:
                await self.sweep()
            except MidstreamError as error:
                _log.warning("the sweep ended early: %s", error.message)

    async def sweep(self) -> None:
        """Prune or delete the last changed sessions, and some of the others, where retention requires it.

        Raises:
            UnavailableError: The store is busy or full. Earlier prunings of the sweep are complete.
        """
        self._records_left = SWEEP_RECORDS_MAX
        newest = await self._check_after(None)
        if newest is not None:
            version, place = await self._read_place()
            place = await self._check_after(place or newest)
            body = msgspec.json.encode(place)
            with suppress(EntryMovedError):  # another node checks the same sessions at this moment
                await self._store.kv_put(RETENTION, PLACE, body, expected=version, at=self._world.now())

    async def _read_place(self) -> tuple[int, ListPlace | None]:
        """Return the progress of the round, with the entry's version; None: a new round begins."""
        try:
            found = await self._store.kv_get(RETENTION, PLACE)
        except EntryDamagedError as error:
            return error.version, None
        if found is None:
            return 0, None
        with suppress(msgspec.MsgspecError):
            return found.version, msgspec.json.decode(found.body, type=ListPlace | None)
        return found.version, None

    async def _check_after(self, place: ListPlace | None) -> ListPlace | None:
        """Check some sessions after a place; return the next place, or None at the end of the list."""
        count = 0
        async for info in self._store.list(after=place, limit=SWEEP_SESSIONS_MAX):
            if self._records_left <= 0:
                return place  # the next sweep continues here
            count += 1
            place = ListPlace(info.mark.at, info.session)
            if is_session(info.session):
                await self._check(info)
        return place if count == SWEEP_SESSIONS_MAX else None

    async def prune_due(self, session: str) -> None:
        """Prune or delete one session where retention requires it.

        Raises:
            UnavailableError: The store is busy or full.
        """
        info = None if self._retention.is_endless else await self._store.find(session)
        if info is not None:
            self._records_left = max(self._records_left, SWEEP_RECORDS_MAX)
            if (seen := self._surveys.get(session)) is not None and seen.is_locked:
                del self._surveys[session]
            await self._check(info)

    async def _check(self, info: SessionInfo) -> None:
        try:
            await self._check_session(info)
        except UnavailableError:
            raise
        except SessionLockedError:
            next_at = self._world.now() + LOCKED_S
            self._store_survey(
                info.session, _Survey(info.end, info.end - info.oldest, next_at, is_locked=True)
            )
        except MidstreamError as error:
            _log.error("not pruned: %s", error.message, extra={"session": info.session})
            self._postpone(info.session, info.end, info.end - info.oldest)

    async def _check_session(self, info: SessionInfo) -> None:
        now = self._world.now()
        if self._is_expired(info, now):
            await self._delete(info.session)
        elif self._records_left > 0 and self._is_due(info, now):
            while await self._prune(info.session):
                if self._records_left <= 0:
                    del self._surveys[info.session]  # the next sweep continues with it
                    return

    def _is_expired(self, info: SessionInfo, now: float) -> bool:
        limit = self._retention.sessions_for_s
        is_open = info.mark.is_live or info.mark.status in OPEN_STATUSES
        is_open = is_open and not self._sessions.is_locked(info)  # its client has had that long to come
        is_part = PART_MARK in info.session  # it is deleted with its parent session
        return limit is not None and not is_open and not is_part and now - info.mark.at > limit

    async def _delete(self, session: str) -> None:
        try:
            await self._sessions.delete(session)
        except (NotFoundError, SessionBusyError, LeaseHeldError):
            return  # another process was faster
        _log.info("deleted, past its retention", extra={"session": session})

    def _is_due(self, info: SessionInfo, now: float) -> bool:
        """Whether a journal must be read, as far as its line in a listing shows."""
        count = info.end - info.oldest
        seen = self._surveys.get(info.session)
        most = self._retention.events_max or 2 * UNREAD_MAX
        step = min(UNREAD_MAX, max(1, most // 2))
        if count <= 0:
            return False
        if seen is not None and seen.end <= info.end:  # otherwise the session was deleted and created again
            return info.end - seen.end >= max(step, seen.count // SURVEYS) or now >= seen.next_at
        limit = self._retention.events_for_s
        return count >= step or (limit is not None and info.created_at <= now - limit)

    # --- one journal

    async def _prune(self, session: str) -> bool:
        """Read a journal, and prune as much as one step permits; return whether something was pruned."""
        now = self._world.now()
        survey = PruningSurvey()
        async for page in self._pages(session):
            survey.take((each.position, each.epoch, each.body) for each in page)
        self._postpone(session, survey.end, survey.count, until=survey.ripe_at(self._retention))
        cut = survey.cut(self._retention, now=now)
        if cut is None:
            return False
        position, epoch = cut
        state = await self._fold_to(session, position)
        if state is None or await self._is_needed(state):
            return False
        record = prune_session(state, at=now)
        if restore_session(record) != state:  # a difference would be lost for ever
            _log.error(
                "not pruned: the pruned journal would fold to another state", extra={"session": session}
            )
            return False
        self._world.reach(Fault.BEFORE_PRUNE)
        is_done = await self._store.prune(session, encode(record), position=position, epoch=epoch)
        self._world.reach(Fault.AFTER_PRUNE)
        if is_done:
            self._sessions.awake.note_pruned(session, EventId(epoch, position))
        return is_done

    def _postpone(self, session: str, end: int, count: int, *, until: float = 0.0) -> None:
        """Set the next survey of a journal."""
        limit = self._retention.events_for_s
        rest_s = math.inf if limit is None else max(SWEEP_S, limit / SURVEYS)
        self._store_survey(session, _Survey(end, count, max(until, self._world.now() + rest_s)))

    def _store_survey(self, session: str, seen: _Survey) -> None:
        self._surveys[session] = seen
        self._surveys.move_to_end(session)
        if len(self._surveys) > SURVEYS_MAX:
            self._surveys.popitem(last=False)

    async def _fold_to(self, session: str, position: int) -> Session | None:
        """Return the session as it was at a position; None if a journal must not begin with this state."""
        state = Session()
        reader = JournalReader()
        async for page in self._pages(session):
            for stored in page:
                if stored.position > position:
                    break
                record = reader.read(stored.body)
                if isinstance(record, OutcomeDamaged):
                    return None  # a person may want to examine its remains
                state = evolve(state, record, epoch=stored.epoch)
            if page[-1].position >= position:
                break
        return state if state.position == position and is_prunable(state) else None

    async def _is_needed(self, state: Session) -> bool:
        """Whether a parent may still need the records of its child session."""
        if state.parent is None:
            return False
        parent = await self._sessions.glance(state.parent.session)
        return parent.is_live and parent.turns == state.parent.turn

    async def _pages(self, session: str) -> AsyncIterator[list[StoredRecord]]:
        after = 0
        while page := await self._store.read(session, after=after, limit=PAGE_RECORDS):
            yield page
            after = page[-1].position
            self._records_left -= len(page)
            await self._world.sleep(PAUSE_S)
