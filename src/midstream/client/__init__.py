"""The client: `connect` to a server, speak in a session, lose the network, go on."""

from __future__ import annotations

from midstream.client.client import Client, Event, InterruptedTurn, connect

__all__ = ["Client", "Event", "InterruptedTurn", "connect"]
