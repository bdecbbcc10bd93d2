"""The MCP servers that a host forwards to its upstream, and which of them can be forwarded."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Transport = Literal["stdio", "http", "sse"]
TRANSPORTS: tuple[Transport, ...] = ("stdio", "http", "sse")


class ForwardedMcpServer(Struct, frozen=True, omit_defaults=True):
    """An MCP server that the host configures for its agent.

    Args:
        name: Unique within a set.
        transport: How it is reached.
        command, args, env: What to start, for `stdio`.
        url, headers: Where it is, otherwise.
        client_id, client_secret, scope: The host's OAuth client registration, for the upstream's own flow.
        needs_auth: It requires OAuth of every client.
    """

    name: str
    transport: Transport = "stdio"
    command: str = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str = ""
    headers: dict[str, str] = {}
    client_id: str = ""
    client_secret: str = ""
    scope: str = ""
    needs_auth: bool = False


class Why(StrEnum):
    """Why a server cannot be forwarded."""

    TRANSPORT = "transport"
    """The upstream does not reach servers in this way."""
    CREDENTIAL = "credential"
    """It needs OAuth, and the upstream has no flow of its own that the host's registration would fit."""
    SECRET = "secret"  # noqa: S105 - a reason, no secret
    """The upstream has a flow of its own, but takes no client secret, and this registration has one."""


_WORDS = {
    Why.TRANSPORT: "it cannot be reached over {transport} from there",
    Why.CREDENTIAL: "its sign-in cannot be shared: sign in to it there, or give it an authorization header",
    Why.SECRET: "its client secret cannot be handed on: register a public client, or sign in to it there",
}


class Skipped(Struct, frozen=True):
    """A server that is left out."""

    name: str
    transport: Transport
    why: Why

    @property
    def words(self) -> str:
        """Return a notice for the user, to be shown once; names and nothing secret."""
        return (
            f"the MCP server {self.name!r} is left out: {_WORDS[self.why].format(transport=self.transport)}"
        )


def select_forwarded(
    servers: Iterable[ForwardedMcpServer],
    *,
    can_oauth: bool = False,
    can_secret: bool = False,
    transports: Collection[Transport] = TRANSPORTS,
) -> tuple[tuple[ForwardedMcpServer, ...], tuple[Skipped, ...]]:
    """Return the servers that an upstream can be given, and those it cannot, both in the order of their names.

    A header that authorizes is a credential that can be shared as it is; the registration then stays here. What is kept
    carries nothing that the upstream has no use for.

    Args:
        can_oauth: The upstream has an OAuth flow of its own that takes a client id and a scope.
        can_secret: That flow takes a client secret, too.
        transports: How it reaches servers.
    """
    kept: list[ForwardedMcpServer] = []
    skipped: list[Skipped] = []
    for server in sorted(servers, key=lambda server: server.name):
        why = _why_not(server, can_oauth=can_oauth, can_secret=can_secret, transports=transports)
        if why is not None:
            skipped.append(Skipped(server.name, server.transport, why))
        elif _is_authorized(server) or not can_oauth or server.transport == "stdio":
            kept.append(replace(server, client_id="", client_secret="", scope=""))
        else:
            kept.append(server)
    return tuple(kept), tuple(skipped)


def _why_not(
    server: ForwardedMcpServer, *, can_oauth: bool, can_secret: bool, transports: Collection[Transport]
) -> Why | None:
    if server.transport not in transports:
        return Why.TRANSPORT
    if server.transport == "stdio" or _is_authorized(server):
        return None
    if not can_oauth and (server.needs_auth or server.client_id):
        return Why.CREDENTIAL
    if server.client_secret and not can_secret:
        return Why.SECRET
    return None


def _is_authorized(server: ForwardedMcpServer) -> bool:
    return any(header.lower() == "authorization" and value for header, value in server.headers.items())
