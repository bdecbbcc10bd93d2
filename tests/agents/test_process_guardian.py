"""The agents of a process end with it, however it ends: at once, with all their children, and no others."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from midstream.agents.owned_processes import GUARDIAN, OWNER_VARIABLE, variable_of
from midstream.agents.prior_transcript import UNRECORDED
from tests.agents.scripted_peer import Orders
from tests.cli.test_gateway import ask_chat_completions, key_of, start, stop
from tests.house.source import ROOT
from tests.spec import spec

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]

BOUND_S = 30.0
"""Seconds within which processes must have ended: far more than the milliseconds that they need."""
OWNER = textwrap.dedent("""
    import asyncio, os, subprocess, sys, time
    from midstream.agents.process_guardian import prepare_to_start
    from midstream.agents.owned_processes import OWNER_VARIABLE, owner_of_new_agents

    def start(program):
        asyncio.run(prepare_to_start())
        env = {**os.environ, OWNER_VARIABLE: owner_of_new_agents()}
        agent = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)
        print(agent.stdout.readline(), end="", flush=True)
        return agent

    for line in sys.stdin:
        exec(line)
""")
"""A program that uses agents, and runs the lines that a test sends."""
FAMILY = textwrap.dedent("""
    import os, subprocess, sys
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    middle = "import os, subprocess, sys; p = subprocess.Popen(%r); print(os.getpid(), p.pid, flush=True); p.wait()"
    ways = [{}, {"start_new_session": True}, {"process_group": 0}, {"env": {}}, {"env": {}, "start_new_session": True}]
    pids = [os.getpid()]
    for way in ways:
        tool = subprocess.Popen([sys.executable, "-c", middle % (sleep,)], stdout=subprocess.PIPE, text=True, **way)
        pids += map(int, tool.stdout.readline().split())
    print(*pids, flush=True)
    tool.wait()
