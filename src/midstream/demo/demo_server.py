"""The demo's server: a real `midstream serve` in a process of its own, so that it can be killed."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from midstream.demo.demo_agent import FOLDER_VARIABLE, MODEL_VARIABLE
from midstream.demo.folder import Folder
from midstream.environment import World
from midstream.errors import PortTakenError, UnavailableError

START_S = 60.0
"""Seconds to wait for a server to listen; on a loaded machine, the first start compiles all imports."""
STOP_S = 15.0
LOG_LINES_SHOWN = 3


class _Listening(Struct):
    """The output of `midstream serve --json` once it listens."""

    url: str
    pid: int


class DemoServer:
    """One server, restarted on the same port and folder."""

    def __init__(self, folder: Folder, model: str, port: int, world: World) -> None:
        self.port = port
        self.url = ""
        self.pid = 0
        self.started_at = 0.0
        """When the newest process was started, in seconds since 1970."""
        self.listened_at = 0.0
        """When it reported that it listens, in seconds since 1970."""
        self._folder = folder
        self._model = model
        self._world = world
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start a process and wait until it listens.

        Raises:
            PortTakenError: Another program listens on the port.
            UnavailableError: It did not start; the message has the end of its log.
        """
        environment = {
            **os.environ,
            FOLDER_VARIABLE: str(self._folder.path),
            MODEL_VARIABLE: self._model,
        }
        self.started_at = self._world.now()
        with self._folder.server_log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "midstream", "serve", "midstream.demo.demo_agent:agent", "--json"),
                *("--port", str(self.port), "--store", str(self._folder.store), "--log-level", "info"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the demo, which ends its server itself
            )
        assert self._process.stdout is not None
        line = b""
        try:
            async with asyncio.timeout(START_S):
                line = await self._process.stdout.readline()
                if not line:  # it is already ending; a signal would interfere
                    await self._process.wait()
        except TimeoutError:
            pass
        if not line:
            await self.stop()
            raise _not_up(self._folder.server_log, self.port)
        listening = msgspec.json.decode(line, type=_Listening)
        self.listened_at = self._world.now()
        self.pid = listening.pid
        self.url = listening.url
        self.port = int(listening.url.rpartition(":")[2])

    async def kill(self) -> None:
        """Kill the process with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        await self._process.communicate()  # read to the end: an open pipe would outlive the event loop

    async def stop(self) -> None:
        """Terminate it, wait, and kill it. Without effect after its end."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await process.communicate()
        except TimeoutError:
            process.kill()
            await process.communicate()


def _not_up(log: Path, port: int) -> UnavailableError:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    output = " / ".join(lines) or "it printed nothing"
    if "[port_taken]" in output:
        return PortTakenError(
            f"another program listens on port {port}: choose another --port (0 takes a free one)"
        )
    return UnavailableError(f"the server did not start: {output}")
