"""Kills agents' processes from outside, as the system does when memory is short."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents

LIMIT_S = 60.0


def end_agents() -> None:
    """Kill all agents that this process has started, and wait until each has ended."""
    mark = f"{OWNER_VARIABLE}={owner_of_new_agents()}".encode()
    end_all([pid for pid in _processes() if mark in _environment(pid)])


def end_all(pids: list[int]) -> None:
    """Kill processes, and wait until each has ended."""
    assert pids, "no process of an agent lives"
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + LIMIT_S
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < until, "a killed process lives on"
        os.sched_yield()


def _processes() -> Iterator[int]:
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and int(each.name) != os.getpid():
            yield int(each.name)


def _environment(pid: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def lives(pid: int) -> bool:
    """Return whether a process has not ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    return False
