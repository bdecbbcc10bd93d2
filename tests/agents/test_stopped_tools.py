"""Tools that an agent has started since a time are ended, and no earlier ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from midstream.agents.stopped_tools import AGENT_VARIABLE, end_tools, ticks_now
from tests.agents.ended_processes import lives

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def started(agent: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "print('ready', flush=True); input()"]
    env = {**os.environ, AGENT_VARIABLE: agent}
    tool = subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert tool.stdout is not None
    assert tool.stdout.readline() == "ready\n"
    return tool


async def test_only_tools_that_this_agent_started_since_then_are_ended() -> None:
    before = started("mine")
    since = ticks_now()
    while ticks_now() == since:  # the clock of processes is coarse
        pass
    mine, other = started("mine"), started("other")
    try:
        assert await end_tools("mine", since + 1) == 1
        assert [lives(each.pid) for each in (before, mine, other)] == [True, False, True]
    finally:
        for each in (before, mine, other):
            each.kill()
            each.communicate()
