"""Tools that continue although the turn of their agent was stopped.

Some agents start a command in a session of its own and stop waiting for it, but not the command. Each agent has an id
in its environment, which its tools inherit. So the processes that it started in this turn can be found and ended.
Processes of earlier turns, such as a server, continue. Linux only.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from midstream.agents.owned_processes import end_processes, start_time, variable_of

AGENT_VARIABLE = "MIDSTREAM_AGENT_ID"


def ticks_now() -> int:
    """Return the current time in the unit of processes' start times; 0 on systems without `/proc`."""
    if sys.platform != "linux":
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


async def end_tools(agent: str, since: int) -> int:
    """End the processes that an agent has started since a time, without the agent; return their number.

    Args:
        agent: The value of `AGENT_VARIABLE` in its environment.
        since: A value of `ticks_now`.
    """

    def is_meant(pid: int) -> bool:
        return variable_of(pid, AGENT_VARIABLE) == agent and int(start_time(pid)) >= since

    return await asyncio.to_thread(end_processes, is_meant) if sys.platform == "linux" else 0
