"""A small process beside this one, which ends the agents of this one as soon as it has ended, however that happened.

A killed process of midstream cannot end its agents. They finish their turns, and start tools that nothing records,
while the next attempt does the same work in the same folder. No signal at the death of a parent helps: packages of
agents start processes themselves, and what these start does not inherit it. The guardian has a session of its own, so
that signals to a terminal or a process group do not end it. It is the program in `owned_processes.py`.

Other systems than Linux do not show the environment of a process. There is no guardian there: an agent ends when it
reads the end of its standard input.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress

from midstream.agents import owned_processes
from midstream.agents.child_processes import has_exited
from midstream.agents.orphan_processes import end_orphans
from midstream.agents.owned_processes import GUARDIAN, OWNER_VARIABLE, owner_of_new_agents

END_WAIT_S = 2.0
"""Seconds that the end of this process waits for its guardian."""
_log = logging.getLogger(__name__)


async def prepare_to_start() -> None:
    """Call this before an agent is started: see that a guardian runs, and end the agents of processes that have ended.

    An orphan of an earlier process, whose guardian was killed too, may be at work on the same conversation.
    """
    await asyncio.to_thread(_guardian.ensure)
    await end_orphans()


class AgentGuardian:
    """The guardian of this process: started when it is needed, and again where it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = ""
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._release)

    def ensure(self) -> None:
        """Start the guardian unless it runs. Where it cannot be started, or has ended, a warning is logged."""
        owner = owner_of_new_agents()
        # The executable of a frozen application is that application, and not an interpreter.
        if not owner or not sys.executable or hasattr(sys, "frozen"):
            return
        with self._lock:
            if (former := self._process) is not None:
                if not has_exited(former.pid):
                    return
                self._close()
                _log.warning(
                    "the guardian of the agents has ended (%s): another one starts", former.returncode
                )
            try:
                self._process = _start(owner)
            except OSError as error:
                _log.warning("no guardian: if this process is killed, its agents run on (%s)", error)

    def end(self) -> None:
        """End it in order: it ends the agents that are left. Called when this process ends."""
        with self._lock:
            process = self._process
            if process is None or process.stdin is None:
                return
            with suppress(OSError):
                process.stdin.write(b".")
            self._close()

    def _release(self) -> None:
        """Release the guardian of the parent, in a forked child."""
        self._lock = threading.Lock()
        if self._process is not None:
            self._process.returncode = 0  # it is no child of this process
        self._close()

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_WAIT_S)


def _start(owner: str) -> subprocess.Popen[bytes]:
    # It inherits no descriptor but the pipe, and holds no folder: it may outlive this process by two seconds.
    return subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-I", "-S", owned_processes.__file__, owner],
        bufsize=0,
        cwd="/",
        env={OWNER_VARIABLE: GUARDIAN, **_interpreter_environment()},
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _interpreter_environment() -> dict[str, str]:
    """Return what an interpreter may need to find its libraries."""
    return {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}


_guardian = AgentGuardian()
