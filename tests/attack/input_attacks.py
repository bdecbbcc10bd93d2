"""Attacks by input and over the network: by a peer, a sender or a false server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import shutil
import socket
import ssl
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from midstream.cli.session_sources import ServerSource
from midstream.client import connect
from midstream.client.requests import delete, questions, snapshot
from midstream.client.transport_selection import TransportKind
from midstream.errors import ProtocolError
from midstream.server.pages import FOLDER
from tests.attack.attack import attack
from tests.attack.ground import Ground, HttpAnswer, Target
from tests.certificates import certificate
from tests.spec import spec

WAIT_S = 30.0
SLOW_PEERS = 300
GROWTH_KIB_MAX = 32 * 1024
"""For 300 connections, including uvicorn's memory for each; without the limits it was 324 MiB."""
LOG_CHARS_MAX = 20_000
KEY = "k" * 32
ADA, ROOT = "the-token-of-ada-1", "the-token-of-root-1"
REDIRECTS = (301, 302, 303, 307, 308)
JSON = "application/json"
LOOKER = """
from midstream import Agent
from midstream.testing import ScriptedModel, calls, text

def answer(request):
    last = request.history.entries[-1]
    if hasattr(last, "results"):
        return text(f"I was told: {last.results[0].content}")
    return calls(("look", "{}")) if last.parts[0].text == "look" else text("Hello.")

agent = Agent(ScriptedModel(answer), name="looker")
"""


@contextlib.contextmanager
def _serving(ground: Ground) -> Iterator[Target]:
    """Serve an agent that calls a tool of its client, to Ada and to an operator."""
    (ground.folder / "looker.py").write_text(LOOKER)
    tokens = ground.write_secret("tokens", f"{ADA} ada\n{ROOT} root *\n")
    store = ground.folder / "sessions.db"
    arguments = ("serve", "looker:agent", "--store", store, "--port", 0, "--token-file", tokens)
    with ground.start(*map(str, arguments)) as target:
        yield target


@contextlib.contextmanager
def _gateway(ground: Ground) -> Iterator[Target]:
    """Run a gateway in front of a scripted agent."""
    key = ground.write_secret("key", KEY)
    arguments = ("gateway", "--upstream", "scripted", "--port", 0, "--token-file", key)
    with ground.start(*map(str, arguments)) as target:
        yield target


def _place(target: Target) -> tuple[str, int]:
    parts = urlsplit(target.url)
    return parts.hostname or "", parts.port or 0


def _command(target: Target, token: str, seqno: int, payload: object, *, key: str = "k1") -> HttpAnswer:
    """Send one command to the session `s1`."""
    frame = {"type": "command", "seqno": seqno, "payload": payload}
    keys = {"x_idempotency_key": key, "x_idempotent_encryption_key": "s" * 43}
    return target.ask("POST", "/v1/sessions/s1/commands", frame, token=token, **keys)


