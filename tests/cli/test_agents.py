"""`module:attribute` finds an agent, or the error contains the remedy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.cli.agents import find_agent, find_server
from midstream.engine.agent import Agent
from midstream.errors import AgentNotFoundError, UsageError

APP = """
from midstream import Agent
from midstream.testing import ScriptedModel
helper = Agent(ScriptedModel([]), name="the helper")
other = 7
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    (tmp_path / "told_app.py").write_text(APP)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_an_agent_is_found_in_the_current_folder() -> None:
    assert find_agent("told_app:helper").name == "the helper"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("told_app", "expected the agent as MODULE:AGENT, such as app:agent"),
        (":helper", "expected the agent as MODULE:AGENT"),
        ("told_app.py:helper", "give its module instead: 'told_app'"),
        ("no_such_app:agent", "run this in the folder of your agent's file"),
        ("no_such.app:agent", "run this in the folder of your agent's file"),
        ("told_app:agent", "did you mean told_app:helper?"),
        ("told_app:other", "`agent` is 7; expected a `midstream.Agent`"),
    ],
)
def test_the_error_for_a_wrong_name_contains_the_remedy(name: str, expected: str) -> None:
    with pytest.raises(AgentNotFoundError) as raised:
        find_agent(name)
    assert expected in raised.value.message


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
    ],
)
def test_the_error_of_a_failing_module_is_shown(folder: Path, source: str, expected: str) -> None:
    (folder / "broken_app.py").write_text(source)
    with pytest.raises(AgentNotFoundError) as raised:
        find_agent("broken_app:agent")
    assert "module 'broken_app' could not be imported" in raised.value.message
    assert expected in raised.value.message


def test_the_error_for_a_module_without_an_agent_explains_how_to_make_one(folder: Path) -> None:
    (folder / "empty_app.py").write_text("")
    with pytest.raises(AgentNotFoundError) as raised:
        find_agent("empty_app:agent")
    assert "create one with `agent = midstream.Agent(...)`" in raised.value.message


FOREIGN_APP = """
from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel
plain = Agent(TestModel(), name="the porter")
structured = Agent(TestModel(), output_type=int)
other = 7
"""


def test_an_agent_of_pydantic_ai_is_converted_or_refused_by_name(folder: Path) -> None:
    (folder / "foreign_app.py").write_text(FOREIGN_APP)
    found = find_agent("foreign_app:plain")
    assert (type(found), found.name) == (Agent, "the porter")
    with pytest.raises(AgentNotFoundError, match=r"'foreign_app:structured'.*`output_type` is <class 'int'>"):
        find_agent("foreign_app:structured")
    with pytest.raises(
        AgentNotFoundError, match=r"Did you mean foreign_app:plain or foreign_app:structured\?"
    ):
        find_agent("foreign_app:other")


def test_an_mcp_server_is_given_by_its_command_or_its_url() -> None:
    assert repr(find_server("files=npx -y 'a server' .")) == "McpServer('files', 'npx')"
    assert (
        repr(find_server("mail=https://mail.example/mcp?key=1"))
        == "McpServer('mail', 'https://mail.example')"
    )


@pytest.mark.parametrize("text", ["npx -y server", "files=", "files='npx", "no name=npx", "=npx"])
def test_an_mcp_server_in_another_form_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        find_server(text)


def test_the_error_for_a_missing_extra_contains_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "midstream.tools.mcp", None)
    with pytest.raises(UsageError, match=r"pip install 'midstream\[mcp\]'"):
        find_server("files=npx")
