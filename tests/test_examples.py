"""What the README shows, run as it stands."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples import client, hello
from midstream import asgi
from midstream.server.serve import serve


async def test_the_agent_and_the_client_of_the_readme_talk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the client keeps its checkpoint where it runs
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    app = asgi(hello.agent, store=tmp_path / "sessions.db")
    serving = asyncio.ensure_future(serve(app, port=0, on_listening=listening.set_result, stop=stop))
    async with asyncio.timeout(20):
        said = await client.ask(await listening, "Do I need a coat in Oslo?")
        stop.set()
        await serving
    assert said == "Let me look. Take a coat: it is 8 degrees in Oslo."
