"""The supervisor of the workers of one server: starts them, replaces those that died, and ends them.

    run: bind the port -> worker 1 -> workers 2 to N -> one ready line
    a worker dies: the others accept from its socket -> start it again, after a pause that grows
    SIGHUP: one worker after the other is replaced; the new one listens before the old one drains
    SIGTERM, SIGINT: all workers drain and end; again: they end at once

A worker runs the command line of its supervisor, with the link (`worker_link.py`) in its environment. It is in a
process group of its own, so that Ctrl-C of a terminal reaches the supervisor alone. Whatever ends the supervisor ends
its workers: they read the end of the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from midstream.environment import World
from midstream.errors import UsageError
from midstream.retries import WORKER_BACKOFF
from midstream.server import worker_link
from midstream.server.uvicorn_server import STOP_WITHIN_S, listen
from midstream.server.worker_link import (
    Orders,
    Page,
    PagesWanted,
    PageWanted,
    Ready,
    WorkerPages,
    WorkerSetup,
    encode_line,
)

START_WITHIN_S = 120.0
"""Seconds for a worker to start and listen; it may migrate its store meanwhile."""
STEADY_S = 10.0
"""Seconds of listening after which the failures of a worker number are no longer a crash loop."""
SILENT_S_MAX = 60.0
"""Seconds without any listening worker after which the server ends, so that a supervisor above it can react."""
END_WITHIN_S = STOP_WITHIN_S + 3.0
"""Seconds from the order to end until a worker is killed."""

_log = logging.getLogger(__name__)


def listen_for_workers(host: str, port: int, count: int, *, shares_port: bool) -> list[socket.socket]:
    """Return the listening sockets: one for each worker if the system distributes connections, else one.

    Raises:
        PortTakenError, UsageError: See `listen`.
    """
    if sys.platform == "win32":
        raise UsageError("this system has no workers; start several servers with a proxy in front of them")
    if sys.platform != "linux":  # elsewhere the last socket gets all connections
        return [listen(host, port, shares_port=shares_port)]
    if port and not shares_port:
        listen(host, port).close()  # refuses a port that another server shares
    sockets = [listen(host, port, shares_port=True)]
    port = sockets[0].getsockname()[1]
    return [*sockets, *(listen(host, port, shares_port=True) for _ in range(count - 1))]


class WorkerProcess:
    """One worker, as its supervisor controls it.

    Args:
        number: From 1; a replacement has the number of the worker that it replaces.
    """

    def __init__(
        self, number: int, process: asyncio.subprocess.Process, connection: socket.socket, world: World
    ) -> None:
        self.number = number
        self.process = process
        self.report: dict[str, Any] = {}
        self.listening = asyncio.Event()
        """Set when the worker listens or has ended."""
        self.began_at = world.monotonic()
        self.is_stopping = False
        self.pages: dict[int, asyncio.Future[str]] = {}
        self._world = world
        self._connection = connection
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._page_requests = 0

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.returncode is not None

    @property
    def is_listening(self) -> bool:
        """Whether it accepts connections."""
        return bool(self.report) and not self.is_stopping and not self.has_ended

    async def connect(
        self, setup: WorkerSetup, take: Callable[[WorkerProcess, Ready | PagesWanted], None]
    ) -> None:
        """Send the setup, and handle messages from then on."""
        reader, self._writer = await asyncio.open_connection(
            sock=self._connection, limit=worker_link.LINE_BYTES_MAX
        )
        self.send(setup)
        self._reading = self._world.spawn(self._read(reader, take), name=f"worker {self.number}")

    def send(self, message: worker_link.ToWorker) -> None:
        """Send a message; a message to a dead worker is lost."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(encode_line(message))

    async def _read(
        self, reader: asyncio.StreamReader, take: Callable[[WorkerProcess, Ready | PagesWanted], None]
    ) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                match msgspec.json.decode(line, type=worker_link.ToSupervisor):
                    case Page(number, text):
                        answer = self.pages.get(number)
                        if answer is not None and not answer.done():
                            answer.set_result(text)
                    case message:
                        take(self, message)

    async def page(self) -> str:
        """Return the worker's metrics; "" after a timeout."""
        self._page_requests += 1
        number = self._page_requests
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.pages[number] = answer
        try:
            self.send(PageWanted(number))
            async with asyncio.timeout(worker_link.PAGES_WITHIN_S):
                return await answer
        except TimeoutError:
            return ""
        finally:
            del self.pages[number]

    async def wait(self) -> int:
        """Wait for the end of the process; return the exit code."""
        code = await self.process.wait()
        self.listening.set()
        return code

    def stop(self, *, is_urgent: bool = False) -> None:
        """Order the worker to drain and end."""
        self.is_stopping = True
        self.send(Orders((), stops=True, is_urgent=is_urgent))

    async def end(self) -> None:
        """Order the worker to end, and kill it after `END_WITHIN_S`."""
        if not self.has_ended:
            self.stop()
            try:
                async with asyncio.timeout(END_WITHIN_S):
                    await self.process.wait()
            except TimeoutError:
                _log.warning("worker %d did not end within %g s; it is killed", self.number, END_WITHIN_S)
                self.process.kill()
                await self.process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
        if self._writer is not None:
            self._writer.close()


