"""The JSON lines that drive a client program: one process for each life, and errors that name the request."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from midstream.client.transport_selection import TransportKind
from midstream.errors import UsageError
from midstream.testing.conformance.client_program import ClientProgram
from midstream.testing.conformance.client_wire import ClientState

ECHO = """
import json, sys
lines = []
for line in sys.stdin:
    request = json.loads(line)
    lines.append(request["method"])
    view = {"phase": "live", "code": None, "delivered": lines, "is_acknowledged": True, "is_reconnecting": False}
    view |= {"is_degraded": False, "has_checkpoint": True}
    if request["method"] == "submit" and request["payload"] == {"type": "cancel"}:
        view = []
    print(json.dumps(view), flush=True)
"""


def _client(tmp_path: Path, text: str = ECHO, *, wait_s: float = 20.0) -> ClientProgram:
    program = tmp_path / "program.py"
    program.write_text(text)
    return ClientProgram([sys.executable, str(program)], "http://127.0.0.1:9", tmp_path, wait_s=wait_s)


async def test_each_method_is_one_line_and_a_restart_is_another_process(tmp_path: Path) -> None:
    client = _client(tmp_path)
    await client.begin("s", TransportKind.WEBSOCKET)
    try:
        await client.submit({"type": "send"})
        await client.mark_handled("1-2")
        await client.advance_clock()
        await client.detach()
        methods = ("begin", "submit", "mark_handled", "advance_clock", "detach", "read_state")
        view = await client.read_state()
        assert view == ClientState(
            "live",
            None,
            methods,
            is_acknowledged=True,
            is_reconnecting=False,
            is_degraded=False,
            has_checkpoint=True,
        )
        await client.restart()
        assert (await client.read_state()).delivered == ("resume", "read_state")
    finally:
        await client.end()
    assert (tmp_path / "s" / "websocket").is_dir()


async def test_an_answer_that_is_no_object_is_an_error_that_names_its_request(tmp_path: Path) -> None:
    client = _client(tmp_path)
    await client.begin("s", TransportKind.SSE)
    try:
        with pytest.raises(UsageError, match="answered `submit` with '\\[\\]'"):
            await client.submit({"type": "cancel"})
    finally:
        await client.end()


async def test_a_state_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    client = _client(tmp_path, "import sys\nfor _ in sys.stdin: print('{}', flush=True)")
    await client.begin("s", TransportKind.SSE)
    try:
        with pytest.raises(UsageError, match="the client program's answer to `read_state` does not fit"):
            await client.read_state()
    finally:
        await client.end()


async def test_a_program_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    client = ClientProgram([str(tmp_path / "nothing")], "", tmp_path, wait_s=1.0)
    with pytest.raises(UsageError, match="cannot be started"):
        await client.begin("s", TransportKind.SSE)
