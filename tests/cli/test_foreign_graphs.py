"""`midstream serve` of LangGraph graphs, killed in a tool and in the middle of an answer, and answered by people."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from midstream.client.sync import SyncClient, connect
from midstream.local_keys import headers_for
from midstream.session.records import CallProgressed, Delta, QuestionAsked, TurnEnded, TurnStatus
from tests.cli.on_terminal import Terminal
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


def answer_after(server: Serving, session: str = "mine") -> str:
    """Follow the session to the end of its turn, and return the whole answer."""
    with connect(server.url) as client, contextlib.closing(client.follow(session, "0-0")) as events:
        for event in events:
            if isinstance(event.record, TurnEnded):
                assert event.record.status is TurnStatus.COMPLETED
                return event.transcript
    raise AssertionError("the session has no end of a turn")


def test_a_killed_tool_call_is_handled_by_its_policy_and_finished_work_is_kept(tmp_path: Path) -> None:
    expected = {"book": "may or may not have taken effect", "look": "there are rooms"}
    with Serving(tmp_path, app=APP, agent="graph") as server:
        for tool in expected:
            with (
                connect(server.url) as client,
                contextlib.closing(client.send(tool, f"rest {tool}")) as events,
            ):
                assert any(isinstance(event.record, CallProgressed) for event in events)
        server.kill()
    assert ledger(tmp_path) == ["asked", "rest", "book", "asked", "rest", "look"]
    with Serving(tmp_path, app=APP, agent="graph") as again:
        answers = {tool: answer_after(again, tool) for tool in expected}
    for tool, answer in answers.items():
        assert answer.count("I will do it.") == answer.count("I was told: rested,") == 1
        assert expected[tool] in answer
    assert Counter(ledger(tmp_path)) == {"asked": 4, "rest": 2, "book": 1, "look": 2}


def test_an_interrupted_answer_is_repeated_after_the_finished_nodes(tmp_path: Path) -> None:
    with Serving(tmp_path, app=APP, agent="builder") as server:
        with connect(server.url) as client, contextlib.closing(client.send("mine", "long")) as events:
            assert any(isinstance(each.record, Delta) and "w9" in each.transcript for each in events)
        server.kill()
    with Serving(tmp_path, app=APP, agent="builder") as again:
        answer = answer_after(again)
        words = "".join(f"w{number} " for number in range(20))
        assert answer == f"There were 0 messages.\n\n{words}"
        assert (count(tmp_path, "plan"), count(tmp_path, "asked")) == (1, 3)


def ask(server: Serving, words: str, session: str = "mine") -> None:
    """Send a message, and wait until a question is open."""
    with connect(server.url) as client, contextlib.closing(client.send(session, words)) as events:
        assert any(isinstance(event.record, QuestionAsked) for event in events)


def http(url: str, body: object = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers_for(url.partition("/v1/")[0])}
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.loads(answer.read() or "{}"))


def answer_next(server: Serving, words: str) -> dict[str, Any]:
    """Answer the next question of the session over HTTP, and return it."""
    with connect(server.url) as client, contextlib.closing(client.follow("mine", "0-0")) as events:
        for _ in events:
            if found := http(f"{server.url}/v1/questions?session=mine")["questions"]:
                break
    place = {name: found[0][name] for name in ("turn", "response", "call_id", "digest")}
    http(f"{server.url}/v1/sessions/mine/answer", {**place, "choice": "respond", "text": words})
    return dict(found[0])


def test_the_interrupts_of_a_tool_are_answered_over_http_and_survive_the_server(tmp_path: Path) -> None:
    with Serving(tmp_path, app=APP, agent="graph") as server:
        ask(server, "choose")
        server.kill()
    with Serving(tmp_path, app=APP, agent="graph") as server:
        asked = answer_next(server, "large")
        assert (asked["kind"], asked["text"]) == ("question", "Which room in Oslo?")
        assert json.loads(asked["arguments"])["options"] == ["large", "small"]
        with connect(server.url) as client, contextlib.closing(client.follow("mine", "0-0")) as events:
            assert any(
                isinstance(each.record, QuestionAsked) and each.record.text == "Sure?" for each in events
            )
        server.kill()
    with Serving(tmp_path, app=APP, agent="graph") as server:
        assert answer_next(server, "true")["text"] == "Sure?"
        assert answer_after(server) == "I will do it. I was told: large True "
    assert ledger(tmp_path) == ["asked", "choose", "asked"]


def test_the_interrupt_of_a_node_is_answered_on_the_command_line(tmp_path: Path) -> None:
    with Serving(tmp_path, app=APP, agent="asking") as server:
        ask(server, "go")
        server.kill()
    with Serving(tmp_path, app=APP, agent="asking") as again:
        done = run("sessions", "answer", "mine", "respond", "--text", "yes", "--url", again.url)
        assert done.returncode == 0, done.stderr
        assert answer_after(again) == "There were 0 messages.\n\nYou said yes."
    assert ledger(tmp_path) == ["plan", "asked", "confirmed"]


def test_the_approvals_of_the_middleware_are_approvals(tmp_path: Path) -> None:
    choices: dict[str, tuple[tuple[str, ...], str]] = {
        "allowed": (("allow",), "paid in Oslo"),
        "edited": (("allow", "--arguments", "EDITED"), "paid in Rome"),
        "denied": (("deny", "--text", "too dear"), "too dear"),
    }
    with Serving(tmp_path, app=APP, agent="careful") as server:
        for session in choices:
            ask(server, "pay", session)
        server.kill()
    with Serving(tmp_path, app=APP, agent="careful") as again:
        for session, (choice, expected) in choices.items():
            (asked,) = http(f"{again.url}/v1/questions?session={session}")["questions"]
            assert (asked["kind"], asked["name"]) == ("approval", "approve")
            shown = json.loads(asked["arguments"])
            assert (shown["tool"], shown["arguments"]) == ("pay", {"city": "Oslo"})
            edited = json.dumps({**shown, "arguments": {"city": "Rome"}})
            how = [edited if each == "EDITED" else each for each in choice]
            done = run("sessions", "answer", session, *how, "--url", again.url)
            assert done.returncode == 0, done.stderr
            assert expected in answer_after(again, session)
    assert [each for each in ledger(tmp_path) if each.startswith("pay")] == ["pay-Oslo", "pay-Rome"]


def test_a_cancel_stops_the_tool_and_the_next_turn_continues_after_it(tmp_path: Path) -> None:
    with Serving(tmp_path, app=APP, agent="graph") as server, connect(server.url) as client:
        stop_at_the_tool(client)
        assert client.ask("mine", "count") == "There were 3 messages."
    with Serving(tmp_path, app=APP, agent="graph") as again, connect(again.url) as client:
        assert client.ask("mine", "count") == "There were 5 messages."
    assert count(tmp_path, "look") == 1


def stop_at_the_tool(client: SyncClient) -> None:
    with contextlib.closing(client.send("mine", "look")) as events:
        for event in events:
            if isinstance(event.record, CallProgressed):
                client.cancel("mine")
            if isinstance(event.record, TurnEnded):
                assert event.record.status is TurnStatus.CANCELLED


def test_a_person_chats_with_a_graph_in_a_terminal(tmp_path: Path) -> None:
    environment = {"MIDSTREAM_HOME": str(tmp_path), "TERM": "xterm", "NO_COLOR": "1"}
    with Serving(tmp_path, app=APP, agent="careful") as server:
        terminal = Terminal(["chat", server.url, "--session", "mine", "--message", "pay"], environment)
        terminal.until("[y]es")
        terminal.press("y\n")
        terminal.until("paid in Oslo")
        assert terminal.read_to_end().code == 0
    assert count(tmp_path, "pay-Oslo") == 1
