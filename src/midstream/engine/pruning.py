"""Retention at work: now and then, what is too old or too much of the store's journals is pruned.

The node of a session is not disturbed: the replacement of a prefix follows from its records alone, and no position
changes. So several processes may do it at once; the second one finds it done. A sweep lists and reads no more than its
budgets and sleeps between sessions, and what a turn that runs may need is never among what goes: see
`session/retention.py` for the places, and `is_prunable` for what is checked of the fold.
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
"""Sessions that one sweep lists at most: those that were changed last, and as many others, so that all have their turn.
A store with more sessions costs a node no more: what is due there goes later."""
RETENTION, PLACE = "retention", "place"
"""Entry that has how far the nodes of a large store have come: they share one round, and a new one goes on with it."""
SEEN_MAX = 100_000
"""Journals of which is kept how they were found: some 20 MiB. Of others the next look reads them again."""
SWEEP_RECORDS_MAX = 50_000
"""Records that one sweep reads at most, about a second of work, but for the last journal; the next one goes on."""
PAUSE_S = 0.005
"""Seconds of rest after each page that was read, so that readers of others do not wait for many."""
LOCKED_S = 600.0
"""Seconds for which a session is left alone that only its client can open; it is looked at when that one leaves."""
LOOKS = 8
"""How often a journal is read while it doubles, and within `events_for_s`."""
UNREAD_MAX = 256
"""Events that a journal may gain in any case before it is measured again."""

_log = logging.getLogger(__name__)


class PrunableSessions(Protocol):
    """The sessions of a host."""

    async def glance(self, session_id: str) -> Session:
        """Return what is known of a session without waking it."""

    async def delete(self, session_id: str) -> None:
        """Remove an idle session and all its records for good."""

    def is_locked(self, info: SessionInfo) -> bool:
        """Whether the open turn of a session waits for its client."""

    def note_pruned(self, session_id: str, last: EventId) -> None:
        """Store that the events of a session up to this one were pruned."""


class _Seen(Struct, frozen=True):
    """Results found when a journal was last read."""

    end: int
    count: int
    look_at: float
    """When it is read again, whatever happens in it."""
    is_locked: bool = False
    """It could not be read: its client was not here."""


class Pruner:
    """Prunes the journals of a store, from `run` until that is cancelled."""

    def __init__(self, sessions: PrunableSessions, store: Store, world: World, retention: Retention) -> None:
        self._sessions = sessions
        self._store = store
        self._world = world
        self._retention = retention
        self._seen: OrderedDict[str, _Seen] = OrderedDict()
        """By session, of those that have something to prune; the longest not read first."""
        self._left = 0
        """Records that this sweep may still read."""

    async def run(self) -> None:
        """Rest, sweep, and so on for ever."""
        while not self._retention.is_endless:
            await self._world.sleep(SWEEP_S)
            try:
                await self.sweep()
            except UnavailableError as error:
                _log.warning("nothing is pruned now: %s", error.code)

    async def sweep(self) -> None:
        """Look at the sessions that were changed last, and at some of the others, and prune or delete what is due.

        Raises:
            UnavailableError: The store is busy or full. What was done is done.
        """
        self._left = SWEEP_RECORDS_MAX
        newest = await self._look_behind(None)
        if newest is not None:
            version, place = await self._read_place()
            place = await self._look_behind(place or newest)
            body = msgspec.json.encode(place)
            with suppress(EntryMovedError):  # another node looked at the same ones at this moment
                await self._store.kv_put(RETENTION, PLACE, body, expected=version, at=self._world.now())

    async def _read_place(self) -> tuple[int, ListPlace | None]:
        """Return how far the nodes have come, with the version of that; None: they begin anew."""
        try:
            found = await self._store.kv_get(RETENTION, PLACE)
        except EntryDamagedError as error:
            return error.version, None
        if found is None:
            return 0, None
        with suppress(msgspec.MsgspecError):
            return found.version, msgspec.json.decode(found.body, type=ListPlace | None)
        return found.version, None

    async def _look_behind(self, place: ListPlace | None) -> ListPlace | None:
        """Look at some sessions behind a place; return the place behind them, or None where there are no more."""
        count = 0
        async for info in self._store.list(after=place, limit=SWEEP_SESSIONS_MAX):
            if self._left <= 0:
                return place  # the next sweep goes on here
            count += 1
            place = ListPlace(info.mark.at, info.session)
            if is_session(info.session):
                await self._tend(info)
        return place if count == SWEEP_SESSIONS_MAX else None

    async def tend(self, session: str) -> None:
        """Look at one session and prune what is due.

        Raises:
            UnavailableError: The store is busy or full.
        """
        info = None if self._retention.is_endless else await self._store.find(session)
        if info is not None:
            self._left = max(self._left, SWEEP_RECORDS_MAX)
            if (seen := self._seen.get(session)) is not None and seen.is_locked:
                del self._seen[session]
            await self._tend(info)

    async def _tend(self, info: SessionInfo) -> None:
        try:
            await self._tend_session(info)
        except UnavailableError:
            raise
        except SessionLockedError:
            look_at = self._world.now() + LOCKED_S
            self._note_seen(info.session, _Seen(info.end, info.end - info.oldest, look_at, is_locked=True))
        except MidstreamError as error:
            _log.error("not pruned: %s", error.message, extra={"session": info.session})
            self._postpone(info.session, info.end, info.end - info.oldest)

    async def _tend_session(self, info: SessionInfo) -> None:
        now = self._world.now()
        if self._is_outlived(info, now):
            await self._delete(info.session)
        elif self._left > 0 and self._is_due(info, now):
            while await self._prune(info.session):
                if self._left <= 0:
                    del self._seen[info.session]  # the next sweep goes on with it
                    return

    def _is_outlived(self, info: SessionInfo, now: float) -> bool:
        limit = self._retention.sessions_for_s
        is_open = info.mark.is_live or info.mark.status in OPEN_STATUSES
        is_open = is_open and not self._sessions.is_locked(info)  # its client has had that long to come
        is_part = PART_MARK in info.session  # it goes with the session that it is part of
        return limit is not None and not is_open and not is_part and now - info.mark.at > limit

    async def _delete(self, session: str) -> None:
        try:
            await self._sessions.delete(session)
        except (NotFoundError, SessionBusyError, LeaseHeldError):
            return  # another process was faster, one way or the other
        _log.info("deleted, past its retention", extra={"session": session})

    def _is_due(self, info: SessionInfo, now: float) -> bool:
        """Return whether a journal must be read, as far as its line in a listing shows."""
        count = info.end - info.oldest
        seen = self._seen.get(info.session)
        most = self._retention.events_max or 2 * UNREAD_MAX
        step = min(UNREAD_MAX, max(1, most // 2))
        if count <= 0:
            return False
        if seen is not None and seen.end <= info.end:  # otherwise it was deleted, and made anew
            return info.end - seen.end >= max(step, seen.count // LOOKS) or now >= seen.look_at
        limit = self._retention.events_for_s
        return count >= step or (limit is not None and info.created_at <= now - limit)

    # --- one journal

    async def _prune(self, session: str) -> bool:
        """Read a journal and prune what is due of it, or as much as may go at once; return whether that was done."""
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
        if restore_session(record) != state:  # whatever was not kept would be lost for ever
            _log.error(
                "not pruned: the pruned journal would fold to another state", extra={"session": session}
            )
            return False
        self._world.reach(Fault.BEFORE_PRUNE)
        is_done = await self._store.prune(session, encode(record), position=position, epoch=epoch)
        self._world.reach(Fault.AFTER_PRUNE)
        if is_done:
            self._sessions.note_pruned(session, EventId(epoch, position))
        return is_done

    def _postpone(self, session: str, end: int, count: int, *, until: float = 0.0) -> None:
        """Leave a journal alone for a while."""
        limit = self._retention.events_for_s
        rest_s = math.inf if limit is None else max(SWEEP_S, limit / LOOKS)
        self._note_seen(session, _Seen(end, count, max(until, self._world.now() + rest_s)))

    def _note_seen(self, session: str, seen: _Seen) -> None:
        self._seen[session] = seen
        self._seen.move_to_end(session)
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)

    async def _fold_to(self, session: str, position: int) -> Session | None:
        """Return the session as it was at a position; None where it may not be what a journal begins with."""
        state = Session()
        reader = JournalReader()
        async for page in self._pages(session):
            for stored in page:
                if stored.position > position:
                    break
                record = reader.read(stored.body)
                if isinstance(record, OutcomeDamaged):
                    return None  # its remains are left for a person to examine
                state = evolve(state, record, epoch=stored.epoch)
            if page[-1].position >= position:
                break
        return state if state.position == position and is_prunable(state) else None

    async def _is_needed(self, state: Session) -> bool:
        """Whether a parent may still ask for what its child did."""
        if state.parent is None:
            return False
        parent = await self._sessions.glance(state.parent.session)
        return parent.is_live and parent.turns == state.parent.turn

    async def _pages(self, session: str) -> AsyncIterator[list[StoredRecord]]:
        after = 0
        while page := await self._store.read(session, after=after, limit=PAGE_RECORDS):
            yield page
            after = page[-1].position
            self._left -= len(page)
            await self._world.sleep(PAUSE_S)
