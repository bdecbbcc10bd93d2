"""A server in its own process on the first core, and its CPU time and memory."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_IDLE, _WAITING = 3, 4
"""Fields of `/proc/stat` with the idle time of the processors."""
_FIRST_CORE = min(os.sched_getaffinity(0))
REFERENCE = Path(__file__).with_name("reference.mjs")
NODE_FOLDER = "DURABLE_STREAMS"
"""Environment variable with the folder of `node_modules/@durable-streams/server` (`make bench-streams`)."""


class Served:
    """A server process. It prints its port in the first line, and answers each line of input with one line.

    Args:
        command: The command to run.
        folder: A folder for its files, created if it is missing.
    """

    def __init__(self, command: list[str], folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "DATA_DIR": str(folder)},
        )
        os.sched_setaffinity(self._process.pid, {_FIRST_CORE})
        self.port = int(self._line())

    def query(self, word: str) -> str:
        """Send a line; return the line that answers it."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._line()

    def cpu_s(self) -> float:
        """Return the CPU seconds so far, of all threads, user and system."""
        # The id of the CPU clock of another process: see `clock_getcpuclockid(3)`.
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def resident_bytes(self) -> int:
        """Return the resident memory."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE_BYTES

    def stop(self) -> None:
        """Kill the server."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def midstream(folder: Path, *options: str) -> Served:
    """Start midstream on a database in `folder`; for the options see `bench.streams.server`."""
    return Served([sys.executable, "-m", "bench.streams.server", str(folder), *options], folder)


def reference(folder: Path) -> Served | None:
    """Start the Durable Streams server with its files in `folder`; return None if it is not installed."""
    if NODE_FOLDER not in os.environ:
        return None
    return Served(["node", str(REFERENCE)], folder)


def others_busy_s(own_s: float) -> float:
    """Return the busy seconds of the whole machine so far, minus `own_s`."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[_IDLE] - fields[_WAITING]) / os.sysconf("SC_CLK_TCK") - own_s


def raise_file_limit(count: int) -> None:
    """Raise the limit of open files for this process and its children, up to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


@contextmanager
def on_last_core() -> Iterator[None]:
    """Move this process to the last core, so that the server has the first one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
