"""`--workers`: several processes on one port."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from midstream.cli.listening import raise_file_limit
from midstream.environment import World
from midstream.errors import UsageError
from midstream.store.store_registry import is_shareable, show_store

F = TypeVar("F", bound=Callable[..., Any])  # whatever click decorates
WORKERS_MAX = 64
"""Limit of the workers of a server: each is a process, and a node of its store."""


def workers_option(command: F) -> F:
    """Add the option `--workers`."""
    return click.option(
        "--workers",
        type=click.IntRange(1, WORKERS_MAX),
        default=1,
        show_default=True,
        help="Processes that share the port and the store. SIGHUP replaces them one after the other.",
    )(command)


def run_workers(
    options: Mapping[str, Any], store: object, *, login: str, on_ready: Callable[[dict[str, Any]], None]
) -> None:
    """Run the workers of a server to their end; exit with the code of a failure.

    Args:
        options: Options of the command: `host`, `port`, `workers`, and perhaps `shares_port`.
        store: The given store.
        login: A one-time login code for a browser; "" for none.
        on_ready: Called with the report of the first worker when all listen.

    Raises:
        UsageError: The store belongs to one process, or the address cannot be used.
        PortTakenError: Another program uses the port.
    """
    from midstream.server.supervisor import Supervisor, listen_for_workers  # noqa: PLC0415 - only here

    if isinstance(store, str) and not is_shareable(store):
        raise UsageError(
            f"--workers needs a store that several processes share; {show_store(store)!r} belongs to one process"
        )
    sockets = listen_for_workers(
        options["host"],
        options["port"],
        options["workers"],
        shares_port=bool(options.get("shares_port")),
    )
    supervisor = Supervisor(
        [sys.executable, "-m", "midstream", *sys.argv[1:]],
        count=options["workers"],
        sockets=sockets,
        login=login,
        on_ready=on_ready,
        world=World(),
    )
    raise_file_limit()
    code = asyncio.run(supervisor.run())
    if code:
        sys.exit(code)
