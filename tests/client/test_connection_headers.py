"""The headers of a client's connections: given ones, a function's, and none for a program in the server's place."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from midstream.client import connect
from midstream.client.connection_headers import ConnectionHeaders
from midstream.client.transport_selection import TransportName
from midstream.errors import ConnectionLostError, UnauthorizedError, UsageError
from midstream.local_keys import prove_server, read_or_make_key
from tests.cli.processes import Serving
from tests.server.known_people import ADA, guarded_app
from tests.server.serving import served
from tests.spec import spec
from tests.test_local_keys import proving

GIVEN = {"Authorization": "Bearer mine"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's own key; no token is given."""
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path))
    monkeypatch.delenv("MIDSTREAM_TOKEN", raising=False)
    return tmp_path


async def test_given_headers_are_sent_and_a_function_is_called_for_each_connection() -> None:
    assert await ConnectionHeaders("http://127.0.0.1:1", GIVEN)() == GIVEN
    numbers = iter(range(9))
    headers = ConnectionHeaders("http://127.0.0.1:1", lambda: {"authorization": f"Bearer {next(numbers)}"})
    assert [(await headers())["authorization"] for _ in range(2)] == ["Bearer 0", "Bearer 1"]


async def test_values_that_no_request_can_carry_are_refused() -> None:
    with pytest.raises(UsageError):
        ConnectionHeaders("http://127.0.0.1:1", {"x-a": "b\r\nc"})
    with pytest.raises(UsageError):
        await ConnectionHeaders("http://127.0.0.1:1", lambda: {"x-a": "b\r\nc"})()


@spec("SEC-12")
async def test_after_a_proof_nothing_is_sent_to_a_program_without_one(home: Path) -> None:
    key, answers = read_or_make_key(home), ["good"]

    def prove(nonce: str, address: str) -> Any:  # noqa: ANN401 - JSON
        if answers[-1] == "none":
            return None
        known = key if answers[-1] == "good" else "another"
        return {"start": "start-1", "proof": prove_server(known, address, "start-1", nonce)}

    with proving(prove) as (url, _):
        answers.append("wrong")
        headers = ConnectionHeaders(url, {})
        with pytest.raises(UnauthorizedError):
            await headers()
        answers.append("good")
        assert "authorization" in await headers()
        for answer in ("none", "wrong"):
            answers.append(answer)
            with pytest.raises(ConnectionLostError):
                await headers()
        answers.append("good")
        assert "authorization" in await headers()


@spec("SEC-10")
async def test_a_server_that_ends_before_its_proof_counts_as_a_lost_connection(home: Path) -> None:
    """One of several workers at a port is killed: the next one would refuse a request without a credential."""
    read_or_make_key(home)

    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(ConnectionLostError, match="no answer from"):
            await ConnectionHeaders(url, {})()
    with pytest.raises(ConnectionLostError, match="no answer from"):
        await ConnectionHeaders(url, {})()


@pytest.mark.slow
@spec("SEC-11")
@pytest.mark.parametrize("transport", ["websocket", "sse", "poll"])
async def test_a_turn_continues_after_a_restart_that_changed_the_servers_token(
    home: Path, transport: TransportName
) -> None:
    server = await asyncio.to_thread(partial(Serving, home))
    try:
        async with asyncio.timeout(60), connect(server.url, transport=transport) as client:
            text = ""
            async for event in client.send("s1", "pay"):
                text = event.transcript
                if event.question is not None:
                    await asyncio.to_thread(server.kill)
                    server = await asyncio.to_thread(partial(Serving, home, port=server.port))
                    [question] = await client.questions("s1")
                    await client.answer("s1", question, "deny")
            assert text
    finally:
        server.kill()


@pytest.mark.parametrize("transport", ["websocket", "sse", "poll"])
async def test_a_refused_credential_is_requested_again_once(transport: TransportName) -> None:
    sent: list[str] = []

    def ended_then_good() -> dict[str, str]:
        sent.append("Bearer the-token-of-a-former-start" if not sent else ADA["authorization"])
        return {"authorization": sent[-1]}

    def wrong() -> dict[str, str]:
        sent.append("wrong")
        return {"authorization": "Bearer a-token-that-nobody-has"}

    async with served(guarded_app()) as server, asyncio.timeout(60):
        async with connect(server.url, transport=transport, headers=ended_then_good) as client:
            assert await client.ask("s1", "hi") == "Hello."
        sent.clear()
        async with connect(server.url, transport=transport, headers=wrong) as client:
            with pytest.raises(UnauthorizedError):
                await client.ask("s1", "hi")
        assert 2 <= len(sent) <= 4
