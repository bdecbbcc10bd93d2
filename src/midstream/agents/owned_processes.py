"""Search for the processes of an owner, by environment and ancestors, and their end. Linux only.

The environment of each agent names its owner: the process that started it, by process id, start time and namespace,
because process ids are used again. The programs that the agent starts inherit this variable, in any group and with any
parent. A program with another environment is found by its parent, or by the leader of its session.

This file is also a program: the guardian of one owner, which `midstream.agents.process_guardian` starts. It therefore
imports only modules that a bare interpreter has loaded.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
"""A constant for type checkers; importing `typing` takes half of the start of a bare interpreter."""
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OWNER_VARIABLE = "MIDSTREAM_AGENT_OWNER"
GUARDIAN = "guardian"
"""Value of `OWNER_VARIABLE` for a guardian, which has no owner and is no result of a search."""
ROUNDS_MAX = 20
"""Greatest number of searches: a process may start another one before it is stopped."""
EXIT_WAIT_S = 1.0
"""Greatest number of seconds to wait for the end of killed processes."""
SEARCHES_AFTER_S = (0.0, 0.01, 0.03, 0.1, 0.3, 0.6, 1.0)
"""Pauses before the searches of a guardian. The environment of a starting process has no owner yet."""
_PROC = "/proc"
_DEAD = ("Z", "X")
_PARENT, _SESSION, _STARTED = 1, 3, 19
"""Positions in `/proc/PID/stat`, after the name."""


def owner_of_new_agents() -> str:
    """Return the value of `OWNER_VARIABLE` for agents that this process starts; "" on systems without `/proc`."""
    if sys.platform != "linux":
        return ""
    try:
        return f"{_namespace()}/{os.getpid()}/{start_time(os.getpid())}"
    except (OSError, LookupError):
        return ""


def has_owner_ended(owner: str) -> bool:
    """Whether the process in a value of `OWNER_VARIABLE` has ended; False for invalid values."""
    namespace, _, rest = owner.partition("/")
    pid, _, started = rest.partition("/")
    if not pid.isdigit() or namespace != _namespace():
        return False
    try:
        return _state(int(pid)) in _DEAD or start_time(int(pid)) != started
    except (OSError, LookupError):
        return True


def end_processes(is_meant: Callable[[int], bool]) -> int:
    """Kill the processes of this user for which `is_meant` is true, and their child processes; return their number.

    All are stopped before the first one is killed. So none can start another one meanwhile, and none loses its parent,
    which identifies programs with another environment. It returns when they have ended, or after `EXIT_WAIT_S`.

    Args:
        is_meant: Decides about a process id. An `OSError` or `LookupError` means no.
    """
    held: dict[int, int] = {}
    try:
        for _ in range(ROUNDS_MAX):
            found = [pid for pid in own_processes() if pid not in held and _hold(pid, held, is_meant)]
            if not found:
                break
        for descriptor in held.values():
            _send(descriptor, signal.SIGKILL)
        _wait_for_exits([*held.values()])
    finally:
        for descriptor in held.values():
            os.close(descriptor)
    return len(held)


def _hold(pid: int, held: dict[int, int], is_meant: Callable[[int], bool]) -> bool:
    """Stop a process if it is meant; its descriptor protects against a reused id."""
    try:
        if not _is_included(pid, held, is_meant):  # most are not, and need no descriptor
            return False
        descriptor = os.pidfd_open(pid)
    except (OSError, LookupError, ValueError):  # it has ended
        return False
    try:
        if _is_included(pid, held, is_meant) and _send(descriptor, signal.SIGSTOP):
            held[pid] = descriptor
    except (OSError, LookupError, ValueError):  # it has ended
        pass
    if pid in held:
        return True
    os.close(descriptor)
    return False


def _is_included(pid: int, held: dict[int, int], is_meant: Callable[[int], bool]) -> bool:
    fields = stat_fields(pid)
    if fields[0] in _DEAD:
        return False
    if is_meant(pid):
        return True
    if not held or owner_of(pid):
        return False  # an agent of another owner
    kin = (held.get(int(fields[_PARENT])), held.get(int(fields[_SESSION])))
    return any(descriptor is not None and _send(descriptor, 0) for descriptor in kin)


def _send(descriptor: int, means: int) -> bool:
    """Send a signal; return whether the process existed."""
    try:
        signal.pidfd_send_signal(descriptor, means)
    except OSError:
        return False
    return True


def _wait_for_exits(descriptors: list[int]) -> None:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    left = len(descriptors)
    until = time.monotonic() + EXIT_WAIT_S
    while left and (left_s := until - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left_s * 1000):
            poll.unregister(descriptor)
            left -= 1


def own_processes() -> Iterator[int]:
    """Yield the other processes of this user, the newest ids first, so that agents are found early."""
    try:
        found = sorted(filter(str.isdigit, os.listdir(_PROC)), key=int, reverse=True)
    except OSError:  # it is not mounted
        return
    for name in found:
        try:
            if (
                name.isdigit()
                and int(name) != os.getpid()
                and os.stat(f"{_PROC}/{name}").st_uid == os.geteuid()
            ):
                yield int(name)
        except OSError:  # it has ended
            continue


def owner_of(pid: int) -> str:
    """Return the value of `OWNER_VARIABLE` in the environment of a process; "" for none.

    Raises:
        OSError: It has ended, or belongs to another user.
    """
    return variable_of(pid, OWNER_VARIABLE)


def variable_of(pid: int, name: str) -> str:
    """Return the value of a variable in the initial environment of a process; "" for none.

    Raises:
        OSError: It has ended, or belongs to another user.
    """
    prefix = f"{name}=".encode()
    for value in _read(f"{pid}/environ").split(b"\0"):
        if value.startswith(prefix):
            return value[len(prefix) :].decode("ascii", "replace")
    return ""


def stat_fields(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the state on: the name before them may contain anything.

    Raises:
        OSError: It has ended.
    """
    return _read(f"{pid}/stat").decode("utf-8", "replace").rpartition(")")[2].split()


def start_time(pid: int) -> str:
    """Return the start time of a process, in ticks since the start of the system.

    Raises:
        OSError: It has ended.
    """
    return stat_fields(pid)[_STARTED]


def _read(name: str) -> bytes:
    with open(f"{_PROC}/{name}", "rb") as file:
        return file.read()


def _namespace() -> str:
    return os.readlink(f"{_PROC}/self/ns/pid")


def _state(pid: int) -> str:
    return stat_fields(pid)[0]


def _guard(owner: str) -> None:
    """Wait for the end of an owner, and end its processes.

    A byte on the standard input announces an orderly end. A closed standard input alone means nothing.
    """
    for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    is_in_order = _wait_for_end(owner)
    for pause_s in SEARCHES_AFTER_S:
        time.sleep(pause_s)
        end_processes(lambda pid: owner_of(pid) == owner)
        if is_in_order:
            break


def _wait_for_end(owner: str) -> bool:
    """Wait for the end of an owner; return whether it was announced."""
    try:
        descriptor = os.pidfd_open(int(owner.split("/")[1]))
    except ProcessLookupError:
        return False
    if has_owner_ended(owner):  # the descriptor may be that of a later process
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(0, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == descriptor:
                return False
            if os.read(0, 1):
                return True
            poll.unregister(0)


if __name__ == "__main__":
    _guard(sys.argv[1])
