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
from midstream.errors import UsageError
from midstream.server.app import asgi
from midstream.server.serve import serve as serve_app


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
    app = asgi(agent, store=path)

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
