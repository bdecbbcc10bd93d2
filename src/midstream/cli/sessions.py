"""`midstream sessions`: list, show, export and delete sessions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import click
import msgspec

from midstream.cli import Surroundings
from midstream.cli.session_actions import answer, cancel, questions, resume_turn, withdraw
from midstream.cli.session_options import complete, source_of, source_options
from midstream.cli.sources import ListedSession, SessionExportLine, resolve, with_whole
from midstream.cli.terminal import COLUMNS, Ink, clean, columns, pad, shorten
from midstream.cli.times import time_of
from midstream.cli.transcript import TurnTranscript, lines, read
from midstream.cli.visible_text import json_of
from midstream.errors import UsageError
from midstream.session.child_names import PART_MARK
from midstream.session.journal_reading import JournalReader
from midstream.store.key_place import KeyPlace

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
@click.pass_obj
def list_sessions(
    surroundings: Surroundings,
    limit: int,
    has_children: bool,  # noqa: FBT001 - click passes options so
    store: str | None,
    url: str | None,
    key_file: KeyPlace | None,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """List sessions, last changed first: a table, or tab-separated lines if stdout is not a terminal."""
    source = source_of(surroundings, store, url, key_file)
    wanted = (line for line in source.list() if has_children or PART_MARK not in line.id)
    found = list(islice(wanted, limit + 1 if limit else None))
    shown = found[:limit] if limit else found
    ink = surroundings.out
    if is_json:
        for line in shown:
            click.echo(json_of(line))
    elif ink.is_terminal:
        for row in _table(shown, ink, columns()):
            click.echo(row, color=True)
    else:
        for line in shown:
            cells = (line.id, str(line.turns), line.status, time_of(line.updated_at), line.title)
            click.echo("\t".join(clean(cell, is_one_line=True) for cell in cells))
    if not found:
        click.echo("No sessions yet.", err=True)
    elif len(found) > len(shown):
        click.echo(f"There are more than {limit}: --limit 0 lists all.", err=True)


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
@click.pass_obj
def show(
    surroundings: Surroundings,
    session: str,
    raw: bool,  # noqa: FBT001 - click passes options so
    store: str | None,
    url: str | None,
    key_file: KeyPlace | None,
    is_json: bool,  # noqa: FBT001 - see above
) -> None:
    """Show a session as a readable transcript."""
    source = source_of(surroundings, store, url, key_file)
    found = resolve(source, session)
    journal = JournalReader()
    turns = read(journal.read(bytes(line.record)) for line in source.records(found.id))
    if is_json:
        click.echo(json_of({**msgspec.to_builtins(found), "transcript": turns}))
        return
    if raw:
        for turn in turns:
            click.echo("\n".join(_raw_lines(turn)))
        return
    ink = surroundings.out
    width = columns() if ink.is_terminal else COLUMNS
    click.echo(shorten(clean(f"{found.id}: {found.title}", is_one_line=True), width))
    for row in lines(turns, ink, width):
        click.echo(row, color=True)


def _raw_lines(turn: TurnTranscript) -> Iterator[str]:
    yield f"turn {turn.turn} {turn.status}"
    for entry in turn.entries:
        yield " ".join(str(value) for value in msgspec.structs.astuple(entry))


@sessions.command()
@click.argument("session", required=False, shell_complete=complete)
@click.option("--all", "is_all", is_flag=True, help="Write all sessions; each line then has its `session`.")
@source_options
@click.pass_obj
def export(
    surroundings: Surroundings,
    session: str | None,
    is_all: bool,  # noqa: FBT001 - click passes options so
    store: str | None,
    url: str | None,
    key_file: KeyPlace | None,
    is_json: bool,  # noqa: ARG001, FBT001 - an export is JSON anyway
) -> None:
    """Write a session's records as JSON lines: {"id": epoch-position, "record": {...}}.

    A record that names a large result has the result beside it, as "whole". With --key-file it is decrypted here, on
    the machine that runs this command.
    """
    if is_all == (session is not None):
        raise UsageError("give either SESSION or --all")
    source = source_of(surroundings, store, url, key_file)
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
@click.pass_obj
def delete(
    surroundings: Surroundings,
    names: tuple[str, ...],
    yes: bool,  # noqa: FBT001 - click passes options so
    dry_run: bool,  # noqa: FBT001 - see above
    store: str | None,
    url: str | None,
    key_file: KeyPlace | None,
    is_json: bool,  # noqa: FBT001 - see above
) -> None:
    """Delete sessions permanently."""
    source = source_of(surroundings, store, url, key_file)
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
        if is_json:
            click.echo(json_of({"id": line.id, "is_deleted": not dry_run}))
    done = "would be deleted" if dry_run else "deleted"
    click.echo(f"{_format_count(found)} {done}.", err=True)


def _format_count(found: list[ListedSession]) -> str:
    return f"{len(found)} session{'s' if len(found) != 1 else ''}"


for command in (questions, answer, resume_turn, cancel, withdraw):
    sessions.add_command(command)
