"""Attacks by input and over the network, against running servers: what a peer, a sender or a false server can do."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from midstream.cli.sources import ServerSource
from midstream.client import connect
from midstream.client.requests import delete, questions, snapshot
from midstream.client.transport_selection import TransportKind
from midstream.errors import ProtocolError
from midstream.server.pages import FOLDER
from tests.spec import spec

WAIT_S = 30.0
SLOW_PEERS = 300
GROWTH_KIB_MAX = 32 * 1024
"""For 300 connections with what uvicorn holds of each; without the limit it was 324 MiB."""
LOG_CHARS_MAX = 20_000
SECRET = "s" * 43
KEY = "k" * 32
ADA, BOB = "the-token-of-ada-1", "the-token-of-bob-1"
REDIRECTS = (301, 302, 303, 307, 308)

pytestmark = pytest.mark.slow

AGENT = """
from midstream import Agent
from midstream.testing import ScriptedModel, calls, text

def answer(request):
    last = request.history.entries[-1]
    if hasattr(last, "results"):
        return text(f"I was told: {last.results[0].content}")
    return calls(("look", "{}")) if last.parts[0].text == "look" else text("Hello.")

agent = Agent(ScriptedModel(answer), name="target")
"""


class Target:
    """A server process.

    Args:
        folder: Where it runs; its log is there.
        arguments: Of `midstream`.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "target.py").write_text(AGENT)
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "midstream", "--home", str(folder / "home"), *arguments, "--json"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        self.ready = json.loads(line)
        parts = urlsplit(self.ready["url"])
        self.url: str = self.ready["url"].rstrip("/")
        self.place = (parts.hostname or "", parts.port or 0)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def resident_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1])

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, str]:
        """Send one request; `_` in the name of a header stands for `-`."""
        connection = http.client.HTTPConnection(*self.place, timeout=WAIT_S)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent |= {"content-type": "application/json"}
        try:
            connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body), sent)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def command(self, token: str, seqno: int, payload: object, *, key: str = "k1") -> tuple[int, str]:
        """Send one command to the session `s1`."""
        frame = {"type": "command", "seqno": seqno, "payload": payload}
        keys = {"x_idempotency_key": key, "x_idempotent_encryption_key": SECRET}
        return self.ask("POST", "/v1/sessions/s1/commands", frame, authorization=f"Bearer {token}", **keys)

    def records(self, token: str) -> list[dict[str, Any]]:
        """Return the records of the session `s1`."""
        _, text = self.ask("GET", "/v1/sessions/s1/records", authorization=f"Bearer {token}")
        return [json.loads(line)["record"] for line in text.splitlines()]

    def records_until(self, token: str, kind: str) -> list[dict[str, Any]]:
        """Read the events of the session `s1` until one of a kind comes; return its records."""
        connection = http.client.HTTPConnection(*self.place, timeout=WAIT_S)
        connection.request(
            "GET", "/v1/sessions/s1/events?after=0", headers={"authorization": f"Bearer {token}"}
        )
        answer = connection.getresponse()
        while f'"{kind}"' not in (line := answer.readline().decode()):
            assert line, "the events ended"
        connection.close()
        return self.records(token)

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=WAIT_S)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Target]:
    """Serve the agent to Ada and to the operator Bob."""
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"{ADA} ada\n{BOB} bob *\n")
    store = str(folder / "sessions.db")
    arguments = ("serve", "target:agent", "--store", store, "--port", "0", "--token-file", str(tokens))
    target = Target(folder, *arguments)
    try:
        yield target
    finally:
        target.stop()


@contextlib.contextmanager
def gateway(folder: Path) -> Iterator[Target]:
    """Run a gateway in front of a scripted agent."""
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(KEY)
    target = Target(folder, "gateway", "--upstream", "scripted", "--port", "0", "--token-file", str(key))
    try:
        yield target
    finally:
        target.stop()


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


# --- memory ---------------------------------------------------------------------------------------------------------


