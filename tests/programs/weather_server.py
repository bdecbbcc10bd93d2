"""An MCP server with one tool, given to agent programs by the gateway."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("forwarded", log_level="ERROR")


@server.tool()
def look_up_weather(place: str) -> str:
    """Return the weather of a place."""
    return f"rain in {place}"


server.run("stdio")
