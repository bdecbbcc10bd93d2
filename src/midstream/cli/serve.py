"""`midstream serve`: host an agent."""

from __future__ import annotations

import asyncio
import importlib
import math
import os
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from midstream.background_loops import spawn_loop
from midstream.cli import Invocation
from midstream.cli.agents import find_access, find_agent, find_server
from midstream.cli.listening import (
    LOCAL_HOSTS,
    address_options,
    log_to_stderr,
    raw_limits_of,
    report_options,
    require_safe_address,
    run_server,
)
from midstream.cli.option_groups import encryption_option, mcp_option, sessions_store_option
from midstream.cli.store_option import encrypted_store
from midstream.cli.terminal import clean
from midstream.cli.workers import run_workers, workers_option
from midstream.engine.agent import Agent
from midstream.engine.sleeping import MemoryLimits
from midstream.environment import World
from midstream.errors import UsageError
from midstream.local_keys import read_or_make_key
from midstream.observability.observers import Observer
from midstream.paths import make_folder
from midstream.server.app import App, asgi
from midstream.server.audit_log import AuditLog
from midstream.server.auth.access import Access, this_user, token_file
from midstream.server.settings_file import SettingsFile
from midstream.server.uvicorn_server import serve as serve_app
from midstream.server.worker_link import WorkerLink, find_link
from midstream.session.retention import BYTES_MAX, EVENTS_FOR_S, EVENTS_MAX, Retention
from midstream.store.store_registry import show_store

T = TypeVar("T", int, float)

DAY_S = 24 * 60 * 60
MIB = 2**20


def _amount(value: str) -> float:
    """Parse a limit: a number above 0, or `all` for infinity.

    Raises:
        click.BadParameter: The value is invalid.
    """
    return _limit(value, float, "a number")


def _count(value: str) -> float:
    """Parse a limit that is a whole number, like `_amount`."""
    return _limit(value, int, "a whole number")


def _limit(value: str, number: type[int | float], kind: str) -> float:
    try:
        limit = math.inf if value == "all" else number(value)
    except ValueError:
        limit = 0
    if not limit > 0:
        raise click.BadParameter(f"{value!r} is not a limit; give {kind} above 0, or 'all'")
    return limit


