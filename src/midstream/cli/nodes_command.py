"""`midstream nodes`: the servers that share a store."""

from __future__ import annotations

from collections.abc import Sequence

import click

from midstream.cli import Surroundings
from midstream.cli.session_options import json_of, source_of, source_options
from midstream.cli.terminal import clean, pad
from midstream.cli.times import duration_of, time_of
from midstream.store.key_place import KeyPlace
from midstream.store.node_reports import NodeLine

HEADINGS = (
    "SERVER",
    "PROCESS",
    "VERSION",
    "STATE",
    "SINCE",
    "HEARD",
    "STREAMS",
    "SESSIONS",
    "LEASES",
    "TURNS",
    "QUEUE",
    "LAG",
)


@click.command(short_help="List the servers that share a store, with their sessions and their lag.")
@source_options
@click.pass_obj
def nodes(
    surroundings: Surroundings,
    store: str | None,
    url: str | None,
    key_file: KeyPlace | None,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """List the servers that share a store: those of SQLite on this machine, those of PostgreSQL on all.

    HEARD is the age of the newest report, which comes every 2 s (30 s of a server that is alone). SESSIONS are in
    memory, LEASES of them run there. QUEUE is the number of appends that wait for the store, LAG how late the event
    loop was. A server that died without giving notice is `silent`, and is listed for an hour.
    """
    found = source_of(surroundings, store, url, key_file).nodes()
    if is_json:
        for line in found:
            click.echo(json_of(line))
    elif surroundings.out.is_terminal:
        for row in _table(found):
            click.echo(row)
    else:
        for line in found:
            click.echo("\t".join(clean(cell, is_one_line=True) for cell in (line.node, *_cells(line))))
    if not found:
        click.echo("No server has reported.", err=True)


def _cells(line: NodeLine) -> tuple[str, ...]:
    worker = f" worker {line.worker}" if line.worker else ""
    return (
        f"{line.kind} {line.name}{worker}",
        f"{line.machine}:{line.pid}",
        line.version,
        line.state,
        time_of(line.started_at),
        duration_of(line.heard_s),
        str(line.streams),
        str(line.sessions),
        str(line.leases),
        str(line.turns),
        str(line.appends_waiting),
        duration_of(line.loop_lag_s, digits=3),
    )


def _table(found: Sequence[NodeLine]) -> Sequence[str]:
    if not found:
        return ()
    rows = [HEADINGS, *([clean(cell, is_one_line=True) for cell in _cells(line)] for line in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    return [
        "  ".join(pad(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
