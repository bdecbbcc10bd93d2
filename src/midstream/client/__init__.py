"""The client: `connect` to a server, and send messages to sessions, with recovery from network failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.lazy_names import lazy_names

if TYPE_CHECKING:
    from midstream.client.client import Client as Client
    from midstream.client.client import InterruptedTurn as InterruptedTurn
    from midstream.client.client import connect as connect
    from midstream.client.client_settings import ClientSettings as ClientSettings
    from midstream.protocol.events import Event as Event
    from midstream.protocol.events import PlaybackLost as PlaybackLost
    from midstream.session.questions import Question as Question

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "client.client": "Client InterruptedTurn connect",
        "client.client_settings": "ClientSettings",
        "protocol.events": "Event PlaybackLost",
        "session.questions": "Question",
    },
)
