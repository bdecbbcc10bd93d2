"""Run the processes of a soak, window by window, and return the gauges of each life of each of them."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import msgspec
import openai

from midstream.environment import World
from tests.forked import ROOT
from tests.ports import held_port
from tests.soak.gauges import Gauges

WINDOW_WITHIN_S = 300.0
"""Seconds for one window; a quiet machine needs a few."""
AT_ONCE = 10
PYTHON = (sys.executable, "-m")
JAVASCRIPT = ROOT / "tests" / "soak" / "client_process.mjs"
More = Callable[[], bool]
"""Function that decides, by the finished windows, whether another one begins."""


def _no_more() -> bool:
    return False


class SoakProcess:
    """A process of a soak, with the gauges of its present life."""

    def __init__(self, *command: object) -> None:
        self._command = [*map(str, command)]
        self.turns = 0
        self.seen: list[Gauges] = []
        self.first_line = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    async def start(self) -> None:
        """Start a new life, with no gauges and no turns."""
        self.turns, self.seen = 0, []
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(*self._command, cwd=ROOT, stdin=pipe, stdout=pipe)
        self.first_line = await self._line()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()

    async def window(self, name: str, count: int) -> None:
        """Send one command and keep the gauges of its response."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{name} {count}\n".encode())
        self.seen.append(msgspec.json.decode(await self._line(), type=Gauges))

    async def _line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(WINDOW_WITHIN_S):
            line = (await self.process.stdout.readline()).decode().strip()
        assert line, f"{self._command} ended"
        return line


async def soak_server(
    folder: Path,
    *,
    windows: int,
    turns: int,
    kills: int = 0,
    leaked_bytes: int = 0,
    node: str = "",
    more: More = _no_more,
) -> dict[str, list[Gauges]]:
    """Run turns of a client against a server; kill the server in the middle of each of the first `kills` windows.

    With `node`, the path of that program, the client is the JavaScript one.

    Returns:
        The gauges of the client's only life and of the server's last one.
    """
    async with AsyncExitStack() as stack:
        port = stack.enter_context(held_port())
        server = SoakProcess(*PYTHON, "tests.soak.soak_server", folder, port, leaked_bytes)
        client = SoakProcess(*PYTHON, "tests.soak.soak_client", folder, port)
        if node:
            client = SoakProcess(node, "--expose-gc", JAVASCRIPT, f"http://127.0.0.1:{port}")
        await stack.enter_async_context(server)
        await stack.enter_async_context(client)
        for number in itertools.takewhile(lambda each: each < kills + windows or more(), itertools.count()):
            asking = asyncio.create_task(client.window(f"w{number}", turns))
            if number < kills:
                await _until_written(folder / "server.db-wal", asking)
                await server.kill()
                await server.start()
            await asking
            server.turns += turns
            await server.window("gauges", server.turns)
        return {"server": server.seen[1:] if kills else server.seen, "client": client.seen}


async def _until_written(path: Path, asking: asyncio.Task[None]) -> None:
    """Wait until the running turns write to the store, so that a kill meets them."""
    before = _written_at(path)
    async with asyncio.timeout(WINDOW_WITHIN_S):
        while _written_at(path) == before:
            assert not asking.done(), "the window ended before the kill"
            await World().sleep(0.01)


def _written_at(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


async def soak_gateway(
    folder: Path, *, windows: int, turns: int, kills: int = 0, more: More = _no_more
) -> dict[str, list[Gauges]]:
    """Send requests to the gateway with OpenAI's SDK, each answer streamed; kill it in the middle of a window.

    Returns:
        The gauges of the gateway's last life.
    """
    async with AsyncExitStack() as stack:
        port = stack.enter_context(held_port())
        upstream = await stack.enter_async_context(SoakProcess(*PYTHON, "bench.gateway_server"))
        url = msgspec.json.decode(upstream.first_line)["url"]
        gateway = SoakProcess(*PYTHON, "tests.soak.soak_gateway", folder, port, url)
        await stack.enter_async_context(gateway)
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="the-key-of-the-soak", max_retries=20
        )
        await stack.enter_async_context(client)
        for number in itertools.takewhile(lambda each: each < kills + windows or more(), itertools.count()):
            half = asyncio.Event()
            asking = asyncio.create_task(_send_questions(client, f"w{number}", turns, half))
            if number < kills:
                async with asyncio.timeout(WINDOW_WITHIN_S):
                    await half.wait()
                await gateway.kill()
                await gateway.start()
            await asking
            gateway.turns += turns
            await gateway.window("gauges", gateway.turns)
        return {"gateway": gateway.seen[1:] if kills else gateway.seen}


async def _send_questions(client: openai.AsyncOpenAI, name: str, count: int, half: asyncio.Event) -> None:
    """Send `count` requests; set `half` when half of them have begun, and `AT_ONCE` are under way."""
    numbers = iter(range(count))

    async def ask() -> None:
        for number in numbers:
            if number == count // 2:
                half.set()
            for _ in range(20):  # A stream cut by a kill is requested again.
                try:
                    await _send_question(client, f"{name} {number}")
                    break
                except (openai.APIConnectionError, httpx.TransportError):
                    continue
            else:
                raise AssertionError(f"question {number} of {name} was cut 20 times")

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(ask())


async def _send_question(client: openai.AsyncOpenAI, question: str) -> None:
    events = await client.chat.completions.create(
        model="8@0.001", messages=[{"role": "user", "content": question}], stream=True
    )
    words = [each.choices[0].delta.content or "" async for each in events if each.choices]
    assert "".join(words).split() == ["token"] * 8, f"the answer to {question!r} was {words}"
