"""Time for a new process to recover 1,000 sessions after a SIGKILL: from its start to the last recovered record.

A child process has an open turn in every session. A third waits in a tool with effects, a third in a tool without, a
third in a response. The bench kills the child; another child recovers all sessions.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

SESSIONS = 1000
ROUNDS = 3


class Recovery(msgspec.Struct):
    """Best of the rounds; times in seconds, except the last."""

    sessions: int
    rounds: int
    from_exec_s: float
    """Time from the start of the process, with the interpreter and all imports."""
    from_main_s: float
    """Time from the first line of the child's own code to the last recovered record."""
    worst_from_exec_s: float
    cpu_ms_per_session: float


async def _run_child(path: str) -> None:
    from midstream.engine.agent import Agent  # noqa: PLC0415
    from midstream.engine.host import Host  # noqa: PLC0415
    from midstream.history.messages import UserMessage  # noqa: PLC0415 - the imports of the child are measured
    from midstream.models.responses import ModelRequest  # noqa: PLC0415
    from midstream.session.turn.commands import SendMessage  # noqa: PLC0415
    from midstream.store.sqlite import SQLiteStore  # noqa: PLC0415
    from midstream.testing.scripted_model import ScriptedModel, ScriptedStep, Stall, calls, steps_since_user  # noqa: PLC0415
    from midstream.tools.function_tools import tool  # noqa: PLC0415

    async def hang() -> str:
        """Run forever."""
        await asyncio.Event().wait()
        return ""

    def response(request: ModelRequest) -> list[ScriptedStep]:
        words = request.history.entries[0].parts[0].text  # type: ignore[union-attr] # our own
        if words == "think" or steps_since_user(request.history):
            return [Stall()]
        return calls((words, "{}"))

    began = time.monotonic()
    tools = [tool(name="work")(hang), tool(name="look", has_effects=False)(hang)]
    host = Host(Agent(ScriptedModel(response), tools=tools), SQLiteStore(path))
    await host.start()
    await host.wait_for_recovery()
    if host.recovery.total:
        assert host.recovery.resumed == host.recovery.total == SESSIONS
        print(began, time.monotonic(), time.process_time(), flush=True)
    else:

        async def begin(number: int) -> None:
            runner = await host.session(f"s{number}", create=True)
            await runner.submit(SendMessage(UserMessage.of(("work", "look", "think")[number % 3])))

        await asyncio.gather(*map(begin, range(SESSIONS)))
        while {info.end async for info in host.store.list(live=True)} != {3, 5}:
            await host.world.sleep(0.01)
        print("ready", flush=True)
    await asyncio.Event().wait()


def _start(path: Path) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "bench.recovery", str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def _kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def measure(folder: Path) -> Recovery:
    """Kill and recover `ROUNDS` times."""
    from_exec, from_main, cpu = [], [], []
    for number in range(ROUNDS):
        path = folder / f"recovery-{number}.db"
        first = _start(path)
        assert _line(first) == "ready\n"
        _kill(first)
        started = time.monotonic()
        second = _start(path)
        began, ended, used = map(float, _line(second).split())
        _kill(second)
        from_exec.append(ended - started)
        from_main.append(ended - began)
        cpu.append(1000 * used / SESSIONS)
    return Recovery(SESSIONS, ROUNDS, min(from_exec), min(from_main), max(from_exec), min(cpu))


def run(folder: Path) -> Recovery:
    """Measure, print, return."""
    result = measure(folder)
    print(
        f"{result.sessions} sessions taken up {result.from_main_s:.2f} s after main,"
        f" {result.from_exec_s:.2f} s after exec (worst {result.worst_from_exec_s:.2f}),"
        f" {result.cpu_ms_per_session:.2f} ms CPU each; bar: 5 s"
    )
    return result


if __name__ == "__main__":
    asyncio.run(_run_child(sys.argv[1]))
