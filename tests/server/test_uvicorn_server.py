"""A server on a port: it starts or reports why not, holds hundreds of streams, and ends within its bound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from starlette.types import Receive, Scope, Send

from midstream.environment import World
from midstream.errors import PortTakenError, StoreDamagedError, UsageError
from midstream.models.responses import DELTA_CHARS_MAX, TextDelta
from midstream.server import uvicorn_server as serve_module
from midstream.server.auth.access import Access
from midstream.server.uvicorn_server import listen, serve
from midstream.store.memory import MemoryStore
from midstream.testing.scripted_model import Gate, Stall, calls, text
from midstream.tools.function_tools import tool
from tests.server.serving import (
    KEYS,
    WAIT_S,
    Served,
    Socket,
    command,
    make_app,
    opening,
    served,
)
from tests.spec import spec

STREAMS = 500


async def test_a_taken_port_is_reported_with_advice_and_nothing_is_started() -> None:
    store = MemoryStore()
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError, match=rf"127\.0\.0\.1:{port}: stop it, or choose another port"):
            await serve(make_app(store=store), port=port)
    assert store.node == ""


def test_servers_that_share_a_port_listen_side_by_side_and_no_other_server_can() -> None:
    with listen("127.0.0.1", 0, shares_port=True) as one:
        port = one.getsockname()[1]
        with listen("127.0.0.1", port, shares_port=True) as other:
            assert other.getsockname() == one.getsockname()
        with pytest.raises(PortTakenError):
            listen("127.0.0.1", port)


def test_a_system_without_port_sharing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    with pytest.raises(UsageError, match="proxy"):
        listen("127.0.0.1", 0, shares_port=True)


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no.such.name.invalid", 0), ("127.0.0.1", 70_000)]
)
def test_an_address_that_cannot_be_bound_is_a_usage_error(host: str, port: int) -> None:
    with pytest.raises(UsageError, match=re.escape(f"cannot listen on {host}:{port}")):
        listen(host, port)


async def test_small_responses_are_sent_without_delay() -> None:
    """Otherwise the second packet of each waits 40 ms until the client has acknowledged the first."""
    found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = writer.get_extra_info("socket")
        found.set_result(line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen("127.0.0.1", 0)
    async with asyncio.timeout(WAIT_S), await asyncio.start_server(accepted, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await found
        writer.close()
        await writer.wait_closed()


async def test_a_server_opens_to_the_network_only_with_authentication_and_named_hosts() -> None:
    with pytest.raises(UsageError, match="has no authentication"):
        await serve(make_app(), host="0.0.0.0", port=0, allowed_hosts=["agents.example"])
    app = make_app(access=Access(authenticate=lambda _: None))
    with pytest.raises(UsageError, match="list the host names"):
        await serve(app, host="0.0.0.0", port=0)


async def test_a_damaged_store_ends_the_start_and_frees_the_port() -> None:
    class DamagedStore(MemoryStore):
        async def open(self) -> None:
            raise StoreDamagedError("no database")

    with listen("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    with pytest.raises(StoreDamagedError):
        await serve(make_app(store=DamagedStore()), port=port)
    listen("127.0.0.1", port).close()


async def test_a_draining_server_instructs_both_kinds_of_streams_to_reconnect_and_ends_soon() -> None:
    async with served(make_app([[Stall()]])) as server, Socket(server.socket()) as speaker:
        await speaker.send(opening())
        await speaker.send(command())
        await speaker.receive_until("attempt_started")
        received = bytearray()
        async with asyncio.timeout(WAIT_S), server.http.stream("GET", "/v1/sessions/s1/events") as response:
            body = response.aiter_raw()
            received += await anext(body)
            async with asyncio.timeout(60):
                server.stop.set()
                goodbye = (await speaker.receive_until("error"))[-1]
                received += await read_until_cut(body)
                close = await speaker.receive_close()
                await server.serving

    assert (goodbye["code"], goodbye["retry"], goodbye["retry_after_s"]) == ("draining", "later", 1.0)
    assert close == (1012, "draining")
    assert b'event: error\ndata: {"type":"error","code":"draining"' in received


async def test_a_hung_tool_and_a_stalled_client_cannot_block_the_shutdown() -> None:
    let_go = asyncio.Event()

    @tool
    async def hang() -> None:
        """Ignore a cancel."""
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()

    flood = [TextDelta("x" * DELTA_CHARS_MAX)] * 300
    script = [[*flood, *calls(("hang", "{}"))]]
    async with served(make_app(script, tools=[hang]), stop_within_s=6.0) as server:
        _, writer = await deaf_reader(server)
        answer = await server.http.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
        assert answer.status_code == 200
        async with asyncio.timeout(WAIT_S), Socket(server.socket()) as reader:
            await reader.send(opening(stream="", secret="", event_id="0-0"))
            await reader.receive_until("call_started")
        assert len(server.app.connections) == 1, "the one that does not read is still there"

        async with asyncio.timeout(WAIT_S):  # Without a limit it would never end.
            server.stop.set()
            await server.serving
        let_go.set()
        writer.transport.abort()


async def test_a_request_during_the_drain_gets_a_retry_delay_and_its_connection_is_closed() -> None:
    async with served(make_app([text("hi")])) as server:
        host, port = server.url.removeprefix("http://").split(":")
        half, sending = await asyncio.open_connection(host, int(port))
        sending.write(
            f"POST /v1/sessions/s1/commands HTTP/1.1\r\nhost: {host}\r\ncontent-length: 9\r\n\r\n{{".encode()
        )
        idle, asking = await asyncio.open_connection(host, int(port))
        asking.write(f"GET /health HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        await idle.readuntil(b"}")
        async with asyncio.timeout(WAIT_S):
            server.stop.set()
            assert await idle.read() == b"", "closed, while another one is still being answered"
            head, _, body = (await half.read()).partition(b"\r\n\r\n")
        sending.close()
        asking.close()
    assert head.startswith(b"HTTP/1.1 503 ")
    assert {b"retry-after: 1", b"connection: close"} <= {*head.split(b"\r\n")}
    assert json.loads(body)["code"] == "draining"


async def read_until_cut(body: AsyncIterator[bytes]) -> bytes:
    """Read a body that must not end: its connection is cut."""
    received = bytearray()
    try:
        async for piece in body:
            received += piece
    except (httpx2.RemoteProtocolError, httpx2.ReadError):
        return bytes(received)
    pytest.fail("the body ended cleanly")


async def deaf_reader(server: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Request events and never read them."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    ask = f"GET /v1/sessions/s1/events HTTP/1.1\r\nhost: {host}\r\n"
    keys = "".join(f"{name}: {value}\r\n" for name, value in KEYS.items())
    writer.write(f"{ask}{keys}\r\n".encode())
    await writer.drain()
    return reader, writer


async def test_five_hundred_open_streams_each_receive_the_turn() -> None:
    gate = asyncio.Event()
    async with served(make_app([[Gate(gate), *text("hello all of you")]])) as server:
        await server.http.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
        host, port = server.url.removeprefix("http://").split(":")
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(STREAMS)]
        for _, writer in streams:
            writer.write(f"GET /v1/sessions/s1/events HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        async with asyncio.timeout(3 * WAIT_S):
            for reader, _ in streams:
                await reader.readuntil(b"event: welcome")
            assert len(server.app.connections) == STREAMS
            gate.set()
            found = [await reader.readuntil(b'"type":"turn_ended"') for reader, _ in streams]
            assert all(b"hello all of you" in each for each in found)

            server.stop.set()
            for reader, writer in streams:
                rest = await reader.read()
                assert b"draining" in rest
                assert not rest.endswith(b"0\r\n\r\n"), "no clean end"
                writer.close()
            await server.serving
    assert len(server.app.connections) == 0


PROGRAM = """
    import asyncio
    from midstream import Agent, asgi
    from midstream.server.uvicorn_server import serve
    from midstream.testing.scripted_model import ScriptedModel, Stall

    app = asgi(Agent(ScriptedModel([[Stall()]])), store="sessions.db")
    asyncio.run(serve(app, port=0, on_listening=lambda url: print(url, flush=True)))
    print("ended", flush=True)
