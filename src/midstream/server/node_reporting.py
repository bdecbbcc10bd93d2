"""Reports of the servers that share a store: each writes its own figures and reads those of the others.

A report is one key-value entry, under the name of the node. It is written every `REPORT_S` seconds while there are
other nodes, and every `ALONE_S` seconds otherwise. `midstream nodes` reads the reports from the store, and each server
reads the other servers' counts of callers (`FleetCounter`). Clocks of different servers are not compared: each server
measures by its own clock how long a report has not changed.
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

from midstream.background_loops import spawn_loop
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

EARLY_REPORT_S = 0.25
"""Seconds until the next exchange of reports, once a caller has used half of a limit here."""
REMOVE_AFTER_S = 3600.0
"""Seconds after which the report of a node that died is deleted."""

_log = logging.getLogger(__name__)


class FleetCounter(Protocol):
    """A limit of all servers of a store together."""

    on_half_used: Callable[[], None] | None
    """Called when a caller has used half of the limit at this server."""

    def own_counts(self) -> dict[str, float]:
        """Return the counts of this server, by caller digest."""

    def set_other_counts(self, counts: Mapping[str, float]) -> None:
        """Set the sums of the counts of all other servers."""


class NodeReports:
    """Writes the reports of one server, and reads those of the others, from `start` to `stop`.

    Args:
        kind, name, worker: See `NodeReport`.
        figures: Returns the figures of this server.
        counters: Limits of all servers together, by name.
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
        """For each other node: the version of its report, and when this version was first read."""
        self._hurried = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to report."""
        for counter in self._counters.values():
            counter.on_half_used = self._hurried.set
        self._running = spawn_loop(self._world, self._run, name="node reports")

    async def stop(self) -> None:
        """Stop, and remove the report of this server. Idempotent."""
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
            _log.debug("the report of this node was not removed: %s", error.code)

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
        """Wait until the next report is due, or until a caller has used half of a limit."""
        self._hurried.clear()
        await self._world.sleep(EARLY_REPORT_S)
        sleeping = self._world.spawn(self._world.sleep(REPORT_S - EARLY_REPORT_S), name="next report")
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
        except EntryMovedError:  # an earlier write succeeded without an answer, or the report was deleted
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
            if silent_s > REMOVE_AFTER_S:
                await store.kv_delete(NODES, row.key, expected=row.version)
            elif silent_s <= SILENT_S and (report := decode_report(row)) is not None:
                for name, counts in report.counts.items():
                    for caller, amount in counts.items():
                        sums[name][caller] += amount
        self._seen = seen
        for name, counter in self._counters.items():
            counter.set_other_counts(sums.get(name, {}))

    async def lines(self) -> Sequence[NodeLine]:
        """Return all servers of the store, including this one, oldest first."""
        return lines_of(await self._host.store.kv_list(NODES), now=self._world.now())
