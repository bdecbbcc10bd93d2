"""Notifications between nodes: sent in groups, after the appends and outside their transactions.

A notification inside an append would lock the whole database in each commit: 525 appends a second instead of 4,736. All
changes are also found by a query each second, so a lost notification costs only time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct

from midstream.background_loops import spawn_loop
from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.extras import extra
from midstream.store.postgres.followed_sessions import FollowedByOthers
from midstream.store.postgres.postgres_connections import Postgres, ServerLink
from midstream.store.postgres.postgres_errors import FAILURES

with extra("postgres"):
    import asyncpg

PAYLOAD_BYTES_MAX = 7900
"""PostgreSQL accepts notifications of less than 8000 bytes."""
ADDRESSEES_MAX = 128
"""Nodes that one notification of the inbox names; others find their commands by the query."""
RECONNECT_S = 0.25
"""Seconds between attempts to listen again."""
PAUSE_S = 0.003
"""Seconds between two notifications that contain only moved journals. Each one wakes all nodes: without a pause, four
workers on two cores make a tenth fewer steps."""

# Notify all nodes of this schema. (Such a connection syncs nothing.)
NOTIFY = "select pg_notify($1, payload) from unnest($2::text[]) as payload"

_log = logging.getLogger(__name__)


class Kind(StrEnum):
    """Changes besides the ends of journals."""

    NODES = "nodes"
    """A node has joined, or its end was noticed."""
    INBOX = "inbox"
    """A command was forwarded. From a node of an older version also: a command was answered."""
    ANSWERS = "answers"
    """A command was answered. It is never sent: see `Signal.answered`."""
    FREE = "free"
    """A session with an open turn was released."""


class Signal(Struct, frozen=True, omit_defaults=True):
    """One notification.

    Args:
        by: The sending node.
        moved: Changed or deleted sessions, with their ends.
        kinds: Other changes.
        follows: Sessions that the sender follows from now on.
        inbox_of, answered: Numbers of the nodes that `Kind.INBOX` concerns: commands were forwarded to them, or theirs
            were answered. If both are empty, it concerns all nodes.
    """

    by: str
    moved: dict[str, int] = {}
    kinds: tuple[Kind, ...] = ()
    follows: tuple[str, ...] = ()
    inbox_of: tuple[int, ...] = ()
    answered: tuple[int, ...] = ()

    def kinds_for(self, node: int) -> set[Kind]:
        """Return the changes that concern the node of this number."""
        kinds = {*self.kinds}
        if self.inbox_of or self.answered:
            kinds.discard(Kind.INBOX)
            kinds |= {Kind.INBOX} if node in self.inbox_of else set()
            kinds |= {Kind.ANSWERS} if node in self.answered else set()
        elif Kind.INBOX in kinds:
            kinds.add(Kind.ANSWERS)
        return kinds


class _Addressees(Struct):
    """Nodes that the next notification of the inbox concerns."""

    inbox_of: set[int] = msgspec.field(default_factory=set)
    answered: set[int] = msgspec.field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.inbox_of or self.answered)


def channel_of(schema: str) -> str:
    """Return the channel of the nodes of a schema."""
    return f"midstream_{schema}"


class Notifier:
    """Sends notifications on a connection of its own: one statement at a time, with all changes since the last one."""

    def __init__(self, postgres: Postgres, node: str, world: World) -> None:
        self._followed = FollowedByOthers(world)
        self._link = ServerLink(postgres, "notifier", synchronous_commit="off")
        self._channel = channel_of(postgres.address.schema)
        self._node = node
        self._world = world
        self._moved: dict[str, int] = {}
        self._kinds: set[Kind] = set()
        self._follows: dict[str, None] = {}
        self._addressees = _Addressees()
        self._is_urgent = asyncio.Event()
        self._sending: asyncio.Task[None] | None = None

    def report_moved(self, ends: Mapping[str, int]) -> None:
        """Send the ends of journals that other nodes follow, soon."""
        if wanted := self._followed.select(ends):
            self._moved.update(wanted)
            self._begin()

    def note_followed(self, sessions: Iterable[str]) -> None:
        """Send the ends of these sessions from now on, because another node follows them."""
        if unknown := self._followed.note(sessions):
            self._moved.update(unknown)
            self._is_urgent.set()
            self._begin()

    def announce(self, sessions: Iterable[str]) -> None:
        """Announce soon that this node follows these sessions."""
        self._follows.update(dict.fromkeys(sessions))
        self._is_urgent.set()
        self._begin()

    def report(self, kind: Kind) -> None:
        """Send another change, soon."""
        self._kinds.add(kind)
        self._is_urgent.set()
        self._begin()

    def report_forwarded(self, node: int) -> None:
        """Report soon that a command was forwarded to the node of this number."""
        self._addressees.inbox_of.add(node)
        self._is_urgent.set()
        self._begin()

    def report_answered(self, node: int) -> None:
        """Report soon that a command of the node of this number was answered."""
        self._addressees.answered.add(node)
        self._is_urgent.set()
        self._begin()

    async def close(self) -> None:
        """Send the rest if possible, and close the connection."""
        if self._sending is not None:
            self._is_urgent.set()
            await asyncio.wait({self._sending}, timeout=1.0)
            self._sending.cancel()
            await asyncio.wait({self._sending})
        await self._link.close()

    def _begin(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = self._world.spawn(self._send(), name="notify")

    async def _send(self) -> None:
        while self._moved or self._kinds or self._follows or self._addressees:
            moved, self._moved = self._moved, {}
            kinds, self._kinds = self._kinds, set()
            follows, self._follows = self._follows, {}
            addressees, self._addressees = self._addressees, _Addressees()
            self._is_urgent.clear()
            payloads = [*self._payloads(moved, kinds, follows, addressees)]
            try:
                connection = await self._link.connection()
                await connection.execute(NOTIFY, self._channel, payloads)
            except (MidstreamError, *FAILURES) as error:
                _log.debug("other nodes were not notified: %s", error)
                self._link.drop()
                self._follows = {**follows, **self._follows}  # repeated with the next notification
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await self._is_urgent.wait()

    def _payloads(
        self, moved: Mapping[str, int], kinds: set[Kind], follows: Iterable[str], addressees: _Addressees
    ) -> Iterator[str]:
        """Yield as few payloads as possible. A name that is too long for one is omitted; the query finds it."""
        ends: dict[str, int] = {}
        names: list[str] = []
        size = 0
        for session, end in (*moved.items(), *((name, None) for name in follows)):
            cost = 32 + 2 * len(session.encode())
            if cost > PAYLOAD_BYTES_MAX // 2:
                continue
            if size + cost > PAYLOAD_BYTES_MAX // 2:
                yield self._payload(Signal(self._node, ends, follows=tuple(names)))
                ends, names, size = {}, [], 0
            if end is None:
                names.append(session)
            else:
                ends[session] = end
            size += cost
        if Kind.INBOX in kinds:  # without numbers, it concerns all nodes
            addressees = _Addressees()
        elif addressees:
            kinds = {*kinds, Kind.INBOX}
        if ends or names or kinds:
            inbox_of, answered = (
                tuple(sorted(each)[:ADDRESSEES_MAX]) for each in (addressees.inbox_of, addressees.answered)
            )
            yield self._payload(
                Signal(self._node, ends, tuple(sorted(kinds)), tuple(names), inbox_of, answered)
            )

    def _payload(self, signal: Signal) -> str:
        return msgspec.json.encode(signal).decode()


class Listener:
    """Receives the notifications of other nodes, on a connection of its own.

    Args:
        on_signal: Called with each notification of another node.
        on_gap: Called when notifications may have been missed.
    """

    def __init__(
        self,
        postgres: Postgres,
        node: str,
        world: World,
        *,
        on_signal: Callable[[Signal], None],
        on_gap: Callable[[], None],
    ) -> None:
        self._postgres = postgres
        self._link = ServerLink(postgres, "listener")
        self._channel = channel_of(postgres.address.schema)
        self._node = node
        self._world = world
        self._on_signal = on_signal
        self._on_gap = on_gap
        self._lost = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            MidstreamError: The server cannot be reached.
        """
        await self._listen()
        self._keeping = spawn_loop(self._world, self._keep, name="listener")

    async def close(self) -> None:
        """Close the connection."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        self._link.drop()

    async def _listen(self) -> None:
        connection = await self._link.connection()
        self._lost.clear()
        connection.add_termination_listener(lambda _: self._lost.set())
        async with self._postgres.errors():
            await connection.add_listener(self._channel, self._receive)

    async def _keep(self) -> None:
        while True:
            await self._lost.wait()
            self._link.drop()
            with contextlib.suppress(MidstreamError, *FAILURES):
                await self._listen()
                self._on_gap()
                continue
            self._lost.set()  # also for a connection that ended before the callback was set
            await self._world.sleep(RECONNECT_S)

    def _receive(self, _connection: asyncpg.Connection, _pid: int, _channel: str, payload: str) -> None:
        try:
            signal = msgspec.json.decode(payload, type=Signal)
        except msgspec.MsgspecError:  # from a newer version
            self._on_gap()
            return
        if signal.by != self._node:
            self._on_signal(signal)
