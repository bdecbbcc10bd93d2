"""The detection of child processes that have ended or are ending."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from midstream.agents.child_processes import has_exited

LIMIT_S = 60.0
LARGE = "block = bytearray(64 * 1024 * 1024); print('ready', flush=True); input()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LARGE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_living_process_has_not_exited(child: subprocess.Popen[str]) -> None:
    assert not has_exited(child.pid)


def test_a_killed_process_has_exited_from_the_moment_of_the_kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    assert has_exited(child.pid)
    child.wait()
    assert has_exited(child.pid)


def test_no_process_is_reaped(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.close()
    until = time.monotonic() + LIMIT_S
    while not has_exited(child.pid):
        assert time.monotonic() < until
        os.sched_yield()
    assert child.wait() == 0