@spec("SEC-82", "SEC-83")
def test_slow_logins_take_no_memory(tmp_path: Path) -> None:
    with serving(tmp_path) as target, contextlib.ExitStack() as peers:
        assert target.ask("GET", "/health")[0] == 200
        before = target.resident_kib
        head = (
            b"POST /v1/login HTTP/1.1\r\nhost: %s:%d\r\nx-midstream: 1\r\ncontent-type: application/json\r\n"
        )
        head %= (target.place[0].encode(), target.place[1])
        sockets = []
        for number in range(SLOW_PEERS):
            peer = peers.enter_context(socket.create_connection(target.place, timeout=WAIT_S))
            peer.settimeout(0)
            is_chunked = number % 2
            length = (
                b"transfer-encoding: chunked\r\n\r\n" if is_chunked else b"content-length: 1048576\r\n\r\n"
            )
            piece = b"10000\r\n" + b"x" * 65536 + b"\r\n" if is_chunked else b"x" * 65536
            sockets.append((peer, piece))
            peer.sendall(head + length)
        for _ in range(15):
            for peer, piece in sockets:
                with contextlib.suppress(OSError):  # refused, or what was sent is not read
                    peer.send(piece)
        assert target.ask("GET", "/health")[0] == 200
        assert target.resident_kib - before < GROWTH_KIB_MAX


@spec("SEC-86")
def test_a_coded_body_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as target:
        for coding in (b"gzip, chunked", b"identity, chunked"):
            with socket.create_connection(target.place, timeout=WAIT_S) as peer:
                peer.sendall(
                    b"POST /v1/login HTTP/1.1\r\nhost: %s\r\ntransfer-encoding: %s\r\n\r\n0\r\n\r\n"
                    % (target.place[0].encode(), coding)
                )
                assert peer.recv(65536).startswith(b"HTTP/1.1 400 ")


# --- values ---------------------------------------------------------------------------------------------------------


@spec("SEC-75", "SEC-77")
def test_a_deep_schema_is_refused_and_fills_no_log(tmp_path: Path) -> None:
    with serving(tmp_path) as target:
        tool = {"spec": {"name": "look", "parameters": nested(440)}}
        sent = {"type": "send", "parts": [{"type": "text", "text": "hi"}], "tools": [tool]}
        status, body = target.command(ADA, 0, sent)
        assert (status, json.loads(body)["code"]) == (400, "malformed_frame")
        assert len(target.log) < LOG_CHARS_MAX
    folder = tmp_path / "gateway"
    folder.mkdir()
    with gateway(folder) as target:
        key = f"Bearer {KEY}"
        tools = [{"type": "function", "function": {"name": "look", "parameters": nested(440)}}]
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
        status, body = target.ask("POST", "/v1/chat/completions", asked, authorization=key)
        assert (status, "levels deep" in body) == (400, True)
        assert len(target.log) < LOG_CHARS_MAX


@spec("SEC-78")
def test_an_endless_or_negative_time_limit_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as target:
        for seconds in (1e300, -1):
            tool = {"spec": {"name": "look"}, "needs_approval": True, "answer_s": seconds}
            sent = {"type": "send", "parts": [{"type": "text", "text": "look"}], "tools": [tool]}
            status, body = target.command(ADA, 0, sent)
            assert (status, json.loads(body)["code"]) == (400, "malformed_frame")


@spec("SEC-81")
def test_a_file_of_the_server_is_not_attached_by_another_person(tmp_path: Path) -> None:
    file = {"type": "file", "media_type": "text/plain", "url": "file:///etc/passwd"}
    with serving(tmp_path) as target:
        status, body = target.command(ADA, 0, {"type": "send", "parts": [file]})
        assert (status, json.loads(body)["code"]) == (403, "access")
        assert target.command(BOB, 0, {"type": "send", "parts": [file]})[0] == 200
    folder = tmp_path / "gateway"
    folder.mkdir()
    with gateway(folder) as target:
        key = f"Bearer {KEY}"
        content = [{"type": "file", "file": {"file_url": "file:///etc/passwd"}}]
        asked = {"model": "m", "messages": [{"role": "user", "content": content}]}
        for _ in range(2):  # what was refused once is known, and refused again
            sent = {"authorization": key, "x_forwarded_for": "203.0.113.7"}
            assert target.ask("POST", "/v1/chat/completions", asked, **sent)[0] == 403
        assert target.ask("POST", "/v1/chat/completions", asked, authorization=key)[0] == 200


