"""The event loop of a command that serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the faster loop, where `midstream[fast]` is installed; None stands for Python's own."""
    try:
        import uvloop  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    return uvloop.new_event_loop
