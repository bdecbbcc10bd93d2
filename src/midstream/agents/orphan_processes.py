"""Agents that outlived the process of midstream which started them: ended before another agent is started.

The guardian of that process ends them first (`midstream.agents.agent_guardian`). This is the second line: the guardian
may have been killed too. How they are found: `midstream.agents.owned_processes`.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from midstream.agents.owned_processes import end_processes, has_owner_ended, owner_of

_log = logging.getLogger(__name__)


async def end_orphans() -> int:
    """End all agents of this user whose owner has ended, with all that they started; return how many processes."""
    return await asyncio.to_thread(_end)


def _end() -> int:
    if sys.platform != "linux":
        return 0
    ended = end_processes(lambda pid: has_owner_ended(owner_of(pid)))
    if ended:
        _log.warning("ended %d processes of agents whose owner had ended", ended)
    return ended
