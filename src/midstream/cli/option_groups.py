"""Shared options of commands."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click
from typing_extensions import override

from midstream.cli.key_option import KeyLocationType
from midstream.cli.log_format import FORMATS

F = TypeVar("F", bound=Callable[..., Any])  # whatever click decorates

LOG_LEVELS = ("debug", "info", "warning", "error")


class FiniteRange(click.FloatRange):
    """Numbers of a range, without infinity and NaN, which `click.FloatRange` accepts."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def group_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds options to a command, in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


log_options: Callable[[F], F] = group_options(
    click.option("--log-level", type=click.Choice(LOG_LEVELS), default="warning", show_default=True),
    click.option(
        "--log-format",
        type=click.Choice([*FORMATS]),
        default="text",
        show_default=True,
        help="json: one object per line, with ids and without content of messages.",
    ),
)
sessions_store_option = click.option(
    "--store",
    metavar="FILE|URL",
    help="The store of all sessions: a SQLite file (created if missing), or a URL such as postgresql://host/db "
    "(default: a file for the current folder, in midstream's data folder).",
)
mcp_option = click.option(
    "--mcp",
    "servers",
    multiple=True,
    metavar="NAME=COMMAND|URL",
    help="Add the tools of this MCP server, given as a command or a URL; may be repeated.",
)


def encryption_option(what: str, store: str) -> Callable[[F], F]:
    """Return the option for the keys of a store, which may be created.

    Args:
        what, store: Names of the encrypted content and of the store, for the help.
    """
    return click.option(
        "--key-file",
        type=KeyLocationType(exists=False),
        help=f"Encrypt {what} with the first key of this file; created if neither the file nor the {store} exists. "
        "A URL is that of a key endpoint.",
    )
