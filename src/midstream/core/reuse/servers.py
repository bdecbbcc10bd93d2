"""The MCP servers that a host forwards to its upstream."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class McpServer(Struct, frozen=True, omit_defaults=True):
    """An MCP server that the host wants its agent to have.

    Args:
        name: Unique within a set.
        transport: How it is reached.
        command, args, env: What to start, for `stdio`.
        url, headers: Where it is, otherwise.
        client_id, client_secret, scope: The host's OAuth client registration, for the upstream's own flow.
        needs_auth: It wants OAuth, whoever asks.
    """

    name: str
    transport: Literal["stdio", "http", "sse"] = "stdio"
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str = ""
    headers: dict[str, str] = {}
    client_id: str = ""
    client_secret: str = ""
    scope: str = ""
    needs_auth: bool = False
