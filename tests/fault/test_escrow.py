"""The server is killed in the middle of an encrypted turn: it waits for its client, and no other can read it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import httpx2
import pytest

from midstream.client import connect
from midstream.client.client import Client
from midstream.errors import WrongSecretError
from midstream.session.records import Delta, TurnEnded, TurnStatus
from midstream.store.encryption.ciphers import FileKeys
from tests.fault.escrow_process import CANARY
from tests.fault.workers import short_pause
from tests.spec import spec

pytestmark = pytest.mark.fault
WAIT_S = 60.0


class EscrowServer:
    """A server process on its own port."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(self.process.wait(), WAIT_S) == -signal.SIGKILL


@asynccontextmanager
async def _serving(folder: Path, port: int) -> AsyncIterator[EscrowServer]:
    command = (sys.executable, "-m", "tests.fault.escrow_process", str(folder), str(port))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
        yield EscrowServer(process, line.decode().strip())
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def _client(folder: Path, url: str) -> Client:
    return connect(url, state=folder / "client.db", secrets=folder / "secrets.db")


async def _refusals(url: str, shown: list[str]) -> str:
    """Send requests to be refused, with secrets in all places where they may and may not be; return all answers."""
    answers: list[str] = []
    async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S) as http:

        async def ask(method: str, what: str, shown: str, body: object = None) -> None:
            headers = {"x-idempotent-encryption-key": f"{shown}x", "x-idempotency-key": "k"}
            answer = await http.request(method, f"/v1/sessions/s1{what}", json=body, headers=headers)
            assert answer.status_code in {400, 403}
            answers.append(answer.text)

        for each in shown:
            wrong = f"{each}x"
            await ask("GET", "", each)
            await ask("GET", "/records", each)
            await ask("GET", "/events?after=1-1", each)
            await ask("GET", "/nothing", each)
            opening = {"type": "open", "stream": "k", "secret": wrong, "event_id": "1-1"}
            await ask("POST", "/events", each, opening)
            await ask("POST", "/events", each, {**opening, "secret": 9 * wrong})
            await ask("POST", "/events", each, {**opening, "stream": [wrong]})
            command = {"type": "command", "seqno": 0, "payload": {"type": "send", "parts": [], "x": wrong}}
            await ask("POST", "/commands", each, command)
        assert (await http.get("/v1/sessions/s1")).status_code == HTTPStatus.FORBIDDEN
        answers.append((await http.get("/metrics")).text)
    return "\n".join(answers)


def _holding(folder: Path, words: list[str]) -> list[tuple[str, str]]:
    files = {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert {"server.db", "server.log"} <= set(files)
    return [(name, word) for name, body in files.items() for word in words if word.encode() in body]


async def _recovered(url: str) -> dict[str, object]:
    async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        async with asyncio.timeout(WAIT_S):
            while (answer := await http.get("/ready")).status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                await short_pause()
        report: dict[str, object] = answer.json()
        return report


@spec("STREAM-93", "STREAM-94")
async def test_a_killed_servers_turn_waits_for_its_client_and_no_other_can_read_it(
    tmp_path: Path, port: int
) -> None:
    here, there = tmp_path / "server", tmp_path / "client"
    here.mkdir()
    there.mkdir()
    FileKeys.make(here / "keys")
    async with _serving(here, port) as server:
        async with _client(there, server.url) as client:
            words = ""
            async for event in client.send("s1", f"{CANARY} hello"):
                words += event.record.text if isinstance(event.record, Delta) else ""
                if words.endswith("far"):
                    break
            secret = await client.secret("s1")
            token = await client.create_viewer_token("s1", for_s=600)
        shown = [secret, token]
        refused = await _refusals(server.url, shown)
        await server.kill()
    assert _holding(here, [*shown, CANARY]) == []

    (here / "go").touch()
    async with _serving(here, port) as server:
        reported = await _recovered(server.url)
        assert reported["failed"] == 0
        assert "1 locked" in (here / "server.log").read_text()  # and it makes no model call, and runs nothing
        async with connect(server.url) as stranger:
            with pytest.raises(WrongSecretError):
                async for _ in stranger.follow("s1", "0-0"):
                    pass
        refused += await _refusals(server.url, shown)
        assert "1 locked" in (here / "server.log").read_text()
        async with _client(there, server.url) as client:
            [turn] = await client.resume_interrupted()
            records = [event.record async for event in turn]
        assert isinstance(records[-1], TurnEnded)
        assert records[-1].status is TurnStatus.COMPLETED
        texts = "".join(each.text for each in records if isinstance(each, Delta))
        assert texts.endswith(f"{CANARY} that is all")
        refused += await _refusals(server.url, shown)
        server.process.terminate()
        assert await asyncio.wait_for(server.process.wait(), WAIT_S) == 0
    assert (here / "ledger").read_text() == "looked\n", "a tool ran twice"
    assert _holding(here, [*shown, CANARY]) == []
    assert [each for each in [*shown, CANARY] if each in refused] == []
    assert "execute_tool look" in (here / "spans.log").read_text()  # there was text to find
    assert "DEBUG" in (here / "server.log").read_text()
