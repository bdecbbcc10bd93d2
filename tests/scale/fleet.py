"""Three `midstream serve` processes on one store, each at an address of its own, started again after each kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx2

from midstream.environment import World
from tests.forked import AsyncForked
from tests.ports import held_port
from tests.scale.served import LEDGER_VARIABLE

SERVERS = 3
READY_S = 60.0
"""Seconds for a start; a quiet machine needs one."""
STARTS_MAX = 40
"""Starts of a server in a row, while the database is restarted."""
STARTS_EVERY_S = 0.5
TAIL_BYTES = 3000
SETTINGS = "heartbeat_s = 1.0\n"
"""Seconds of a heartbeat: a frozen server is found after three of them."""


class FleetServer:
    """One `midstream serve` process after the other, on one port.

    Args:
        words: Its command line after `midstream serve`, without the port.
    """

    def __init__(self, name: str, folder: Path, port: int, words: Sequence[str]) -> None:
        self.name = name
        self.port = port
        self.lives = 0
        self._folder = folder
        self._words = [*words, f"--port={port}"]
        self._process: AsyncForked | None = None

    async def start(self) -> None:
        """Start the next process, as often as a database that is restarted refuses it, and wait until it listens.

        Service managers do the same (`Restart=always`, `restart: unless-stopped`).
        """
        self.lives += 1
        for _ in range(STARTS_MAX):
            if await self._start_once():
                return
            assert "[store_busy]" in self.log(), f"{self.name} did not start: {self.log()}"
            await World().sleep(STARTS_EVERY_S)
        raise AssertionError(f"{self.name} did not start: {self.log()}")

    async def _start_once(self) -> bool:
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = await AsyncForked.started(
                *("midstream", "serve", *self._words, "--json"),
                env={
                    **os.environ,
                    LEDGER_VARIABLE: str(self._folder / "ledger"),
                    "MIDSTREAM_HOME": str(self._folder / "home"),
                },
                stderr=log,
            )
        async with asyncio.timeout(READY_S):
            return await self._process.stdout.readline() != b""

    async def until_ready(self) -> None:
        """Wait until it takes requests."""
        async with httpx2.AsyncClient(timeout=2.0, trust_env=False) as http, asyncio.timeout(READY_S):
            while True:
                with contextlib.suppress(httpx2.HTTPError):
                    if (await http.get(f"http://127.0.0.1:{self.port}/ready")).status_code == 200:
                        return
                await World().sleep(0.05)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for the end of the process; return its exit code."""
        assert self._process is not None
        return await self._process.wait()

    def log(self) -> str:
        log = self._folder / f"{self.name}.log"
        return log.read_text(errors="replace")[-TAIL_BYTES:] if log.exists() else ""


class Fleet:
    """Servers that are started again when a signal of the test ended them; any other end is a problem.

    Args:
        store: The URL of their store.
        folder: Where their logs and the ledger of their tools are.
        words: Their command line after `midstream serve`, without port and store.
    """

    def __init__(self, store: str, folder: Path, ports: Sequence[int], words: Sequence[str]) -> None:
        self.servers = [
            FleetServer(f"server-{number}", folder, port, [*words, f"--store={store}"])
            for number, port in enumerate(ports, start=1)
        ]
        self.problems: list[str] = []
        self._expected: set[FleetServer] = set()

    def is_starting(self, server: FleetServer) -> bool:
        """Return whether a server was killed, and does not listen again yet."""
        return server in self._expected

    async def kill(self, server: FleetServer, after_s: float) -> None:
        """Kill a server, and start it again after some seconds."""
        self._expected.add(server)
        try:
            server.signal(signal.SIGKILL)
            await server.ended()
            await World().sleep(after_s)
            await server.start()
        finally:
            self._expected.discard(server)

    async def freeze(self, server: FleetServer, for_s: float) -> None:
        """Stop a server for some seconds, unless it is killed meanwhile."""
        life = server.lives
        server.signal(signal.SIGSTOP)
        await World().sleep(for_s)
        if server.lives == life:
            server.signal(signal.SIGCONT)

    async def restart(self, server: FleetServer) -> float:
        """Let a server hand its turns over and end; start the next one. Return the seconds to its end."""
        self._expected.add(server)
        began_at = World().monotonic()
        try:
            server.signal(signal.SIGTERM)
            code = await server.ended()
            seconds = World().monotonic() - began_at
            if code != 0:
                self.problems.append(f"{server.name} ended with {code} after SIGTERM: {server.log()}")
            await server.start()
            await server.until_ready()
        finally:
            self._expected.discard(server)
        return seconds

    def note_exits(self) -> None:
        """Record servers that ended by themselves."""
        for server in self.servers:
            if not server.is_alive and server not in self._expected:
                self.problems.append(f"{server.name} ended by itself: {server.log()}")
                self._expected.add(server)

    async def end(self) -> None:
        for server in self.servers:
            if server.is_alive:
                server.signal(signal.SIGKILL)
                await server.ended()


@contextlib.asynccontextmanager
async def running_fleet(
    store: str, folder: Path, words: Sequence[str] = (), *, servers: int = SERVERS
) -> AsyncIterator[Fleet]:
    """Start servers of the agent of this folder, ready to take requests."""
    settings = folder / "settings.toml"
    settings.write_text(SETTINGS)
    given = words or ("tests.scale.served:agent", "--no-auth", f"--settings={settings}")
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in range(servers)]
        fleet = Fleet(store, folder, ports, given)
        try:
            await fleet.servers[0].start()
            await asyncio.gather(*(each.start() for each in fleet.servers[1:]))
            await asyncio.gather(*(each.until_ready() for each in fleet.servers))
            yield fleet
        finally:
            await fleet.end()