@click.command(short_help="Serve an agent.")
@click.argument("agent_name", metavar="MODULE:AGENT")
@address_options(port=8000)
@click.option(
    "--share-port",
    "shares_port",
    is_flag=True,
    help="Share the port with other servers; start several with the same --store.",
)
@workers_option
@sessions_store_option
@click.option(
    "--no-auth",
    "is_open",
    is_flag=True,
    help="Do not authenticate: every program on this machine has access.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Authenticate by a file of tokens, readable by you only; `midstream access add` writes it.",
)
@click.option("--auth", "access_name", metavar="MODULE:ACCESS", help="Authenticate by your own `Access`.")
@click.option(
    "--allow-origin",
    "allowed_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let pages of this origin, such as https://app.example, use the server, without cookies; may be repeated.",
)
@click.option(
    "--allow-webhook",
    "webhook_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let subscriptions of plain streams send webhooks to this origin of a private network, such as "
    "http://127.0.0.1:9000 (without a port: all ports of the host); may be repeated.",
)
@click.option(
    "--trust-proxy",
    "trusted_proxies",
    multiple=True,
    metavar="ADDRESS",
    help="A proxy whose X-Forwarded-For and X-Forwarded-Proto are trusted; may be repeated.",
)
@mcp_option
@click.option("--metrics", "has_metrics", is_flag=True, help="Serve counters for Prometheus at /metrics.")
@click.option(
    "--otel",
    "has_spans",
    is_flag=True,
    help="Send spans and metrics to OpenTelemetry, as configured in this process.",
)
@click.option(
    "--keep-events-days",
    type=_amount,
    metavar="DAYS|all",
    default=str(round(EVENTS_FOR_S / DAY_S)),
    show_default=True,
    help="Days for which the events of a finished turn can be replayed; the conversation stays.",
)
@click.option(
    "--keep-events-count",
    type=_count,
    metavar="COUNT|all",
    default=str(EVENTS_MAX),
    show_default=True,
    help="Events of one session that can be replayed; the conversation stays.",
)
@click.option(
    "--keep-events-mib",
    type=_amount,
    metavar="MIB|all",
    default=str(BYTES_MAX // MIB),
    show_default=True,
    help="MiB (1,048,576 bytes) of events of one session that can be replayed; the conversation stays.",
)
@click.option(
    "--keep-sessions-days",
    type=_amount,
    metavar="DAYS|all",
    default="all",
    show_default=True,
    help="Days after its last change until a session is deleted.",
)
@click.option(
    "--memory-mib",
    type=click.IntRange(min=1),
    metavar="MIB",
    default=MemoryLimits().bytes_max // MIB,
    show_default=True,
    help="Limit in MiB of all sessions in memory, estimated from their journals.",
)
@click.option(
    "--settings",
    "settings_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Settings of streams, as TOML: is_recovery_on, look_back_s, heartbeat_s, in_flight_max, coalesce_s, "
    "tail_bytes_max. May be changed while the server runs.",
)
@encryption_option("sessions", "store")
@click.option(
    "--encrypt",
    "encrypting",
    type=click.Choice(["client"]),
    help="Encrypt each session under its client's secret too; only that client can open it.",
)
@click.option(
    "--audit-log",
    "audit_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Append one JSON line for each act of a principal, and for each refusal, to this file.",
)
@report_options
@click.pass_obj
def serve(invocation: Invocation, /, **options: Any) -> None:  # noqa: ANN401 - click passes options so
    """Serve an agent. MODULE:AGENT names a `midstream.Agent`; the current folder is searched first.

    By default, only your own commands on this machine, and browsers that opened the printed link, have access (see
    --no-auth, --token-file, --auth). Interrupted turns of an earlier process continue. Ctrl-C ends the server within 10
    s; the next start continues the interrupted work.
    """
    link = find_link()
    log_to_stderr(options["log_level"], options["log_format"], worker=link.setup.number if link else 0)
    make_folder(invocation.places.data)
    path = options["store"] or make_folder(invocation.places.store.parent) / invocation.places.store.name
    _refuse_open_doors(options)
    login = "" if _is_asking_otherwise(options) else World().new_id("login")
    report = partial(_report, invocation, login=login, is_json=options["is_json"])
    if link is None and options["workers"] > 1:
        require_safe_address(options)
        run_workers(options, path, login=login, on_ready=report)
        return
    _serve_here(invocation, options, path, link, link.setup.login if link else login, report)


def _serve_here(
    invocation: Invocation,
    options: dict[str, Any],
    path: str | Path,
    link: WorkerLink | None,
    login: str,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Serve in this process: the whole server, or one of its workers."""
    agent = find_agent(options["agent_name"])
    if options["servers"]:
        agent = agent.with_tools(*map(find_server, options["servers"]))
    tls = require_safe_address(options)
    settings = SettingsFile(options["settings_path"]) if options["settings_path"] else None
    app = asgi(
        agent,
        store=encrypted_store(path, options["key_file"], is_escrowed=options["encrypting"] == "client"),
        access=_access_of(invocation, options, login, start=link.setup.start if link else ""),
        allowed_origins=options["allowed_origins"],
        webhook_origins=options["webhook_origins"],
        observers=_observers_of(agent, options),
        retention=_retention_of(options),
        memory=MemoryLimits(bytes_max=options["memory_mib"] * MIB),
        settings=settings.read() if settings else None,
        audit=AuditLog(options["audit_path"]) if options["audit_path"] else None,
    )

    if link is not None:
        app.reports.worker = link.setup.number
    if link is not None and app.metrics is not None:
        app.metrics.worker, app.metrics.other_pages = link.setup.number, link.other_pages
        link.page_of = app.metrics.render

    def report_url(url: str) -> None:
        ready = {"url": url, "pid": os.getpid(), "store": show_store(path), "agent": agent.name}
        if link is None:
            report(ready)
        else:
            link.report = ready

    serving = serve_app(
        app,
        host=options["host"],
        port=options["port"],
        shares_port=options["shares_port"],
        allowed_hosts=options["allowed_hosts"],
        trusted_proxies=options["trusted_proxies"],
        tls=tls,
        allows_plain_text=options["allows_plain_text"],
        on_listening=report_url,
        link=link,
        raw_limits=raw_limits_of(options),
    )
    run_server(_run_with_settings(serving, app, settings))


def _report(invocation: Invocation, ready: dict[str, Any], *, login: str, is_json: bool) -> None:
    """Print the address of the server; on a terminal with a login link, which must not be in a log.

    Args:
        ready: The members `url`, `pid`, `store`, `agent`, and `workers` if there are several.
    """
    url: str = ready["url"]
    is_shown = bool(login) and invocation.talk.is_terminal and not is_json
    page = f"{url}/#login={login}" if is_shown else f"{url}/"
    if is_json:
        click.echo(msgspec.json.encode({**ready, "page": page}))
        return
    workers = f", {ready['workers']} workers" if "workers" in ready else ""
    click.echo(f"{clean(ready['agent'])} on {url}{workers}. Ctrl-C stops it.", err=True)
    click.echo(f"Sessions: {ready['store']}", err=True)
    click.echo(f"Terminal: midstream chat {url}", err=True)
    how = ""
    if login:
        how = (
            " (valid once; `midstream login` prints another)"
            if is_shown
            else f" (log in: midstream login {url})"
        )
    # On a separate line: a wrapped link is unusable.
    click.echo(f"Browser{how}:\n{page}", err=True)


async def _run_with_settings(
    serving: Coroutine[None, None, None], app: App, settings: SettingsFile | None
) -> None:
    """Serve to the end, and apply changed settings."""
    if settings is None:
        await serving
        return
    following = spawn_loop(
        app.world, partial(settings.follow, partial(setattr, app, "settings")), name="follow settings"
    )
    try:
        await serving
    finally:
        following.cancel()
        await asyncio.wait([following])


def _observers_of(agent: Agent, options: dict[str, Any]) -> list[Observer]:
    """Return the observers.

    Raises:
        UsageError: The extra is not installed.
    """
    observers: list[Observer] = []
    try:
        if options["has_metrics"]:
            prometheus = importlib.import_module("midstream.observability.prometheus")
            observers.append(prometheus.Prometheus())
        if options["has_spans"]:
            otel = importlib.import_module("midstream.observability.opentelemetry")
            observers.append(otel.OpenTelemetry(agent=agent.name))
    except ImportError as error:
        raise UsageError(
            "an extra is missing: pip install 'midstream[prometheus]', 'midstream[otel]'"
        ) from error
    return observers


def _is_asking_otherwise(options: dict[str, Any]) -> bool:
    return bool(options["is_open"] or options["token_file"] or options["access_name"])


def _refuse_open_doors(options: dict[str, Any]) -> None:
    """Refuse unsafe options of authentication.

    Raises:
        UsageError: The options exclude each other, or open the server to the network without authentication.
    """
    ways = [bool(options[name]) for name in ("is_open", "token_file", "access_name")]
    if sum(ways) > 1:
        raise UsageError("--no-auth, --token-file and --auth exclude each other; give one of them")
    host = options["host"]
    if host in LOCAL_HOSTS:
        return
    if options["is_open"]:
        raise UsageError("--no-auth serves this machine only; remove --host")
    if not any(ways):
        raise UsageError(
            f"--host {host} opens the server to the network; authenticate with --token-file or --auth"
        )


def _access_of(invocation: Invocation, options: dict[str, Any], login: str, *, start: str) -> Access | None:
    if options["is_open"]:
        return None
    if options["access_name"]:
        return find_access(options["access_name"])
    if options["token_file"]:
        return Access(authenticate=token_file(options["token_file"]))
    key = read_or_make_key(invocation.places.data)
    return Access(authenticate=this_user(key, shares_port=options["shares_port"], start=start), login=login)


def _retention_of(options: dict[str, Any]) -> Retention:
    mib = options["keep_events_mib"]
    return Retention(
        events_for_s=_finite_or_none(options["keep_events_days"] * DAY_S),
        events_max=_finite_or_none(options["keep_events_count"]),
        bytes_max=None if mib == math.inf else math.ceil(mib * MIB),
        sessions_for_s=_finite_or_none(options["keep_sessions_days"] * DAY_S),
    )


def _finite_or_none(limit: T) -> T | None:
    return None if limit == math.inf else limit