""")
"""An agent with tools in other groups and sessions, some without its environment, each with its own child."""


class Owner:
    """A process that starts agents."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", OWNER]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)

    def run(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def read(self) -> list[int]:
        assert self.process.stdout is not None
        return [int(word) for word in self.process.stdout.readline().split()]

    def start(self, program: str) -> list[int]:
        """Start an agent, and return the process ids that it prints."""
        self.run(f"agent = start({program!r})")
        pids = self.read()
        assert pids, "the agent did not start"
        return pids

    def guardians(self) -> list[int]:
        """Return the guardians that this process has started."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if is_guardian(pid)]


def is_guardian(pid: int) -> bool:
    with contextlib.suppress(OSError):  # a zombie has no environment
        return variable_of(pid, OWNER_VARIABLE) == GUARDIAN
    return False


@contextlib.contextmanager
def owner() -> Iterator[Owner]:
    started_owner = Owner()
    try:
        yield started_owner
    finally:
        started_owner.process.kill()
        started_owner.process.communicate(timeout=60)


def watch(pids: list[int]) -> Callable[[float], list[int]]:
    """Watch living processes; the result waits until all have ended, and returns those that have not."""
    descriptors = {os.pidfd_open(pid): pid for pid in pids}

    def wait(limit_s: float) -> list[int]:
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        until = time.monotonic() + limit_s
        while descriptors and (left_s := until - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left_s * 1000):
                poll.unregister(descriptor)
                os.close(descriptor)
                del descriptors[descriptor]
        return [*descriptors.values()]

    return wait


@spec("REUSE-87")
@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), 9)",
        "os.kill(os.getpid(), 15)",
        "os._exit(1)",
        "os.abort()",
        "sys.exit()",
        "raise ValueError",
    ],
)
def test_a_process_tree_ends_with_its_owner_and_so_does_the_guardian(end: str) -> None:
    with owner() as killed:
        family = killed.start(FAMILY)
        assert len(family) == 11
        left = watch([*family, *killed.guardians()])
        killed.run(end)
        assert left(BOUND_S) == []


@spec("REUSE-87")
def test_agents_of_a_living_owner_are_left_alone() -> None:
    with owner() as killed, owner() as living:
        family, others = killed.start(FAMILY), living.start(FAMILY)
        left, guardian = watch(family), watch(killed.guardians())
        killed.process.kill()
        assert left(BOUND_S) == []
        assert guardian(BOUND_S) == []
        assert watch(others)(0) == others


@spec("REUSE-87")
def test_an_owner_started_by_another_owners_agent_keeps_its_agents_while_it_lives() -> None:
    nested = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {OWNER!r}], text=True, stdin=-1); "
    nested += f"p.stdin.write({f'start({FAMILY!r})'!r} + chr(10)); p.stdin.flush(); p.wait()"
    with owner() as outer, owner() as third:
        family = outer.start(nested)
        third.start("print(1)")  # it searches for orphans, and there is none
        assert watch(family)(0) == family
        left = watch(family)
        outer.process.kill()
        assert left(BOUND_S) == []


@spec("REUSE-87")
def test_a_process_that_forks_while_it_is_ended_leaves_no_child() -> None:
    number = f"600.{time.monotonic_ns()}"
    forking = textwrap.dedent(f"""
        import os, subprocess
        for count in range(300):
            subprocess.Popen(["sleep", "{number}"], env={{}}, start_new_session=True)
            if count == 2:
                print(os.getpid(), flush=True)
    """)
    with owner() as killed:
        left = watch([*killed.start(forking), *killed.guardians()])
        killed.process.kill()
        assert left(BOUND_S) == []
    assert [line for line in command_lines() if number in line] == []


def command_lines() -> Iterator[str]:
    for each in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if each.name.isdigit():
                yield (each / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")


@spec("REUSE-87")
def test_terminal_signals_do_not_end_the_guardian() -> None:
    with owner() as killed:
        family = killed.start(FAMILY)
        (guardian,) = killed.guardians()
        left = watch([*family, guardian])
        assert os.getsid(guardian) == guardian, "it has a session of its own"
        for means in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(guardian, means)
        assert killed.guardians() == [guardian]
        killed.process.kill()
        assert left(BOUND_S) == []


@spec("REUSE-87")
def test_a_killed_guardian_is_replaced_before_the_next_agent_starts() -> None:
    with owner() as killed:
        family = killed.start(FAMILY)
        (first,) = killed.guardians()
        os.kill(first, signal.SIGKILL)
        family += killed.start(FAMILY)
        (second,) = killed.guardians()
        assert second != first
        left = watch(family)
        killed.process.kill()
        assert left(BOUND_S) == []


@spec("REUSE-87")
def test_a_second_agent_has_the_same_guardian() -> None:
    with owner() as living:
        living.start(FAMILY)
        first = living.guardians()
        living.start(FAMILY)
        assert living.guardians() == first


@spec("REUSE-87")
def test_a_forked_child_does_not_end_the_agents_of_its_parent_and_has_a_guardian_of_its_own() -> None:
    with owner() as parent:
        family = parent.start(FAMILY)
        left = watch(family)
        # The child ends normally, with its exit handlers.
        parent.run("pid = os.fork() or sys.exit(); os.waitpid(pid, 0); print(pid, flush=True)")
        parent.read()
        assert watch(family)(0) == family
        parent.process.kill()
        assert left(BOUND_S) == []


@spec("REUSE-87")
def test_an_owner_that_closes_all_its_files_keeps_its_agents_until_it_ends() -> None:
    with owner() as killed:
        family = killed.start(FAMILY)
        killed.run("os.closerange(3, 100); print(1, flush=True)")
        killed.read()
        (guardian,) = killed.guardians()
        os.kill(guardian, 0)
        assert watch(family)(0.2) == family
        left = watch(family)
        killed.process.kill()
        assert left(BOUND_S) == []


@spec("REUSE-87")
def test_the_guardian_is_small_and_inherits_no_file() -> None:
    with owner() as living:
        living.run("a, b = os.pipe(); os.set_inheritable(a, True); os.set_inheritable(b, True)")
        living.start("print(1)")
        (guardian,) = living.guardians()
        files = {each.name: str(each.readlink()) for each in Path(f"/proc/{guardian}/fd").iterdir()}
        assert files.pop("0").startswith("pipe:")
        assert [file for file in files.values() if file.startswith(("pipe:", "socket:"))] == []
        status = Path(f"/proc/{guardian}/status").read_text()
        kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
        assert kib < 20 * 1024


# --- a real gateway -------------------------------------------------------------------------------------------------


@spec("REUSE-86", "REUSE-87")
@pytest.mark.slow
def test_a_tool_that_an_agent_starts_after_the_death_of_its_gateway_takes_no_effect(tmp_path: Path) -> None:
    pytest.importorskip("acp")
    folder, ledger = tmp_path / "agent", tmp_path / "ledger"
    agent = f"cd {ROOT} && exec {sys.executable} -m tests.agents.acp_agent {folder} load"
    orders = Orders(folder)
    orders.order("after the gateway", str(ledger))
    options = ["--upstream", f"acp:sh -c '{agent}'"]
    process, ready = start(tmp_path, *options)
    answer: list[Any] = []
    asking = threading.Thread(target=lambda: answer.append(request_quietly(ready)))
    asking.start()
    pids = wait_for(lambda: [each["pids"] for each in orders.recorded("family")])[0]
    left = watch(pids)
    process.kill()
    process.communicate(timeout=60)
    asking.join(60)
    assert left(BOUND_S) == [], "the agent goes on after the death of its gateway"
    assert not ledger.exists(), "its tool took effect"
    orders.order("ledger", str(ledger))
    process, ready = start(tmp_path, *options)
    try:
        assert ask_chat_completions(ready["url"], key_of(ready), "do it")[0] == 200
    finally:
        assert stop(process) == 0
    assert ledger.read_text() == "effect\n"
    assert [UNRECORDED in each["text"] for each in orders.recorded("told")] == [False, True]


def request_quietly(fields: dict[str, Any]) -> object:
    with contextlib.suppress(Exception):
        return ask_chat_completions(fields["url"], key_of(fields), "do it")
    return None


def wait_for(look: Callable[[], Any]) -> Any:  # noqa: ANN401 - the search term
    until = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < until, "it did not happen"
        os.sched_yield()
    return found
