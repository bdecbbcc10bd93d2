"""Processes that this process has started: whether one has ended, also where its end was not noticed yet."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from midstream.agents.owned_processes import stat_fields

_EXITING = 0x4
"""Linux: flag of a process that frees what it has (`PF_EXITING`), which takes a while for a large one."""
_FLAGS = 6
"""Where the flags stand in `/proc/PID/stat`, behind the name."""
_KILLED = 1 << (signal.SIGKILL - 1) if sys.platform != "win32" else 0
_PROC = Path("/proc")


def has_exited(pid: int) -> bool:
    """Return whether a child process has ended, or was killed and is ending. It is not reaped.

    The event loop learns of an exit a moment later, and some packages only when they write to the closed pipe. A
    message that is written to a process that has just ended is in doubt; an agent that has ended before is resumed.

    Args:
        pid: The id of a process that this process has started.
    """
    if not hasattr(os, "waitid"):  # Windows; there the write fails
        return False
    try:
        is_waitable = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it was reaped already
        return True
    return is_waitable or (sys.platform == "linux" and _is_ending(pid))


def _is_ending(pid: int) -> bool:
    try:
        flags = int(stat_fields(pid)[_FLAGS])
        status = (_PROC / str(pid) / "status").read_text("utf-8", "replace").splitlines()
    except OSError:  # no such system of files
        return False
    pending = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
    return bool(flags & _EXITING) or any(signals & _KILLED for signals in pending)
