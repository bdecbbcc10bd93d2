"""Liveness of nodes: a node has an entry in the store, and answers on a subject of its own.

A server drops the subscriptions of a dead process, and answers a request to it at once: no responders. A node without
responders for `GRACE_S` is dead: its entry is removed, and its sessions are free. Each node sends a request to the next
one, in the order of their names, a few times a second.

A stopped process keeps its subscriptions and does not answer. After a lease of silence it counts as frozen, and its
entry is removed, too. No clocks are compared. A node that was wrongly taken for dead or frozen restores its entry and
keeps the sessions that no other node has claimed. In the others it is fenced by the epoch.

A node that lost its own connection declares no other node dead for `REJOIN_S`: all may have lost theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable

from midstream.background_loops import spawn_loop
from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.extras import extra
from midstream.store.jetstream.jetstream_errors import SubjectMovedError, UnknownOutcomeError
from midstream.store.jetstream.jetstream_link import JetStreamLink, SubjectWrite
from midstream.store.jetstream.journal_messages import NodeEntry, decode, encode
from midstream.store.jetstream.stream_subjects import StreamSubjects
from midstream.store.node_liveness import next_node

with extra("nats"):
    from nats.aio.msg import Msg

PROBE_S = 0.25
"""Seconds between two requests to the next node."""
LOOK_S = 1.0
"""Seconds between two reads of the entries of all nodes."""
GRACE_S = 1.0
"""Seconds without a subscription after which a node is dead: it might only reconnect."""
GRACE_PAUSE_S = 0.1
REJOIN_S = 3.0
"""Seconds for all others to reconnect after the observer's own connection was lost."""
PING = "ping"

_log = logging.getLogger(__name__)


class NodePresence:
    """The presence of this node, and its view of the others.

    Args:
        lease_s: Seconds of silence after which a node that is connected counts as frozen.
        on_change: Called when the death of a node was noticed.
    """

    def __init__(
        self,
        link: JetStreamLink,
        subjects: StreamSubjects,
        world: World,
        node: str,
        *,
        lease_s: float,
        on_change: Callable[[], Awaitable[None]],
    ) -> None:
        self.node = node
        self.number = 0
        """A unique number of this node."""
        self.others: frozenset[str] = frozenset()
        self._link = link
        self._subjects = subjects
        self._world = world
        self._lease_s = lease_s
        self._on_change = on_change
        self._next_silent_s = 0.0
        self._next = ""
        self._nudged = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Become a node.

        Raises:
            MidstreamError: The store cannot be written.
        """
        await self._link.listen(self._subjects.inbox(self.node, PING), self._answer)
        await self._link.flush()
        self.number = await self._enter()
        await self.look()
        self._watching = spawn_loop(self._world, self._watch, name="node presence")

    async def leave(self) -> None:
        """Stop to be a node: its sessions are free."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        with contextlib.suppress(MidstreamError):
            await self._bury(self.node)

    def look_soon(self) -> None:
        """Request a read of the nodes' entries: a node has joined or left."""
        self._nudged.set()

    async def look(self) -> None:
        """Read the nodes' entries.

        Raises:
            MidstreamError: The store cannot be read.
        """
        messages = await self._link.scan(self._subjects.kv_stream, self._subjects.nodes)
        nodes = {decode(message.data, NodeEntry).node for message in messages}
        if self.number and self.node not in nodes:
            _log.warning("node %s was declared dead by another node", self.node)
            await self._enter()
        self.others = frozenset(nodes - {self.node})

    async def is_dead(self, node: str) -> bool:
        """Whether a node is dead; wait `GRACE_S` for one that does not listen.

        Raises:
            MidstreamError: The store cannot be reached.
        """
        if node == self.node:
            return False
        if await self._link.last(self._subjects.kv_stream, self._subjects.node(node)) is None:
            return True
        if not await self._is_absent(node):
            return False
        await self._bury(node)
        await self._on_change()
        return True

    async def _is_absent(self, node: str) -> bool:
        """Whether a node has no subscription for `GRACE_S`, while this node has its connection."""
        start = self._world.monotonic()
        while not self._is_protecting():
            try:
                if await self._link.ask(self._subjects.inbox(node, PING)) is not None:
                    return False
            except UnknownOutcomeError:
                return False  # it listens, or this node is disconnected
            if not self._link.is_connected or self._link.connected_at > start:
                return False
            if self._world.monotonic() - start >= GRACE_S:
                return True
            await self._world.sleep(GRACE_PAUSE_S)
        return False

    def _is_protecting(self) -> bool:
        was_lost = self._link.connections > 1
        return was_lost and self._world.monotonic() < self._link.connected_at + REJOIN_S

    async def _answer(self, message: Msg) -> None:
        await self._link.signal(message.reply)

    async def _enter(self) -> int:
        entry = NodeEntry(self.node, f"{socket.gethostname()} {os.getpid()}")
        write = SubjectWrite(self._subjects.node(self.node), encode(entry), is_only=True)
        while True:
            with contextlib.suppress(SubjectMovedError, UnknownOutcomeError):
                return await self._link.commit(self._subjects.kv_stream, [write])

    async def _bury(self, node: str) -> None:
        found = await self._link.last(self._subjects.kv_stream, self._subjects.node(node))
        if found is not None:
            await self._link.purge(self._subjects.kv_stream, self._subjects.node(node), below=found.seq + 1)

    async def _watch(self) -> None:
        """Send requests to the next node."""
        looked_at = self._world.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await self._nudged.wait()
            try:
                if self._nudged.is_set() or self._world.monotonic() - looked_at >= LOOK_S:
                    self._nudged.clear()
                    looked_at = self._world.monotonic()
                    await self.look()
                await self._probe()
            except MidstreamError as error:
                _log.debug("the next node was not checked: %s", error)

    async def _probe(self) -> None:
        following = next_node(self.node, self.others)
        if following is None:
            return
        if following != self._next:
            self._next, self._next_silent_s = following, 0.0
        start = self._world.monotonic()
        try:
            answer = await self._link.ask(self._subjects.inbox(following, PING))
        except UnknownOutcomeError:
            if self._link.is_connected and self._link.connected_at < start and not self._is_protecting():
                self._next_silent_s += self._world.monotonic() - start + PROBE_S
        else:
            self._next_silent_s = 0.0
            if answer is None and await self.is_dead(following):
                _log.warning("node %s has died", following)
        if self._next_silent_s >= self._lease_s:
            _log.warning("node %s was silent for %g s: its sessions are free", following, self._lease_s)
            self._next_silent_s = 0.0
            await self._bury(following)
            await self._on_change()
