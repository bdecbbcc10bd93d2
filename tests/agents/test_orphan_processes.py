"""Agents of a killed process are ended with their children; agents of a living process are not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.agents.orphan_processes import end_orphans
from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

OWNER = textwrap.dedent("""
    import os, subprocess, sys
    from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents

    env = {**os.environ, OWNER_VARIABLE: owner_of_new_agents()}
    tool = "import time; print('works', flush=True); time.sleep(600)"
    agent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {tool!r}])"
    subprocess.run([sys.executable, "-c", agent], env=env, start_new_session=True)
""")
"""An owner with an agent that runs a tool."""


def start_owner() -> subprocess.Popen[str]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "works\n"
    return owner


def processes_of(owner: int) -> list[int]:
    mark = f"/{owner}/".encode()
    found = []
    for each in Path("/proc").iterdir():
        try:
            values = (each / "environ").read_bytes().split(b"\0") if each.name.isdigit() else []
        except OSError:
            continue
        if any(value.startswith(OWNER_VARIABLE.encode()) and mark in value for value in values):
            found.append(int(each.name))
    return found


def test_the_agents_of_a_killed_process_are_ended_with_their_tools() -> None:
    owner = start_owner()
    try:
        asyncio.run(end_orphans())
        assert len(processes_of(owner.pid)) == 2, "its owner lives"
        owner.kill()
        os.waitid(
            os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT
        )  # a zombie until the end of this test, so dead
        asyncio.run(end_orphans())
        assert owner.stdout is not None
        assert owner.stdout.read() == ""  # ends when both processes have released it
        assert processes_of(owner.pid) == []
    finally:
        owner.kill()
        owner.communicate(timeout=60)


def test_a_process_that_reuses_the_id_of_a_dead_owner_is_not_an_owner() -> None:
    namespace, pid, started = owner_of_new_agents().split("/")
    with started_as(f"{namespace}/{pid}/{int(started) - 1}") as agent:
        asyncio.run(end_orphans())
        assert agent.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("owner", ["pid:[1]/1/1", "none", ""])
def test_agents_of_another_namespace_and_malformed_values_are_left_alone(owner: str) -> None:
    with started_as(owner) as agent:
        asyncio.run(end_orphans())
        assert agent.poll() is None


@contextlib.contextmanager
def started_as(owner: str) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, OWNER_VARIABLE: owner}
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=env)
    try:
        yield agent
    finally:
        agent.kill()
        agent.communicate(timeout=60)
