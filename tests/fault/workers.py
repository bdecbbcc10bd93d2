"""Several servers on one database, from outside: started, frozen, killed, queried over HTTP, and judged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
import msgspec

from midstream.environment import World
from midstream.errors import NotFoundError, UnavailableError
from midstream.session.records import Record, TurnEnded, decode
from midstream.store.contract import StoredRecord
from midstream.testing.history_checker import Evidence, Execution, check, check_ended
from tests.fault import starting
from tests.fault.stored import is_writable, read_session
from tests.fault.turn import LedgerLine
from tests.server.serving import KEYS

WAIT_S = 60.0
"""Seconds for a test's waits; an idle machine needs milliseconds."""

POLL_S = 0.02
"""Seconds between two looks at another process. A look may open the store, and slows what it waits for."""
OK, CONFLICT, UNAVAILABLE = 200, 409, 503


class Worker:
    """One server process. `async with` ends it in any state."""

    program = "tests.fault.worker_process"

    def __init__(self, folder: Path, *options: object) -> None:
        self.url = ""
        self.started_at = 0.0
        self._folder = folder
        self._options = [str(each) for each in options]

    async def __aenter__(self) -> Self:
        self.started_at = time.time()
        log = self._folder / "log"
        self.process = await starting.start(self.program, self._folder, *self._options, log=log)
        assert self.process.stdout is not None
        async with asyncio.timeout(2 * WAIT_S):
            self.url = (await self.process.stdout.readline()).decode().strip()
        assert self.url, f"it ended at its start: {log.read_text()}"
        # Each client loads the certificates of the machine: one for all requests.
        self._client = httpx2.AsyncClient(base_url=self.url, timeout=WAIT_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()
        await self._client.aclose()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        async with asyncio.timeout(WAIT_S):
            return await self.process.wait()

    async def send_message(self, session: str, words: str, *, stream: str = "") -> httpx2.Response:
        """Send a message as command 0 of a stream; the same stream again is the same message."""
        keys = {
            "x-idempotency-key": stream or f"{session}-{os.urandom(4).hex()}",
            "x-idempotent-encryption-key": "s" * 43,
        }
        payload = {"type": "send", "parts": [{"type": "text", "text": words}], "when_busy": "refuse"}
        body = {"type": "command", "seqno": 0, "payload": payload}
        return await self._ask("POST", f"/v1/sessions/{session}/commands", json=body, headers=keys)

    async def send_until_accepted(
        self, session: str, words: str, *, stream: str, refusals: Collection[int] = (CONFLICT, UNAVAILABLE)
    ) -> None:
        """Send a message again, as the same one, until it is accepted."""
        async with asyncio.timeout(WAIT_S):
            while (answer := await self.send_message(session, words, stream=stream)).status_code != OK:
                assert answer.status_code in refusals, answer.text
                await short_pause()

    async def post(self, session: str, frame: object, *, connection: int, name: str = "") -> httpx2.Response:
        """Post a frame as a connection of the stream `k1`, with the connection's name if there is one."""
        headers = {**KEYS, "x-idempotency-connection": str(connection), **_named(name)}
        return await self._ask("POST", f"/v1/sessions/{session}/commands", json=frame, headers=headers)

    @asynccontextmanager
    async def open_stream(
        self, session: str, frame: object, *, name: str
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Open a connection over server-sent events; yields the lines."""
        path = f"/v1/sessions/{session}/events"
        headers = {"accept": "text/event-stream", **_named(name)}
        async with self._client.stream("POST", path, json=frame, headers=headers) as answer:
            yield answer.aiter_lines()

    async def cancel(self, session: str) -> httpx2.Response:
        return await self._ask("POST", f"/v1/sessions/{session}/cancel")

    async def get(self, path: str) -> httpx2.Response:
        return await self._ask("GET", path)

    @asynccontextmanager
    async def events(self, session: str) -> AsyncIterator[AsyncIterator[str]]:
        """Follow a session from its start; yields the lines."""
        path = f"/v1/sessions/{session}/events?after=0-0"
        async with self._client.stream("GET", path) as answer:
            yield answer.aiter_lines()

    async def _ask(self, method: str, path: str, **options: object) -> httpx2.Response:
        if self._client.is_closed:
            raise httpx2.ConnectError(f"{self.url} was killed")
        return await self._client.request(method, path, **options)  # type: ignore[arg-type] # httpx2's own


async def freeze(folder: Path, worker: Worker) -> None:
    """Stop a server with SIGSTOP between two transactions: inside of one it blocks the database for the others."""
    async with asyncio.timeout(WAIT_S):
        while True:
            worker.signal(signal.SIGSTOP)
            while not _is_stopped(worker.process.pid):
                await short_pause()
            if await is_writable(folder):
                return
            worker.signal(signal.SIGCONT)
            await short_pause()


def _is_stopped(pid: int) -> bool:
    """Return whether each thread of a process has stopped: one may wait for the disk."""
    with contextlib.suppress(FileNotFoundError):  # a thread has ended
        states = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return all(state.rpartition(")")[2].split()[0] == "T" for state in states)
    return False


async def bring_into_tool(folder: Path, worker: Worker, session: str = "s", words: str = "work") -> None:
    """Let a worker own a session and be in its tool.

    The message is sent again while the store has no leader (503), as a client does.
    """
    stream = f"{session}-{os.urandom(4).hex()}"
    await worker.send_until_accepted(session, words, stream=stream, refusals=(UNAVAILABLE,))
    await until(lambda: any(line.session == session for line in lines(folder)))


def _named(name: str) -> dict[str, str]:
    return {"x-midstream-connection": name} if name else {}


def journal(folder: Path, session: str) -> list[StoredRecord]:
    """Read a whole journal without being a node."""
    return read_session(folder, session)


def records(folder: Path, session: str) -> list[Record]:
    return [decode(each.body) for each in journal(folder, session)]


async def until_there(folder: Path, session: str, *kinds: type[Record]) -> list[Record]:
    """Wait until a journal has records of these kinds, in this order; return all of it."""
    found: list[Record] = []
    async with asyncio.timeout(WAIT_S):
        while True:
            left = iter(found)
            if kinds and all(any(isinstance(each, kind) for each in left) for kind in kinds):
                return found
            await short_pause()
            # The database does not exist yet, or its servers elect a leader.
            with contextlib.suppress(NotFoundError, UnavailableError):
                found = records(folder, session)


async def until(is_true: Callable[[], bool]) -> None:
    """Wait until a condition is true; a store without a leader cannot answer yet."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(UnavailableError):
                if is_true():
                    return
            await short_pause()


async def short_pause() -> None:
    """Wait some milliseconds for another process; every caller is bounded."""
    await World().sleep(POLL_S)


def lines(folder: Path) -> list[LedgerLine]:
    """Return the tools' notes; an unfinished line may be there in part."""
    path = folder / "ledger"
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return [msgspec.json.decode(line, type=LedgerLine) for line in whole.splitlines()]


def executions(folder: Path) -> list[Execution]:
    """Return the tools' notes of their own runs."""
    noted = lines(folder)
    ended = {
        (each.session, each.turn, each.response, each.call_id, each.run)
        for each in noted
        if each.what == "ended"
    }
    return [
        Execution(
            each.session,
            each.turn,
            each.response,
            each.call_id,
            each.run,
            each.tool,
            has_ended=(each.session, each.turn, each.response, each.call_id, each.run) in ended,
        )
        for each in noted
        if each.what == "began"
    ]


def problems(folder: Path, sessions: Sequence[str], *, is_ended: bool = True) -> list[str]:
    """Return all problems in the remaining state."""
    evidence = Evidence({each: journal(folder, each) for each in sessions}, ledger=executions(folder))
    return [str(each) for each in (check_ended if is_ended else check)(evidence)]


def ends(folder: Path, session: str) -> list[str]:
    return [each.status.value for each in records(folder, session) if isinstance(each, TurnEnded)]
