"""Programs of tests, forked from a server that has imported what they use (`tests.preloaded`)."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NamedTuple, Self

ROOT: Final = Path(__file__).parents[1]
PROCESSES: Final = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.preloaded"])
_ONE: Final = threading.Lock()
"""Lock for one thread at a time: a start reads the exit codes of ended processes, and each can be read once.
"""


class Start(NamedTuple):
    """Start parameters of a program.

    Args:
        files: Its standard input, output and error.
        has_terminal: Whether its standard input becomes the terminal that controls it.
        ignores_interrupts: Whether a shell would have started it in the background.
    """

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    cwd: Path
    files: Sequence[Connection]
    has_terminal: bool = False
    ignores_interrupts: bool = False


def fork(start: Start) -> multiprocessing.process.BaseProcess:
    """Start `python -m MODULE ARGUMENTS` in a process of the fork server."""
    process = PROCESSES.Process(target=_live, args=(start,), daemon=True)
    with _ONE:
        process.start()
    for file in start.files:
        file.close()
    return process


def exit_code(process: multiprocessing.process.BaseProcess) -> int | None:
    """Return the exit code of a process that has ended."""
    with _ONE:
        return process.exitcode


def _live(start: Start) -> None:
    """Run as a program."""
    for number, file in enumerate(start.files):
        os.dup2(file.fileno(), number)
        file.close()
    # The locale decides how the interpreter handles bytes that are not text.
    as_here = sys.stdout.errors
    given = open(0, errors=as_here, closefd=False)  # noqa: SIM115
    printed = open(1, "w", errors=as_here, closefd=False)  # noqa: SIM115
    complaints = open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    vars(sys).update(stdin=given, __stdin__=given, stdout=printed, __stdout__=printed)
    vars(sys).update(stderr=complaints, __stderr__=complaints)
    faulthandler.enable(2)  # A crash of the interpreter shows where.
    if start.has_terminal:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    if start.ignores_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.cwd)
    sys.path.insert(0, str(start.cwd))
    sys.argv = [start.module, *start.arguments]
    sys.modules.pop(start.module, None)
    try:
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:  # As the interpreter ends then: by the signal.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def open_stream(wanted: int | IO[Any], *, is_input: bool = False) -> tuple[Connection, int | None]:
    """Return a file of a program, and the other end of a pipe.

    Args:
        wanted: `PIPE`, `DEVNULL`, a file or its number.
    """
    if wanted == subprocess.PIPE:
        read, write = os.pipe()
        ours, theirs = (write, read) if is_input else (read, write)
        return Connection(theirs, readable=is_input, writable=not is_input), ours
    if wanted == subprocess.DEVNULL:
        return Connection(os.open(os.devnull, os.O_RDWR)), None
    return Connection(os.dup(wanted if isinstance(wanted, int) else wanted.fileno())), None


class Forked:
    """`python -m MODULE ARGUMENTS` in a process of the fork server, with the interface of `subprocess.Popen`.

    Where a test is about the interpreter (its variables, its search path, its imports), start a process
    instead.

    Args:
        arguments: The command line after `python -m`.
        stdin: `PIPE`, `DEVNULL`, a file or its number; as `stdout` and `stderr`.
    """

    def __init__(
        self,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] = subprocess.PIPE,
        text: bool = False,
        has_terminal: bool = False,
    ) -> None:
        self.args = [*map(str, arguments)]
        binary = "" if text else "b"
        given, to = open_stream(stdin, is_input=True)
        out, output = open_stream(stdout)
        err, logged = open_stream(stderr)
        self.stdin = None if to is None else os.fdopen(to, f"w{binary}")
        self.stdout = None if output is None else os.fdopen(output, f"r{binary}")
        self.stderr = None if logged is None else os.fdopen(logged, f"r{binary}")
        module, *words = self.args
        self._process = fork(
            Start(
                module,
                words,
                {**(os.environ if env is None else env)},
                cwd or Path.cwd(),
                (given, out, err),
                has_terminal=has_terminal,
                ignores_interrupts=signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            )
        )

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return exit_code(self._process)

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the program.

        Raises:
            subprocess.TimeoutExpired: It did not come.
        """
        wait([self._process.sentinel], timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, data: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: ANN401 - as subprocess has it
        """Send `data`, read the output of the program, and wait for its end; a second read returns nothing."""
        with ThreadPoolExecutor(2) as readers:
            files = [None if each is None or each.closed else each for each in (self.stdout, self.stderr)]
            reads = [None if each is None else readers.submit(each.read) for each in files]
            try:
                if self.stdin is not None:
                    with contextlib.suppress(BrokenPipeError), self.stdin:
                        self.stdin.write(data)
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()  # This ends the readers, too.
                raise
            out, err = (None if each is None else each.result(timeout) for each in reads)
        self._close()
        return out, err

    def _close(self) -> None:
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):
                    file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        self.wait()


class AsyncForked:
    """A process of the fork server, as `asyncio.subprocess.Process` has it. Make it with `started`.

    Args:
        stdin: `PIPE` or `DEVNULL`.
        stderr: A file or its number.
    """

    stdin: asyncio.StreamWriter
    _transport: asyncio.ReadTransport

    def __init__(
        self,
        *arguments: object,
        env: Mapping[str, str],
        cwd: Path,
        stdin: int,
        stderr: int | IO[Any],
        limit: int,
    ) -> None:
        self.stdout = asyncio.StreamReader(limit)
        given, self._to = open_stream(stdin, is_input=True)
        out, self._output = open_stream(subprocess.PIPE)
        err, _ = open_stream(stderr)
        module, *words = map(str, arguments)
        self._process = fork(Start(module, words, {**env}, cwd, (given, out, err)))
        self._has_ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._note_end)

    @classmethod
    async def started(
        cls,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        stdin: int = subprocess.DEVNULL,
        stderr: int | IO[Any] = 2,
        limit: int = 2**16,
    ) -> Self:
        """Start `python -m MODULE ARGUMENTS`, and begin to read its output."""
        made = cls(
            *arguments,
            env=os.environ if env is None else env,
            cwd=cwd,
            stdin=stdin,
            stderr=stderr,
            limit=limit,
        )
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReaderProtocol(made.stdout)
        assert made._output is not None
        made._transport, _ = await loop.connect_read_pipe(lambda: reader, os.fdopen(made._output, "rb", 0))
        if made._to is not None:
            unread = asyncio.StreamReaderProtocol(asyncio.StreamReader())
            to, _ = await loop.connect_write_pipe(lambda: unread, os.fdopen(made._to, "wb", 0))
            made.stdin = asyncio.StreamWriter(to, unread, None, loop)
        return made

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return exit_code(self._process)

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
        """Read its output to the end, and wait for its end."""
        out = await self.stdout.read()
        await self.wait()
        self._transport.close()
        return out, None

    def _note_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._has_ended.set()
