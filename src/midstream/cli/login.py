"""`midstream login` and `midstream token`: access to a server of this machine, for a browser and for scripts."""

from __future__ import annotations

from urllib.parse import urlsplit

import click

from midstream.cli import Invocation
from midstream.cli.session_options import url_argument
from midstream.cli.session_sources import ServerSource
from midstream.errors import UnauthorizedError
from midstream.local_keys import headers_for, is_loopback


@click.command(short_help="Print a one-time login link for a browser.")
@url_argument
def login(url: str) -> None:
    """Print a one-time login link to the page of the server at URL, valid for one hour."""
    url = url.rstrip("/")
    click.echo(f"{url}/#login={ServerSource(url).login_link()}")


@click.command(short_help="Print your token for a server on this machine.")
@url_argument
@click.pass_obj
def token(invocation: Invocation, url: str) -> None:
    """Print the bearer token of this user for the running server at URL, for scripts.

    The token gives all rights on this server until its next start. Keep it out of URLs, logs and public command lines.
    """
    shown = headers_for(url, invocation.places)
    if not shown:
        if is_loopback(urlsplit(url).hostname or ""):
            ServerSource(url).credentials()  # raises the reason
        raise UnauthorizedError(f"this user has no token for {url!r}; request one from its operator")
    click.echo(shown["authorization"].removeprefix("Bearer "))
