"""`midstream backup` and `midstream restore`: copy the sessions during operation, and restore a copy."""

from __future__ import annotations

from pathlib import Path

import click

from midstream.cli import Invocation
from midstream.cli.input_file import InputFile
from midstream.cli.output import Output, json_option, one_line
from midstream.cli.status_line import StatusLine
from midstream.environment import World
from midstream.errors import UsageError
from midstream.store.sqlite.backup_restore import put_back
from midstream.store.sqlite.online_backup import back_up
from midstream.store.store_registry import file_of, show_store


@click.command()
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--store",
    metavar="FILE|URL",
    help="Copy this store (default: that of `midstream serve`).",
)
@click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
@json_option()
@click.pass_obj
def backup(
    invocation: Invocation,
    target: Path,
    store: str | None,
    force: bool,  # noqa: FBT001 - click passes options so
    output: Output,
) -> None:
    """Copy the sessions into one file, also while a server uses them.

    The copy is consistent, is checked, and appears only when it is complete; `midstream restore` restores it. A copy of
    an encrypted database needs the same key file.
    """
    named = store or invocation.places.store
    file = file_of(named)
    if file is None:
        raise UsageError(
            f"store {show_store(named)!r} is not a single file; copy it with the tools of its database "
            "(PostgreSQL: `pg_dump --schema`, or base backups with an archive of the log)"
        )
    with StatusLine(is_terminal=invocation.talk.is_terminal, world=World()) as line:
        done = back_up(
            file, target, may_replace=force, progress=lambda share: line.show(f"copied {share:.0%}")
        )
    counts = f"{done.sessions:,} sessions, {done.records:,} records, {done.bytes:,} bytes"
    output.print_one(done, f"{one_line(str(target))}: {counts}")


@click.command()
@click.argument("source", type=InputFile())
@click.option(
    "--store",
    metavar="FILE",
    help="Restore this database (default: that of `midstream serve`).",
)
@click.option(
    "--force", is_flag=True, help="Replace the database if it exists. The old one is kept under another name."
)
@json_option()
@click.pass_obj
def restore(
    invocation: Invocation,
    source: Path,
    store: str | None,
    force: bool,  # noqa: FBT001 - click passes options so
    output: Output,
) -> None:
    """Replace the database by a copy of the sessions that `backup` made. Stop all servers first.

    The copy is checked. With --force, an existing database is kept under the printed name. The server informs clients
    with later events that it was set back.
    """
    named = store or invocation.places.store
    file = file_of(named)
    if file is None:
        raise UsageError(
            f"store {show_store(named)!r} is not a single file; restore it with the tools of its database, or copy "
            "SQLite's file into a new one: `midstream store copy FILE URL`"
        )
    done = put_back(source, file, may_replace=force)
    kept = f"; the old one is {one_line(done.replaced)}" if done.replaced else ""
    counts = f"{done.sessions:,} sessions, {done.records:,} records"
    output.print_one(done, f"{one_line(str(file))}: {counts}{kept}")
