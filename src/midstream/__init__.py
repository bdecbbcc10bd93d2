"""midstream: AI-agent sessions that survive kills, cuts and edits.

The public names. Each is loaded at its first use, so that `import midstream` is fast and a client never loads a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.lazy_names import lazy_names
from midstream.version import __version__ as __version__

if TYPE_CHECKING:
    from midstream.agents.pool import Pooled as Pooled
    from midstream.client.client import Client as Client
    from midstream.client.client import connect as connect
    from midstream.client.client_settings import ClientSettings as ClientSettings
    from midstream.engine.agent import Agent as Agent
    from midstream.engine.agent import sub_agent as sub_agent
    from midstream.engine.host import Host as Host
    from midstream.engine.sleeping import MemoryLimits as MemoryLimits
    from midstream.errors import MidstreamError as MidstreamError
    from midstream.errors import TurnFailedError as TurnFailedError
    from midstream.history.operations import Repaired as Repaired
    from midstream.history.operations import check as check
    from midstream.history.operations import convert as convert
    from midstream.history.operations import repair as repair
    from midstream.models.model import Model as Model
    from midstream.protocol.events import Event as Event
    from midstream.protocol.stream_settings import StreamSettings as StreamSettings
    from midstream.server.app import asgi as asgi
    from midstream.session.retention import Retention as Retention
    from midstream.timing import StallBudgets as StallBudgets
    from midstream.tools.function_tools import DidNotHappen as DidNotHappen
    from midstream.tools.function_tools import Happened as Happened
    from midstream.tools.function_tools import Tool as Tool
    from midstream.tools.function_tools import current_call as current_call
    from midstream.tools.function_tools import question as question
    from midstream.tools.function_tools import report_progress as report_progress
    from midstream.tools.function_tools import tool as tool

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "agents.pool": "Pooled",
        "client.client": "Client connect",
        "client.client_settings": "ClientSettings",
        "engine.agent": "Agent sub_agent",
        "engine.host": "Host",
        "engine.sleeping": "MemoryLimits",
        "errors": "MidstreamError TurnFailedError",
        "history.operations": "Repaired check convert repair",
        "models.model": "Model",
        "protocol.events": "Event",
        "protocol.stream_settings": "StreamSettings",
        "server.app": "asgi",
        "session.retention": "Retention",
        "timing": "StallBudgets",
        "tools.function_tools": ("DidNotHappen Happened Tool current_call question report_progress tool"),
    },
)
