"""Memory of the agents of this process, with their child processes."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from midstream.agents.owned_processes import own_processes, owner_of, owner_of_new_agents

_KIB_PER_MIB = 1024
_PROC = Path("/proc")


def measure_memory() -> float | None:
    """Return the resident memory of all agents of this process in MiB; None on systems without `/proc`.

    Shared memory is counted once (proportional set size).
    """
    owner = owner_of_new_agents()
    if sys.platform != "linux" or not owner:
        return None
    kib = 0
    for pid in own_processes():
        with suppress(OSError):  # it is just ending, or belongs to another user
            if owner_of(pid) == owner:
                kib += _kib_of(pid)
    return kib / _KIB_PER_MIB


def _kib_of(pid: int) -> int:
    for line in (_PROC / str(pid) / "smaps_rollup").read_text("ascii", "replace").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0  # a zombie has none
