from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

import pytest

from midstream.errors import ModelError
from midstream.history.messages import History, UserMessage
from midstream.models.network_log import SHOWN_BYTES_MAX, NetworkLog
from midstream.models.openai_compatible import OpenAICompatible
from midstream.models.responses import ModelRequest
from midstream.observability.debug_output import NETWORK_LOGGER
from tests.models.chat_server import Answer, chat_server, delta, refusal, stream

KEY = "sk-proj-0123456789abcdef"
REQUEST = ModelRequest("", History((UserMessage.of(f"my key is {KEY}, my token is eyJhbGciOiJIUzI1NiJ9"),)))


async def lines_of(answer: Answer, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.set_level(logging.DEBUG, NETWORK_LOGGER)
    headers = {"x-gateway-key": "a-header-with-a-secret"}
    async with (
        chat_server(answer) as server,
        OpenAICompatible(server.url, "m", KEY, headers=headers) as model,
    ):
        try:
            async for _ in model.stream(REQUEST):
                pass
        except ModelError:
            pass
    return [record.getMessage() for record in caplog.records if record.name == NETWORK_LOGGER]


async def test_direction_size_status_and_beginning_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    lines = await lines_of(stream(delta("stop", content="a-header-with-a-secret, hello")), caplog)
    assert lines[0].startswith("openai-compatible:m -> POST /chat/completions, ")
    assert "my key is [redacted]" in lines[0]
    assert lines[1] == "openai-compatible:m <- status 200"
    assert "[redacted], hello" in lines[2]
    assert not any(KEY in line or "a-header-with-a-secret" in line for line in lines)


async def test_a_refusal_is_logged_with_its_body(caplog: pytest.LogCaptureFixture) -> None:
    lines = await lines_of(refusal(401, {"message": f"Incorrect API key provided: {KEY}"}), caplog)
    assert lines[1] == "openai-compatible:m <- status 401"
    assert "Incorrect API key provided: [redacted]" in lines[2]


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"api_key": KEY}),
        json.dumps({"client_secret": 'two"parts ' + KEY}),
        json.dumps({"headers": {"Authorization": f"Bearer {KEY}"}}),
        f"Authorization: Bearer {KEY}",
        "x" * (SHOWN_BYTES_MAX - 8) + f' "{KEY}"',
    ],
)
def test_secrets_are_redacted_also_where_the_line_is_cut(body: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, NETWORK_LOGGER)
    NetworkLog("m", []).log_request("POST", "/x", body.encode())
    (line,) = (record.getMessage() for record in caplog.records)
    assert KEY[:8] not in line
    assert len(line) < SHOWN_BYTES_MAX + 100


def test_a_log_entry_is_one_printable_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, NETWORK_LOGGER)
    NetworkLog("m", []).log_piece(b"data: 1\n\ndata: \xff\xf0\r\x1b[2J")
    assert caplog.records[0].getMessage().isprintable()


PROGRAM = """
import asyncio, logging, sys
from midstream.history.messages import History, UserMessage
from midstream.models.responses import ModelRequest
from midstream.models.openai_compatible import OpenAICompatible
{setup}
async def main():
    async with OpenAICompatible("http://127.0.0.1:1/v1", "m", "secret-key") as model:
        try:
            async for _ in model.stream(ModelRequest("", History((UserMessage.of("hi"),)))): pass
        except Exception: pass
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "setup", ["", "logging.basicConfig(level=logging.DEBUG)"], ids=["none", "own logging"]
)
@pytest.mark.parametrize("asked", ["", "1"])
def test_the_environment_variable_shows_each_line_once(setup: str, asked: str) -> None:
    environment = {**os.environ, "MIDSTREAM_DEBUG_NETWORK": asked}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(setup=setup)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    count = 1 if asked or setup else 0
    assert done.stderr.count("openai-compatible:m -> POST /chat/completions") == count
    assert done.stderr.count("openai-compatible:m <- broken: ClientConnectorError") == count
