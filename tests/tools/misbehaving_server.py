"""An MCP server, built with the official SDK; its tools misbehave on purpose.

Without an argument it serves stdio; with the number of an open, listening socket, streamable HTTP. `LEDGER`
names a file with one line for each event at the server.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import uvicorn
from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

LEDGER = Path(os.environ["LEDGER"])
READ_ONLY = ToolAnnotations(read_only_hint=True)

server = MCPServer("tested", log_level="ERROR")


def note(line: str) -> None:
    with LEDGER.open("a", encoding="utf-8") as ledger:
        ledger.write(f"{line}\n")


@server.tool(annotations=READ_ONLY)
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def put(text: str) -> str:
    """Put a text."""
    note(f"put {text}")
    return f"put {text} ☃"


@server.tool()
async def send(text: str, ctx: Context) -> str:
    """Send a text, once per key."""
    key = dict(ctx.request_context.meta or {}).get("midstream/effect_key")
    note(f"send {text} {key}")
    await ctx.report_progress(1, 2, "half")
    return "sent"


@server.tool()
async def die() -> str:
    """Die in the middle."""
    note("die")
    os._exit(3)


@server.tool(annotations=READ_ONLY)
async def die_reading() -> str:
    """Die while reading."""
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Never answer."""
    note("hang")
    try:
        await asyncio.Event().wait()
    finally:
        note("hang was cancelled")
    return ""


@server.tool(annotations=READ_ONLY)
def big() -> str:
    """Answer at length."""
    return "x" * 5_000_000


@server.tool(annotations=READ_ONLY)
def picture() -> list[str | Image]:
    """Answer with a picture."""
    return ["look:", Image(data=b"\x89PNG" * 300, format="png")]


@server.tool(annotations=READ_ONLY)
def fail() -> str:
    """Fail."""
    raise ToolError("it does not work ☃")


@server.tool()
def replace() -> str:
    """Take `add` away and offer `subtract` instead."""
    server.remove_tool("add")
    server.add_tool(subtract, annotations=READ_ONLY)
    return "replaced"


def subtract(a: int, b: int) -> int:
    """Subtract."""
    return a - b


@server.tool(name="odd.name/ü")
def odd() -> str:
    """Have a name that no provider takes."""
    return "odd"


def broken() -> str:
    """Have a schema that is none."""
    return ""


server.add_tool(broken)
tool = server._tool_manager.get_tool("broken")
assert tool is not None
tool.parameters = {"type": "object", "properties": {"a": {"type": "no such type"}}}


def deep() -> str:
    """Have a schema of 81 levels."""
    return ""


server.add_tool(deep)
tool = server._tool_manager.get_tool("deep")
assert tool is not None
tool.parameters = {"type": "object"}
for _ in range(40):
    tool.parameters = {"type": "object", "properties": {"a": tool.parameters}}

if __name__ == "__main__":
    note(f"started {os.getpid()}")
    sys.stderr.write("token of a fool: hunter2\n")
    sys.stderr.flush()
    if sys.argv[1:]:
        listening = socket.socket(fileno=int(sys.argv[1]))
        app = server.streamable_http_app()
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
    else:
        server.run()
