"""Child processes: whether one has ended, also before its exit was noticed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from midstream.agents.owned_processes import stat_fields

_EXITING = 0x4
"""Linux: flag of a process that is freeing its resources (`PF_EXITING`), which takes long for a large one."""
_FLAGS = 6
"""Position of the flags in `/proc/PID/stat`, after the name."""
_KILLED = 1 << (signal.SIGKILL - 1) if sys.platform != "win32" else 0
_PROC = Path("/proc")


def has_exited(pid: int) -> bool:
    """Return whether a child process has ended, or was killed and is ending. It is not reaped.

    The event loop notices an exit a moment later, and some packages only when they write to the closed pipe. A message
    that was written to a process at its end is in doubt. An agent whose end is noticed before is resumed instead.

    Args:
        pid: The process id of a child of this process.
    """
    if not hasattr(os, "waitid"):  # on Windows the write fails instead
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
    except OSError:  # a system without /proc
        return False
    pending = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
    return bool(flags & _EXITING) or any(signals & _KILLED for signals in pending)
