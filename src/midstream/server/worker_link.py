"""The connection between a worker and its supervisor: one line of JSON for each message, on a socket pair.

`midstream serve --workers N` is one supervisor and N workers, each a process with an event loop. The supervisor owns
the listening sockets, and every worker inherits all of them. On Linux each worker has a socket of its own on the same
port, and the system distributes connections among the sockets. While a worker is missing, the others accept from its
socket too, so no connection waits or is refused. When this connection ends, the supervisor has ended, and the worker
stops as after a SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct

from midstream.environment import World
from midstream.errors import UsageError

VARIABLE = "MIDSTREAM_WORKER_LINK"
"""Environment variable with the descriptor of a worker's end; the worker removes the variable."""
LINE_BYTES_MAX = 64 * 2**20
"""Bytes of one message, which may contain the metrics of all workers."""
PAGES_WITHIN_S = 2.0
"""Seconds for the other workers to return their metrics; slower workers are left out."""

_log = logging.getLogger(__name__)


class WorkerSetup(Struct, frozen=True, tag="setup"):
    """The first message to a worker.

    Args:
        number: Number of the worker, from 1.
        sockets: Descriptors of all listening sockets.
        own: Index of the socket from which this worker always accepts.
        start: Id of this start of the server, the same for all workers.
        login: A one-time login code for the worker to store; "" for none.
    """

    number: int
    sockets: tuple[int, ...]
    own: int
    start: str
    login: str = ""


class Orders(Struct, frozen=True, tag="orders"):
    """Orders to a worker, until the next ones.

    Args:
        accept: Indices of the sockets to accept from.
        stops: Drain and end.
        is_urgent: End without waiting for connections.
    """

    accept: tuple[int, ...]
    stops: bool = False
    is_urgent: bool = False


class PageWanted(Struct, frozen=True, tag="page_wanted"):
    """Request for the metrics of a worker."""

    number: int


class WorkerPages(Struct, frozen=True, tag="pages"):
    """The metrics of the workers, by their numbers: the answer to `PagesWanted`."""

    number: int
    pages: dict[int, str]


class Ready(Struct, frozen=True, tag="ready"):
    """A worker listens; `report` is what `midstream serve --json` prints."""

    report: dict[str, Any]


class PagesWanted(Struct, frozen=True, tag="pages_wanted"):
    """Request for the metrics of all other workers."""

    number: int


class Page(Struct, frozen=True, tag="page"):
    """The metrics of one worker: the answer to `PageWanted`."""

    number: int
    text: str


Accept = Callable[[dict[int, socket.socket]], Awaitable[None]]
"""Accepts connections from these sockets, by index."""
ToWorker = WorkerSetup | Orders | PageWanted | WorkerPages
ToSupervisor = Ready | PagesWanted | Page


def encode_line(message: ToWorker | ToSupervisor) -> bytes:
    """Encode a message as a line."""
    return msgspec.json.encode(message) + b"\n"


class WorkerLink:
    """A worker's end of the connection to its supervisor.

    Args:
        connection: One end of a socket pair.

    Raises:
        UsageError: The supervisor ended before it sent anything.
    """

    def __init__(self, connection: socket.socket, *, world: World = World()) -> None:
        self.stop = asyncio.Event()
        """Set when this worker must end."""
        self.report: dict[str, Any] = {}
        """The line that `--json` prints for this worker; see `Ready`."""
        self.page_of: Callable[[], bytes] | None = None
        """Returns the metrics of this worker."""
        self._connection = connection
        self._world = world
        self.setup = self._read_setup()
        self._sockets = [socket.socket(fileno=each) for each in self.setup.sockets]
        for each in self._sockets:
            os.set_inheritable(each.fileno(), False)  # noqa: FBT003 - not by the programs that tools start
            each.setblocking(False)  # noqa: FBT003 - the standard library's interface
        self._writer: asyncio.StreamWriter | None = None
        self._following: asyncio.Task[None] | None = None
        self._page_requests = 0
        self._answers: dict[int, asyncio.Future[dict[int, str]]] = {}

    def _read_setup(self) -> WorkerSetup:
        line = b""
        while not line.endswith(b"\n"):  # byte by byte: the event loop reads the next messages
            piece = self._connection.recv(1)
            if not piece:
                raise UsageError("the supervisor of this worker has ended")
            line += piece
        return msgspec.json.decode(line, type=WorkerSetup)

    @property
    def listener(self) -> socket.socket:
        """A duplicate of this worker's own listening socket."""
        return self._sockets[self.setup.own].dup()

    async def follow(self, accept: Accept, cut: Callable[[], None]) -> None:
        """Report that this worker listens, and follow orders from then on.

        Args:
            accept: Called with duplicates of the further sockets to accept from, by index, whenever they change.
            cut: Called when this worker must end without waiting for connections.
        """
        reader, self._writer = await asyncio.open_connection(sock=self._connection, limit=LINE_BYTES_MAX)
        self._send(Ready(self.report))
        self._following = self._world.spawn(
            self._follow_orders(reader, accept, cut), name="orders of the supervisor"
        )

    async def _follow_orders(
        self, reader: asyncio.StreamReader, accept: Accept, cut: Callable[[], None]
    ) -> None:
        try:
            while line := await reader.readline():
                match msgspec.json.decode(line, type=ToWorker):
                    case Orders(stops=True) as orders:
                        self.stop.set()
                        if orders.is_urgent:
                            cut()
                    case Orders() as orders:
                        missing = [index for index in orders.accept if index != self.setup.own]
                        await accept({index: self._sockets[index].dup() for index in missing})
                    case PageWanted(number):
                        text = b"" if self.page_of is None else self.page_of()
                        self._send(Page(number, text.decode()))
                    case WorkerPages(number, pages):
                        answer = self._answers.get(number)
                        if answer is not None and not answer.done():
                            answer.set_result(pages)
                    case WorkerSetup():
                        pass
        except (OSError, ValueError) as error:
            _log.warning("the link to the supervisor failed: %s", error)
        if not self.stop.is_set():
            _log.warning("the supervisor has ended; this worker stops")
        self.stop.set()

    def _send(self, message: ToSupervisor) -> None:
        assert self._writer is not None
        self._writer.write(encode_line(message))

    async def other_pages(self) -> dict[int, str]:
        """Return the metrics of all other workers, by number."""
        if self._writer is None:
            return {}
        self._page_requests += 1
        number = self._page_requests
        answer: asyncio.Future[dict[int, str]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._send(PagesWanted(number))
            async with asyncio.timeout(2 * PAGES_WITHIN_S):
                return await answer
        except TimeoutError:
            return {}
        finally:
            del self._answers[number]

    def close_sockets(self) -> None:
        """Close this worker's listening sockets, so that the other workers and the next supervisor can use the port."""
        for each in self._sockets:
            each.close()

    async def close(self) -> None:
        """Close the connection."""
        self.close_sockets()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        if self._writer is not None:
            self._writer.close()


def find_link() -> WorkerLink | None:
    """Return the link of this process if it is a worker, else None."""
    descriptor = os.environ.pop(VARIABLE, "")
    if not descriptor:
        return None
    connection = socket.socket(fileno=int(descriptor))
    os.set_inheritable(connection.fileno(), False)  # noqa: FBT003 - not by the programs that tools start
    return WorkerLink(connection)
