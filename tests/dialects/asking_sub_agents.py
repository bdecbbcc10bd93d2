"""An agent whose sub-agents ask people, for `midstream serve` and for tests in one process.

A clerk asks a question about its task, and then for permission to note the answer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from midstream.engine.agent import Agent, sub_agent
from midstream.history.messages import Step, Text, UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta
from midstream.testing.scripted_model import Pause, Response, ScriptedModel, calls, steps_since_user, text
from midstream.tools.function_tools import question, tool
from tests.dialects.chat_agent import LEDGER_VARIABLE

HELD_S = 600.0
PLANS = {
    "one": (("clerk", {"task": "paint"}),),
    "two": (("clerk", {"task": "paint"}), ("clerk", {"task": "paint"})),
    "own": (("ask_user", {"question": "Which own?"}), ("clerk", {"task": "paint"})),
    "deep": (("chief", {"task": "paint"}),),
}
"""The calls of the agent, by the words of its user."""


def hold_file() -> Path:
    """Return the file whose presence stops clerks from continuing after an answer."""
    return Path(os.environ[LEDGER_VARIABLE] + ".hold")


@tool(needs_approval=True)
def note(what: str) -> str:
    """Note something down, for ever."""
    with Path(os.environ[LEDGER_VARIABLE]).open("a", encoding="utf-8") as ledger:
        ledger.write(what + "\n")
    return f"noted {what}"


def words_of(request: ModelRequest) -> str:
    """Return the last message of the user, or the task."""
    last = [each for each in request.history.entries if isinstance(each, UserMessage)][-1]
    return "".join(part.text for part in last.parts if isinstance(part, Text))


def results_of(request: ModelRequest) -> list[str]:
    """Return the results of the last step."""
    last = request.history.entries[-1]
    return [each.content for each in last.results] if isinstance(last, Step) else []


def calls_response(*planned: tuple[str, dict[str, str]]) -> Response:
    """Return a response with calls."""
    return calls(*((name, json.dumps(arguments)) for name, arguments in planned))


def lead(request: ModelRequest) -> Response:
    """Make the calls that the user's words select, then report their results."""
    if not steps_since_user(request.history):
        return calls_response(*PLANS[words_of(request)])
    return text("; ".join(results_of(request)))


def pass_on(request: ModelRequest) -> Response:
    """Delegate the task to a clerk."""
    if not steps_since_user(request.history):
        return calls_response(("clerk", {"task": words_of(request)}))
    return text("; ".join(results_of(request)))


def work(request: ModelRequest) -> Response:
    """Ask, then note the answer."""
    number = steps_since_user(request.history)
    if number == 0:
        return calls_response(("ask_user", {"question": f"Which {words_of(request)}?"}))
    if number == 1 and hold_file().exists():
        return [TextDelta("I wait."), Pause(HELD_S), Finished()]
    if number == 1:
        return calls_response(("note", {"what": results_of(request)[0]}))
    return text("; ".join(results_of(request)))


clerk = Agent(ScriptedModel(work), tools=[note, question()], name="clerk")
chief = Agent(ScriptedModel(pass_on), tools=[sub_agent(clerk, description="Notes.")], name="chief")
agent = Agent(
    ScriptedModel(lead),
    tools=[question(), sub_agent(clerk, description="Notes."), sub_agent(chief, description="Leads.")],
    name="agent",
)
