"""A server in a process of its own, on the first core, and what it spends there."""

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
"""Where `/proc/stat` says how long the processors had nothing to do."""
_FIRST_CORE = min(os.sched_getaffinity(0))
REFERENCE = Path(__file__).with_name("reference.mjs")
NODE_FOLDER = "DURABLE_STREAMS"
"""Environment: the folder with `node_modules/@durable-streams/server` (`make bench-streams`)."""


class Served:
    """A server that tells its port in its first line, and answers each further line with a line.

    Args:
        command: What to run.
        folder: Where it may write; made if it is missing.
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

    def ask(self, word: str) -> str:
        """Send a line, and return the line that answers it."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return self._line()

    def cpu_s(self) -> float:
        """Return the seconds of a processor it has had so far, all its threads and the kernel's work for it."""
        # The kernel's name for the clock of another process: see `clock_getcpuclockid(3)`.
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def resident_bytes(self) -> int:
        """Return how much memory it has."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * PAGE_BYTES

    def stop(self) -> None:
        """Kill it."""
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
    """Start the Durable Streams server, file-backed in `folder`; None where it is not installed."""
    if NODE_FOLDER not in os.environ:
        return None
    return Served(["node", str(REFERENCE)], folder)


def others_busy_s(own_s: float) -> float:
    """Return how long the whole machine has been busy so far, without `own_s` seconds of it."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[_IDLE] - fields[_WAITING]) / os.sysconf("SC_CLK_TCK") - own_s


def allow_files(count: int) -> None:
    """Let this process and its children open so many files, if the system's own limit does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


@contextmanager
def on_last_core() -> Iterator[None]:
    """Leave the first core to the server."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