def _records(target: Target, *, until: str = "") -> list[dict[str, Any]]:
    """Return the records of the session `s1`, optionally after a record of one kind has appeared."""
    if until:
        connection = http.client.HTTPConnection(*_place(target), timeout=WAIT_S)
        connection.request(
            "GET", "/v1/sessions/s1/events?after=0", headers={"authorization": f"Bearer {ADA}"}
        )
        answer = connection.getresponse()
        while f'"{until}"' not in (line := answer.readline().decode()):
            assert line, "the events ended"
        connection.close()
    exported = target.ask("GET", "/v1/sessions/s1/records", token=ADA).body.decode()
    return [json.loads(line)["record"] for line in exported.splitlines()]


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def _resident_kib(target: Target) -> int:
    status = Path(f"/proc/{target.process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1])


# --- memory ---------------------------------------------------------------------------------------------------------


@attack(quick=True)
@spec("SEC-82", "SEC-83")
def attack_slow_logins_take_no_memory(ground: Ground) -> None:
    with _serving(ground) as target, contextlib.ExitStack() as peers:
        host, port = _place(target)
        assert target.ask("GET", "/health").status == 200
        before = _resident_kib(target)
        head = f"POST /v1/login HTTP/1.1\r\nhost: {host}:{port}\r\nx-midstream: 1\r\ncontent-type: {JSON}\r\n"
        sockets = []
        for number in range(SLOW_PEERS):
            peer = peers.enter_context(socket.create_connection((host, port), timeout=WAIT_S))
            is_chunked = number % 2
            length = "transfer-encoding: chunked" if is_chunked else "content-length: 1048576"
            peer.sendall(f"{head}{length}\r\n\r\n".encode())
            peer.settimeout(0)
            sockets.append((peer, b"10000\r\n" + b"x" * 65536 + b"\r\n" if is_chunked else b"x" * 65536))
        for _ in range(15):
            for peer, piece in sockets:
                with contextlib.suppress(OSError):  # refused, or the body is not read
                    peer.send(piece)
        assert target.ask("GET", "/health").status == 200
        assert _resident_kib(target) - before < GROWTH_KIB_MAX


@attack()
@spec("SEC-83")
def attack_silent_peers_of_tls_are_counted(ground: Ground) -> None:
    """Peers that connect and never start a handshake."""
    tokens = ground.write_secret("tokens", f"{ADA} ada\n")
    pem = certificate(ground.folder / "server.pem")
    pem.chmod(0o600)
    limits = ("--connections-max", "4", "--connections-reserved", "2")
    options = ("--token-file", tokens, "--tls-cert", pem, "--tls-key", pem, *limits)
    with ground.serving(*options) as target, contextlib.ExitStack() as stack:
        place = _place(target)
        with contextlib.ExitStack() as silent:
            peers = [silent.enter_context(socket.create_connection(place, timeout=WAIT_S)) for _ in range(20)]
            for peer in peers[6:]:
                with contextlib.suppress(ConnectionResetError):
                    assert peer.recv(1) == b""
        trusted = ssl.create_default_context(cafile=pem)
        connection = http.client.HTTPSConnection("127.0.0.1", place[1], timeout=WAIT_S, context=trusted)
        stack.callback(connection.close)
        for _ in range(600):  # until the server has noticed their end
            with contextlib.suppress(OSError):
                connection.request("GET", "/v1/sessions", headers={"authorization": f"Bearer {ADA}"})
                break
            connection.close()
        assert connection.getresponse().status == 200


@attack()
@spec("SEC-86")
def attack_a_compressed_body_is_refused(ground: Ground) -> None:
    with _serving(ground) as target:
        host, port = _place(target)
        for coding in ("gzip, chunked", "identity, chunked"):
            with socket.create_connection((host, port), timeout=WAIT_S) as peer:
                head = f"POST /v1/login HTTP/1.1\r\nhost: {host}\r\ntransfer-encoding: {coding}\r\n\r\n"
                peer.sendall(f"{head}0\r\n\r\n".encode())
                assert peer.recv(65536).startswith(b"HTTP/1.1 400 ")


# --- values ---------------------------------------------------------------------------------------------------------


@attack(quick=True)
@spec("SEC-75", "SEC-77", "SEC-78")
def attack_odd_values_are_refused_and_fill_no_log(ground: Ground) -> None:
    with _serving(ground) as target:
        deep = {"spec": {"name": "look", "parameters": _nested(440)}}
        timed = ({"spec": {"name": "look"}, "needs_approval": True, "answer_s": each} for each in (1e300, -1))
        for tool in (deep, *timed):
            sent = {"type": "send", "parts": [{"type": "text", "text": "look"}], "tools": [tool]}
            answer = _command(target, ADA, 0, sent)
            assert (answer.status, answer.code) == (400, "malformed_frame")
        assert len(target.stop()) < LOG_CHARS_MAX


@attack()
@spec("SEC-75", "SEC-77")
def attack_a_deep_schema_is_refused_by_the_gateway(ground: Ground) -> None:
    with _gateway(ground) as target:
        tools = [{"type": "function", "function": {"name": "look", "parameters": _nested(440)}}]
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
        answer = target.ask("POST", "/v1/chat/completions", asked, token=KEY)
        assert (answer.status, b"levels deep" in answer.body) == (400, True)
        assert len(target.stop()) < LOG_CHARS_MAX


@attack()
@spec("SEC-81")
def attack_another_person_cannot_attach_a_file_of_the_server(ground: Ground) -> None:
    file = {"type": "file", "media_type": "text/plain", "url": "file:///etc/passwd"}
    with _serving(ground) as target:
        answer = _command(target, ADA, 0, {"type": "send", "parts": [file]})
        assert (answer.status, answer.code) == (403, "access")
        assert _command(target, ROOT, 0, {"type": "send", "parts": [file]}).status == 200
    with _gateway(ground) as target:
        content = [{"type": "file", "file": {"file_url": "file:///etc/passwd"}}]
        asked = {"model": "m", "messages": [{"role": "user", "content": content}]}
        for _ in range(2):  # an input that was refused once is known, and refused again
            answer = target.ask(
                "POST", "/v1/chat/completions", asked, token=KEY, x_forwarded_for="203.0.113.7"
            )
            assert answer.status == 403
        assert target.ask("POST", "/v1/chat/completions", asked, token=KEY).status == 200


@attack()
@spec("SEC-84")
def attack_a_result_is_not_accepted_from_another_stream(ground: Ground) -> None:
    with _serving(ground) as target:
        tools = [{"spec": {"name": "look"}, "has_effects": False}]
        sent = {"type": "send", "parts": [{"type": "text", "text": "look"}], "tools": tools}
        assert _command(target, ADA, 0, sent).status == 200
        started = _records(target, until="call_started")
        (call,) = [each for each in started if each["type"] == "call_started"]

        def result(words: str) -> dict[str, Any]:
            outcome = {"call_id": call["call_id"], "content": words}
            return {"type": "result", "turn": 1, "response": 1, "result": outcome}

        assert _command(target, ROOT, 0, result("forged"), key="k2").status == 200
        assert not any(each["type"] == "call_ended" for each in _records(target))
        assert _command(target, ADA, 1, result("real")).status == 200
        ended = [each for each in _records(target, until="turn_ended") if each["type"] == "call_ended"]
        assert [each["result"]["content"] for each in ended] == ["real"]


# --- a false server -------------------------------------------------------------------------------------------------


class Decoy:
    """Two servers: the first redirects each request to the second, which records its requests."""

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
                place = "/elsewhere" if is_same_host else f"http://localhost:{port}/elsewhere"
                answer = f"HTTP/1.1 {status} Redirect\r\nlocation: {place}\r\ncontent-length: 0\r\n"
                writer.write(f"{answer}connection: close\r\n\r\n".encode())
                await writer.drain()
            writer.close()

        async with contextlib.AsyncExitStack() as stack:
            second = await stack.enter_async_context(await asyncio.start_server(note, "127.0.0.1", 0))
            port = second.sockets[0].getsockname()[1]
            first = await stack.enter_async_context(await asyncio.start_server(redirect, "127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{first.sockets[0].getsockname()[1]}"
            yield

    def check(self) -> None:
        """Assert that the first server received a request, and the second none."""
        assert self.asked != []
        assert self.came == []


async def _send_to_decoy(transport: TransportKind, status: int, *, is_same_host: bool) -> None:
    decoy = Decoy()
    async with decoy.serving(status, is_same_host=is_same_host):
        client = connect(decoy.url, transport=transport, headers={"authorization": "Bearer secret"})
        async with client, asyncio.timeout(WAIT_S):
            with pytest.raises(ProtocolError, match="a redirect; redirects are not followed"):
                async for _ in client.send("s1", "my words"):
                    pass
    decoy.check()


@attack(quick=True)
@spec("SEC-73")
def attack_a_client_follows_no_redirect(ground: Ground) -> None:
    for transport in TransportKind:
        asyncio.run(_send_to_decoy(transport, 307, is_same_host=False))


@attack()
@spec("SEC-73")
def attack_a_client_follows_no_redirect_of_any_kind(ground: Ground) -> None:
    for transport in TransportKind:
        for status in REDIRECTS:
            for is_same_host in (False, True):
                asyncio.run(_send_to_decoy(transport, status, is_same_host=is_same_host))


@attack()
@spec("SEC-73")
def attack_a_request_outside_the_streams_follows_no_redirect(ground: Ground) -> None:
    async def ask() -> None:
        decoy = Decoy()
        async with decoy.serving(307):
            for work in (
                snapshot(decoy.url, "s1", {}),
                questions(decoy.url, None, {}),
                delete(decoy.url, "s1", {}),
                asyncio.to_thread(lambda: ServerSource(decoy.url).questions(None)),
            ):
                with pytest.raises(ProtocolError, match="redirect"):
                    await work
        decoy.check()

    asyncio.run(ask())


@attack()
@spec("SEC-73")
def attack_the_browser_client_follows_no_redirect(ground: Ground) -> None:
    node = shutil.which("node")
    assert node is not None, "this attack needs node"
    program = f"""
        import {{ connect }} from {json.dumps((FOLDER / "client/midstream.js").as_uri())};
        const [url, transport] = process.argv.slice(1);
        const client = await connect({{ url, transport }});
        await client.ask("s1", "my words").catch((error) => console.log(error.code));
        process.exit(0);
    """

    async def run(transport: str) -> None:
        decoy = Decoy()
        async with decoy.serving(307):
            arguments = ("--input-type=module", "-e", textwrap.dedent(program), decoy.url, transport)
            process = await asyncio.create_subprocess_exec(node, *arguments, stdout=asyncio.subprocess.PIPE)
            try:
                output, _ = await asyncio.wait_for(process.communicate(), WAIT_S)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        assert output.split() == [b"protocol"]
        decoy.check()

    for transport in ("sse", "poll"):
        asyncio.run(run(transport))
