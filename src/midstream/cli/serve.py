"""`midstream serve`: host an agent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click
import msgspec

from midstream.cli import Surroundings
from midstream.cli.agents import find_agent, find_server
from midstream.cli.listening import LOCAL_HOSTS, address_options, log_to_stderr, telling_options
from midstream.cli.places import made
from midstream.cli.terminal import clean
from midstream.core.retention import EVENTS_FOR_S, Retention
from midstream.errors import UsageError
from midstream.server.app import asgi
from midstream.server.serve import serve as serve_app
from midstream.store.contract import Store
from midstream.store.sqlite import SQLiteStore

DAY_S = 24 * 60 * 60


@click.command(short_help="Serve an agent.")
@click.argument("agent_name", metavar="MODULE:AGENT")
@address_options(port=8000)
@click.option(
    "--share-port",
    "shares_port",
    is_flag=True,
    help="Let other servers listen on the same port: start several with the same --store.",
)
@click.option(
    "--store",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The database of all sessions, made where it is missing (default: in midstream's data folder).",
)
@click.option(
    "--mcp",
    "servers",
    multiple=True,
    metavar="NAME=COMMAND|URL",
    help="Add the tools of this MCP server: a command to start, or an address; may be repeated.",
)
@click.option(
    "--keep-events-days",
    type=click.FloatRange(0, min_open=True),
    default=EVENTS_FOR_S / DAY_S,
    show_default=True,
    help="Days in which the events of a finished turn can be replayed; the conversation stays.",
)
@click.option(
    "--keep-sessions-days",
    type=click.FloatRange(0, min_open=True),
    help="Days after its last change in which a session is kept; then it is deleted (default: for ever).",
)
@click.option(
    "--key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Encrypt sessions under the first key of this file; made where there is neither it nor a store yet.",
)
@telling_options
@click.pass_obj
def serve(
    surroundings: Surroundings,
    agent_name: str,
    host: str,
    port: int,
    shares_port: bool,  # noqa: FBT001 - click passes options so
    store: Path | None,
    allowed_hosts: tuple[str, ...],
    servers: tuple[str, ...],
    keep_events_days: float,
    keep_sessions_days: float | None,
    key_file: Path | None,
    log_level: str,
    is_json: bool,  # noqa: FBT001 - click passes options so
) -> None:
    """Serve an agent: MODULE:AGENT names a `midstream.Agent`, searched in the current folder first.

    Interrupted turns of an earlier process are carried on. Ctrl-C ends within 10 s; what is cut then is carried on
    by the next start.
    """
    log_to_stderr(log_level)
    agent = find_agent(agent_name)
    if servers:
        agent = agent.with_tools(*map(find_server, servers))
    path = store or made(surroundings.places.data) / surroundings.places.store.name
    if host not in LOCAL_HOSTS:
        if not allowed_hosts:
            raise UsageError(
                f"--host {host} lets the network in: name the hosts under which clients may ask with --allow-host"
            )
        warning = "Warning: there is no login yet: whoever reaches this address can use and read everything."
        click.echo(surroundings.talk.yellow(warning), err=True, color=True)
    retention = Retention(
        events_for_s=keep_events_days * DAY_S,
        sessions_for_s=keep_sessions_days * DAY_S if keep_sessions_days else None,
    )
    app = asgi(agent, store=_store_of(path, key_file), retention=retention)

    def tell(url: str) -> None:
        if is_json:
            ready = {"url": url, "pid": os.getpid(), "store": str(path), "agent": agent.name}
            click.echo(msgspec.json.encode(ready))
            return
        click.echo(f"{clean(agent.name)} on {url}, sessions in {path}. Ctrl-C ends it.", err=True)
        click.echo(f"Talk to it in a browser, or with: midstream chat {url}", err=True)

    asyncio.run(
        serve_app(
            app,
            host=host,
            port=port,
            shares_port=shares_port,
            allowed_hosts=allowed_hosts,
            on_listening=tell,
        )
    )


def _store_of(path: Path, key_file: Path | None) -> Store:
    store = SQLiteStore(path)
    if key_file is None:
        return store
    try:
        from midstream.store.ciphers import FileKeys  # noqa: PLC0415 - an extra that few need
        from midstream.store.encrypted import encrypted  # noqa: PLC0415 - see above
    except ModuleNotFoundError as error:
        raise UsageError("--key-file needs more: pip install 'midstream[crypto]'") from error
    if not key_file.exists() and not path.exists():
        FileKeys.make(key_file)
    return encrypted(store, FileKeys(key_file))
