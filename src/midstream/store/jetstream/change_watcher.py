"""Changes that concern a node: ends of followed journals, forwarded commands, orphans.

After each write, a signal is sent to the nodes that follow the session. A signal may be lost. So followed journals,
nodes and sessions with open turns are also checked every `BACKSTOP_S`, and after each reconnection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Mapping
from enum import StrEnum

from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.extras import extra
from midstream.store.contract import ForwardedCommand, News
from midstream.store.jetstream.command_routes import CommandRoutes
from midstream.store.jetstream.jetstream_link import JetStreamLink
from midstream.store.jetstream.node_presence import NodePresence
from midstream.store.jetstream.session_reader import SessionReader
from midstream.store.jetstream.stream_subjects import StreamSubjects

with extra("nats"):
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

BACKSTOP_S = 2.0
"""Seconds after which everything is checked, without any signal."""
CHECKED_MAX = 200
"""Followed sessions of one check; the others are checked later."""
FORWARDED_MAX = 100
"""Commands of one result; further ones wait for the next call."""
EXAMINED_AT_ONCE = 64
"""Journals of sessions without a node that are read concurrently."""
FAILURE_PAUSE_S = 0.25


class Sign(StrEnum):
    """Kind of change."""

    NODES = "nodes"
    """A node has joined, or its end was noticed."""
    FREE = "free"
    """A session with an open turn was released."""


_log = logging.getLogger(__name__)


class ChangeWatcher:
    """Checks for changes while `watch` is called."""

    def __init__(
        self,
        link: JetStreamLink,
        subjects: StreamSubjects,
        reader: SessionReader,
        presence: NodePresence,
        world: World,
    ) -> None:
        self._link = link
        self._subjects = subjects
        self._reader = reader
        self._presence = presence
        self._world = world
        self._routes: CommandRoutes | None = None
        self._nudged = asyncio.Event()
        self._signs: set[Sign] = set(Sign)
        self._ends: dict[str, int] = {}
        """Ends of followed journals, as far as they are known."""
        self._follows: dict[str, Subscription] = {}
        self._turn = itertools.count()
        self._looked_at = 0.0
        self._others_reported: frozenset[str] = frozenset()
        self._peers_reported = -1
        self._commands_reported: set[tuple[int, int]] = set()
        self._orphans_reported: set[tuple[str, int]] = set()

    async def start(self, routes: CommandRoutes) -> None:
        """Begin to receive signals.

        Raises:
            MidstreamError: The store is not reached.
        """
        self._routes = routes
        for sign in Sign:
            await self._link.listen(self._subjects.all_nodes(sign), self._receive_sign)

    def note(self, *signs: Sign) -> None:
        """Request checks of these kinds."""
        self._signs.update(signs)
        self._nudged.set()

    def note_all(self) -> None:
        """Request all checks, because signals may have been missed."""
        self._ends.clear()
        self.note(*Sign)

    async def report(self, sign: Sign) -> None:
        """Request a check on all nodes, including this one."""
        self.note(sign)
        await self._link.signal(self._subjects.all_nodes(sign))

    async def report_moved(self, session: str, end: int) -> None:
        """Send the end of a journal to the nodes that follow its session."""
        if self._presence.others:
            await self._link.signal(self._subjects.moved(session), b"%d" % end)

    async def watch(self, followed: Mapping[str, int]) -> News:
        """See `Store.watch`."""
        while True:
            self._nudged.clear()
            signs, self._signs = self._signs, set()
            try:
                news = await self._find_changes(followed, signs)
            except MidstreamError as error:
                self.note_all()
                _log.debug("the store cannot be read: %s", error.message)
                await self._world.sleep(FAILURE_PAUSE_S)
                continue
            except BaseException:
                self._signs |= signs
                raise
            if news is not None:
                return news
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BACKSTOP_S):
                    await self._nudged.wait()

    async def _find_changes(self, followed: Mapping[str, int], signs: set[Sign]) -> News | None:
        """Return new changes and mark them as returned; None if there are none."""
        assert self._routes is not None
        is_due = self._world.monotonic() - self._looked_at >= BACKSTOP_S
        if is_due:
            signs |= set(Sign)
        if Sign.NODES in signs or self._routes.has_unknown_sender():
            await self._presence.look()
        others = self._presence.others
        if others != self._others_reported:
            signs.add(Sign.FREE)
            self._routes.note()
        moved = await self._find_moved(followed, is_due=is_due)
        orphans = self._orphans_reported
        if Sign.FREE in signs or Sign.NODES in signs:
            orphans = await self._find_orphans()
        waiting = self._routes.waiting()
        commands: list[tuple[int, ForwardedCommand]] = [
            each for each in waiting if (each[1].number, each[0]) not in self._commands_reported
        ][:FORWARDED_MAX]
        fresh = orphans - self._orphans_reported
        # There is no await from here on, so that a cancelled call consumes nothing.
        if is_due:
            self._looked_at = self._world.monotonic()
        known = {(each.number, epoch) for epoch, each in waiting}
        self._commands_reported &= known
        self._orphans_reported = orphans
        self._others_reported = others
        if not (moved or commands or fresh or len(others) != self._peers_reported):
            return None
        self._commands_reported |= {(each.number, epoch) for epoch, each in commands}
        self._peers_reported = len(others)
        if len(commands) == FORWARDED_MAX:
            self._nudged.set()
        return News(
            moved, tuple(each for _, each in commands), tuple(sorted(name for name, _ in fresh)), len(others)
        )

    # --- followed journals

    async def _find_moved(self, followed: Mapping[str, int], *, is_due: bool) -> frozenset[str]:
        await self._follow(followed)
        if is_due and followed:
            names = [*followed]
            start = next(self._turn) * CHECKED_MAX % len(names)
            for name in (names + names)[start : start + min(CHECKED_MAX, len(names))]:
                self._ends.pop(name, None)
        moved = {name for name, end in followed.items() if self._ends.get(name, -1) > end}
        # A known end below the reader's position: the signal of the read record is still under way.
        unknown = [
            name for name, end in followed.items() if name not in moved and self._ends.get(name, -1) != end
        ]
        found = await asyncio.gather(*map(self._reader.present, unknown))
        for name, newest in zip(unknown, found, strict=True):
            self._ends[name] = 0 if newest is None else newest.head.end
            if self._ends[name] != followed[name]:
                moved.add(name)
        return frozenset(moved)

    async def _follow(self, followed: Mapping[str, int]) -> None:
        for name in self._follows.keys() - followed.keys():
            subscription = self._follows.pop(name)
            self._ends.pop(name, None)
            with contextlib.suppress(Exception):  # the subscription was lost with the connection
                await subscription.unsubscribe()
        fresh = [name for name in followed if name not in self._follows]
        for name in fresh:
            self._follows[name] = await self._listen(name)
        if fresh:
            await self._link.flush()

    async def _listen(self, session: str) -> Subscription:
        async def receive(message: Msg) -> None:
            with contextlib.suppress(ValueError):
                end = int(message.data)
                if self._ends.get(session) != end:
                    self._ends[session] = end
                    self._nudged.set()

        return await self._link.listen(self._subjects.moved(session), receive)

    # --- orphans

    async def _find_orphans(self) -> set[tuple[str, int]]:
        """Return the sessions with an open turn that no living node has, with their epochs."""
        lines = self._reader.lines
        await lines.refresh()
        living = self._presence.others | {self._presence.node}
        left = [line for line in lines.live() if line.node not in living]
        found = {(line.session, line.epoch) for line in left} & self._orphans_reported
        fresh = [line.session for line in left if (line.session, line.epoch) not in found]
        for start in range(0, len(fresh), EXAMINED_AT_ONCE):
            epochs = await asyncio.gather(*map(self._examine, fresh[start : start + EXAMINED_AT_ONCE]))
            found |= {each for each in epochs if each is not None}
        return found

    async def _examine(self, session: str) -> tuple[str, int] | None:
        """Return a session with the epoch in its journal; None if it is no orphan."""
        newest = await self._reader.present(session)
        if newest is None:
            self._reader.lines.drop(session)
        elif newest.head.mark.is_live and await self._is_free(newest.head.node):
            return session, newest.head.epoch
        return None

    async def _is_free(self, node: str) -> bool:
        return not node or await self._presence.is_dead(node)

    async def _receive_sign(self, message: Msg) -> None:
        with contextlib.suppress(ValueError):
            sign = Sign(message.subject.rpartition(".")[2])
            self.note(sign)
            if sign is Sign.NODES:
                self._presence.look_soon()
