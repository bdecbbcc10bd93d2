"""The demo's tools work on a real folder, and every execution is in the ledger."""

from __future__ import annotations

from pathlib import Path

import pytest

from midstream.demo import demo_agent
from midstream.demo.demo_agent import FOLDER_VARIABLE, agent_over, tools_over
from midstream.demo.folder import Folder
from midstream.engine.agent import Agent
from midstream.environment import World
from midstream.errors import UsageError
from midstream.history.messages import Outcome, ToolCall
from midstream.tools.function_tools import CallContext, by_name, run_call


class Quick(World):
    async def sleep(self, seconds: float) -> None:
        pass


async def run_tool(folder: Folder, name: str, arguments: str = "{}") -> tuple[Outcome, str]:
    tools = by_name(tools_over(folder, Quick()))
    result = await run_call(tools[name], ToolCall("c1", name, arguments), CallContext("s", 1, 1, "c1"))
    return result.outcome, result.content


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    folder = Folder(tmp_path)
    folder.make()
    return folder


async def test_notes_can_be_listed_read_and_searched(folder: Folder) -> None:
    assert await run_tool(folder, "list_files") == (Outcome.OK, "bread.txt\nlighthouse.txt\ntides.txt")
    outcome, content = await run_tool(folder, "read_file", '{"path": "tides.txt"}')
    assert (outcome, content.startswith("High water")) == (Outcome.OK, True)
    outcome, content = await run_tool(folder, "search_files", '{"word": "KEEPER"}')
    assert (outcome, content) == (
        Outcome.OK,
        "lighthouse.txt: Mary Quinn was the keeper. She kept the light for 41 years and wrote a diary.",
    )
    assert await run_tool(folder, "search_files", '{"word": "whale"}') == (
        Outcome.OK,
        "No file holds 'whale'.",
    )


async def test_a_note_is_written_in_steps_that_the_ledger_shows(folder: Folder) -> None:
    written = await run_tool(folder, "write_note", '{"path": "new.txt", "text": "0123456789"}')
    assert written == (Outcome.OK, "Wrote 10 characters to new.txt.")
    assert (folder.notes / "new.txt").read_text() == "0123456789"
    found = [entry.what for entry in folder.entries("s")]
    assert found == ["started", *(f"wrote {step}/5" for step in range(1, 6)), "finished"]


async def test_a_tool_that_fails_started_and_did_not_finish(folder: Folder) -> None:
    outcome, _ = await run_tool(folder, "read_file", '{"path": "../ledger.txt"}')
    assert outcome is Outcome.ERROR
    assert [entry.what for entry in folder.entries("s")] == ["started"]


def test_the_agent_is_made_from_the_environment(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder.path))
    monkeypatch.setenv("MIDSTREAM_DEMO_MODEL", "scripted")
    agent = demo_agent.agent
    assert isinstance(agent, Agent)
    assert sorted(agent.tools) == ["list_files", "read_file", "search_files", "write_note"]
    monkeypatch.delenv(FOLDER_VARIABLE)
    with pytest.raises(UsageError):
        demo_agent.__getattr__("agent")


def test_there_are_two_models(folder: Folder) -> None:
    assert agent_over(folder.path, "local", World()).model.name.startswith("local:")
    with pytest.raises(UsageError):
        agent_over(folder.path, "gpt", World())
