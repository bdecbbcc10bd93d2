"""`midstream nodes`: the servers that share a store."""

from __future__ import annotations

from collections.abc import Sequence

import click

from midstream.cli.output import Output
from midstream.cli.session_options import source_options
from midstream.cli.session_sources import Source
from midstream.cli.terminal import clean, columns, pad, width_of
from midstream.cli.times import duration_of, time_of
from midstream.store.node_reports import NodeLine

HEADINGS = (
    "SERVER",
    "PROCESS",
    "VERSION",
    "STATE",
    "SINCE",
    "REPORT",
    "STREAMS",
    "SESSIONS",
    "LEASES",
    "TURNS",
    "QUEUE",
    "LAG",
)
GAP = "  "
LEFT_OUT_FIRST = ("VERSION", "STREAMS", "TURNS", "SINCE", "PROCESS", "LAG")
"""Columns that are omitted on a narrow terminal, in this order."""


@click.command(short_help="List the servers that share a store, with their sessions and their lag.")
@source_options
def nodes(source: Source, output: Output) -> None:
    """List the servers that share a store. Servers of a SQLite store are on this machine.

    REPORT is the age of the newest report; a server reports every 2 s (a single server every 30 s). SESSIONS is the
    number of sessions in memory, and LEASES the number of those that the server runs. QUEUE is the number of appends
    that wait for the store, LAG the delay of the event loop. A server that died is `silent`, and is listed for an hour.
    A narrow terminal shows fewer columns; --json has all.
    """
    found = source.nodes()
    output.print_list(
        found,
        lambda line: (line.node, *_cells(line)),
        table=lambda: _table(found, columns()),
        none="No server has reported.",
    )


def _cells(line: NodeLine) -> tuple[str, ...]:
    worker = f" worker {line.worker}" if line.worker else ""
    return (
        f"{line.kind} {line.name}{worker}",
        f"{line.machine}:{line.pid}",
        line.version,
        line.state,
        time_of(line.started_at),
        duration_of(line.report_age_s),
        str(line.streams),
        str(line.sessions),
        str(line.leases),
        str(line.turns),
        str(line.appends_waiting),
        duration_of(line.loop_lag_s, digits=3),
    )


def _table(found: Sequence[NodeLine], width: int) -> Sequence[str]:
    if not found:
        return ()
    rows = [HEADINGS, *([clean(cell, is_one_line=True) for cell in _cells(line)] for line in found)]
    widths = {name: max(width_of(row[number]) for row in rows) for number, name in enumerate(HEADINGS)}
    for name in LEFT_OUT_FIRST:
        if sum(widths.values()) + len(GAP) * (len(widths) - 1) > width:
            del widths[name]
    shown = [(HEADINGS.index(name), wide) for name, wide in widths.items()]
    return [GAP.join(pad(row[number], wide) for number, wide in shown).rstrip() for row in rows]
