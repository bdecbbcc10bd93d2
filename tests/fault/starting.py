"""Start the programs of this folder: forked from a server that has imported their modules (`tests/forked.py`).

In the full matrix, whose figures include the start of a server, each process is a new interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from tests.fault.extent import IS_FULL
from tests.forked import ROOT, AsyncForked


async def start(
    module: str, *arguments: object, log: Path | None = None
) -> asyncio.subprocess.Process | AsyncForked:
    """Start `python -m MODULE ARGUMENTS`; its stdout is piped, and its stderr appended to `log`."""
    words = [str(each) for each in arguments]
    with contextlib.nullcontext() if log is None else log.open("ab") as stderr:
        if not IS_FULL:
            return await AsyncForked.started(module, *words, stderr=2 if stderr is None else stderr)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *words),
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
