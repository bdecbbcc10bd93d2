"""Abilities of an upstream, as far as decisions depend on them."""

from __future__ import annotations

from msgspec import Struct


class Abilities(Struct, frozen=True):
    """Abilities of an upstream beyond opening, resuming and answering.

    Args:
        takes_tools: It asks the client application to run tools (`ToolCallRequested`) and takes the results with
            the next `send`.
        takes_history: A fresh conversation gets the earlier entries as messages (`UpstreamMessage.before`), not as a
            transcript.
        takes_files: It reads attachments; otherwise they are named in words.
        takes_servers: It can be given MCP servers.
        can_reinstruct: A resumed conversation goes by the instructions of its new `Setup`.
        can_retool: A resumed conversation has the tools and servers of its new `Setup`.
        can_fork: `fork` works.
        can_oauth: Its MCP servers can be signed in to in a flow of its own, by the client application's client
            id and scope.
        can_secret: That flow takes a client secret, too.
        has_process: Each open agent has a process of its own, whose memory is free once the agent is closed.
        rest_s: Seconds without a message after which an open agent is closed by default: few for an agent that takes
            much memory and is resumed quickly.
        grants: Wishes for the making of an answer that it takes
            (`midstream.session.model_settings.ModelSettings`), by name.
    """

    takes_tools: bool = False
    takes_history: bool = False
    takes_files: bool = False
    takes_servers: bool = False
    can_reinstruct: bool = False
    can_retool: bool = False
    can_fork: bool = False
    can_oauth: bool = False
    can_secret: bool = False
    has_process: bool = False
    rest_s: float = 300.0
    grants: frozenset[str] = frozenset()
