"""The cases of the Autobahn test suite, run by a current runner (`kosoku`) against our WebSocket stack.

The suite itself runs on Python 2 only. Most of its cases expect an echo: so an echo replaces our endpoint,
under the same server with the same limits. Then all of them run against the endpoint itself, which must
refuse invalid frames and continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from kosoku import FailureError, run_fuzzingclient
from starlette.types import Receive, Scope, Send

from midstream.environment import World
from midstream.server.uvicorn_server import serve
from tests.server.serving import WAIT_S, Socket, make_app, opening, served

WITHIN_S = 50.0
BEYOND_OUR_LIMITS = [
    *(f"9.{kind}.{size}" for kind in (1, 2) for size in (4, 5, 6)),
    *("9.3.*", "9.4.*", "12.*", "13.*"),
]
"""Messages above 1 MiB, and compression, which is switched off."""
MEASURES = ["9.5.*", "9.6.*", "9.7.*", "9.8.*"]
"""A thousand messages each, and long ones in small pieces: they measure time, and test no rule."""

FRAMING = ("3.", "4.", "7.1.5", "7.3.", "7.5.", "7.7.", "7.9.")
WANTS_AN_ECHO = {"3.4"}


class Echo:
    """A server that echoes its messages."""

    world = World()
    open_streams = 0
    requires_authentication = False

    async def start(self) -> None:
        """Nothing to do."""

    def drain(self) -> None:
        """Nothing to do."""

    async def stop(self, *, grace_s: float) -> None:
        """Nothing to do."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({**message, "type": "websocket.send"})


@contextlib.asynccontextmanager
async def echoing() -> AsyncIterator[str]:
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    serving = asyncio.create_task(serve(Echo(), port=0, on_listening=listening.set_result, stop=stop))
    yield await asyncio.wait_for(listening, WAIT_S)
    stop.set()
    await asyncio.wait_for(serving, WAIT_S)


async def failures(address: str) -> list[str]:
    """Run the suite; return the failed cases."""
    trial = run_fuzzingclient(address, exclude_cases=[*BEYOND_OUR_LIMITS, *MEASURES], concurrency=4)
    try:
        results = await asyncio.wait_for(trial, WITHIN_S)
    except FailureError as error:
        return [each.case_id for each in error.results if not each.passed]
    assert len(results) > 200
    return []


async def test_the_websocket_stack_passes_the_suite() -> None:
    async with echoing() as url:
        assert await failures(url.removeprefix("http://")) == []


async def test_our_endpoint_survives_the_suite(caplog: pytest.LogCaptureFixture) -> None:
    async with served(make_app()) as server:
        address = f"{server.url.removeprefix('http://')}/v1/sessions/s1/stream"
        unlike_an_echo = await failures(address)
        async with Socket(server.socket()) as socket:
            await socket.send(opening())
            assert (await socket.receive())["type"] == "welcome"
    # Broken framing is refused as the suite expects, before our endpoint receives a message.
    assert [case for case in unlike_an_echo if case.startswith(FRAMING) and case not in WANTS_AN_ECHO] == []
    assert server.app.open_streams == 0
    logged = {record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR}
    assert logged <= {"Invalid UTF-8 sequence received from client."}
