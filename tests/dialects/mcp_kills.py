"""MCP's Python client with `midstream serve`, which is killed at random moments, and the conformance suite.

    python -m tests.dialects.mcp_kills [--kills 20] [--seed N] [--suite docs/reference/mcp.md]

The client is unmodified, in both kinds of the protocol; a failed call is made again with the same id
(`midstream/call`), as the guide describes. Afterwards the tool of the agent ran once, and the answer is whole.
Raw requests show what that client does not support: a request that is repeated with its id, and tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx2
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp_types import RequestParamsMeta
from msgspec import Struct

from midstream.environment import World
from tests.dialects import chat_agent, mcp_suite
from tests.dialects.ui_stream import KillableServer, long_form, run_servers

Json = dict[str, Any]

MODES = ("legacy", "auto")
STORY_S = 180.0
TRIES_MAX = 60
PAUSE_S = 0.2
HEADERS = {"accept": "application/json, text/event-stream"}
TASKS: Json = {"extensions": {"io.modelcontextprotocol/tasks": {}}}


class CallResult(Struct):
    """A client's result at the end of a call."""

    answer: str = ""
    session: str = ""
    shown: str = ""
    """The words of its progress.

    A message that does not grow is a repetition: when a resumed stream breaks, this client (`mcp` 2.3) reads it
    again from the first break.
    """
    progress: float = 0.0
    tries: int = 0


async def call(url: str, mode: str, name: str, on_words: Callable[[], None]) -> CallResult:
    """Call `ask` by the client until it has an answer."""
    outcome = CallResult()
    meta = cast("RequestParamsMeta", {"midstream/call": name})

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        if progress > outcome.progress:
            outcome.shown += message or ""
            outcome.progress = progress
        on_words()

    while outcome.tries < TRIES_MAX:
        outcome.tries += 1
        try:
            async with Client(f"{url}/v1/mcp", mode=mode) as client:
                result = await client.call_tool(
                    "ask", {"message": "hi"}, progress_callback=on_progress, meta=meta
                )
            assert not result.is_error, result
            found = result.structured_content
            outcome.answer, outcome.session = found["answer"], found["session"]
            return outcome
        except* (MCPError, httpx2.HTTPError):
            await World().sleep(PAUSE_S)
    raise AssertionError("the call was never answered")


class RawMcpClient:
    """A client by hand, in one MCP session."""

    def __init__(self, url: str) -> None:
        self.http = httpx2.AsyncClient(base_url=url, timeout=60, headers=HEADERS)
        self.session: dict[str, str] = {}

    async def initialize(self) -> None:
        params = {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "t", "version": "1"},
        }
        body = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        response = await self._send(lambda: self.http.post("/v1/mcp", json=body))
        self.session = {
            "mcp-session-id": response.headers["mcp-session-id"],
            "mcp-protocol-version": "2025-11-25",
        }

    async def request(self, rpc_id: int, method: str, params: Json) -> Json:
        """Send a request, with its id, until its response arrives."""
        body = {"jsonrpc": "2.0", "id": rpc_id, "method": method, "params": params}

        async def post() -> httpx2.Response:
            response = await self.http.post("/v1/mcp", json=body, headers=self.session)
            if '"result"' not in response.text and '"error"' not in response.text:
                raise httpx2.ReadError("the stream ended before its response")
            return response

        response = await self._send(post)
        lines = [
            line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")
        ]
        message: Json = json.loads(lines[-1] if lines else response.text)
        assert message["id"] == rpc_id, message
        return message

    async def modern(self, method: str, params: Json, name: str) -> Json:
        """Send a request of the modern version until its response arrives."""
        meta = {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": TASKS,
        }
        headers = {"mcp-protocol-version": "2026-07-28", "mcp-method": method, "mcp-name": name}
        params = {**params, "_meta": {**meta, **params.get("_meta", {})}}
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        response = await self._send(lambda: self.http.post("/v1/mcp", json=body, headers=headers))
        message: Json = response.json()
        result: Json = message["result"]
        return result

    async def _send(self, send: Callable[[], Awaitable[httpx2.Response]]) -> httpx2.Response:
        for _ in range(TRIES_MAX):
            with contextlib.suppress(httpx2.HTTPError):
                response = await send()
                if response.status_code != 503:
                    return response
            await World().sleep(PAUSE_S)
        raise AssertionError("the server did not come back")

    async def aclose(self) -> None:
        await self.http.aclose()


async def as_task(raw: RawMcpClient, name: str) -> str:
    """Call `ask` as a task; return its answer."""
    params: Json = {"name": "ask", "arguments": {"message": "hi"}, "_meta": {"midstream/call": name}}
    found = await raw.modern("tools/call", params, "ask")
    assert found["resultType"] == "task", found
    task = found["taskId"]
    while True:
        found = await raw.modern("tasks/get", {"taskId": task}, task)
        if found["status"] == "completed":
            answer: str = found["result"]["structuredContent"]["answer"]
            return answer
        assert found["status"] == "working", found
        await World().sleep(PAUSE_S)


