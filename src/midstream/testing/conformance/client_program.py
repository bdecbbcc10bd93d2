"""A client program under test, in any language, controlled with JSON lines on its stdin and stdout.

Each request is one line, `{"method": …}` with members of its own; the program answers each with one line, an object.
The methods are:

- `begin`: use this `session` at this `url`, over this `transport`, and store persistent data in this `folder`.
- `resume`: the same, with the data of an earlier process in the folder, which was killed.
- `submit`: let the application submit this `payload`. A `send` opens the stream, a `cancel` follows on it.
- `detach`: let the application leave, and keep the stored data.
- `mark_handled`: the application has handled all events up to `event_id`.
- `advance_clock`: advance the client's clock to its next deadline.
- `read_state`: answer with the members of `ClientState`.

There is only one request at a time. The program's stderr is passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from midstream.client.transport_selection import TransportKind
from midstream.environment import World
from midstream.errors import UsageError
from midstream.testing.conformance.client_wire import ClientState
from midstream.testing.conformance.scripts import Json

LINE_BYTES_MAX = 2**20
"""Bytes of one answer of the program."""


class ClientProgram:
    """The program behind `ProbedClient`: one process for each life of its client.

    Args:
        command: The program and its arguments.
        folder: The folder for the program's files; each stream gets a folder of its own in it.
        wait_s: Seconds for each answer.

    Raises:
        UsageError: By each method, if the program cannot start, has ended, or did not answer with JSON in time.
    """

    def __init__(
        self, command: Sequence[str], url: str, folder: Path, *, wait_s: float, world: World = World()
    ) -> None:
        self._command = list(command)
        self._url = url
        self._folder = folder
        self._wait_s = wait_s
        self._world = world
        self._program: asyncio.subprocess.Process | None = None
        self._setup: Json = {}

    async def begin(self, session: str, transport: TransportKind) -> None:
        """Start the program with this session and transport."""
        folder = self._folder / session / transport.value
        folder.mkdir(parents=True, exist_ok=True)
        self._setup = {
            "url": self._url,
            "session": session,
            "transport": transport.value,
            "folder": str(folder),
        }
        await self._start()
        await self._call("begin", **self._setup)

    async def submit(self, payload: Json) -> None:
        """Let the application submit this payload."""
        await self._call("submit", payload=payload)

    async def detach(self) -> None:
        """Let the application leave."""
        await self._call("detach")

    async def mark_handled(self, event_id: str) -> None:
        """Mark an event as handled by the application."""
        await self._call("mark_handled", event_id=event_id)

    async def restart(self) -> None:
        """Kill the program, and resume with another process of it."""
        await self.end()
        await self._start()
        await self._call("resume", **self._setup)

    async def advance_clock(self) -> None:
        """Advance the client's clock to its next deadline."""
        await self._call("advance_clock")

    async def read_state(self) -> ClientState:
        """Return the program's report of its client."""
        answer = await self._call("read_state")
        try:
            return msgspec.convert(answer, ClientState)
        except msgspec.ValidationError as error:
            raise UsageError(f"the client program's answer to `read_state` does not fit: {error}") from error

    async def end(self) -> None:
        """Kill the program and its child processes."""
        program, self._program = self._program, None
        if program is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        await program.wait()

    async def _start(self) -> None:
        try:
            self._program = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES_MAX,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"the client program {self._command[0]!r} cannot be started: {error}") from error

    async def _call(self, method: str, **members: object) -> Json:
        program = self._program
        assert program is not None, "call `begin` first"
        assert program.stdin is not None, "it has a pipe"
        assert program.stdout is not None, "it has a pipe"
        line = b""
        with contextlib.suppress(ConnectionError):
            program.stdin.write(msgspec.json.encode({"method": method, **members}) + b"\n")
            await program.stdin.drain()
        try:
            async with asyncio.timeout(self._wait_s):
                line = await program.stdout.readline()
        except TimeoutError:
            message = f"the client program did not answer `{method}` within {self._wait_s:g} s"
            raise UsageError(message) from None
        except ValueError as error:  # the line is too long
            raise UsageError(f"the client program's answer to `{method}` is too long: {error}") from error
        if not line:
            status = await program.wait()
            raise UsageError(f"the client program ended with status {status} at `{method}`")
        try:
            return msgspec.json.decode(line, type=Json)
        except msgspec.DecodeError as error:
            shown = line[:80].decode(errors="replace").rstrip()
            raise UsageError(f"the client program answered `{method}` with {shown!r}: {error}") from error
