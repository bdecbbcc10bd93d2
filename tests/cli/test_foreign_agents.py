"""`midstream serve` of an agent of pydantic-ai, killed while a tool runs, and answered on the command line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from midstream.client.sync import connect
from midstream.session.records import CallProgressed, QuestionAsked, TurnEnded, TurnStatus
from tests.cli.processes import Serving, run

pytestmark = pytest.mark.slow

APP = """
import threading
from pathlib import Path

from pydantic_ai import Agent
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.function import DeltaToolCall, FunctionModel

from midstream import report_progress


async def stream(messages, info):
    returned = [part for part in messages[-1].parts if isinstance(part, ToolReturnPart)]
    if returned:
        for word in f"I was told: {returned[0].content}".split(" "):
            yield f"{word} "
        return
    yield "I will do it. "
    yield {0: DeltaToolCall(messages[-1].parts[-1].content, '{"city": "Oslo"}', tool_call_id="c1")}


agent = Agent(FunctionModel(stream_function=stream), name="porter")


def book_in(city):
    with Path("ledger").open("a") as ledger:
        ledger.write(f"{city}\\n")
    report_progress("written")


@agent.tool_plain
def book(city: str) -> str:
    book_in(city)
    threading.Event().wait()


@agent.tool_plain(metadata={"midstream": "rerun"})
def look(city: str) -> str:
    book_in(city)
    if len(Path("ledger").read_text().split()) == 1:
        threading.Event().wait()
    return "there are rooms"


@agent.tool_plain(requires_approval=True)
def pay(city: str) -> str:
    book_in(city)
    return "paid"
"""


def ledger(folder: Path) -> list[str]:
    there = folder / "ledger"
    return there.read_text().split() if there.exists() else []


def answer_after(server: Serving, session: str = "mine") -> str:
    """Follow the session to the end of its turn, and return the whole answer."""
    with connect(server.url) as client, contextlib.closing(client.follow(session, "0-0")) as events:
        for event in events:
            if isinstance(event.record, TurnEnded):
                assert event.record.status is TurnStatus.COMPLETED
                return event.transcript
    raise AssertionError("the session has no end of a turn")


def test_a_killed_tool_call_is_handled_by_its_policy(tmp_path: Path) -> None:
    expected = {"look": "there are rooms", "book": "may or may not have taken effect"}
    with Serving(tmp_path, app=APP) as server:
        for tool in expected:
            with connect(server.url) as client, contextlib.closing(client.send(tool, tool)) as events:
                assert any(isinstance(event.record, CallProgressed) for event in events)
        server.kill()
    assert ledger(tmp_path) == ["Oslo", "Oslo"]
    with Serving(tmp_path, app=APP) as again:
        answers = {tool: answer_after(again, tool) for tool in expected}
    for tool, answer in answers.items():
        assert answer.startswith("I will do it.")
        assert answer.count("I will do it.") == answer.count("I was told:") == 1
        assert expected[tool] in answer
    assert ledger(tmp_path) == ["Oslo", "Oslo", "Oslo"], "one tool ran again"


def test_an_approval_survives_the_server_and_is_given_on_the_command_line(tmp_path: Path) -> None:
    with Serving(tmp_path, app=APP) as server:
        with connect(server.url) as client, contextlib.closing(client.send("mine", "pay")) as events:
            assert any(isinstance(event.record, QuestionAsked) for event in events)
        server.kill()
    with Serving(tmp_path, app=APP) as again:
        assert ledger(tmp_path) == []
        done = run("sessions", "answer", "mine", "allow", "--url", again.url)
        assert (done.returncode, done.stderr) == (0, "Answered: pay: allow.\n")
        assert answer_after(again).rstrip().endswith("I was told: paid")
        assert ledger(tmp_path) == ["Oslo"]
