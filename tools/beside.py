"""Run commands beside one another: `python tools/beside.py "make types" "make hooks" -- pytest -n 3`.

The last command, behind `--`, is shown as it runs. The output of each other one is shown whole
when all have ended, before the closing line of the last. The exit code is 1 if one of them failed.
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


def run(beside: list[str], last: list[str]) -> int:
    """Run all commands at once; return 0 if all of them succeeded, and 1 otherwise."""
    with ExitStack() as stack:
        started = [(line, *stack.enter_context(_started(line))) for line in beside]
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
def _started(line: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start a command, and yield it with the file of its output."""
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            shlex.split(line), stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            yield process, file
        finally:
            _end(process)


def _show(process: subprocess.Popen[bytes]) -> bytes:
    """Pass on the output of a process to its end, but for its last line, which is returned."""
    assert process.stdout is not None
    held = b""
    for line in process.stdout:
        sys.stdout.buffer.write(held)
        sys.stdout.flush()
        held = line
    return held


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs."""
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
