"""`midstream store`: prepare a store in a database, or copy a store into another one."""

from __future__ import annotations

import asyncio

import click

from midstream.cli.output import Output, json_option, one_line
from midstream.store.store_registry import copy_named, prepare_store, show_store


@click.group()
def store() -> None:
    """Prepare a store in a database; copy a store into another one."""


@store.command()
@click.argument("url")
@click.option("--grant", metavar="ROLE", default="", help="Grant this role the rights that a server needs.")
@json_option()
def migrate(url: str, grant: str, output: Output) -> None:
    """Create the tables of a store, or migrate them to the current version.

    A server does this itself if its role may create tables. URL is a PostgreSQL address, such as
    postgresql://owner@host/database.
    """
    done = asyncio.run(prepare_store(url, grant=grant))
    is_changed = done.before != done.after
    now = (
        f"schema {done.before} before, {done.after} now"
        if is_changed
        else f"up to date (schema {done.after})"
    )
    output.print_one(done, f"{one_line(show_store(url))}: {now}")


@store.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@json_option()
def copy(source: str, target: str, output: Output) -> None:
    """Copy a store into another one, of any kind, and compare them.

    FROM and TO are files or URLs. Servers may use FROM: stop them, and repeat the command for the rest. No server may
    use TO. After an interruption, the command continues. Encrypted sessions stay encrypted with their keys.
    """
    done = asyncio.run(copy_named(source, target))
    output.print_one(
        done,
        f"{one_line(show_store(target))}: {done.sessions:,} sessions, {done.records:,} records, "
        f"{done.blobs:,} large results, {done.entries:,} entries; the same as in the source",
    )
