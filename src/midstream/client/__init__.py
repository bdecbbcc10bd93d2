"""The client: `connect` to a server, speak in a session, lose the network, go on."""

from __future__ import annotations

from midstream.client.client import Client, InterruptedTurn, connect
from midstream.client.settings import ClientSettings
from midstream.core.events import Event, PlaybackLost
from midstream.core.questions import Question

__all__ = ["Client", "ClientSettings", "Event", "InterruptedTurn", "PlaybackLost", "Question", "connect"]
