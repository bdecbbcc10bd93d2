"""One simulated world: processes on one memory, access of clients to them, and the trace of everything."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from midstream.engine.host import Host
from midstream.environment import World
from midstream.errors import MidstreamError
from midstream.session import session as sessions
from midstream.session.records import decode
from midstream.session.session import Session
from midstream.store.memory import Memory, MemoryStore
from tests.simulation.agents import OutsideWorld, agent_of
from tests.simulation.loop import SimulatedLoop, SimulatedProcess, pass_time
from tests.simulation.weathered_store import Weather, WeatheredStore

T = TypeVar("T")

BEGINS_AT = 1_000_000.0
"""Wall clock at the beginning of a run, in seconds since 1970."""
WITHOUT_LIMIT_S = 600.0
"""Seconds for the start and stop of a process; it is never cut short."""
PATIENCE_S = 8.0
"""Seconds for which a client waits for an answer before it tries again, perhaps elsewhere."""


class CutOffError(Exception):
    """The connection ended without an answer: the outcome at the server is unknown."""


class SimulatedWorld(World):
    """The clock of the loop, chance from the seed."""

    def __init__(self, loop: SimulatedLoop, chance: random.Random, *, skew_s: float) -> None:
        self._loop = loop
        self._chance = chance
        self._skew_s = skew_s
        self._numbers = itertools.count(1)

    def now(self) -> float:
        return BEGINS_AT + self._skew_s + self._loop.time()

    def monotonic(self) -> float:
        return self._loop.time()

    def chance(self) -> float:
        return self._chance.random()

    def new_id(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers)}-{self._chance.getrandbits(32):08x}"

    def new_secret(self) -> str:
        return f"{self._chance.getrandbits(256):064x}"


class SimulatedServer:
    """One process with a host."""

    def __init__(self, lab: Lab, name: str, *, skew_s: float, look_back_s: float) -> None:
        self.process = SimulatedProcess(name)
        world = SimulatedWorld(lab.loop, lab.chance(name), skew_s=skew_s)
        self.memory_store = MemoryStore(lab.memory, world=world)

        def note(*what: object) -> None:
            lab.note(name, *what)

        store = WeatheredStore(self.memory_store, lab.weather, lab.chance(f"{name} store"), note)
        self.host = Host(agent_of(lab.outside, world), store, world=world, look_back_s=look_back_s)
        self.is_ready = False
        self.is_leaving = False
        self.connections: dict[asyncio.Future[Any], None] = {}
        self._lab = lab
        self.process.on_death.append(self._die)

    async def begin(self) -> None:
        """Start the host in its process; ends also where the process dies meanwhile."""
        try:
            await self._lab.call(self, self.host.start(), patience_s=WITHOUT_LIMIT_S)
        except (CutOffError, MidstreamError) as error:
            self._lab.note(self.process.name, "did not start", type(error).__name__)
            self._lab.loop.kill(self.process)
        else:
            self.is_ready = True

    async def leave(self, *, grace_s: float) -> None:
        """Stop the host as a SIGTERM does; the rest of the process then dies."""
        self.is_leaving = True
        try:
            await self._lab.call(self, self.host.stop(grace_s=grace_s), patience_s=WITHOUT_LIMIT_S)
        except CutOffError:
            return
        await pass_time(1.0)  # The last cancelled task ends now.
        left = [task.get_name() for task in self.process.tasks if not task.done()]
        if any(name.startswith("RunCall") for name in left):  # It ignores cancellation, and is tracked.
            left = [name for name in left if not name.startswith(("RunCall", "watchdog"))]
        if left:
            self._lab.problems.append(f"tasks outlive their host: {left}")
        self._lab.loop.kill(self.process)

    def _die(self) -> None:
        self._lab.note(self.process.name, "dies")
        self._lab.memory.kill(self.memory_store.node)
        for connection in self.connections:
            if not connection.done():
                connection.set_exception(CutOffError())


class Lab:
    """Everything of one run.

    Args:
        seed: Where all chance comes from.
        loop: The loop it runs in.
    """

    def __init__(self, seed: int, loop: SimulatedLoop) -> None:
        self.seed = seed
        self.loop = loop
        self.memory = Memory()
        self.weather = Weather()
        self.trace: list[tuple[object, ...]] = []
        self.problems: list[str] = []
        self.servers: list[SimulatedServer] = []
        self.on_append: list[Callable[[str, bytes], None]] = []
        self.cutting = 0.0
        """Share of connections that are cut."""
        self.is_over = False
        """Whether no new message is sent any more."""
        self.following = 0
        """Number of clients that only read, or wait for the end."""
        self.has_outlasted_runners = False
        """Whether an outage of the store exceeded the patience of every runner."""
        self.outside = OutsideWorld(self.chance("outside"), lambda *what: self.note("outside", *what))
        self._network = self.chance("network")
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._outer = contextvars.copy_context()

    def chance(self, name: str) -> random.Random:
        """Return a separate source of chance for each part, so that none disturbs another."""
        return random.Random(f"{self.seed}/{name}")

    def note(self, *what: object) -> None:
        """Write a line of the trace."""
        self.trace.append((round(self.loop.time(), 6), *what))
        if what[1] == "append" and len(what) > 4:
            for body in what[5]:  # type: ignore[attr-defined]
                for callback in self.on_append:
                    callback(str(what[2]), body)

    # --- processes --------------------------------------------------------------------------------------------

    def server(self, *, skew_s: float = 0.0, look_back_s: float = 7200.0) -> SimulatedServer:
        """Make the next process."""
        made = SimulatedServer(self, f"p{len(self.servers) + 1}", skew_s=skew_s, look_back_s=look_back_s)
        self.servers.append(made)
        return made

    @property
    def reachable(self) -> list[SimulatedServer]:
        """Return the servers that accept connections; a frozen one does too, and never answers."""
        return [
            each for each in self.servers if each.is_ready and not (each.process.is_dead or each.is_leaving)
        ]

    async def any_server(self, chance: random.Random) -> SimulatedServer:
        """Wait for a server and choose one."""
        wait_s = 0.1
        while not (found := self.reachable):
            await pass_time(wait_s * (0.5 + chance.random()))
            wait_s = min(10.0, wait_s * 2)
        return chance.choice(found)

    async def call(
        self, server: SimulatedServer, work: Coroutine[Any, Any, T], *, patience_s: float = PATIENCE_S
    ) -> T:
        """Run an operation at a server, and wait for its answer.

        Raises:
            CutOffError: The process died, the connection was cut, or patience ended.
            MidstreamError: The error that the server answered.
        """
        connection: asyncio.Future[T] = self.loop.create_future()
        if server.process.is_dead:
            work.close()
            raise CutOffError
        server.connections[connection] = None
        handler = self.loop.start(server.process, work)

        def answer(done: asyncio.Task[T]) -> None:
            error = None if done.cancelled() else done.exception()
            if connection.done():
                return
            if done.cancelled():
                connection.set_exception(CutOffError())
            elif error is not None:
                connection.set_exception(error)
            else:
                connection.set_result(done.result())

        handler.add_done_callback(answer, context=server.process.context.copy())
        try:
            async with asyncio.timeout(self._cut_after(patience_s)):
                return await connection
        except TimeoutError:
            raise CutOffError from None
        finally:
            server.connections.pop(connection, None)
            if not handler.done() and not server.process.is_dead:
                server.process.context.copy().run(handler.cancel)  # the server sees the disconnect

    def _cut_after(self, patience_s: float) -> float:
        """Return the time at which a connection ends: its client's patience, or earlier; without patience it
        is never cut.
        """
        if patience_s < WITHOUT_LIMIT_S and self.cutting and self._network.random() < self.cutting:
            return min(patience_s, self._network.expovariate(2.0))
        return patience_s

    # --- clients ----------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a client; its error is a problem of the run."""
        # Also where a server's code starts it: it belongs to no process that can die.
        task: asyncio.Task[None] = self.loop.create_task(work, context=self._outer.copy())
        self._tasks[task] = None
        task.add_done_callback(self._ended, context=self._outer.copy())

    @property
    def clients(self) -> list[asyncio.Task[None]]:
        """Return the running clients."""
        return list(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problems.append(f"a client failed: {error!r}")

    def folded(self, session: str) -> Session:
        """Return a session as folded from the memory."""
        found = self.memory.sessions[session]
        return sessions.fold((each.epoch, decode(each.body)) for each in found.records)

    def end_of(self, session: str) -> int:
        """Return the position of a session's last record; 0 where there is none."""
        found = self.memory.sessions.get(session)
        return len(found.records) if found else 0
