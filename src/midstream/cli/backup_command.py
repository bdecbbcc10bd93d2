"""`midstream backup` and `midstream restore`: copy the sessions while a server works on them, and put a copy back."""

from __future__ import annotations

from pathlib import Path

import click

from midstream.cli import Surroundings
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
    help="Copy this store (default: the one `midstream serve` uses).",
)
@click.option("--force", is_flag=True, help="Replace TARGET if it exists.")
@json_option()
@click.pass_obj
def backup(
    surroundings: Surroundings,
    target: Path,
    store: str | None,
    force: bool,  # noqa: FBT001 - click passes options so
    output: Output,
) -> None:
    """Copy the sessions into one file, also while a server works on them.

    The copy shows one moment, is checked, and appears only when it is complete; `midstream restore` puts it back. A
    copy of an encrypted database needs the same key file.
    """
    named = store or surroundings.places.store
    file = file_of(named)
    if file is None:
        raise UsageError(
            f"store {show_store(named)!r} is not a single file; copy it with the tools of its database "
            "(PostgreSQL: `pg_dump --schema`, or base backups with an archive of the log)"
        )
    with StatusLine(is_terminal=surroundings.talk.is_terminal, world=World()) as line:
        done = back_up(
            file, target, may_replace=force, progress=lambda share: line.show(f"copied {share:.0%}")
        )
    counts = f"{done.sessions:,} sessions, {done.records:,} records, {done.bytes:,} bytes"
    output.print_one(done, f"{one_line(str(target))}: {counts}")


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--store",
    metavar="FILE",
    help="Restore this database (default: the one `midstream serve` uses).",
)
@click.option(
    "--force", is_flag=True, help="Replace the database if it exists. It is kept beside the new one."
)
@json_option()
@click.pass_obj
def restore(
    surroundings: Surroundings,
    source: Path,
    store: str | None,
    force: bool,  # noqa: FBT001 - click passes options so
    output: Output,
) -> None:
    """Put a copy of the sessions, made by `backup`, in the place of the database. Stop all servers first.

    The copy is checked. A database that is there is moved aside, under the name that is printed. Clients that have seen
    later events are informed that the server was set back.
    """
    named = store or surroundings.places.store
    file = file_of(named)
    if file is None:
        raise UsageError(
            f"store {show_store(named)!r} is not a single file; restore it with the tools of its database, or copy "
            "SQLite's file into a new one: `midstream store copy FILE URL`"
        )
    done = put_back(source, file, may_replace=force)
    kept = f"; the one before is {one_line(done.replaced)}" if done.replaced else ""
    counts = f"{done.sessions:,} sessions, {done.records:,} records"
    output.print_one(done, f"{one_line(str(file))}: {counts}{kept}")
