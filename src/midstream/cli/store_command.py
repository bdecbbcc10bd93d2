"""`midstream store`: what operators do with a store as a whole."""

from __future__ import annotations

import asyncio

import click

from midstream.cli.session_options import json_of
from midstream.cli.terminal import clean
from midstream.store.store_registry import prepare_store, show_store


@click.group()
def store() -> None:
    """Prepare a store in a database."""


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
