"""The client: `connect` to a server, speak in a session, lose the network, go on."""

from __future__ import annotations

from midstream.client.client import Client, InterruptedTurn, connect
from midstream.client.client_settings import ClientSettings
from midstream.protocol.events import Event, PlaybackLost
from midstream.session.questions import Question

__all__ = ["Client", "ClientSettings", "Event", "InterruptedTurn", "PlaybackLost", "Question", "connect"]
