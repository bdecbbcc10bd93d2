"""The guardian: a small process that ends this process's agents after this process has ended in any way.

A killed process of midstream cannot end its agents. They continue their turns and start unrecorded tools, while the
next attempt does the same work in the same folder. A signal at the parent's death does not help: agents start processes
of their own, which do not inherit it. The guardian has a session of its own, so that signals to a terminal or a process
group do not end it. It is the program in `owned_processes.py`.

Only Linux shows the environment of other processes. On other systems an agent ends when its standard input ends.
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
    """Start the guardian and end orphaned agents; call this before an agent is started.

    An orphan of an earlier process whose guardian was killed, too, may work on the same conversation.
    """
    await asyncio.to_thread(_guardian.ensure)
    await end_orphans()


class AgentGuardian:
    """The guardian of this process: started when it is needed, and restarted after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = ""
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._release)

    def ensure(self) -> None:
        """Start the guardian if it does not run. Log a warning if it cannot be started, or has ended."""
        owner = owner_of_new_agents()
        # A frozen application's executable is the application, not an interpreter.
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
                _log.warning("no guardian: if this process is killed, its agents continue (%s)", error)

    def end(self) -> None:
        """End the guardian, which ends the remaining agents. Called when this process ends."""
        with self._lock:
            process = self._process
            if process is None or process.stdin is None:
                return
            with suppress(OSError):
                process.stdin.write(b".")
            self._close()

    def _release(self) -> None:
        """Release the parent's guardian, in a forked child."""
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
    # It inherits only the pipe, and has no working folder: it may outlive this process by two seconds.
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
    """Return the variables that an interpreter may need to find its libraries."""
    return {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}


_guardian = AgentGuardian()
