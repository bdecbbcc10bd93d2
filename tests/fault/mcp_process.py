"""An MCP server whose tools write into the ledger: `python -m tests.fault.mcp_process FOLDER HOW`.

HOW selects the event in the middle of a call with effects: `mcp`, none; `mcp_dies`, this process is killed;
`kills`, its parent is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Literal

import msgspec
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ToolAnnotations

from midstream.environment import World
from midstream.tools.mcp import EFFECT_KEY
from tests.fault.turn import PIDS, LedgerLine

folder, how = Path(sys.argv[1]), sys.argv[2]
server = MCPServer("ledger", log_level="ERROR")


def note(name: str, key: str, what: Literal["began", "ended"]) -> None:
    """Write that a run began or ended; the lines before determine its number."""
    session, turn, response, call_id = key.split("/")
    lines = [
        msgspec.json.decode(line, type=LedgerLine) for line in (folder / "ledger").read_bytes().splitlines()
    ]
    place = (session, int(turn), int(response), call_id)
    before = sum(
        (each.session, each.turn, each.response, each.call_id, each.what) == (*place, "began")
        for each in lines
    )
    line = LedgerLine(*place, before + (what == "began"), name, what)
    with (folder / "ledger").open("ab") as ledger:
        ledger.write(msgspec.json.encode(line) + b"\n")


async def run(name: str, ctx: Context) -> str:
    key = str(dict(ctx.request_context.meta or {})[EFFECT_KEY])
    note(name, key, "began")
    if name == "write" and how == "mcp_dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "write" and how == "kills":
        os.kill(os.getppid(), signal.SIGKILL)
    await World().sleep(0.01)
    note(name, key, "ended")
    return "it was done"


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
async def look(ctx: Context) -> str:
    """Look."""
    return await run("look", ctx)


@server.tool()
async def write(ctx: Context) -> str:
    """Write."""
    return await run("write", ctx)


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
async def put(ctx: Context) -> str:
    """Put."""
    return await run("put", ctx)


if __name__ == "__main__":
    with (folder / PIDS).open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    server.run()
