"""`midstream` as real processes: a server that prints its address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.forked import Forked

WAIT_S = 60.0

APP = """
from pathlib import Path

from midstream import Agent, question, report_progress, sub_agent
from midstream.demo.script import scripted_model
from midstream.history.messages import Text
from midstream.testing import Pause, ScriptedModel, calls, text
from midstream.tools.function_tools import tool


@tool(has_effects=False)
def look(where: str) -> str:
    '''Look somewhere.'''
    return f"nothing in {where}"


@tool(needs_approval=True)
def pay(sum: int, note: str = '') -> str:
    '''Pay.'''
    report_progress("counting")
    with Path("ledger").open("a") as ledger:
        ledger.write(f"{sum}\\n")
    return f"paid {sum}"


def clerk_response(request):
    said = request.history.entries[-1]
    return text("It is paid.") if not hasattr(said, "parts") else calls(("pay", '{"sum": 7}'), text="I pay.")


clerk = Agent(ScriptedModel(clerk_response), tools=[pay], name="clerk")
failures = []


def response(request):
    said = request.history.entries[-1]
    if not hasattr(said, "parts"):
        results = [result.content for result in said.results]
        return text("There is nothing there." if "harbour" in results[0] else f"I was told: {results[0]}")
    words = said.parts[0].text
    if words == "look":
        return calls(("look", '{"where": "the harbour"}'), text="I will look.")
    if words == "fail":
        from midstream.errors import ModelRejectedError
        return [ModelRejectedError("no such key")]
    if words == "pay":
        return calls(("pay", '{"sum": 3}'))
    if words == "pay much":
        return calls(("pay", '{"sum": 3, "note": "' + "all of it \u202e" * 200 + 'and more"}'))
    if words == "ask":
        return calls(("ask_user", '{"question": "Which one?", "options": ["red", "blue"]}'))
    if words == "delegate":
        return calls(("clerk", '{"task": "pay"}'))
    if words == "fail once":
        from midstream.errors import ModelRejectedError
        failures.append(words)
        return [ModelRejectedError("no such key")] if len(failures) == 1 else text("Now it works.")
    if words == "long":
        slowly = [step for number in range(100) for step in (Pause(0.02), *text(f"w{number} ")[:-1])]
        return [*slowly, *text("end")]
    return text(f"You said: {words}.")


agent = Agent(ScriptedModel(response, delay_s=0.002), name="tested").with_tools(
    look, pay, question(), sub_agent(clerk, description="Pays.")
)
# Defects as nobody foresees them: one when a session is opened, one when it decides.
unopened = Agent(ScriptedModel(response))
unopened.model = "openai:gpt-5"
undecided = Agent(ScriptedModel(response))
undecided.stalls = None
"""


def run(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    typed: str | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end, without a terminal."""
    stdin = subprocess.DEVNULL if typed is None else subprocess.PIPE
    process = Forked(
        "midstream", *arguments, stdin=stdin, text=True, cwd=cwd, env={**os.environ, **(environment or {})}
    )
    out, err = process.communicate(typed, WAIT_S)
    return subprocess.CompletedProcess(process.args, process.wait(), out, err)


class Serving:
    """`midstream serve` of an agent above, in a folder."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        options: Sequence[str] = (),
        agent: str = "agent",
        app: str = APP,
        store: str = "",
    ) -> None:
        (folder / "told.py").write_text(app)
        self.store = folder / "sessions.db"
        self._process = Forked(
            *("midstream", "serve", f"told:{agent}", "--json"),
            *("--port", str(port), "--store", store or str(self.store)),
            *options,
            text=True,
            cwd=folder,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self._process.communicate()[1]
        self.listening = json.loads(line)
        self.url: str = self.listening["url"]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()
        self._process.communicate(timeout=WAIT_S)

    def terminate(self) -> int:
        """Send SIGTERM; return the exit code."""
        self._process.terminate()
        self._process.communicate(timeout=WAIT_S)
        return self._process.wait()

    def interrupt(self) -> tuple[int, str]:
        """Send SIGINT; return the exit code and the output on stderr."""
        self._process.send_signal(signal.SIGINT)
        _, output = self._process.communicate(timeout=WAIT_S)
        return self._process.wait(), str(output)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
