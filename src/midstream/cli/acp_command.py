"""`midstream acp`: an agent for editors, over stdin and stdout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from midstream.cli import Invocation
from midstream.cli.agents import find_agent, find_server
from midstream.cli.listening import log_to_stderr, run_server
from midstream.cli.option_groups import encryption_option, log_options, mcp_option, sessions_store_option
from midstream.cli.store_option import encrypted_store
from midstream.extras import extra
from midstream.paths import make_folder

with extra("acp"):
    from acp.connection import Connection
    from acp.stdio import stdio_streams

    from midstream.server.acp_server import AcpServer

LINE_BYTES_MAX = 64 * 1024 * 1024
"""Greatest size of a message, such as one with a picture or a file."""


@click.command(short_help="Serve an agent to an editor (Agent Client Protocol).")
@click.argument("agent_name", metavar="MODULE:AGENT")
@sessions_store_option
@mcp_option
@encryption_option("sessions", "store")
@log_options
@click.pass_obj
def acp(invocation: Invocation, /, **options: Any) -> None:  # noqa: ANN401 - click passes options so
    """Serve an agent to an editor, such as Zed, over the Agent Client Protocol. The editor starts this command.

    MODULE:AGENT names a `midstream.Agent`; the current folder is searched first. Sessions are in the store. An
    interrupted turn continues when the command is started again. Other servers may use the store at the same time.
    """
    log_to_stderr(options["log_level"], options["log_format"])
    _keep_stdio()
    make_folder(invocation.places.data)
    path = options["store"] or make_folder(invocation.places.store.parent) / invocation.places.store.name
    agent = find_agent(options["agent_name"])
    if options["servers"]:
        agent = agent.with_tools(*map(find_server, options["servers"]))
    store = encrypted_store(path, options["key_file"], is_escrowed=False)
    run_server(_serve(AcpServer(agent, store, cwd=str(Path.cwd()))))


def _keep_stdio() -> None:
    """Reserve stdin and stdout for the protocol: tools print to stderr, and read an empty stdin."""
    sys.stdout.flush()
    sys.stdin = os.fdopen(os.dup(0), encoding="utf-8")
    protocol_out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = protocol_out


async def _serve(server: AcpServer) -> None:
    """Answer the editor until it closes stdin."""
    reader, writer = await stdio_streams(limit=LINE_BYTES_MAX)
    sys.stdin, sys.stdout = sys.__stdin__, sys.stderr  # for tools: stdin is empty
    connection = Connection(server.handle, writer, reader, listening=False)
    server.connect(connection)
    listening = server.host.world.spawn(connection.main_loop(), name="acp")
    if sys.platform != "win32":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, listening.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await listening
    finally:
        await server.stop()
        await connection.close()
