"""The demo's server is a real process: started, killed, restarted, and stopped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from midstream.demo.demo_server import DemoServer
from midstream.demo.folder import Folder
from midstream.environment import World
from midstream.errors import UnavailableError


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make()
    return folder


async def test_a_killed_server_restarts_on_the_same_port(folder: Folder) -> None:
    server = DemoServer(folder, "scripted", 0, World())
    await server.start()
    first, port = server.pid, server.port
    await server.kill()
    await server.start()
    try:
        assert (server.port, server.pid != first) == (port, True)
        assert server.started_at < server.listened_at
        os.kill(server.pid, 0)
    finally:
        await server.stop()
        await server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


async def test_a_server_that_does_not_start_reports_why(folder: Folder) -> None:
    server = DemoServer(folder, "no such model", 0, World())
    with pytest.raises(UnavailableError, match="is local or scripted, not 'no such model'"):
        await server.start()
