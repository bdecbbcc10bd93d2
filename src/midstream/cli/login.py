"""`midstream login` and `midstream token`: into a server of this machine, for a browser and for a script."""

from __future__ import annotations

import click

from midstream.cli import Surroundings
from midstream.cli.session_options import url_argument
from midstream.cli.sources import ServerSource
from midstream.errors import UnauthorizedError
from midstream.local_keys import shown_to


@click.command(short_help="Print a link that logs a browser in, once.")
@url_argument
def login(url: str) -> None:
    """Print a link to the page of the server at URL that logs one browser in, within an hour."""
    url = url.rstrip("/")
    click.echo(f"{url}/#login={ServerSource(url).login_link()}")


@click.command(short_help="Print the token of a server of this machine.")
@url_argument
@click.pass_obj
def token(surroundings: Surroundings, url: str) -> None:
    """Print the bearer token of this user for the server at URL, for scripts.

    It opens everything this server has: keep it out of addresses, logs and command lines that others can see.
    """
    shown = shown_to(url, surroundings.places)
    if not shown:
        raise UnauthorizedError(
            f"no server of yours has made a key on this machine, or {url!r} is another one"
        )
    click.echo(shown["authorization"].removeprefix("Bearer "))
