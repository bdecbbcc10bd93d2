"""Continuation of interrupted turns, from the position where the terminal stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.on_terminal import Terminal
from tests.cli.processes import Serving
from tests.cli.test_session_actions import send_message
from tests.spec import spec


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    with Serving(tmp_path) as serving:
        yield serving


def test_resumable_turns_are_listed(run: Run, server: Serving) -> None:
    nothing = run("resume", "--url", server.url)
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    send_message(server, "good", "hello", until="turn_ended")
    send_message(server, "bad", "fail once", until="turn_ended")
    (row,) = run("resume", "--url", server.url).stdout.splitlines()
    assert row.split("\t")[:3] == ["bad", "1", "failed"]
    assert json.loads(run("resume", "--url", server.url, "--json").stdout)["id"] == "bad"


def test_a_failed_turn_continues_and_its_rest_is_shown(run: Run, server: Serving) -> None:
    send_message(server, "bad", "fail once", until="turn_ended")
    done = run("resume", "bad", "--url", server.url)
    assert (done.exit_code, done.stdout) == (0, "Now it works.\n")
    assert "~ turn 1 continues" in done.stderr
    again = run("resume", "bad", "--url", server.url)
    assert (again.exit_code, again.stdout, "[nothing_to_resume]" in again.stderr) == (4, "", True)


def test_a_turn_that_fails_again_is_reported(run: Run, server: Serving) -> None:
    send_message(server, "bad", "fail", until="turn_ended")
    done = run("resume", "bad", "--url", server.url)
    assert (done.exit_code, done.stdout) == (5, "")


def test_an_unknown_session_is_reported(run: Run, server: Serving) -> None:
    assert run("resume", "nowhere", "--url", server.url).exit_code == 3


def test_any_client_can_answer_a_turn_that_waits_for_a_person(server: Serving, tmp_path: Path) -> None:
    send_message(server, "mine", "ask", until="question_asked")
    environment = {"MIDSTREAM_HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"}
    terminal = Terminal(["resume", "mine", "--url", server.url], environment)
    terminal.until("turn 1 of mine is running; it waits for person")
    terminal.until("your answer >")
    terminal.press("the red one\n")
    terminal.until("I was told: the red one")
    assert terminal.read_to_end().code == 0


WITH_PAY = """
from midstream import Agent, tool
from midstream.testing import ScriptedModel, calls, text

@tool(needs_approval=True)
def pay(amount: int) -> str:
    "Pay."
    return "paid"

agent = Agent(ScriptedModel([calls(("c", "pay", '{"amount": 5}')), text("Done.")]), name="cook", tools=[pay])
"""
WITHOUT_PAY = WITH_PAY.replace(", tools=[pay]", "")


@spec("TURN-90")
def test_a_turn_whose_tool_is_missing_is_shown_and_continues_on_request(run: Run, tmp_path: Path) -> None:
    with Serving(tmp_path, app=WITH_PAY) as server:
        send_message(server, "s", "pay", until="question_asked")
        server.kill()
    with Serving(tmp_path, app=WITHOUT_PAY) as server:
        environment = {"MIDSTREAM_HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"}
        terminal = Terminal(["resume", "s", "--url", server.url], environment)
        terminal.until("it waits for agent")
        terminal.until("midstream sessions resume s")
        terminal.press("\x03")
        terminal.read_to_end()
        refused = run("chat", server.url, "--session", "s", "--message", "and?")
        assert "'pay'" in refused.stderr
        assert "[agent_mismatch]" in refused.stderr
        assert run("sessions", "resume", "s", "--url", server.url).exit_code == 0
        assert run("sessions", "answer", "s", "allow", "--url", server.url).exit_code == 0
        done = run("resume", "s", "--url", server.url)
        shown = run("sessions", "show", "s", "--url", server.url).stdout
        assert "Done." in done.stdout + shown
