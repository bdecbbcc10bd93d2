"""midstream: AI-agent sessions that survive anything.

The public names. Each is loaded when it is first used, so that `import midstream` costs next to nothing and a
client never pays for a server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from midstream.version import __version__ as __version__

if TYPE_CHECKING:
    from midstream.client import Client, ClientSettings, connect
    from midstream.core.events import Event
    from midstream.core.retention import Retention
    from midstream.core.settings import StreamSettings
    from midstream.errors import MidstreamError, TurnFailedError
    from midstream.history import Repaired, check, convert, repair
    from midstream.runtime.agent import Agent, sub_agent
    from midstream.runtime.host import Host
    from midstream.runtime.models import Model
    from midstream.runtime.pool import Pooled
    from midstream.runtime.sleeping import MemoryLimits
    from midstream.server.app import asgi
    from midstream.tools import (
        DidNotHappen,
        Happened,
        Tool,
        current_call,
        question,
        report_progress,
        tool,
    )

_HOMES = {
    "Agent": "midstream.runtime.agent",
    "Client": "midstream.client",
    "ClientSettings": "midstream.client",
    "DidNotHappen": "midstream.tools",
    "Event": "midstream.core.events",
    "Happened": "midstream.tools",
    "Host": "midstream.runtime.host",
    "MidstreamError": "midstream.errors",
    "Model": "midstream.runtime.models",
    "Pooled": "midstream.runtime.pool",
    "Repaired": "midstream.history",
    "MemoryLimits": "midstream.runtime.sleeping",
    "Retention": "midstream.core.retention",
    "StreamSettings": "midstream.core.settings",
    "Tool": "midstream.tools",
    "TurnFailedError": "midstream.errors",
    "asgi": "midstream.server.app",
    "check": "midstream.history",
    "connect": "midstream.client",
    "convert": "midstream.history",
    "current_call": "midstream.tools",
    "question": "midstream.tools",
    "repair": "midstream.history",
    "report_progress": "midstream.tools",
    "sub_agent": "midstream.runtime.agent",
    "tool": "midstream.tools",
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
