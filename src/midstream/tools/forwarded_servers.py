"""MCP servers of a client application for its upstream agent, and the rules for forwarding them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Transport = Literal["stdio", "http", "sse"]
TRANSPORTS: tuple[Transport, ...] = ("stdio", "http", "sse")


class ForwardedMcpServer(Struct, frozen=True, omit_defaults=True):
    """An MCP server that the client application configures for its agent.

    Args:
        name: Its name, unique in a set.
        transport: Its transport.
        command, args, env: The program to start, for `stdio`.
        url, headers: Its address, for other transports.
        client_id, client_secret, scope: The client application's OAuth registration, for the upstream's own flow.
        needs_auth: Whether it requires OAuth.
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
    """The reason why a server cannot be forwarded."""

    TRANSPORT = "transport"
    """The upstream does not support the server's transport."""
    CREDENTIAL = "credential"
    """It needs OAuth, and the upstream has no flow for the client application's registration."""
    SECRET = "secret"  # noqa: S105 - a reason, no secret
    """The upstream's flow accepts no client secret, and the registration has one."""


_WORDS = {
    Why.TRANSPORT: "it cannot be reached over {transport} from there",
    Why.CREDENTIAL: "its sign-in cannot be shared: sign in to it there, or give it an authorization header",
    Why.SECRET: "its client secret cannot be handed on: register a public client, or sign in to it there",
}


class Skipped(Struct, frozen=True):
    """A server that is not forwarded."""

    name: str
    transport: Transport
    why: Why

    @property
    def words(self) -> str:
        """Return a notice for the user, without secrets."""
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
    """Return the servers that an upstream can use, and the skipped ones, both in the order of their names.

    An authorization header is a credential that can be forwarded; then the registration is not. Forwarded servers have
    no fields that the upstream cannot use.

    Args:
        can_oauth: Whether the upstream has its own OAuth flow with a client id and a scope.
        can_secret: Whether that flow accepts a client secret, too.
        transports: Its transports.
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
