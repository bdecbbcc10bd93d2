"""MCP servers of the client application for an upstream; each reason to omit one is logged once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from midstream.agents.upstream_abilities import Abilities
from midstream.tools.forwarded_servers import TRANSPORTS, ForwardedMcpServer, Transport, select_forwarded

_log = logging.getLogger(__name__)


class Forwarding:
    """The servers for one upstream, during its life.

    Args:
        abilities: Whether it has its own flow to sign in to servers.
    """

    def __init__(self, name: str, abilities: Abilities) -> None:
        self._name = name
        self._abilities = abilities
        self._logged: set[str] = set()

    def select(
        self, servers: Iterable[ForwardedMcpServer], transports: Collection[Transport] = TRANSPORTS
    ) -> tuple[ForwardedMcpServer, ...]:
        """Return the servers to pass on, in the order of their names; log each new reason to omit one."""
        kept, skipped = select_forwarded(
            servers,
            can_oauth=self._abilities.can_oauth,
            can_secret=self._abilities.can_secret,
            transports=transports,
        )
        for left in skipped:
            if left.words not in self._logged:
                self._logged.add(left.words)
                _log.warning("%s: %s", self._name, left.words)
        return kept
