"""The measurement of the memory of all agents of this process, including their child processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents
from midstream.agents.resident_memory import measure_memory

MIB = 64
BLOCK = f"block = bytearray({MIB} * 1024 * 1024); print('ready', flush=True); input()"
# A shell passes the variables to its children, as an agent does to its tools.
COMMAND = ["sh", "-c", 'exec 3<&0; "$0" -c "$1" <&3 & wait', sys.executable, BLOCK]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show it")


def test_the_memory_of_agents_and_their_children_counts_and_no_other() -> None:
    before = measure_memory()
    assert before is not None
    for owner, is_counted in (("another", False), (owner_of_new_agents(), True)):
        env = {**os.environ, OWNER_VARIABLE: owner}
        with subprocess.Popen(
            COMMAND, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as agent:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "ready\n"
            used = measure_memory()
            assert used is not None
            assert (used - before > MIB) == is_counted
            assert agent.stdin is not None
            agent.stdin.close()
