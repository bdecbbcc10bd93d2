"""Ends of agents' processes: kills from outside, as the system does when memory is short; the close of an upstream."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sized
from contextlib import suppress
from pathlib import Path
from typing import Any

from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents
from midstream.testing.upstream_contract import CLOSE_S, LOOK_S, WORLD

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


async def close_cancelled(close: Callable[[], Coroutine[Any, Any, None]], agents: Sized) -> None:
    """Close an upstream in a task that is cancelled meanwhile, and wait until it has no `agents`."""
    closing = asyncio.create_task(close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing}, timeout=CLOSE_S)
    async with asyncio.timeout(CLOSE_S):
        while agents:
            await WORLD.sleep(LOOK_S)


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
