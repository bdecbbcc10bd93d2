"""Time for a new process to continue after a SIGKILL: from its start to the first recovered record.

A child process has a session in the middle of a turn. The bench kills it and starts another child, which reports when
its own code began, and when the journal had its first record.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec

ROUNDS = 7


class Takeover(msgspec.Struct):
    """Medians in milliseconds."""

    rounds: int
    from_exec_ms: float
    """Time from the start of the process, with the interpreter and all imports."""
    from_main_ms: float
    """Time from the child's own code: opening the store, folding, claiming, the first synced append."""
    worst_from_main_ms: float


async def _run_child(path: str) -> None:
    from midstream.engine.agent import Agent  # noqa: PLC0415
    from midstream.engine.host import Host  # noqa: PLC0415
    from midstream.history.messages import UserMessage  # noqa: PLC0415 - the imports of the child are measured
    from midstream.session.turn.commands import SendMessage  # noqa: PLC0415
    from midstream.store.sqlite import SQLiteStore  # noqa: PLC0415
    from midstream.testing.scripted_model import ScriptedModel, Stall  # noqa: PLC0415

    began = time.monotonic()
    host = Host(Agent(ScriptedModel(lambda _: [Stall()])), SQLiteStore(path))
    await host.start()
    await host.wait_for_recovery()
    if host.recovery.total:
        print(began, time.monotonic(), flush=True)
    else:
        runner = await host.session("s", create=True)
        await runner.submit(SendMessage(UserMessage.of("hi")))
        print("ready", flush=True)
    await asyncio.Event().wait()


def _start(path: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "bench.takeover", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def _kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def measure(folder: Path) -> Takeover:
    """Kill and recover `ROUNDS` times."""
    from_exec, from_main = [], []
    for number in range(ROUNDS):
        path = folder / f"takeover-{number}.db"
        first = _start(path)
        assert _line(first) == "ready\n"
        _kill(first)
        started = time.monotonic()
        second = _start(path)
        began, ended = map(float, _line(second).split())
        _kill(second)
        from_exec.append(1000 * (ended - started))
        from_main.append(1000 * (ended - began))
    return Takeover(ROUNDS, statistics.median(from_exec), statistics.median(from_main), max(from_main))


def run(folder: Path) -> Takeover:
    """Measure, print, return."""
    result = measure(folder)
    print(
        f"first recovered record after {result.from_main_ms:.1f} ms"
        f" (worst {result.worst_from_main_ms:.1f}), {result.from_exec_ms:.0f} ms after exec"
    )
    return result


if __name__ == "__main__":
    asyncio.run(_run_child(sys.argv[1]))
