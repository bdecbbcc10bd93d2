"""A store without any change to the package: a folder, and one row in the registry."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from midstream.cli import midstream_command
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.environment import World
from midstream.store.contract import Store
from midstream.store.store_registry import BACKENDS, read_store
from midstream.testing import ScriptedModel, text
from midstream.testing.store_contract import StoreContract
from midstream.testing.store_fakes import Storage as AnyPlace
from tests.cli.processes import APP, Serving, run
from tests.store.toy.store import ToyBackend, ToyFile, ToyStore

REGISTERED = """
from midstream.store.store_registry import BACKENDS
from toy_store import ToyBackend
BACKENDS["toy"] = ToyBackend
"""


class ToyPlace:
    def __init__(self, path: Path) -> None:
        self._place = ToyFile(path)

    def store(self) -> Store:
        return ToyStore(self._place, World())

    def kill(self, store: Store) -> None:
        assert isinstance(store, ToyStore)
        self._place.kill(store.node)


class TestToyStore(StoreContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> AnyPlace:
        return ToyPlace(tmp_path / "toy")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(BACKENDS, "toy", ToyBackend)
    return f"toy:{tmp_path / 'sessions.toy'}"


async def test_a_session_is_served_from_a_url_and_continues_in_the_next_process(url: str) -> None:
    async with Host(Agent(ScriptedModel([text("hello")])), url) as host:
        assert await host.ask("s", "hi") == "hello"
    async with Host(Agent(ScriptedModel([text("again")])), url) as host:
        assert await host.ask("s", "and now?") == "again"
        assert (await host.glance("s")).turns == 2
    with read_store(url) as store:
        assert [line.session for line in store.list()] == ["s"]


def test_commands_that_read_a_store_accept_the_url(url: str) -> None:
    asyncio.run(_answer(url))
    listed = CliRunner().invoke(midstream_command, ["sessions", "list", "--store", url, "--json"])
    assert listed.exit_code == 0, listed.output
    assert '"id":"s"' in listed.output
    removed = CliRunner().invoke(midstream_command, ["sessions", "delete", "s", "--yes", "--store", url])
    assert removed.exit_code == 0, removed.output
    with read_store(url) as store:
        assert [*store.list()] == []


async def _answer(url: str) -> None:
    async with Host(Agent(ScriptedModel([text("hello")])), url) as host:
        await host.ask("s", "hi")


@pytest.mark.slow
def test_a_server_whose_agent_registers_the_store_serves_from_its_url_also_after_a_kill(
    tmp_path: Path,
) -> None:
    shutil.copy(Path(__file__).with_name("store.py"), tmp_path / "toy_store.py")
    for words in ("one", "two"):
        with Serving(tmp_path, app=APP + REGISTERED, options=["--store", "toy:sessions.toy"]) as server:
            done = run("chat", server.url, "--session", "s", typed=words)
            assert f"You said: {words}." in done.stdout, done.stderr
            server.kill()
    turns = ToyFile(tmp_path / "sessions.toy").content.journals["s"].mark.turns
    assert turns == 2
