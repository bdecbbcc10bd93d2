"""`midstream serve` of LangGraph graphs, killed while a tool runs and in the middle of an answer, and answered by people."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from midstream.client.sync import connect
from midstream.core.records import CallProgressed, Delta, QuestionAsked, TurnEnded, TurnStatus
from tests.cli.processes import Serving, run

pytestmark = pytest.mark.slow

APP = """
import asyncio
import json
import threading
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGenerationChunk
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import interrupt

from midstream import report_progress


def note(what):
    with Path("ledger").open("a") as ledger:
        ledger.write(f"{what}\\n")


def noted(what):
    return Path("ledger").read_text().split().count(what) if Path("ledger").exists() else 0


def piece(text="", **parts):
    return ChatGenerationChunk(message=AIMessageChunk(text, **parts))


class Scripted(BaseChatModel):
    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **_):
        return self

    def _generate(self, messages, stop=None, run_manager=None, **_):
        raise NotImplementedError

    async def _astream(self, messages, stop=None, run_manager=None, **_):
        note("asked")
        turn = [place for place, each in enumerate(messages) if isinstance(each, HumanMessage)][-1]
        results = [each.content for each in messages[turn:] if isinstance(each, ToolMessage)]
        words = messages[turn].content
        if words == "count":
            yield piece(f"There were {turn} messages.")
        elif words == "long":
            for number in range(20):
                yield piece(f"w{number} ")
                if number == 9 and noted("asked") == 2:
                    await asyncio.Event().wait()
        elif results:
            for word in f"I was told: {', '.join(results)}".split(" "):
                yield piece(f"{word} ")
        else:
            yield piece("I will do it. ")
            calls = [
                {"name": name, "args": '{"city": "Oslo"}', "id": f"c{number}", "index": number}
                for number, name in enumerate(words.split())
            ]
            yield piece(tool_call_chunks=calls)


@tool
def book(city: str) -> str:
    '''Book.'''
    note("book")
    report_progress("written")
    threading.Event().wait()


@tool
def rest(city: str) -> str:
    '''Do a little.'''
    note("rest")
    return "rested"


@tool
def look(city: str) -> str:
    '''Look.'''
    note("look")
    report_progress("written")
    if noted("look") == 1:
        threading.Event().wait()
    return "there are rooms"


@tool
def choose(city: str) -> str:
    '''Choose.'''
    room = interrupt({"question": f"Which room in {city}?", "options": ["large", "small"]})
    is_sure = interrupt("Sure?")
    note("choose")
    return f"{room} {is_sure}"


@tool
def pay(city: str) -> str:
    '''Pay.'''
    note(f"pay-{city}")
    return f"paid in {city}"


look.metadata = {"midstream": "rerun"}
graph = create_agent(Scripted(), [book, rest, look, choose], name="porter")
careful = create_agent(Scripted(), [pay], middleware=[HumanInTheLoopMiddleware(interrupt_on={"pay": True})])


async def plan(state):
    note("plan")
    return {"messages": [await Scripted().ainvoke([HumanMessage("count")])]}


async def write(state):
    return {"messages": [await Scripted().ainvoke(state["messages"][:1])]}


async def confirm(state):
    answer = interrupt("Shall I?")
    note("confirmed")
    return {"messages": [("ai", f"You said {answer}.")]}


builder = StateGraph(MessagesState)
builder.add_sequence([plan, write])
builder.add_edge(START, "plan")
asking = StateGraph(MessagesState)
asking.add_sequence([plan, confirm])
asking.add_edge(START, "plan")
"""


def ledger(folder: Path) -> list[str]:
    there = folder / "ledger"
    return there.read_text().split() if there.exists() else []


def count(folder: Path, what: str) -> int:
    return ledger(folder).count(what)


def answer_after(server: Serving) -> str:
    """Follow the session to the end of its turn, and return the whole answer."""
    with connect(server.url) as client, contextlib.closing(client.follow("mine", "0-0")) as events:
        for event in events:
            if isinstance(event.record, TurnEnded):
                assert event.record.status is TurnStatus.COMPLETED
                return event.transcript
    raise AssertionError("the session has no end of a turn")


@pytest.mark.parametrize(
    ("tool", "runs", "says"),
    [("book", 1, "may or may not have taken effect"), ("look", 2, "there are rooms")],
)
def test_a_tool_that_was_killed_is_handled_by_its_policy_and_what_was_done_stays_done(
    tool: str, runs: int, says: str, tmp_path: Path
) -> None:
    with Serving(tmp_path, app=APP, agent="graph") as server:
        with connect(server.url) as client, contextlib.closing(client.send("mine", f"rest {tool}")) as events:
            assert any(isinstance(event.record, CallProgressed) for event in events)
        server.kill()
    assert ledger(tmp_path) == ["asked", "rest", tool]
    with Serving(tmp_path, app=APP, agent="graph") as again:
        answer = answer_after(again)
    assert answer.count("I will do it.") == answer.count("I was told: rested,") == 1
    assert says in answer
    assert ledger(tmp_path) == ["asked", "rest", *[tool] * runs, "asked"]


def test_an_answer_that_was_cut_is_made_again_behind_the_nodes_that_were_done(tmp_path: Path) -> None:
    with Serving(tmp_path, app=APP, agent="builder") as server:
        with connect(server.url) as client, contextlib.closing(client.send("mine", "long")) as events:
            assert any(isinstance(each.record, Delta) and "w9" in each.transcript for each in events)
        server.kill()
    with Serving(tmp_path, app=APP, agent="builder") as again:
        answer = answer_after(again)
        words = "".join(f"w{number} " for number in range(20))
        assert answer == f"There were 0 messages.\n\n{words}"
        assert (count(tmp_path, "plan"), count(tmp_path, "asked")) == (1, 3)
