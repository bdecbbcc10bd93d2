"""Start the programs of this folder: forked from a server that has imported what they use.

Three quarters of the time of a short case would be imports. In the full matrix, whose figures have the time that a
server takes to start, each process is a new interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import multiprocessing
import os
import runpy
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Self

from tests.fault.extent import IS_FULL

ROOT: Final = Path(__file__).parents[2]
PROCESSES: Final = multiprocessing.get_context("forkserver")
USUAL: Final = (
    *(f"tests.fault.{name}_process" for name in ("pool", "person", "server", "worker", "asking")),
    "midstream.tools.mcp",
    "midstream.frameworks.pydantic_ai_durable",
    "pydantic_ai.models.function",
)
CONTRACT: Final = (
    "agents.testing",
    "langgraph.checkpoint.sqlite.aio",
    "midstream.frameworks.langgraph",
    "midstream.frameworks.openai_agents",
)
"""In the environment of `make contract` only the programs of test_driven.py are forked."""
PROCESSES.set_forkserver_preload(list(CONTRACT if importlib.util.find_spec("agents") else USUAL))


class Forked:
    """A process of the server, as `asyncio.subprocess.Process` has it."""

    def __init__(self, module: str, arguments: list[str], log: Path | None) -> None:
        self.stdout = asyncio.StreamReader()
        ours, theirs = PROCESSES.Pipe(duplex=False)
        given = (module, arguments, {**os.environ}, theirs, log)
        self._process = PROCESSES.Process(target=_live, args=given, daemon=True)
        self._process.start()
        theirs.close()
        self._out = ours
        self._has_ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._note_end)

    async def opened(self) -> Self:
        """Begin to read what the process prints."""
        pipe = os.fdopen(os.dup(self._out.fileno()), "rb", 0)
        self._out.close()
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self.stdout), pipe
        )
        return self

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        await self._has_ended.wait()
        assert self.returncode is not None
        return self.returncode

    async def communicate(self) -> tuple[bytes, None]:
        """Read to the end of what it prints, and wait for its end."""
        out = await self.stdout.read()
        await self.wait()
        self._transport.close()
        return out, None

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self._has_ended.set()


async def start(
    module: str, *arguments: object, log: Path | None = None
) -> asyncio.subprocess.Process | Forked:
    """Start `python -m MODULE ARGUMENTS`; its stdout is piped, and its stderr appended to `log`."""
    words = [str(each) for each in arguments]
    if not IS_FULL:
        return await Forked(module, words, log).opened()
    with contextlib.nullcontext() if log is None else log.open("ab") as stderr:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *words),
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )


def _live(
    module: str, arguments: list[str], environment: dict[str, str], out: Connection, log: Path | None
) -> None:
    """Be a program, in a process of the fork server."""
    os.dup2(out.fileno(), sys.stdout.fileno())
    out.close()
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # as the interpreter ends then: by the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