async def twice(raw: RawMcpClient, rpc_id: int) -> str:
    """Send one request twice at once, and again after each cut; return the answer, which is one."""
    params: Json = {"name": "ask", "arguments": {"message": "hi"}}
    found = await asyncio.gather(*(raw.request(rpc_id, "tools/call", params) for _ in range(2)))
    assert found[0] == found[1], found
    answer: str = found[0]["result"]["structuredContent"]["answer"]
    return answer


class McpStory:
    """Kills of one server under calls.


    Args:
        words: The words of each answer.
    """

    def __init__(self, server: KillableServer, words: int, chance: random.Random) -> None:
        self.server = server
        self.url = server.url
        self.chance = chance
        self.words = words
        self.kills = 0
        self.calls = 0
        self.retries = 0
        self.resumed = 0
        """Calls during which the server was killed, and which their client completed by itself."""

    @property
    def answer(self) -> str:
        return "".join(f"word{number} " for number in range(self.words))

    async def kill_within(self, kills: int, took_s: float, is_over: Callable[[], bool]) -> int:
        """Kill the server this often while a call runs, which takes this long."""
        done = 0
        while done < kills:
            await World().sleep(self.chance.random() * took_s / kills)
            if is_over():
                break
            await self.server.kill()
            await self.server.start()
            done += 1
        self.kills += done
        return done

    def count_runs(self) -> int:
        """Return how often the tool of the agent ran."""
        return (
            len(self.server.ledger.read_text(encoding="utf-8").splitlines())
            if self.server.ledger.exists()
            else 0
        )

    async def play(self, mode: str, kills: int) -> None:
        """Play one call, and judge it."""
        before, name = self.count_runs(), f"{mode}-{self.calls}-{self.chance.random()}"
        self.calls += 1
        took_s = self.words * chat_agent.PAUSE_S * 1.3
        raw = RawMcpClient(self.url)
        seen = 0

        def on_words() -> None:
            nonlocal seen
            seen += 1

        if mode == "task":
            playing: asyncio.Task[Any] = asyncio.create_task(as_task(raw, name))
        elif mode == "twice":
            await raw.initialize()
            playing = asyncio.create_task(twice(raw, self.calls))
        else:
            playing = asyncio.create_task(call(self.url, mode, name, on_words))
        try:
            done = await self.kill_within(kills, took_s, playing.done)
            async with asyncio.timeout(STORY_S):
                result = await playing
        finally:
            playing.cancel()
            await raw.aclose()
        answer = result.answer if isinstance(result, CallResult) else result
        assert answer == self.answer, f"{mode}: {len(answer)} characters instead of {len(self.answer)}"
        assert self.count_runs() - before <= 1, f"{mode}: the tool ran {self.count_runs() - before} times"
        if isinstance(result, CallResult):
            self.retries += result.tries - 1
            self.resumed += bool(done and result.tries == 1)
            assert result.shown == chat_agent.FIRST + self.answer, f"{mode}: {result.shown[:200]!r}"


async def play(folder: Path, kills: int, seed: int, *options: str, words: int = 1500) -> Json:
    """Kill a server this many times under calls of each kind; return the counts."""
    chance = random.Random(seed)
    modes = [*MODES, "task", "twice"]
    async with run_servers(folder, words, *options) as [server]:
        story = McpStory(server, words, chance)
        while story.kills < kills:
            await story.play(modes[story.calls % len(modes)], min(2, kills - story.kills))
        found = {name: getattr(story, name) for name in ("kills", "calls", "retries", "resumed")}
        return {**found, "effects": story.count_runs()}


def main(arguments: list[str]) -> int:
    """Run the long form."""
    options = long_form("mcp_kills", arguments, kills=20)
    write = sys.stdout.write
    write(f"seed {options.seed}\n")
    failed: list[str] = []
    if reason := mcp_suite.lacking():
        write(f"{reason}\n")
    else:
        with tempfile.TemporaryDirectory() as made:
            found = asyncio.run(mcp_suite.judge(Path(made)))
        failed = mcp_suite.faults(found)
        write(f"conformance: {sum(each.passed for each in found)} checks passed; not as expected: {failed}\n")
        if options.suite is not None:
            options.suite.write_text(mcp_suite.PAGE + mcp_suite.table_of(found) + "\n", encoding="utf-8")
    with tempfile.TemporaryDirectory() as made:
        write(f"kills: {asyncio.run(play(Path(made), options.kills, options.seed))}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
