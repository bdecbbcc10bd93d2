"""The file of MCP servers for an agent of the gateway: the `mcpServers` object that most programs use.

`${NAME}` in a value is replaced by that environment variable, so that the file needs no secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from midstream.errors import UsageError
from midstream.file_safety import read_own
from midstream.tools.forwarded_servers import TRANSPORTS, ForwardedMcpServer, Transport

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_TRANSPORTS: Mapping[str, Transport] = {
    **{each: each for each in TRANSPORTS},
    "streamable-http": "http",
    "streamable_http": "http",
    "streamableHttp": "http",
}
_OAUTH = {
    "client_id": ("client_id", "clientId", "CLIENT_ID"),
    "client_secret": ("client_secret", "clientSecret", "CLIENT_SECRET"),
    "scope": ("scope", "scopes"),
}
"""Names of a client registration's fields in the object `oauth` or `auth` of a server."""


def read_servers(path: Path) -> tuple[ForwardedMcpServer, ...]:
    """Return the servers in a file, sorted by name.

    Raises:
        UsageError: The file cannot be read or is invalid, or a variable is not set.
    """
    try:
        content = msgspec.json.decode(read_own(path, "the file of MCP servers", is_named=True))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{str(path)!r} is not valid JSON: {error}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict):
        raise UsageError(f'{str(path)!r} contains no servers; expected {{"mcpServers": {{"NAME": {{…}}}}}}')
    return tuple(_server(name, servers[name]) for name in sorted(servers))


def _server(name: str, description: Any) -> ForwardedMcpServer:  # noqa: ANN401 - JSON of another program
    try:
        settings = _expand(description)
        oauth: Mapping[str, Any] = next(
            (settings[key] for key in ("oauth", "auth") if isinstance(settings.get(key), dict)), {}
        )
        transport = (
            settings.get("type") or settings.get("transport") or ("http" if "url" in settings else "stdio")
        )
        fields = {
            "name": name,
            "transport": _TRANSPORTS.get(transport, transport),
            "command": settings.get("command", ""),
            "args": settings.get("args", ()),
            "env": settings.get("env", {}),
            "url": settings.get("url", ""),
            "headers": settings.get("headers", {}),
            "needs_auth": bool(oauth) or settings.get("needs_auth", False),
            **{field: _find_registered(oauth, names) for field, names in _OAUTH.items()},
        }
        server = msgspec.convert(fields, ForwardedMcpServer)
    except (AttributeError, TypeError, msgspec.ValidationError) as error:
        raise UsageError(f"the MCP server {name!r} has an invalid description: {error}") from error
    if not (server.command if server.transport == "stdio" else server.url):
        missing = "command" if server.transport == "stdio" else "url"
        raise UsageError(f"the MCP server {name!r} has no {missing!r}")
    return server


def _find_registered(oauth: Mapping[str, Any], names: tuple[str, ...]) -> str:
    value = next((oauth[name] for name in names if name in oauth), "")
    return " ".join(value) if isinstance(value, list) else str(value)


def _expand(value: Any) -> Any:  # noqa: ANN401 - JSON of another program
    match value:
        case str():
            return _VARIABLE.sub(_variable, value)
        case list():
            return [_expand(each) for each in value]
        case dict():
            return {key: _expand(each) for key, each in value.items()}
        case _:
            return value


def _variable(found: re.Match[str]) -> str:
    value = os.environ.get(found[1])
    if value is None:
        raise UsageError(f"the variable {found[1]} is not set; an MCP server needs it")
    return value
