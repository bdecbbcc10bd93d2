"""Processes are found by their owner's name and by their ancestors, and end together; others are left alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from midstream.agents.owned_processes import (
    OWNER_VARIABLE,
    end_processes,
    has_owner_ended,
    own_processes,
    owner_of,
    owner_of_new_agents,
)
from tests.spec import spec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

WAITS = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
PARENT = (
    "import subprocess, sys; "
    f"sys.exit(subprocess.Popen([sys.executable, '-c', {WAITS!r}], env={{}}, process_group=0).wait())"
)


@contextlib.contextmanager
def start(program: str, env: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a program; give it and the process id that it prints."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], env=env, stdin=pipe, stdout=pipe, text=True)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=60)


def owned_by(owner: str) -> Mapping[str, str]:
    return {**os.environ, OWNER_VARIABLE: owner}


@spec("REUSE-87")
def test_a_child_without_the_environment_ends_with_its_parent_and_another_owners_child_lives() -> None:
    with start(PARENT, owned_by("mine")) as (mine, child), start(WAITS, owned_by("other")) as (other, _):
        assert owner_of(mine.pid) == "mine"
        assert owner_of(child) == ""
        assert {mine.pid, child, other.pid} <= {*own_processes()}
        assert end_processes(lambda pid: owner_of(pid) == "mine") == 2
        assert mine.wait(60) == -signal.SIGKILL
        assert mine.communicate(timeout=60)[0] == "", "the child has let go of its output"
        assert other.poll() is None
    assert end_processes(lambda pid: owner_of(pid) == "mine") == 0


@spec("REUSE-87")
def test_a_child_with_another_owner_is_not_ended_with_its_parent() -> None:
    nested = PARENT.replace("env={}", f"env={{{OWNER_VARIABLE!r}: 'nested'}}")
    with start(nested, owned_by("mine")) as (mine, child):
        try:
            assert end_processes(lambda pid: owner_of(pid) == "mine") == 1
            assert mine.wait(60) == -signal.SIGKILL
            assert owner_of(child) == "nested"
        finally:
            os.kill(child, signal.SIGKILL)


def test_an_owner_has_ended_if_it_is_gone_or_has_another_start_time() -> None:
    own = owner_of_new_agents()
    namespace, pid, time = own.split("/")
    with start(WAITS, os.environ) as (process, _):
        gone = f"{namespace}/{process.pid}/{time}"
    assert not has_owner_ended(own)
    assert has_owner_ended(gone)
    assert has_owner_ended(f"{namespace}/{pid}/{int(time) - 1}")
    for strange in ("", "guardian", "a/b/c", f"pid:[1]/{pid}/1"):
        assert not has_owner_ended(strange)
