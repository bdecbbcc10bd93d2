"""Agents that editors start by `midstream acp` in tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from midstream.engine.agent import Agent, sub_agent
from midstream.history.messages import Finish, Step, Text, UserMessage
from midstream.models.responses import Finished, ModelRequest, TextDelta, ThinkingDelta
from midstream.testing.scripted_model import (
    Pause,
    Response,
    ScriptedModel,
    Stall,
    calls,
    steps_since_user,
    text,
)
from midstream.tools.function_tools import current_call, question, report_progress, tool, transaction

LEDGER_VARIABLE = "ACP_LEDGER"
WORDS = 40
FIRST = "I note it. "
THOUGHT = "Which words?"
ANSWER = FIRST + "".join(f"word{number} " for number in range(WORDS))
SCHEMA = "create table if not exists app_order (effect text not null)"
_PAUSE_S = 0.002


@tool
def note(what: str) -> str:
    """Note something down, for ever."""
    with Path(os.environ[LEDGER_VARIABLE]).open("a", encoding="utf-8") as ledger:
        ledger.write(what + "\n")
    return "noted"


@tool(on_doubt="in_transaction")
def order(what: str) -> str:
    """Order something, in the store's own transaction."""
    transaction().execute(SCHEMA)
    transaction().execute("insert into app_order values (?)", (current_call().effect_key,))
    return f"ordered {what}"


def noting_answer(request: ModelRequest) -> Response:
    """Return the next response for the state of a request: two effects, then many words."""
    if not steps_since_user(request.history):
        wanted = ("order", '{"what": "it"}'), ("note", '{"what": "it"}')
        return [ThinkingDelta(THOUGHT), *calls(*wanted, text=FIRST)]
    steps: list[TextDelta | Pause] = []
    for number in range(WORDS):
        steps += (TextDelta(f"word{number} "), Pause(_PAUSE_S))
    return [*steps, Finished()]


noting = Agent(ScriptedModel(noting_answer), tools=[note, order], name="noting")


@tool(needs_approval=True)
def burn(what: str) -> str:
    """Burn something."""
    return f"burnt {what}"


@tool(has_effects=False)
def look(where: str) -> str:
    """Look somewhere."""
    report_progress("looking")
    sys.stdout.write("a tool prints this, and it is not the protocol's\n")
    sys.stdout.flush()
    return f"nothing at {where}, and stdin has {sys.stdin.read()!r}"


ask = question("ask", description="Ask the user.")
helper = Agent(
    ScriptedModel([calls(("burn", '{"what": "twig"}')), text("helped")]), tools=[burn], name="helper"
)


def newest_words(request: ModelRequest) -> str:
    """Return the newest words of the user."""
    users = [each for each in request.history.entries if isinstance(each, UserMessage)]
    return "".join(part.text for part in users[-1].parts if isinstance(part, Text))


def answer_newest(request: ModelRequest) -> Response:
    """Return a response to the user's word."""
    words, steps = newest_words(request), steps_since_user(request.history)
    wanted = {
        "burn": ("burn", '{"what": "tree"}'),
        "look": ("look", '{"where": "here"}'),
        "ask": ("ask", '{"question": "Which one?"}'),
        "help": ("helper", '{"task": "burn"}'),
    }
    found = [each.name for each in request.tools]
    wanted["add"] = next((name for name in found if name.endswith("__add")), "add"), '{"a": 2, "b": 3}'
    if words == "tools":
        return text(f"I have {' '.join(sorted(found))}")
    if words in wanted and not steps:
        return calls(wanted[words])
    if words == "wait":
        return [TextDelta("Waiting"), Stall()]
    if words == "long":
        return [TextDelta("cut her"), Finished(Finish.LENGTH)]
    if steps:
        last = request.history.entries[-1]
        assert isinstance(last, Step)
        return text(f"It came to: {'; '.join(each.content for each in last.results)}")
    parts = [type(part).__name__ for part in _newest(request).parts]
    return text(f"You sent {', '.join(parts)}: {words}")


def _newest(request: ModelRequest) -> UserMessage:
    return [each for each in request.history.entries if isinstance(each, UserMessage)][-1]


talking = Agent(
    ScriptedModel(answer_newest),
    tools=[burn, look, ask, sub_agent(helper, description="Helps.")],
    name="talking",
)
