"""`midstream serve` of an agent of the OpenAI Agents SDK: kills in its tool and in its answer, approvals, chats.

The SDK calls a scripted server of the Responses API on this machine, found by `OPENAI_BASE_URL`. `make
contract`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents.testing", reason="the SDK is in its own environment: `make contract`")

from midstream.client.sync import connect
from midstream.session.records import CallProgressed, Delta, QuestionAsked, TurnEnded, TurnStatus
from tests.cli.processes import WAIT_S, Serving, run
from tests.models.responses_server import call_events, call_item, completed, text_deltas
from tests.ports import held_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
APP = """
import threading
from pathlib import Path

from agents import Agent, function_tool

from midstream import report_progress
from midstream.frameworks.openai_agents_served import make_agent


def book_in(city):
    with Path("ledger").open("a") as ledger:
        ledger.write(f"{city}\\n")
    report_progress("written")


@function_tool
def book(city: str) -> str:
    book_in(city)
    threading.Event().wait()


@function_tool
def look(city: str) -> str:
    book_in(city)
    if Path("ledger").read_text().split().count("Oslo") == 1:
        threading.Event().wait()
    return "there are rooms"


@function_tool(needs_approval=True)
def pay(city: str) -> str:
    book_in(city)
    return "paid"


agent = Agent(name="porter", model="gpt-5", instructions="You book.", tools=[book, look, pay])
careful = make_agent(agent, on_doubt={"look": "rerun"})
"""


class ScriptedResponsesApi:
    """The Responses API: calls the tool that the message names, then answers with its result.

    The message `talk` gets an answer without a tool. It stops after its second word until `may_continue` is set.
    """

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.may_continue = threading.Event()

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append(body)
        last = body["input"][-1]
        yield {"type": "response.created", "response": {"id": "r"}}
        if last["type"] == "function_call_output":
            yield from text_deltas(*(f"{word} " for word in f"I was told: {last['output']}".split(" ")))
            yield completed()
        elif last["content"] == "talk":
            yield from text_deltas("one ", "two ")
            self.may_continue.wait(WAIT_S)
            yield from text_deltas("three ", "four")
            yield completed()
        else:
            arguments = '{"city":"Bergen"}' if last["content"] == "book" else '{"city":"Oslo"}'
            yield from text_deltas("I will do it. ")
            yield from call_events(arguments, "c1", last["content"])
            yield completed(call_item(arguments, "c1", last["content"]))


@contextlib.contextmanager
def scripted_provider() -> Iterator[ScriptedResponsesApi]:
    provider = ScriptedResponsesApi()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/responses"
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                for number, event in enumerate(provider.events(body)):
                    numbered = json.dumps({**event, "sequence_number": number})
                    self.wfile.write(f"event: {event['type']}\ndata: {numbered}\n\n".encode())
                    self.wfile.flush()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - their name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    serving.start()
    provider.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield provider
    finally:
        provider.may_continue.set()
        server.shutdown()
        server.server_close()
        serving.join(WAIT_S)


@pytest.fixture(autouse=True)
def python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let programs that are started in another folder import midstream, which `make contract` does not install."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ScriptedResponsesApi]:
    with scripted_provider() as found:
        monkeypatch.setenv("OPENAI_BASE_URL", found.url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
        monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path))
        yield found


def ledger(folder: Path) -> list[str]:
    there = folder / "ledger"
    return there.read_text().split() if there.exists() else []


def answer_after(server: Serving, session: str = "mine") -> str:
    """Follow a session to the end of its turn, and return the whole answer."""
    with connect(server.url) as client, contextlib.closing(client.follow(session, "0-0")) as events:
        for event in events:
            if isinstance(event.record, TurnEnded):
                assert event.record.status is TurnStatus.COMPLETED
                return event.transcript
    raise AssertionError("the session has no end of a turn")


def until(server: Serving, text: str, kind: type[object], session: str = "mine") -> None:
    """Send a message, and return when an event of this kind has arrived."""
    with connect(server.url) as client, contextlib.closing(client.send(session, text)) as events:
        assert any(isinstance(event.record, kind) for event in events)


def test_killed_tool_calls_are_handled_by_their_policies(
    tmp_path: Path, provider: ScriptedResponsesApi
) -> None:
    with Serving(tmp_path, app=APP, agent="careful") as server:
        for tool in ("book", "look"):
            until(server, tool, CallProgressed, session=tool)
        server.kill()
    assert sorted(ledger(tmp_path)) == ["Bergen", "Oslo"]
    with Serving(tmp_path, app=APP, agent="careful") as again:
        answers = {tool: answer_after(again, tool) for tool in ("book", "look")}
    for answer in answers.values():
        assert answer.startswith("I will do it.")
        assert answer.count("I will do it.") == answer.count("I was told:") == 1
    assert "may or may not have taken effect" in answers["book"]
    assert "there are rooms" in answers["look"]
    assert sorted(ledger(tmp_path)) == ["Bergen", "Oslo", "Oslo"]
    assert len(provider.bodies) == 4  # the responses before the kill were not paid for twice
    assert {body["instructions"] for body in provider.bodies} == {"You book."}


def test_a_killed_answer_is_requested_again_and_shown_once(
    tmp_path: Path, provider: ScriptedResponsesApi
) -> None:
    with (
        held_port() as port,
        Serving(tmp_path, app=APP, port=port) as server,
        run_chat(server, "talk") as chat,
    ):
        with connect(server.url) as client, contextlib.closing(client.follow("mine", "0-0")) as events:
            assert any("two" in event.transcript for event in events if isinstance(event.record, Delta))
        server.kill()
        provider.may_continue.set()
        with Serving(tmp_path, app=APP, port=port) as again:
            assert answer_after(again) == "one two three four"
            printed, _ = chat.communicate(timeout=WAIT_S)
    assert printed == "one two three four\n"
    assert len(provider.bodies) == 2


@contextlib.contextmanager
def run_chat(server: Serving, text: str) -> Iterator[subprocess.Popen[str]]:
    """Run `midstream chat` from the send of the message until the end of the block."""
    command = [sys.executable, "-m", "midstream", "chat", server.url, "--session", "mine", "--message", text]
    chat = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert chat.stderr is not None
        assert chat.stderr.readline().split() == ["you", text]
        yield chat
    finally:
        chat.kill()
        chat.communicate()


def test_an_approval_survives_the_server_and_is_given_over_http(
    tmp_path: Path, provider: ScriptedResponsesApi
) -> None:
    with Serving(tmp_path, app=APP) as server:
        until(server, "pay", QuestionAsked)
        server.kill()
    with Serving(tmp_path, app=APP, options=["--no-auth"]) as again:
        assert ledger(tmp_path) == []
        with urllib.request.urlopen(f"{again.url}/", timeout=WAIT_S) as page:
            assert page.headers["content-type"].startswith("text/html")
        with urllib.request.urlopen(f"{again.url}/v1/questions", timeout=WAIT_S) as listed:
            assert b'"pay"' in listed.read()
        done = run("sessions", "answer", "mine", "allow", "--url", again.url)
        assert (done.returncode, done.stderr) == (0, "Answered: pay: allow.\n")
        assert answer_after(again).rstrip().endswith("I was told: paid")
        assert ledger(tmp_path) == ["Oslo"]


def test_a_denied_call_never_runs(tmp_path: Path, provider: ScriptedResponsesApi) -> None:
    with Serving(tmp_path, app=APP) as server:
        until(server, "pay", QuestionAsked)
        assert run("sessions", "answer", "mine", "deny", "--url", server.url).returncode == 0
        assert "I was told:" in answer_after(server)
    assert ledger(tmp_path) == []


def test_an_unsupported_agent_ends_the_command_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "told.py").write_text(
        'from agents import Agent\nagent = Agent("a", model="gpt-5", output_type=int)\n'
    )
    done = run("serve", "told:agent", cwd=tmp_path, environment={"OPENAI_API_KEY": "k"})
    assert done.returncode == 2
    assert "`output_type` is <class 'int'> (a session's answer is text)" in done.stderr
