"""Agents that outlived the process of midstream which started them: found by their environment, and ended.

A killed process of midstream cannot end its agents. They finish their turns, and run tools, while the next attempt
does the same work in the same folder. The environment of each agent therefore names its owner: the process that started
it. The programs that the agent starts inherit the name, so that they are found too, whatever group or parent they have.
An owner is identified by process id, start time and namespace, because process ids are used again.

Linux only: other systems do not show the environment of a process. There an agent ends when it reads the end of its
standard input.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OWNER_VARIABLE = "MIDSTREAM_AGENT_OWNER"
ROUNDS_MAX = 20
"""Searches in a row: a process may start another one while it is being ended."""
_PROC = Path("/proc")
_DEAD = {"Z", "X"}
_log = logging.getLogger(__name__)


def owner_of_new_agents() -> str:
    """Return the value of `OWNER_VARIABLE` for agents that this process starts; "" on systems without `/proc`."""
    if sys.platform != "linux":
        return ""
    with suppress(OSError, LookupError):
        return f"{_namespace()}/{os.getpid()}/{_start_time(os.getpid())}"
    return ""


async def end_orphans() -> int:
    """End all agents of this user whose owner has ended, with all that they started; return how many processes.

    Call it before an agent is started: an orphan of an earlier process may be at work on the same conversation.
    """
    return await asyncio.to_thread(_end)


def _end() -> int:
    if sys.platform != "linux":
        return 0
    ended: set[int] = set()
    for _ in range(ROUNDS_MAX):
        found = [pid for pid in own_processes() if _end_one(pid)]
        ended |= {*found}
        if not found:
            break
    if ended:
        _log.warning("ended %d processes of agents whose owner had ended", len(ended))
    return len(ended)


def _end_one(pid: int) -> bool:
    """Kill a process if its owner is gone; its descriptor holds it, so that another one of the same id is safe."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _state(pid) in _DEAD or not _is_orphan(owner_of(pid)):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except (OSError, LookupError):
        return False
    finally:
        os.close(descriptor)
    return True


def _is_orphan(owner: str) -> bool:
    namespace, _, rest = owner.partition("/")
    pid, _, started = rest.partition("/")
    if not pid.isdigit() or namespace != _namespace():
        return False
    try:
        return _state(int(pid)) in _DEAD or _start_time(int(pid)) != started
    except (OSError, LookupError):
        return True


def own_processes() -> Iterator[int]:
    """Yield the processes of this user, without this one."""
    try:
        found = [*_PROC.iterdir()]
    except OSError:  # it is not mounted
        return
    for each in found:
        with suppress(OSError):
            if each.name.isdigit() and each.stat().st_uid == os.geteuid() and int(each.name) != os.getpid():
                yield int(each.name)


def owner_of(pid: int) -> str:
    """Return the value of `OWNER_VARIABLE` in the environment of a process; "" for none.

    Raises:
        OSError: It has ended, or is another user's.
    """
    prefix = f"{OWNER_VARIABLE}=".encode()
    values = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return next(
        (value[len(prefix) :].decode("ascii", "replace") for value in values if value.startswith(prefix)), ""
    )


def _namespace() -> str:
    return (_PROC / "self" / "ns" / "pid").readlink().name


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the state on: the name before them may contain anything."""
    return (_PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _start_time(pid: int) -> str:
    return _stat(pid)[19]
