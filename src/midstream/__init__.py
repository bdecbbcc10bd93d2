"""midstream: AI-agent sessions that survive anything.

The public names. Each is loaded when it is first used, so that `import midstream` costs next to nothing and a
client never pays for a server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from midstream.version import __version__ as __version__

if TYPE_CHECKING:
    from midstream.agents.pool import Pooled
    from midstream.client import Client, ClientSettings, connect
    from midstream.engine.agent import Agent, sub_agent
    from midstream.engine.host import Host
    from midstream.engine.sleeping import MemoryLimits
    from midstream.errors import MidstreamError, TurnFailedError
    from midstream.history.operations import Repaired, check, convert, repair
    from midstream.models.model import Model
    from midstream.protocol.events import Event
    from midstream.protocol.stream_settings import StreamSettings
    from midstream.server.app import asgi
    from midstream.session.retention import Retention
    from midstream.tools.function_tools import (
        DidNotHappen,
        Happened,
        Tool,
        current_call,
        question,
        report_progress,
        tool,
    )

_HOMES = {
    "Agent": "midstream.engine.agent",
    "Client": "midstream.client",
    "ClientSettings": "midstream.client",
    "DidNotHappen": "midstream.tools.function_tools",
    "Event": "midstream.protocol.events",
    "Happened": "midstream.tools.function_tools",
    "Host": "midstream.engine.host",
    "MidstreamError": "midstream.errors",
    "Model": "midstream.models.model",
    "Pooled": "midstream.agents.pool",
    "Repaired": "midstream.history.operations",
    "MemoryLimits": "midstream.engine.sleeping",
    "Retention": "midstream.session.retention",
    "StreamSettings": "midstream.protocol.stream_settings",
    "Tool": "midstream.tools.function_tools",
    "TurnFailedError": "midstream.errors",
    "asgi": "midstream.server.app",
    "check": "midstream.history.operations",
    "connect": "midstream.client",
    "convert": "midstream.history.operations",
    "current_call": "midstream.tools.function_tools",
    "question": "midstream.tools.function_tools",
    "repair": "midstream.history.operations",
    "report_progress": "midstream.tools.function_tools",
    "sub_agent": "midstream.engine.agent",
    "tool": "midstream.tools.function_tools",
}

__all__ = [
    "Agent",
    "Client",
    "ClientSettings",
    "DidNotHappen",
    "Event",
    "Happened",
    "Host",
    "MemoryLimits",
    "MidstreamError",
    "Model",
    "Pooled",
    "Repaired",
    "Retention",
    "StreamSettings",
    "Tool",
    "TurnFailedError",
    "asgi",
    "check",
    "connect",
    "convert",
    "current_call",
    "question",
    "repair",
    "report_progress",
    "sub_agent",
    "tool",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'midstream' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
