"""A peer cannot fill the log, and a drain does not look like an accident."""

from __future__ import annotations

import logging

import pytest
import websockets

from midstream.server.api.http_endpoints import StreamCutError
from midstream.server.uvicorn_logs import PEER_LINES_MAX, PERIOD_S, PeerNoise
from midstream.testing.fake_worlds import FakeWorld
from midstream.testing.scripted_model import text
from tests.server.serving import KEYS, SECRET, Socket, command, make_app, opening, served


def line(message: str, error: Exception | None = None, *values: object) -> logging.LogRecord:
    exc_info = (type(error), error, None) if error else None
    return logging.LogRecord("uvicorn.error", logging.ERROR, "", 0, message, values, exc_info)


def test_a_cut_stream_leaves_no_traceback_and_a_bug_does() -> None:
    noise = PeerNoise(FakeWorld())
    assert not noise.filter(line("Exception in ASGI application\n", StreamCutError("draining")))
    assert noise.filter(line("Exception in ASGI application\n", ValueError("a bug")))


@pytest.mark.parametrize(
    "message", ["Invalid HTTP request received.", "Invalid UTF-8 sequence received from client."]
)
async def test_log_lines_caused_by_peers_are_few_and_short(message: str) -> None:
    clock = FakeWorld()
    noise = PeerNoise(clock)
    lines = [line(message, ValueError("what the peer sent")) for _ in range(3 * PEER_LINES_MAX)]
    assert sum(noise.filter(each) for each in lines) == PEER_LINES_MAX
    assert lines[0].exc_info is None

    await clock.advance(PERIOD_S)
    assert noise.filter(line(message))


async def test_no_content_of_people_or_models_is_logged_at_any_level(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("", "midstream", "uvicorn", "uvicorn.error", "uvicorn.access"):
        caplog.set_level(logging.DEBUG, logger=name)  # Whatever another test has configured.
    async with served(make_app([text("canary of the model")])) as server:
        async with Socket(server.socket("s1/stream?ticket=canary&rest=")) as socket:
            await socket.send(opening())
            await socket.send(command(words="canary of the user"))
            await socket.receive_until("turn_ended")
            await socket.send('{"canary": ')
            await socket.receive_until("error")
        with pytest.raises(websockets.InvalidStatus):
            await server.socket("s1/nowhere?ticket=canary&rest=", origin="http://canary.example")
        await server.http.post("/v1/sessions/s1/commands?canary", content=b"canary", headers=KEYS)
    ours = [
        (record.name, caplog.handler.format(record))
        for record in caplog.records
        if not record.name.startswith(("websockets.client", "httpx2", "httpcore2"))
    ]
    assert ours, "nothing was looked at"
    assert [each for each in ours if "canary" in each[1] or SECRET in each[1]] == []


@pytest.mark.parametrize(
    "message",
    [
        '%s - "WebSocket %s" [accepted]',
        '%s - "WebSocket %s" 403',
        "ASGI callable returned without completing handshake.",
    ],
)
def test_addresses_and_refusals_are_not_logged(message: str) -> None:
    values = ("peer", "/?ticket=1") if "%s" in message else ()
    assert not PeerNoise(FakeWorld()).filter(line(message, None, *values))