@spec("SEC-84")
def test_a_result_is_not_taken_from_another_stream(tmp_path: Path) -> None:
    with serving(tmp_path) as target:
        tools = [{"spec": {"name": "look"}, "has_effects": False}]
        sent = {"type": "send", "parts": [{"type": "text", "text": "look"}], "tools": tools}
        assert target.command(ADA, 0, sent)[0] == 200
        started = target.records_until(ADA, "call_started")
        (call,) = [each for each in started if each["type"] == "call_started"]

        def result(words: str) -> dict[str, Any]:
            outcome = {"call_id": call["call_id"], "content": words}
            return {"type": "result", "turn": 1, "response": 1, "result": outcome}

        assert target.command(BOB, 0, result("forged"), key="k2")[0] == 200
        assert not any(each["type"] == "call_ended" for each in target.records(ADA))
        assert target.command(ADA, 1, result("real"))[0] == 200
        ended = [each for each in target.records_until(ADA, "turn_ended") if each["type"] == "call_ended"]
        assert [each["result"]["content"] for each in ended] == ["real"]


# --- a false server -------------------------------------------------------------------------------------------------


class Decoy:
    """Two servers: the first redirects each request to the second, which notes what came."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[bytes] = []
        self.came: list[bytes] = []

    @contextlib.asynccontextmanager
    async def serving(self, status: int, *, is_same_host: bool = False) -> AsyncIterator[None]:
        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                self.came.append(await reader.readuntil(b"\r\n\r\n"))
            writer.close()

        async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                head = await reader.readuntil(b"\r\n\r\n")
                (self.came if b"/elsewhere" in head else self.asked).append(head)
                target = b"/elsewhere" if is_same_host else b"http://localhost:%d/elsewhere" % port
                writer.write(
                    b"HTTP/1.1 %d Redirect\r\nlocation: %s\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                    % (status, target)
                )
                await writer.drain()
            writer.close()

        async with contextlib.AsyncExitStack() as stack:
            second = await stack.enter_async_context(await asyncio.start_server(note, "127.0.0.1", 0))
            port = second.sockets[0].getsockname()[1]
            first = await stack.enter_async_context(await asyncio.start_server(redirect, "127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{first.sockets[0].getsockname()[1]}"
            yield


@spec("SEC-73")
@pytest.mark.parametrize("is_same_host", [False, True])
@pytest.mark.parametrize("transport", [*TransportKind])
async def test_a_client_follows_no_redirect(transport: TransportKind, *, is_same_host: bool) -> None:
    for status in REDIRECTS:
        decoy = Decoy()
        async with decoy.serving(status, is_same_host=is_same_host):
            client = connect(decoy.url, transport=transport, headers={"authorization": "Bearer secret"})
            async with client, asyncio.timeout(WAIT_S):
                with pytest.raises(ProtocolError, match="a redirect; none is followed"):
                    async for _ in client.send("s1", "my words"):
                        pass
        assert decoy.asked != []
        assert decoy.came == []


@spec("SEC-73")
async def test_a_request_of_a_client_or_a_command_follows_no_redirect() -> None:
    decoy = Decoy()
    async with decoy.serving(307):
        for work in (
            snapshot(decoy.url, "s1", {}),
            questions(decoy.url, None, {}),
            delete(decoy.url, "s1", {}),
            asyncio.to_thread(ServerSource(decoy.url).questions, None),
        ):
            with pytest.raises(ProtocolError, match="redirect"):
                await work
    assert len(decoy.asked) == 4
    assert decoy.came == []


@spec("SEC-73")
@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
@pytest.mark.parametrize("transport", ["sse", "poll"])
async def test_the_browser_client_follows_no_redirect(transport: str) -> None:
    program = f"""
        import {{ connect }} from {json.dumps((FOLDER / "client/midstream.js").as_uri())};
        const [url, transport] = process.argv.slice(1);
        const client = await connect({{ url, transport }});
        await client.ask("s1", "my words").catch((error) => console.log(error.code));
        process.exit(0);
    """
    decoy = Decoy()
    async with decoy.serving(307):
        node = await asyncio.create_subprocess_exec(
            *("node", "--input-type=module", "-e", textwrap.dedent(program), decoy.url, transport),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            told, _ = await asyncio.wait_for(node.communicate(), WAIT_S)
        finally:
            if node.returncode is None:
                node.kill()
                await node.wait()
    assert told.split() == [b"protocol"]
    assert decoy.asked != []
    assert decoy.came == []
