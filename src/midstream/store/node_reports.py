"""Reports of the servers that share a store, for storage and for display."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from midstream.store.contract import KeyValueEntry, KeyValueReader

NODES = "nodes"
"""Namespace of the reports, each under the name of its node."""
REPORT_S = 2.0
"""Seconds between two reports, and between two reads of the other servers' reports."""
ALONE_S = 30.0
"""Seconds between two reports of a server without other nodes."""
SILENT_S = 20.0
"""Seconds without a new report after which a node counts as gone; while it was alone, `ALONE_S` more."""
REPORT_COUNTS_S = SILENT_S + ALONE_S
"""Seconds after which the report of a killed server no longer counts, whatever its `every_s`."""


class NodeReport(Struct, frozen=True, omit_defaults=True):
    """State of one server.

    Args:
        kind: `serve` or `gateway`.
        name: Name of its agent or its upstream.
        machine, pid, worker: The process; worker 0 is the only process of its server.
        started_at: In seconds since 1970.
        every_s: Seconds until the next report.
        counts: Use of limits by callers, by the names of limits and the digests of callers.
    """

    kind: str
    version: str
    name: str
    machine: str
    pid: int
    started_at: float
    every_s: float
    worker: int = 0
    figures: dict[str, float] = {}
    counts: dict[str, dict[str, float]] = {}


class NodeLine(Struct, frozen=True):
    """A server that shares the store, for display.

    Args:
        node: Its name in the store.
        state: `serving`, `draining`, or `silent`: its newest report is too old.
        report_age_s: Seconds since its newest report, measured with the clocks of both machines.
        started_at: In seconds since 1970.
        streams: Open connections of clients.
        sessions: Sessions in memory. `leases` of them are run here, `followed` are followed for readers.
        turns: Turns that are open in them.
        appends_waiting: Appends that wait for the store.
        loop_lag_s: Seconds that the event loop was late for the newest report.
    """

    node: str
    state: str
    kind: str
    name: str
    machine: str
    pid: int
    worker: int
    version: str
    started_at: float
    report_age_s: float
    streams: int
    sessions: int
    leases: int
    followed: int
    turns: int
    appends_waiting: int
    loop_lag_s: float


def lines_of(rows: Sequence[KeyValueEntry], *, now: float) -> Sequence[NodeLine]:
    """Return the servers that share a store, the oldest first.

    Args:
        rows: The entries of `NODES`.
        now: In seconds since 1970.
    """
    lines = []
    for row in rows:
        report = decode_report(row)
        if report is not None:
            lines.append(_line_of(row, report, report_age_s=max(0.0, now - row.at)))
    return sorted(lines, key=lambda line: (line.started_at, line.node))


def _line_of(row: KeyValueEntry, report: NodeReport, *, report_age_s: float) -> NodeLine:
    figures = report.figures
    is_silent = report_age_s > SILENT_S + (report.every_s if report.every_s > REPORT_S else 0.0)
    state = "draining" if figures.get("is_draining") else "serving"
    return NodeLine(
        row.key,
        "silent" if is_silent else state,
        report.kind,
        report.name,
        report.machine,
        report.pid,
        report.worker,
        report.version,
        report.started_at,
        round(report_age_s, 3),
        round(figures.get("streams", 0)),
        round(figures.get("sessions_awake", 0)),
        round(figures.get("leases", 0)),
        round(figures.get("sessions_followed", 0)),
        round(figures.get("turns_running", 0)),
        round(figures.get("appends_waiting", 0)),
        round(figures.get("loop_lag_seconds", 0.0), 6),
    )


async def has_fresh_reports(store: KeyValueReader, *, now: float) -> bool:
    """Whether nodes use a store, or did `REPORT_COUNTS_S` ago. The reports are not decoded: they may be sealed."""
    return any(now - row.at < REPORT_COUNTS_S for row in await store.kv_list(NODES))


def decode_report(row: KeyValueEntry) -> NodeReport | None:
    """Decode a report; None if it is damaged, or of another version."""
    try:
        return msgspec.json.decode(row.body, type=NodeReport)
    except (msgspec.MsgspecError, RecursionError):
        return None
