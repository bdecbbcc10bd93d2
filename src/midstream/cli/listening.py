"""Shared parts of the commands that listen: options, logging, and the report of the address."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from midstream.cli.env_secrets import drop_secret_variables
from midstream.cli.log_format import FORMATS, ContentFilter
from midstream.cli.option_groups import group_options, log_options
from midstream.errors import UsageError
from midstream.server.raw_connections import RawLimits
from midstream.server.uvicorn_server import TlsFiles

if sys.platform != "win32":
    import resource

F = TypeVar("F", bound=Callable[..., Any])  # whatever click decorates

COLLECT_AFTER = (10_000, 5, 5)
"""Thresholds of the garbage collector in a server. Python's defaults (700, 10, 10) are for small programs: they
traverse thousands of connections often, and find few cycles. Objects that wait for a full collection are bounded by
10,000 * (5 + 2) * (5 + 2), or a quarter of all objects if that is more: 50 to 100 MB at 100 to 200 bytes each."""
FILES_MAX = 65_536
"""Limit of open files of a server. Each connection is one, and most systems have a default of 1,024."""
KIB = 1024
LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


def address_options(port: int) -> Callable[[F], F]:
    """Options of the address, TLS and permitted host names; `port` is the default port."""
    pem = click.Path(exists=True, dir_okay=False, path_type=Path)
    return group_options(
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            default=port,
            show_default=True,
            help="Port to listen on; 0 chooses a free one.",
        ),
        click.option(
            "--allow-host",
            "allowed_hosts",
            multiple=True,
            metavar="NAME",
            help="Permitted host name of requests, if --host is open to the network; * for any.",
        ),
        click.option(
            "--tls-cert",
            type=pem,
            help="PEM file with the server's certificate and its chain; enables TLS.",
        ),
        click.option(
            "--tls-key", type=pem, help="PEM file with the certificate's key, readable by you only."
        ),
        click.option(
            "--allow-plain-text",
            "allows_plain_text",
            is_flag=True,
            help="Allow plain text if --host is open to the network, for a proxy with TLS in front.",
        ),
        *_raw_options(),
    )


def _raw_options() -> tuple[Callable[[F], F], ...]:
    """Options of the limits below HTTP."""
    limits = RawLimits()
    above = click.IntRange(min=1)
    return (
        click.option(
            "--connections-max",
            type=above,
            default=limits.connections_max,
            show_default=True,
            help="Limit of open connections; lower if the process may open fewer files.",
        ),
        click.option(
            "--connections-per-address-max",
            type=above,
            default=limits.per_address_max,
            show_default=True,
            help="Limit of open connections of one address; not for this machine and trusted proxies.",
        ),
        click.option(
            "--connections-reserved",
            type=above,
            default=limits.reserved,
            show_default=True,
            help="Further connections for this machine only.",
        ),
        click.option(
            "--held-kib-max",
            type=above,
            metavar="KIB",
            default=limits.held_bytes_max // KIB,
            show_default=True,
            help="Limit in KiB of all requests with incomplete headers.",
        ),
        click.option(
            "--held-kib-per-address-max",
            type=above,
            metavar="KIB",
            default=limits.held_bytes_per_address_max // KIB,
            show_default=True,
            help="The same for one address; not for this machine and trusted proxies.",
        ),
    )


def raw_limits_of(options: Mapping[str, Any]) -> RawLimits:
    """Return the limits below HTTP from the options."""
    return RawLimits(
        options["connections_max"],
        options["connections_per_address_max"],
        options["held_kib_max"] * KIB,
        options["held_kib_per_address_max"] * KIB,
        options["connections_reserved"],
    )


def require_safe_address(options: Mapping[str, Any]) -> TlsFiles | None:
    """Return the files for TLS, if given.

    Raises:
        UsageError: One file is missing. Or the address is open to the network, and host names, or the choice of TLS or
            plain text, are missing.
    """
    certificate, key = options["tls_cert"], options["tls_key"]
    if (certificate is None) != (key is None):
        raise UsageError("TLS needs both files; give --tls-cert and --tls-key")
    tls = TlsFiles(certificate, key) if certificate else None
    if options["host"] in LOCAL_HOSTS:
        return tls
    message = f"--host {options['host']} opens the server to the network"
    if not options["allowed_hosts"]:
        raise UsageError(f"{message}; list the permitted host names with --allow-host")
    if tls is None and not options["allows_plain_text"]:
        raise UsageError(
            f"{message} in plain text; give --tls-cert and --tls-key, or --allow-plain-text if a proxy "
            f"in front has TLS"
        )
    return tls


report_options: Callable[[F], F] = group_options(
    log_options,
    click.option("--json", "is_json", is_flag=True, help="Print one JSON object when the server listens."),
)
"""Options of the log, and of the format of the address report."""


def log_to_stderr(level: str, log_format: str, *, worker: int = 0) -> None:
    """Write log lines of this level and above to stderr, each with its session.

    Args:
        worker: Number of this worker; 0 without workers.
    """
    log = logging.StreamHandler()
    log.setFormatter(FORMATS[log_format](worker))
    log.addFilter(ContentFilter())
    logging.basicConfig(level=level.upper(), handlers=[log])


def run_server(work: Coroutine[None, None, None]) -> None:
    """Run a server in a process configured for many connections: open files, garbage collector, event loop."""
    raise_file_limit()
    tune_garbage_collector()
    drop_secret_variables()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(work)


def raise_file_limit() -> None:
    """Raise this process's limit of open files to `FILES_MAX`, or as far as the system permits."""
    if sys.platform == "win32":  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, FILES_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def tune_garbage_collector() -> None:
    """Exclude loaded objects from garbage collection, and collect other objects less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the factory of uvloop if `midstream[fast]` is installed, else None."""
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    return uvloop.new_event_loop
