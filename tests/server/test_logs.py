"""A peer cannot fill the log, and a drain does not look like an accident."""

from __future__ import annotations

import logging

import pytest

from midstream.server.http import StreamCutError
from midstream.server.logs import PEER_LINES_MAX, PERIOD_S, PeerNoise
from midstream.testing.worlds import FakeWorld


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
async def test_lines_that_peers_cause_are_few_and_short(message: str) -> None:
    clock = FakeWorld()
    noise = PeerNoise(clock)
    lines = [line(message, ValueError("what the peer sent")) for _ in range(3 * PEER_LINES_MAX)]
    assert sum(noise.filter(each) for each in lines) == PEER_LINES_MAX
    assert lines[0].exc_info is None

    await clock.advance(PERIOD_S)
    assert noise.filter(line(message))


def test_addresses_of_requests_are_not_logged() -> None:
    accepted = '%s - "WebSocket %s" [accepted]'
    assert not PeerNoise(FakeWorld()).filter(line(accepted, None, "peer", "/?ticket=1"))
