"""Abilities of an upstream that decisions depend on."""

from __future__ import annotations

import math

from msgspec import Struct

from midstream.number_checks import require_seconds


class Abilities(Struct, frozen=True):
    """Abilities of an upstream, in addition to opening, resuming and answering.

    Args:
        takes_tools: It requests tool runs (`ToolCallRequested`) and takes the results with the next `send`.
        takes_history: A fresh conversation gets the earlier entries as messages (`UpstreamMessage.before`), not as a
            transcript.
        takes_files: It reads attachments; otherwise the text contains only their names.
        takes_servers: It accepts MCP servers.
        can_reinstruct: A resumed conversation follows the instructions of its new `Setup`.
        can_retool: A resumed conversation has the tools and servers of its new `Setup`.
        can_fork: `fork` works.
        can_oauth: It has its own flow to sign in to MCP servers, with the client application's client id and scope.
        can_secret: That flow accepts a client secret, too.
        stores_transcripts: It writes conversations into a store of midstream, except those of a private `Setup`.
        has_process: Each open agent has a process of its own, whose memory is free once the agent is closed.
        rest_s: Default seconds without a message until an open agent is closed: few for much memory and a quick resume.
        grants: Names of the settings for an answer that it accepts (`midstream.session.model_settings.ModelSettings`).
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
    stores_transcripts: bool = False
    has_process: bool = False
    rest_s: float = 300.0
    grants: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        require_seconds("rest_s", self.rest_s, most=math.inf)
