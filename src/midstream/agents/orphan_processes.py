"""Orphaned agents of dead processes of midstream, which are ended before another agent is started.

The guardian of that process ends them first (`midstream.agents.process_guardian`). This search is for the case that the
guardian was killed, too. `midstream.agents.owned_processes` finds them.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from midstream.agents.owned_processes import end_processes, has_owner_ended, owner_of

_log = logging.getLogger(__name__)


async def end_orphans() -> int:
    """End all agents of this user whose owner has ended, with their child processes; return the number of processes."""
    return await asyncio.to_thread(_end)


def _end() -> int:
    if sys.platform != "linux":
        return 0
    ended = end_processes(lambda pid: has_owner_ended(owner_of(pid)))
    if ended:
        _log.warning("ended %d processes of agents whose owner had ended", ended)
    return ended
