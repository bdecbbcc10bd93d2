"""The agent for the cut clients of the AI SDK: a tool with an effect, then many words, for `midstream serve`."""

from __future__ import annotations

import os
from pathlib import Path

from midstream.engine.agent import Agent
from midstream.history.messages import Step
from midstream.models.responses import Finished, ModelRequest, TextDelta, ThinkingDelta
from midstream.testing.scripted_model import Pause, Response, ScriptedModel, calls, steps_since_user
from midstream.tools.function_tools import tool

LEDGER_VARIABLE = "CHAT_LEDGER"
WORDS_VARIABLE = "CHAT_WORDS"
PAUSE_S = 0.002
FIRST = "I note it. "
THOUGHT = "Which words?"


def words() -> list[str]:
    """Return the words of the answer, each a different one."""
    return [f"word{number} " for number in range(int(os.environ[WORDS_VARIABLE]))]


@tool
def note(what: str) -> str:
    """Note something down, for ever."""
    with Path(os.environ[LEDGER_VARIABLE]).open("a", encoding="utf-8") as ledger:
        ledger.write(what + "\n")
    return "noted"


def answer(request: ModelRequest) -> Response:
    """Return the next response for the state of a request."""
    if not steps_since_user(request.history):
        return [ThinkingDelta(THOUGHT), *calls(("note", '{"what": "it"}'), text=FIRST)]
    last = request.history.entries[-1]
    assert isinstance(last, Step)
    steps: list[TextDelta | Pause] = []
    for word in words():
        steps += (TextDelta(word), Pause(PAUSE_S))
    return [*steps, Finished()]


agent = Agent(ScriptedModel(answer), tools=[note], name="chat")