"""


async def started(folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        textwrap.dedent(PROGRAM),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )


@spec("STREAM-27")
async def test_a_killed_server_ends_no_response_cleanly(tmp_path: Path) -> None:
    process = await started(tmp_path)
    assert process.stdout is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), WAIT_S)).decode().strip()
        async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            await client.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
            async with (
                asyncio.timeout(WAIT_S),
                client.stream("GET", "/v1/sessions/s1/events", headers=KEYS) as response,
            ):
                body = response.aiter_raw()
                await anext(body)
                silent = client.get("/v1/sessions/s2/poll?n=1&after=0-0", headers=KEYS)
                polling = asyncio.create_task(silent)
                while (await client.get("/ready")).json().get("streams") != 2:
                    pass
                process.kill()
                await read_until_cut(body)
                with pytest.raises(httpx2.TransportError):
                    await polling
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_successfully_with_a_stream_open(
    number: signal.Signals, tmp_path: Path
) -> None:
    process = await started(tmp_path)
    assert process.stdout is not None
    try:
        url = (await asyncio.wait_for(process.stdout.readline(), WAIT_S)).decode().strip()
        async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S) as client:
            await client.post("/v1/sessions/s1/commands", json=command(), headers=KEYS)
            async with client.stream("GET", "/v1/sessions/s1/events", headers=KEYS) as response:
                body = response.aiter_raw()
                await anext(body)
                process.send_signal(number)
                await read_until_cut(body)
        output, complaints = await asyncio.wait_for(process.communicate(), WAIT_S)
    finally:
        if process.returncode is None:
            process.kill()
    others = [line for line in complaints.splitlines() if b"no authentication is configured" not in line]
    assert (process.returncode, output, others) == (0, b"ended\n", [])


class Large:
    """An app with a large response, which waits until its client has gone."""

    world = World()
    open_streams = 0
    requires_authentication = False

    def __init__(self) -> None:
        self.is_alone = asyncio.Event()

    async def start(self) -> None:
        """Nothing to do."""

    def drain(self) -> None:
        """Nothing to do."""

    async def stop(self, *, grace_s: float) -> None:
        """Nothing to do."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(16 * 2**20), "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.is_alone.set()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no such option")
async def test_a_client_that_does_not_read_its_response_is_cut_and_its_memory_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_module, "UNREAD_S", 0.5)
    app, stop = Large(), asyncio.Event()
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(app, port=0, on_listening=listening.set_result, stop=stop))
    url = await asyncio.wait_for(listening, WAIT_S)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=WAIT_S) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await asyncio.wait_for(app.is_alone.wait(), WAIT_S)
    stop.set()
    await asyncio.wait_for(serving, WAIT_S)


async def test_the_announced_address_can_be_typed() -> None:
    async with served(make_app()) as server:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", server.url)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_the_other_loopback_is_served_too() -> None:
    try:
        listen("::1", 0).close()
    except UsageError:
        pytest.skip("this machine has no IPv6 loopback")
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    work = serve(make_app(), host="::1", port=0, on_listening=listening.set_result, stop=stop)
    serving = asyncio.create_task(work)
    async with httpx2.AsyncClient(base_url=await listening) as client:
        answer = await client.get("/health")
    stop.set()
    await asyncio.wait_for(serving, WAIT_S)
    assert json.loads(answer.text)["status"] == "ok"
