"""An agent in a Starlette app, served by plain uvicorn in a process that receives SIGKILL and SIGTERM."""

from __future__ import annotations

import signal
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx2
import pytest

from midstream.session.records import Delta, EpochStarted, TurnEnded
from tests.fault.workers import WAIT_S, Worker, ends, problems, until_there
from tests.server.known_people import status_and_code

pytestmark = pytest.mark.fault


class Mounted(Worker):
    """One server process around the app."""

    program = "tests.server.mounted_process"


async def _half(folder: Path, server: Worker) -> None:
    """Run a turn to the middle of its answer."""
    assert (await server.send_message("s", "think")).status_code == HTTPStatus.OK
    await until_there(folder, "s", Delta)


async def test_a_killed_turn_continues_at_the_next_start_without_a_request(tmp_path: Path) -> None:
    async with Mounted(tmp_path) as server:
        await _half(tmp_path, server)
        await server.kill()
    (tmp_path / "go").touch()
    async with Mounted(tmp_path):
        await until_there(tmp_path, "s", EpochStarted, EpochStarted, TurnEnded)
    assert ends(tmp_path, "s") == ["completed"]
    assert problems(tmp_path, ["s"]) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_a_terminating_server_drains_its_streams_and_ends(
    number: signal.Signals, tmp_path: Path
) -> None:
    async with Mounted(tmp_path) as server:
        await _half(tmp_path, server)
        async with server.events("s") as lines:
            async for line in lines:
                if "half" in line:
                    break
            server.signal(number)
            with pytest.raises(httpx2.RemoteProtocolError):  # Reset: the client reconnects.
                async for _ in lines:
                    pass
        assert await server.ended() == -number  # As uvicorn ends.
    assert (tmp_path / "ended").exists()
    (tmp_path / "go").touch()
    async with Mounted(tmp_path):
        await until_there(tmp_path, "s", EpochStarted, EpochStarted, TurnEnded)
    assert ends(tmp_path, "s") == ["completed"]


async def test_without_the_lifespan_the_log_names_the_missing_argument(tmp_path: Path) -> None:
    async with Mounted(tmp_path, "--without-lifespan") as server:
        for _ in range(2):
            assert (await server.get("/v1/sessions")).status_code == HTTPStatus.OK
    log = (tmp_path / "log").read_text()
    assert log.count("mounted without its lifespan") == 1
    assert "lifespan=agents.lifespan" in log


async def _send_request(server: Worker, **headers: str) -> Any:  # noqa: ANN401 - a status, and a status with a code
    """Send a request as a client of this machine; a proxy header names another one."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx2.AsyncClient(base_url=server.url, timeout=WAIT_S) as client:
        answer = await client.get("/v1/sessions", headers=named)
    return status_and_code(answer) if answer.is_error else answer.status_code


async def test_without_authentication_remote_clients_are_refused_with_a_warning_in_the_log(
    tmp_path: Path,
) -> None:
    async with Mounted(tmp_path) as server:
        assert "no authentication is configured" in (tmp_path / "log").read_text()
        assert await _send_request(server) == HTTPStatus.OK
        for header in ("x_forwarded_for", "x_real_ip"):
            assert await _send_request(server, **{header: "198.51.100.7"}) == (403, "access")
            assert await _send_request(server, **{header: "127.0.0.1"}) == HTTPStatus.OK
        assert await _send_request(server, forwarded='for="[2001:db8::7]:4711";proto=https') == (
            403,
            "access",
        )


async def test_remote_clients_are_served_where_that_is_enabled(tmp_path: Path) -> None:
    async with Mounted(tmp_path, "--allow-unauthenticated") as server:
        assert "every client of every machine" in (tmp_path / "log").read_text()
        assert await _send_request(server, x_forwarded_for="198.51.100.7") == HTTPStatus.OK
