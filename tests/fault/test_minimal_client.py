"""The JavaScript client of `examples/`, killed at random times with its server: each word once, and one turn."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from midstream.environment import World
from tests.fault.extent import IS_FULL
from tests.fault.words_agent import WORDS
from tests.fault.workers import POLL_S
from tests.forked import ROOT
from tests.ports import held_port
from tests.spec import spec

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(shutil.which("node") is None, reason="no node here"),
]
ASK = ROOT / "examples" / "minimal_client" / "ask.mjs"
NODE = ("node", "--experimental-websocket", "--no-warnings")
CLIENTS = 3
SERVER_KILLS, CLIENT_KILLS = 2, 4
"""In one round. A turn during which a server died more often is held as a suspect."""
ROUNDS = 20 if IS_FULL else 1
WAIT_S = 180.0
"""Seconds for the answers after the last kill: the client's pauses grow while a busy machine starts a server."""


class _Program:
    """A process that is restarted after each kill."""

    def __init__(self, *command: object) -> None:
        self._command = [str(word) for word in command]

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self._command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.communicate()


@asynccontextmanager
async def _running(*programs: _Program) -> AsyncIterator[None]:
    try:
        for each in programs:
            await each.start()
        yield
    finally:
        for each in programs:
            await each.kill()


@spec("STREAM-11", "STREAM-14", "STREAM-24", "STREAM-26")
@pytest.mark.timeout(ROUNDS * WAIT_S)
@pytest.mark.parametrize("seed", range(ROUNDS))
async def test_the_client_of_the_examples_shows_each_word_once_whichever_process_dies(
    seed: int, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    with held_port() as port:
        url = f"http://127.0.0.1:{port}"
        store = tmp_path / "sessions.db"
        serve = ("-m", "midstream", "serve", "tests.fault.words_agent:agent", "--no-auth", "--port", port)
        server = _Program(sys.executable, *serve, "--store", store)
        folders = {f"s{number}": tmp_path / f"s{number}" for number in range(CLIENTS)}
        clients = [_Program(*NODE, ASK, url, name, "Count", folder) for name, folder in folders.items()]
        async with _running(server, *clients):
            victims = [server] * SERVER_KILLS + chance.choices(clients, k=CLIENT_KILLS)
            chance.shuffle(victims)
            for victim in victims:
                await World().sleep(chance.uniform(0.0, 1.5))
                await victim.kill()
                await victim.start()
            async with asyncio.timeout(WAIT_S):
                shown = [(await each.process.communicate())[0].decode().strip() for each in clients]
            assert shown == [WORDS] * CLIENTS
            async with httpx.AsyncClient(base_url=url) as http:
                sessions = [await _read(http, name) for name in folders]
        assert [(each["turns"], each["last"]) for each in sessions] == [(1, "completed")] * CLIENTS
        assert [folder.joinpath("checkpoint.json").exists() for folder in folders.values()] == [
            False
        ] * CLIENTS


async def _read(http: httpx.AsyncClient, session: str) -> dict[str, Any]:
    """Return a session. The server may have been started again just now."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with suppress(httpx.ConnectError):
                session_now: dict[str, Any] = (await http.get(f"/v1/sessions/{session}")).json()
                return session_now
            await World().sleep(POLL_S)


@spec("STREAM-95")
@pytest.mark.timeout(WAIT_S)
async def test_the_secret_that_the_client_of_the_examples_keeps_opens_an_encrypted_session_again(
    tmp_path: Path,
) -> None:
    pytest.importorskip("cryptography")
    with held_port() as port:
        url = f"http://127.0.0.1:{port}"
        serve = ("-m", "midstream", "serve", "tests.fault.words_agent:agent", "--no-auth", "--port", port)
        keys = ("--store", tmp_path / "sessions.db", "--key-file", tmp_path / "keys", "--encrypt", "client")
        first, second = tmp_path / "first", tmp_path / "second"
        async with _running(_Program(sys.executable, *serve, *keys)):
            for folder in (first, second):
                if folder is second:
                    second.mkdir()
                    shutil.copy(first / "session-secret", second)
                client = _Program(*NODE, ASK, url, "s", "Count", folder)
                async with _running(client):
                    assert (await client.process.communicate())[0].decode().strip() == WORDS
    kept = [sorted(file.name for file in folder.iterdir()) for folder in (first, second)]
    assert kept == [["answer.txt", "session-secret"]] * 2
