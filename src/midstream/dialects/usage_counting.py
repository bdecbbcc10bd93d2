"""Counts ended answers of the gateway, also those of killed processes."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from midstream.dialects.application_sessions import ApplicationSessions
from midstream.dialects.usage_ledger import Snapshot, UsageLedger
from midstream.environment import World
from midstream.errors import MidstreamError, SessionNotFoundError
from midstream.session.applications import ApplicationResponse
from midstream.session.records import Record, ResponseCompleted, TurnEnded

TEND_S = 60.0
"""Seconds between two checks of all entries."""
REFRESH_S = 2.0
"""Seconds between two reads of other processes' counts, while a limit depends on them."""
YOUNG_S = 30.0
"""Seconds for which only the process of an answer counts it. A process that has just started ignores this: it may
replace a killed one."""
LOST_S = 600.0
"""Seconds after which an entry without an answer in a journal is removed: its process was killed before that."""
SETTLE_S = 5.0
"""Seconds for which the shutdown waits for the count of the last answers."""
ENDINGS_MAX = 3
"""Greatest number of a session's answers that may end in one append."""
COUNTED_MAX = 10_000
"""Counted answers that are remembered in memory."""

_log = logging.getLogger(__name__)


class UsageCounting:
    """Completes the usage entries of ended answers.

    Args:
        ledger: The ledger with the entries.
        durable, private: The sessions on disk, which other processes can count later, and those in memory.
    """

    def __init__(
        self,
        ledger: UsageLedger,
        durable: ApplicationSessions,
        private: ApplicationSessions,
        world: World,
    ) -> None:
        self._ledger = ledger
        self._durable = durable
        self._world = world
        self._counted: OrderedDict[str, None] = OrderedDict()
        self._counting: set[asyncio.Task[None]] = set()
        for sessions in (durable, private):
            sessions.host.observers.add(_EndCount(self, sessions))
            sessions.count_usage = partial(self._count, sessions)

    async def begin(self) -> None:
        """Read earlier usage, on which limits depend.

        Raises:
            MidstreamError: The store fails.
        """
        await self._ledger.refresh()

    def count_soon(self, sessions: ApplicationSessions, session: str) -> None:
        """Count the newest answers of a session in a task, after it has folded the append."""
        task = self._world.spawn(self._count(sessions, session), name=f"usage of {session}")
        self._counting.add(task)
        task.add_done_callback(self._counting.discard)

    async def settle(self) -> None:
        """Wait at most `SETTLE_S` for running counts; the next process counts the rest."""
        if self._counting:
            await asyncio.wait({*self._counting}, timeout=SETTLE_S)

    async def tend(self) -> None:
        """Count answers of killed processes, fold old entries, and read other processes' counts, until cancelled."""
        young_s = 0.0
        while True:
            try:
                found = await self._ledger.refresh()
                await self._count_left(found, young_s=young_s)
                young_s = YOUNG_S
                await self._ledger.fold(found)
            except MidstreamError as error:
                _log.warning("usage is counted later: %s", error.code)
            for _ in range(round(TEND_S / REFRESH_S)):
                await self._world.sleep(REFRESH_S)
                if self._ledger.is_needed and self._durable.host.has_peers:
                    try:
                        await self._ledger.refresh()
                    except MidstreamError as error:
                        _log.warning("usage at other nodes is read later: %s", error.code)

    async def _count(self, sessions: ApplicationSessions, session: str) -> None:
        try:
            runner = sessions.host.awake.get(session) or await sessions.host.session(session)
            for response in runner.state.application.responses[-ENDINGS_MAX:]:
                await self._count_one(response)
        except MidstreamError as error:  # `tend` counts it later
            _log.warning("an answer is counted later: %s", error.code, extra={"session": session})

    async def _count_one(self, response: ApplicationResponse) -> None:
        name = response.usage_entry
        if not name or response.is_open or name in self._counted:
            return
        await self._ledger.end(name, response.usage, at=response.ended_at)
        self._counted[name] = None
        if len(self._counted) > COUNTED_MAX:
            self._counted.popitem(last=False)

    async def _count_left(self, found: Snapshot, *, young_s: float) -> None:
        """Count answers that have ended in their journals; remove entries whose answers never began."""
        now = self._world.now()
        for name, entry in found.entries.items():
            if entry.is_ended or not entry.session or entry.at > now - young_s:
                continue
            try:
                runner = await self._durable.host.session(entry.session)
                responses: Sequence[ApplicationResponse] = runner.state.application.responses
            except SessionNotFoundError:
                responses = ()
            response = next((each for each in responses if each.usage_entry == name), None)
            if response is not None:
                await self._count_one(response)
            elif entry.at < now - LOST_S:
                await self._ledger.drop(name)


class _EndCount:
    """Observer that starts counts after the end of an answer."""

    def __init__(self, counting: UsageCounting, sessions: ApplicationSessions) -> None:
        self._counting = counting
        self._sessions = sessions

    def on_append(self, session: str, records: Sequence[Record]) -> None:
        """See `Observer.on_append`."""
        if any(isinstance(record, ResponseCompleted | TurnEnded) for record in records):
            self._counting.count_soon(self._sessions, session)
