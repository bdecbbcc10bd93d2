"""`midstream sessions`: list, show, export and delete sessions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import click
import msgspec

from midstream.cli.output import Output, one_line
from midstream.cli.session_actions import COMMANDS
from midstream.cli.session_options import complete, source_options
from midstream.cli.session_sources import ListedSession, SessionExportLine, Source, resolve, with_whole
from midstream.cli.terminal import Ink, clean, columns, pad, shorten
from midstream.cli.times import time_of
from midstream.cli.transcript import TurnTranscript, lines, read
from midstream.cli.visible_text import json_of
from midstream.errors import UsageError
from midstream.session.child_names import PART_MARK
from midstream.session.journal_reading import JournalReader

LIST_MAX = 50
ID_COLUMNS = 24


@click.group()
def sessions() -> None:
    """List, show, answer, resume, stop, export and delete sessions.

    SESSION is an id, a unique beginning of one, or - for the last changed session.
    """


@sessions.command("list")
@click.option("--limit", type=click.IntRange(min=0), default=LIST_MAX, show_default=True, help="0: all.")
@click.option("--all", "has_children", is_flag=True, help="Include sessions of sub-agents.")
@source_options
def list_sessions(
    limit: int,
    has_children: bool,  # noqa: FBT001 - click passes options so
    source: Source,
    output: Output,
) -> None:
    """List sessions, newest change first: a table, or tab-separated lines if stdout is not a terminal."""
    wanted = (line for line in source.list() if has_children or PART_MARK not in line.id)
    found = list(islice(wanted, limit + 1 if limit else None))
    shown = found[:limit] if limit else found
    output.print_list(
        shown,
        session_cells,
        table=lambda: _table(shown, output.ink, columns()),
        none="There are no sessions.",
    )
    if len(found) > len(shown):
        click.echo(f"There are more than {limit}: --limit 0 lists all.", err=True)


def session_cells(line: ListedSession) -> tuple[str, ...]:
    """Return the cells of a session for a list."""
    return (line.id, str(line.turns), line.status, time_of(line.updated_at), line.title)


def _table(shown: list[ListedSession], ink: Ink, width: int) -> Iterator[str]:
    if not shown:
        return
    ids = [clean(line.id, is_one_line=True) for line in shown]
    first = min(ID_COLUMNS, max(len("SESSION"), *map(len, ids)))
    rest = max(10, width - first - len("  TURNS  STATUS       CHANGED              "))
    yield ink.bold(f"{pad('SESSION', first)}  TURNS  STATUS       CHANGED              TITLE")
    for line, name in zip(shown, ids, strict=True):
        title = shorten(clean(line.title, is_one_line=True), rest)
        status = pad(clean(line.status, is_one_line=True), 11)
        yield f"{pad(name, first)}  {line.turns:>5}  {status}  {time_of(line.updated_at)}  {title}"


@sessions.command()
@click.argument("session", shell_complete=complete)
@click.option("--raw", is_flag=True, help="Print text without removing control characters.")
@source_options
def show(
    session: str,
    raw: bool,  # noqa: FBT001 - click passes options so
    source: Source,
    output: Output,
) -> None:
    """Show a session as a readable transcript."""
    found = resolve(source, session)
    journal = JournalReader()
    turns = read(journal.read(bytes(line.record)) for line in source.records(found.id))
    if output.is_json:
        output.print_json({**msgspec.to_builtins(found), "transcript": turns})
        return
    if raw:
        for turn in turns:
            click.echo("\n".join(_raw_lines(turn)))
        return
    click.echo(shorten(one_line(f"{found.id}: {found.title}"), output.width))
    output.print_rows(lines(turns, output.ink, output.width))


def _raw_lines(turn: TurnTranscript) -> Iterator[str]:
    yield f"turn {turn.turn} {turn.status}"
    for entry in turn.entries:
        yield " ".join(str(value) for value in msgspec.structs.astuple(entry))


@sessions.command()
@click.argument("session", required=False, shell_complete=complete)
@click.option("--all", "is_all", is_flag=True, help="Write all sessions; each line then has its `session`.")
@source_options
def export(
    session: str | None,
    is_all: bool,  # noqa: FBT001 - click passes options so
    source: Source,
    output: Output,  # noqa: ARG001 - an export is always JSON
) -> None:
    """Write a session's records as JSON lines: {"id": epoch-position, "record": {...}}.

    A record that refers to a large result is followed by the result, as "whole". With --key-file, this command decrypts
    the records.
    """
    if is_all == (session is not None):
        raise UsageError("give either SESSION or --all")
    if session is not None:
        found = resolve(source, session)
        for line in source.records(found.id):
            click.echo(json_of(with_whole(source, found.id, line)))
        return
    for each in list(source.list()):
        for line in source.records(each.id):
            whole = with_whole(source, each.id, line)
            click.echo(json_of(SessionExportLine(whole.id, whole.record, whole.whole, session=each.id)))


@sessions.command()
@click.argument("names", metavar="SESSION...", nargs=-1, required=True, shell_complete=complete)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted.")
@source_options
def delete(
    names: tuple[str, ...],
    yes: bool,  # noqa: FBT001 - click passes options so
    dry_run: bool,  # noqa: FBT001 - see above
    source: Source,
    output: Output,
) -> None:
    """Delete sessions permanently."""
    found = list({line.id: line for line in (resolve(source, name) for name in names)}.values())
    for line in found:
        title = shorten(clean(line.title, is_one_line=True), 40)
        click.echo(f"{clean(line.id, is_one_line=True)}  {line.turns} turns  {title}", err=True)
    if not (dry_run or yes):
        if not sys.stdin.isatty():
            raise UsageError("stdin is not a terminal; give --yes to confirm the permanent deletion")
        click.confirm(f"Delete {_format_count(found)} permanently?", abort=True, err=True)
    for line in found:
        if not dry_run:
            source.delete(line.id)
        output.print_json({"id": line.id, "is_deleted": not dry_run})
    done = "would be deleted" if dry_run else "deleted"
    click.echo(f"{_format_count(found)} {done}.", err=True)


def _format_count(found: list[ListedSession]) -> str:
    return f"{len(found)} session{'s' if len(found) != 1 else ''}"


for command in COMMANDS:
    sessions.add_command(command)
