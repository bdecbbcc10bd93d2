"""`midstream store`: prepare a store in a database, copy a store into another one."""

from __future__ import annotations

import asyncio

import click

from midstream.cli.terminal import clean
from midstream.cli.visible_text import json_of
from midstream.store.store_registry import copy_named, prepare_store, show_store


@click.group()
def store() -> None:
    """Prepare a store in a database; copy a store into another one."""


@store.command()
@click.argument("url")
@click.option(
    "--grant", metavar="ROLE", default="", help="Give this role the rights with which a server runs."
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def migrate(url: str, grant: str, is_json: bool) -> None:  # noqa: FBT001 - click passes options so
    """Make the tables of a store, or bring them up to date.

    A server does this by itself where its role may create tables. URL is a PostgreSQL address, such as
    postgresql://owner@host/database.
    """
    done = asyncio.run(prepare_store(url, grant=grant))
    if is_json:
        click.echo(json_of(done))
        return
    shown = clean(show_store(url), is_one_line=True)
    if done.before == done.after:
        click.echo(f"{shown}: up to date (schema {done.after})", err=True)
    else:
        click.echo(f"{shown}: schema {done.before} before, {done.after} now", err=True)


@store.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def copy(source: str, target: str, is_json: bool) -> None:  # noqa: FBT001 - click passes options so
    """Copy a store into another one, of any kind, and compare them.

    FROM and TO are files or URLs. Servers may work on FROM: stop them, and repeat the command for the rest. No server
    may work on TO. Interrupted, it goes on where it was. Encrypted sessions stay encrypted under their keys.
    """
    done = asyncio.run(copy_named(source, target))
    if is_json:
        click.echo(json_of(done))
        return
    shown = clean(show_store(target), is_one_line=True)
    click.echo(
        f"{shown}: {done.sessions:,} sessions, {done.records:,} records, {done.blobs:,} large results, "
        f"{done.entries:,} entries; the same as in the source",
        err=True,
    )