class Supervisor:
    """Runs the workers of one server, from the first start to the last end.

    Args:
        command: The command line of a worker.
        count: Number of workers.
        sockets: The sockets of `listen_for_workers`.
        login: A one-time login code for a browser; the first worker stores it.
        on_ready: Called with the report of the first worker when all listen.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        count: int,
        sockets: Sequence[socket.socket],
        login: str,
        on_ready: Callable[[dict[str, Any]], None],
        world: World,
    ) -> None:
        self._command = command
        self._count = count
        self._sockets = sockets
        self._login = login
        self._on_ready = on_ready
        self._world = world
        self._start_name = world.new_id("start")
        self._workers: dict[int, WorkerProcess] = {}
        """The worker of each number, listening or starting."""
        self._processes: set[WorkerProcess] = set()
        """All processes that are not reaped yet, including replacements."""
        self._is_ready = False
        self._listened_at = 0.0
        """Monotonic time at which a worker last listened."""
        self._failures: dict[int, int] = {}
        self._stopping = asyncio.Event()
        self._rolling: asyncio.Task[None] | None = None
        self._exit_code = 0
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Run until a signal or until no worker can be started; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        if not sys.stdin.isatty():  # at a terminal, SIGHUP means that the terminal was closed
            loop.add_signal_handler(signal.SIGHUP, self._roll_soon)
        keeping: list[asyncio.Task[None]] = []
        try:
            if await self._start_all():
                self._is_ready = True
                self._on_ready({**self._workers[1].report, "pid": os.getpid(), "workers": self._count})
                keeping = [
                    self._world.spawn(self._keep(number), name=f"keep worker {number}")
                    for number in range(1, self._count + 1)
                ]
                await self._stopping.wait()
        finally:
            await self._end_all(keeping)
        return self._exit_code

    async def _start_all(self) -> bool:
        """Start the first worker, which creates the store, then all others; return whether all listen."""
        if not await self._is_started(await self._start(1, login=self._login)):
            return False
        others = [await self._start(number) for number in range(2, self._count + 1)]
        return all([await self._is_started(each) for each in others])

    async def _is_started(self, worker: WorkerProcess) -> bool:
        if await self._wait_until_listening(worker):
            return True
        if not self._stopping.is_set():
            code = worker.process.returncode
            self._exit_code = code if code and code > 0 else 1
            _log.error("worker %d did not start (%s); the server ends", worker.number, _describe_end(code))
        return False

    async def _wait_until_listening(self, worker: WorkerProcess) -> bool:
        """Wait until a worker listens; return False if it ends, times out, or the server stops."""
        stopping = self._world.spawn(self._stopping.wait(), name="stopping")
        listening = self._world.spawn(worker.listening.wait(), name="listening")
        await asyncio.wait({stopping, listening}, timeout=START_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, listening):
            task.cancel()
        if not worker.has_ended and not worker.report and not self._stopping.is_set():
            _log.error("worker %d does not listen after %g s; it is killed", worker.number, START_WITHIN_S)
            worker.process.kill()
            await worker.wait()
        return worker.is_listening

    async def _start(self, number: int, *, login: str = "", replaces: bool = True) -> WorkerProcess:
        own, theirs = socket.socketpair()
        descriptors = [each.fileno() for each in self._sockets]
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), *descriptors],
                process_group=0,
                env={**os.environ, worker_link.VARIABLE: str(theirs.fileno())},
            )
        finally:
            theirs.close()
        own.setblocking(False)  # noqa: FBT003 - the standard library's interface
        worker = WorkerProcess(number, process, own, self._world)
        self._processes.add(worker)
        if replaces:
            self._workers[number] = worker
        index = (number - 1) % len(self._sockets)
        await worker.connect(
            WorkerSetup(number, tuple(descriptors), index, self._start_name, login), self._handle
        )
        self._watch_end(worker)
        return worker

    def _watch_end(self, worker: WorkerProcess) -> None:
        task = self._world.spawn(self._note_end(worker), name=f"end of worker {worker.number}")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _note_end(self, worker: WorkerProcess) -> None:
        await worker.wait()
        self._assign()

    def _handle(self, worker: WorkerProcess, message: Ready | PagesWanted) -> None:
        match message:
            case Ready(report):
                worker.report = report
                worker.listening.set()
                self._assign()
            case PagesWanted(number):
                task = self._world.spawn(self._answer_pages(worker, number), name="metrics of the workers")
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _answer_pages(self, asking: WorkerProcess, number: int) -> None:
        others = [each for each in self._workers.values() if each is not asking and each.is_listening]
        pages = await asyncio.gather(*(each.page() for each in others))
        asking.send(
            WorkerPages(number, {each.number: page for each, page in zip(others, pages, strict=True) if page})
        )

    def _assign(self) -> None:
        """Distribute the sockets of missing workers among the listening workers."""
        count = len(self._sockets)
        listening = [each for each in self._workers.values() if each.is_listening]
        owned = {(each.number - 1) % count for each in listening}
        missing = set(range(count)) - owned
        for worker in listening:
            worker.send(Orders(tuple(sorted({(worker.number - 1) % count, *missing}))))

    async def _keep(self, number: int) -> None:
        """Start a worker again whenever it has ended."""
        while True:
            worker = self._workers[number]
            code = await worker.wait()
            if self._stopping.is_set():
                return
            if self._workers[number] is not worker:
                continue  # it was replaced
            is_steady = self._world.monotonic() - worker.began_at >= STEADY_S and bool(worker.report)
            failures = self._failures[number] = 1 if is_steady else self._failures.get(number, 0) + 1
            now = self._world.monotonic()
            if worker.report or any(each.is_listening for each in self._workers.values()):
                self._listened_at = now
            if now - self._listened_at > SILENT_S_MAX:
                _log.error(
                    "no worker has listened for %g s; the last one ended with %s; the server ends",
                    SILENT_S_MAX,
                    _describe_end(code),
                )
                self._exit_code = code if code > 0 else 1
                self._stopping.set()
                return
            wait_s = WORKER_BACKOFF.wait_s(failures, chance=self._world.chance())
            _log.error(
                "worker %d (process %d) has ended: %s; it is started again in %.1f s",
                number,
                worker.process.pid,
                _describe_end(code),
                wait_s,
            )
            await self._end(worker)
            await self._world.sleep(wait_s)
            while self._workers[number] is worker and not self._stopping.is_set():
                try:
                    await self._wait_until_listening(await self._start(number))
                except OSError as error:  # the system cannot start a process now
                    _log.error("worker %d cannot be started: %s", number, error)
                    await self._world.sleep(WORKER_BACKOFF.most_s)

    async def _end(self, worker: WorkerProcess) -> None:
        await worker.end()
        self._processes.discard(worker)

    # --- signals

    def _stop(self) -> None:
        is_urgent = self._stopping.is_set()
        self._stopping.set()
        for worker in self._processes:
            worker.stop(is_urgent=is_urgent)

    def _roll_soon(self) -> None:
        if not self._is_ready:
            _log.warning("the server is starting; this SIGHUP is ignored")
        elif self._rolling is None or self._rolling.done():
            self._rolling = self._world.spawn(self._roll(), name="rolling restart")
        else:
            _log.warning("a rolling restart is under way; this SIGHUP is ignored")

    async def _roll(self) -> None:
        """Replace one worker after the other. If a new worker does not start, the remaining old workers stay."""
        for number in range(1, self._count + 1):
            if self._stopping.is_set():
                return
            new = await self._start(number, replaces=False)
            if not await self._wait_until_listening(new):
                await self._end(new)
                if not self._stopping.is_set():
                    _log.error(
                        "the new worker %d did not start (%s); the rolling restart ends, and the old workers stay",
                        number,
                        _describe_end(new.process.returncode),
                    )
                return
            old, self._workers[number] = self._workers[number], new
            self._failures.pop(number, None)
            self._assign()
            await self._end(old)
            _log.info("worker %d is replaced: process %d by %d", number, old.process.pid, new.process.pid)

    async def _end_all(self, keeping: Sequence[asyncio.Task[None]]) -> None:
        self._stopping.set()
        for each in self._sockets:
            each.close()
        tasks = [*keeping, *([self._rolling] if self._rolling is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        try:
            await asyncio.gather(*map(self._end, [*self._processes]))
        finally:  # also after a cancellation: no worker outlives its supervisor, not even a frozen one
            for worker in self._processes:
                if not worker.has_ended:
                    worker.process.kill()
            for task in self._answering:
                task.cancel()


def _describe_end(code: int | None) -> str:
    if code is None:
        return "it did not listen in time"
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
