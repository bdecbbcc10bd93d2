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
from collections.abc import Callable, Iterator
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
        return f"{_namespace()}/{os.getpid()}/{start_time(os.getpid())}"
    return ""


async def end_orphans() -> int:
    """End all agents of this user whose owner has ended, with all that they started; return how many processes.

    Call it before an agent is started: an orphan of an earlier process may be at work on the same conversation.
    """
    return await asyncio.to_thread(_end)


def _end() -> int:
    if sys.platform != "linux":
        return 0
    ended = end_processes(lambda pid: _is_orphan(owner_of(pid)))
    if ended:
        _log.warning("ended %d processes of agents whose owner had ended", ended)
    return ended


def end_processes(is_meant: Callable[[int], bool]) -> int:
    """Kill the processes of this user that `is_meant` names, until there are none; return how many (Linux only).

    Args:
        is_meant: Decides about a process id. What it raises as `OSError` or `LookupError` means no.
    """
    ended: set[int] = set()
    for _ in range(ROUNDS_MAX):
        found = [pid for pid in own_processes() if _end_one(pid, is_meant)]
        ended |= {*found}
        if not found:
            break
    return len(ended)


def _end_one(pid: int, is_meant: Callable[[int], bool]) -> bool:
    """Kill a process if it is meant; its descriptor holds it, so that another one of the same id is safe."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if _state(pid) in _DEAD or not is_meant(pid):
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
        return _state(int(pid)) in _DEAD or start_time(int(pid)) != started
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
    return variable_of(pid, OWNER_VARIABLE)


def variable_of(pid: int, name: str) -> str:
    """Return the value of a variable in the environment that a process was started with; "" for none.

    Raises:
        OSError: It has ended, or is another user's.
    """
    prefix = f"{name}=".encode()
    values = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return next(
        (value[len(prefix) :].decode("ascii", "replace") for value in values if value.startswith(prefix)), ""
    )


def _namespace() -> str:
    return (_PROC / "self" / "ns" / "pid").readlink().name


def stat_fields(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the state on: the name before them may contain anything.

    Raises:
        OSError: It has ended.
    """
    return (_PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()


def _state(pid: int) -> str:
    return stat_fields(pid)[0]


def start_time(pid: int) -> str:
    """Return when a process was started, in ticks since the start of the system.

    Raises:
        OSError: It has ended.
    """
    return stat_fields(pid)[19]
