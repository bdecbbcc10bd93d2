"""Run commands concurrently: `python tools/beside.py "make types" "make hooks" -- pytest -n 3`.

The output of the last command, after `--`, is printed while it runs. The output of each other command is printed when
all commands have ended, before the last line of the last command. The exit code is 1 if a command failed.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

ENDS_WITHIN_S = 10.0


def run(others: list[str], last: list[str]) -> int:
    """Run all commands concurrently; return 0 if all of them succeeded, and 1 otherwise."""
    with ExitStack() as stack:
        started = [(line, *stack.enter_context(_start(line))) for line in others]
        shown = subprocess.Popen(last, stdout=subprocess.PIPE)
        stack.callback(_end, shown)
        closing = _show(shown)
        failed = [" ".join(last)] if shown.wait() else []
        for line, process, file in started:
            if process.wait():
                failed.append(line)
            file.seek(0)
            print(f"--- {line}", file.read().decode(errors="replace").rstrip(), sep="\n", flush=True)
    sys.stdout.buffer.write(closing)
    sys.stdout.flush()
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


@contextmanager
def _start(line: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start a command; yield the process and the file of its output."""
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            shlex.split(line), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            yield process, file
        finally:
            _end(process)


def _show(process: subprocess.Popen[bytes]) -> bytes:
    """Print the output of a process until it ends, except its last line, which is returned."""
    assert process.stdout is not None
    last_line = b""
    for line in process.stdout:
        sys.stdout.buffer.write(last_line)
        sys.stdout.flush()
        last_line = line
    return last_line


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process that still runs."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> int:
    """Run the commands of the command line."""
    at = sys.argv.index("--")
    return run(sys.argv[1:at], sys.argv[at + 1 :])


if __name__ == "__main__":
    sys.exit(main())
