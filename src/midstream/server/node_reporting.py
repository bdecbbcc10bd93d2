"""Reports of the servers that share a store: each writes how it stands, and reads how the others stand.

A report is one entry of the key-value part, under the name of the node. It is written every `REPORT_S` seconds while
there are other nodes, and every `ALONE_S` seconds otherwise. So `midstream nodes` needs the store alone, and each
server has what callers have used up at the others (`FleetCounter`). No two clocks are compared for that: each server
adds up, by its own clock, how long a report stayed as it was.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from midstream.engine.host import Host
from midstream.errors import EntryMovedError, MidstreamError
from midstream.store.node_reports import (
    ALONE_S,
    NODES,
    REPORT_S,
    SILENT_S,
    NodeLine,
    NodeReport,
    decode_report,
    lines_of,
)
from midstream.version import __version__

HURRY_S = 0.25
"""Seconds after which a caller that has used up half of a limit here is reported, and the others' reports are read."""
FORGOTTEN_S = 3600.0
"""Seconds after which the report of a node that died is deleted."""

_log = logging.getLogger(__name__)


class FleetCounter(Protocol):
    """A limit that holds for all servers of a store together."""

    hurry: Callable[[], None] | None
    """Called when a caller has used up half of it here."""

    def own_counts(self) -> dict[str, float]:
        """Return what callers have used up here, by their digests."""

    def set_elsewhere(self, counts: Mapping[str, float]) -> None:
        """Take what they have used up at all other servers together."""


class NodeReports:
    """Writes the reports of one server, and reads those of the others, from `start` to `stop`.

    Args:
        kind, name, worker: See `NodeReport`.
        figures: Returns how this server stands.
        counters: The limits that hold for all servers, by their names.
    """

    def __init__(
        self,
        host: Host,
        kind: str,
        *,
        name: str,
        figures: Callable[[], Mapping[str, float]],
        counters: Mapping[str, FleetCounter],
    ) -> None:
        self.worker = 0
        self.loop_lag_s = 0.0
        """Seconds that the event loop was late for the newest report."""
        self._host = host
        self._world = host.world
        self._kind = kind
        self._name = name
        self._figures = figures
        self._counters = counters
        self._started_at = self._world.now()
        self._version = 0
        self._written_at = -ALONE_S
        self._seen: dict[str, tuple[int, float]] = {}
        """Of each other node the version of its report, and when this version was first read."""
        self._hurried = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to report."""
        for counter in self._counters.values():
            counter.hurry = self._hurried.set
        self._running = self._world.spawn(self._run(), name="node reports")

    async def stop(self) -> None:
        """Remove the report of this server. Calling it again is harmless."""
        running, self._running = self._running, None
        if running is None:
            return
        running.cancel()
        await asyncio.wait({running})
        try:
            row = await self._host.store.kv_get(NODES, self._host.store.node)
            if row is not None:
                await self._host.store.kv_delete(NODES, row.key, expected=row.version)
        except MidstreamError as error:
            _log.debug("the report of this node stays: %s", error.code)

    async def _run(self) -> None:
        while True:
            due_at = self._world.monotonic()
            try:
                await self._report()
                await self._read()
            except MidstreamError as error:
                _log.debug("the nodes are not reported: %s", error.code)
            due_at += REPORT_S
            await self._wait()
            self.loop_lag_s = max(0.0, self._world.monotonic() - due_at)

    async def _wait(self) -> None:
        """Wait for the next report, or until a caller comes near a limit."""
        self._hurried.clear()
        await self._world.sleep(HURRY_S)
        sleeping = self._world.spawn(self._world.sleep(REPORT_S - HURRY_S), name="next report")
        hurried = self._world.spawn(self._hurried.wait(), name="hurried report")
        try:
            await asyncio.wait({sleeping, hurried}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sleeping, hurried):
                task.cancel()
        if not self._host.has_peers:
            self._hurried.clear()

    async def _report(self) -> None:
        now, every_s = self._world.monotonic(), REPORT_S if self._host.has_peers else ALONE_S
        if every_s == ALONE_S and now - self._written_at < ALONE_S:
            return
        report = NodeReport(
            self._kind,
            __version__,
            self._name,
            socket.gethostname(),
            os.getpid(),
            self._started_at,
            every_s,
            self.worker,
            {name: float(value) for name, value in self._figures().items()},
            {name: counts for name, each in self._counters.items() if (counts := each.own_counts())},
        )
        store, body = self._host.store, msgspec.json.encode(report)
        try:
            self._version = await store.kv_put(
                NODES, store.node, body, expected=self._version, at=self._world.now()
            )
        except EntryMovedError:  # an earlier write happened though its answer was lost, or it was forgotten
            row = await store.kv_get(NODES, store.node)
            self._version = 0 if row is None else row.version
            return
        self._written_at = now

    async def _read(self) -> None:
        store, now = self._host.store, self._world.monotonic()
        seen: dict[str, tuple[int, float]] = {}
        sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for row in await store.kv_list(NODES):
            if row.key == store.node:
                continue
            version, since = self._seen.get(row.key, (row.version, now))
            seen[row.key] = (row.version, since if version == row.version else now)
            silent_s = now - seen[row.key][1]
            if silent_s > FORGOTTEN_S:
                await store.kv_delete(NODES, row.key, expected=row.version)
            elif silent_s <= SILENT_S and (report := decode_report(row)) is not None:
                for name, counts in report.counts.items():
                    for caller, amount in counts.items():
                        sums[name][caller] += amount
        self._seen = seen
        for name, counter in self._counters.items():
            counter.set_elsewhere(sums.get(name, {}))

    async def lines(self) -> Sequence[NodeLine]:
        """Return all servers of the store, this one too, the oldest first."""
        return lines_of(await self._host.store.kv_list(NODES), now=self._world.now())
