"""A store with a few recorded sessions, and the command line as a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from midstream.cli import midstream_command
from midstream.engine.agent import Agent
from midstream.engine.host import Host
from midstream.history.messages import UserMessage
from midstream.session.turn.commands import SendMessage
from midstream.store.contract import Store
from midstream.testing import ScriptedModel, calls, text
from midstream.tools.function_tools import tool
from tests.cli.on_terminal import OnTerminal, runner
from tests.client.conftest import ring  # noqa: F401 - a fixture

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Store this process's files, and those of its children, in a folder of the test."""
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("sessions", "list")` runs that command line with its own home folder."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | Path) -> Result:
        return CliRunner().invoke(midstream_command, [str(each) for each in arguments])

    return run


@tool(has_effects=False)
def look(where: str) -> str:
    """Look somewhere."""
    return f"nothing in {where}\n\x1b]0;pwned\x07\x1b[31mred\u202e gnitirw"


async def record_sessions(path: Store | Path | str, fields: dict[str, list[str]]) -> None:
    """Let an agent answer messages in sessions of a store: one call of `look`, then text."""
    model = ScriptedModel(
        [calls(("look", '{"where": "the harbour"}'), text="I will look."), text("There is nothing.")]
    )
    host = Host(Agent(model, tools=[look]), path)
    await host.start()
    for session_id, messages in fields.items():
        for words in messages:
            runner = await host.session(session_id, create=True)
            await runner.submit(SendMessage(UserMessage.of(words)))
            while runner.state.is_live:
                await runner.wait(runner.newest.position)
    await host.stop()


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    """Two sessions: `harbour-1` with two turns, then `harvest-2`, with control characters in its title."""
    path = tmp_path / "sessions.db"
    await record_sessions(
        path,
        {
            "harbour-1": ["What is in the harbour?", "Look again."],
            "harvest-2": ["\x1b[2Jgone\u202e " + "long " * 40],
        },
    )
    return path


@pytest.fixture
def on_terminal(tmp_path: Path) -> OnTerminal:
    """`on_terminal("sessions", "list")` runs that command line on a terminal of 80 columns, to its end."""
    return runner({"MIDSTREAM_HOME": str(tmp_path), "TERM": "xterm-256color", "NO_COLOR": ""})
