"""The programs of the README, run as printed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from examples import client, hello, in_process
from midstream import asgi
from midstream.server.uvicorn_server import serve

ANSWER = "Let me look. Take a coat: it is 8 degrees in Oslo."


async def test_the_agent_and_the_client_of_the_readme_work_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # The client stores its checkpoint in the current folder.
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    app = asgi(hello.agent, store=tmp_path / "sessions.db")
    serving = asyncio.ensure_future(serve(app, port=0, on_listening=listening.set_result, stop=stop))
    shown: list[str] = []
    async with asyncio.timeout(60):
        url = await listening
        assert await client.ask(url, "Do I need a coat in Oslo?") == ANSWER
        await client.stream(url, "And now?", shown.append)
        stop.set()
        await serving
    assert shown[-1] == ANSWER
    assert all(ANSWER.startswith(each) for each in shown)


async def test_the_agent_of_the_readme_answers_in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # The store is in the current folder.
    async with asyncio.timeout(60):
        assert await in_process.main("Do I need a coat in Oslo?") == ANSWER
        assert await in_process.main("And now?") == ANSWER
